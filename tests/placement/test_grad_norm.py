"""Each logical parameter once: the norm of the whole model, the same number on every rank of any mesh."""

import copy
import pickle

import pytest
import torch
from torch import nn

import minidist as md
from minidist.comm.comm import Comm
from minidist.placement import Partial, Replicate, Shard, clip_grad_norm_


class Named(nn.Module):
    """Parameters given as {name: (gradient, {axis: placement})}."""

    def __init__(self, given):
        super().__init__()
        for name, (grad, placed) in given.items():
            parameter = nn.Parameter(torch.zeros(len(grad)))
            parameter.grad = torch.tensor(grad, dtype=torch.float32)
            for axis, placement in placed.items():
                md.place(parameter, axis, placement)
            self.register_parameter(name, parameter)


def norms(world):
    """{case: (norm, largest)} on two ranks."""
    r = world.rank
    mine = [3.0 + r]
    cases = {
        "shards": Named({"w": (mine, {"x": Shard(0)})}),
        "replicated norm": Named({"w": (mine, {"x": Shard(1)}), "norm": ([12.0], {})}),
        "tied over stages": Named({"stage": (mine, {"x": Shard(0)}), "embed": ([12.0], {"x": Replicate()})}),
        "empty shard": Named({"w": ([3.0, 4.0] if r == 0 else [], {"x": Shard(0)})}),
        "no gradient": Named({"w": (mine, {"x": Shard(0)})}),
    }
    cases["no gradient"].register_parameter("frozen", nn.Parameter(torch.zeros(1)))
    mesh = md.Mesh({"x": 2}, world)
    return {name: [md.grad_norm(m, mesh, p).item() for p in (2.0, float("inf"))] for name, m in cases.items()}


def test_each_parameter_counts_once():
    """Oracles: 5 for two shards, 13 with a replicated 12 beside them, as LayerNorm or as a tied embedding."""
    for found in md.launch(norms, ranks=2):
        assert found == {
            "shards": pytest.approx([5.0, 4.0]),
            "replicated norm": pytest.approx([13.0, 12.0]),
            "tied over stages": pytest.approx([13.0, 12.0]),
            "empty shard": pytest.approx([5.0, 4.0]),
            "no gradient": pytest.approx([5.0, 4.0]),
        }


def faults(world):
    """What the usual mistakes make of 3 | 4 and a replicated 12."""
    x = {"x": world}
    shards = torch.tensor([3.0 + world.rank, 12.0])
    local = shards.norm()
    return {
        "double count": md.grad_norm(
            Named({"w": ([3.0 + world.rank], {"x": Shard(0)}), "norm": ([12.0], {"x": Shard(0)})}), x
        ).item(),
        "local": local.item(),
        "averaged norms": world.all_reduce(local.clone(), op="mean").item(),
        "sharded counted once": md.grad_norm(Named({"w": ([3.0 + world.rank], {}), "norm": ([12.0], {})}), x).item(),
    }


def test_the_known_wrong_answers_are_other_numbers():
    everywhere = md.launch(faults, ranks=2)
    assert [found["double count"] for found in everywhere] == pytest.approx([17.69, 17.69], abs=0.005)
    assert [found["local"] for found in everywhere] == pytest.approx([12.37, 12.65], abs=0.005)
    assert [found["averaged norms"] for found in everywhere] == pytest.approx([12.51, 12.51], abs=0.005)
    assert all(abs(value - 13) > 0.3 for found in everywhere for value in found.values())


def clipped(world):
    module = Named({"w": ([3.0 + world.rank], {"x": Shard(0)})})
    before = clip_grad_norm_(module, 1.0, {"x": world})
    factor = module.w.grad.item() / (3.0 + world.rank)
    unchanged = clip_grad_norm_(module, 10.0, {"x": world})
    return before.item(), factor, unchanged.item()


def test_clipping_scales_every_shard_by_the_same_factor():
    for before, factor, after in md.launch(clipped, ranks=2):
        assert (before, factor, after) == pytest.approx((5.0, 0.2, 1.0), abs=1e-5)


def on_a_mesh(world):
    """A [4, 6] and a [3] gradient on meshes of 4 ranks, cut in every way there is."""
    draw = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(4, 6, generator=draw), torch.randn(3, generator=draw)
    found = []
    for axes in ({"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}, {"tp": 4}):
        mesh = md.Mesh(axes, world)
        for placed in ({}, {"tp": Shard(0)}, {"tp": Shard(1)}):
            local = weight
            for axis, where in placed.items():
                local = md.redistribute(local, Replicate(), where, mesh[axis])
            module = nn.Module()
            module.w, module.b = nn.Parameter(torch.zeros_like(local)), nn.Parameter(torch.zeros(3))
            module.w.grad, module.b.grad = local, bias.clone()
            for axis, where in placed.items():
                md.place(module.w, axis, where)
            found.append(md.grad_norm(module, mesh).item())
    return found, torch.cat([weight.flatten(), bias]).norm().item()


def test_the_norm_depends_on_no_mesh():
    everywhere = md.launch(on_a_mesh, ranks=4)
    assert all(found == everywhere[0][0] for found, _ in everywhere)
    assert everywhere[0][0] == pytest.approx([everywhere[0][1]] * 9)


def test_what_cannot_be_counted_says_so():
    solo = Comm(group=None, ranks=(0,), rank=0)
    with pytest.raises(ValueError, match=r"w is placed on \['tp'\].*axes \['x'\]"):
        md.grad_norm(Named({"w": ([1.0], {"tp": Shard(0)})}), {"x": solo})
    with pytest.raises(ValueError, match="w is Partial on"):
        md.grad_norm(Named({"w": ([1.0], {"x": Partial()})}), {"x": solo})
    with pytest.raises(ValueError, match=r"norm=1\.0"):
        md.grad_norm(Named({}), {"x": solo}, norm=1.0)
    with pytest.raises(ValueError, match="max_norm=0"):
        clip_grad_norm_(Named({}), 0, {"x": solo})
    with pytest.raises(TypeError, match="not 1"):
        md.place(nn.Parameter(torch.zeros(1)), "x", 1)


def test_a_placement_stays_with_its_parameter():
    module = nn.Linear(2, 3)
    md.place(module.weight, "tp", Shard(0))
    md.place(module.weight, "dp", Shard(1))
    kept = [module.double().weight, pickle.loads(pickle.dumps(module)).weight]
    for weight in kept:
        assert (md.placement_of(weight, "tp"), md.placement_of(weight, "dp")) == (Shard(0), Shard(1))
    assert md.placement_of(module.bias, "tp") == Replicate()
    assert md.placement_of(copy.deepcopy(module).weight, "tp") == Replicate()  # torch copies no attribute
