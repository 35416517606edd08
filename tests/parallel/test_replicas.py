"""Replicas that start equal, stay equal, can be saved, and say so when they are not."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from minidist.parallel import data

SIDE = [(1.0, 3.0), (11.0, 13.0)]  # rank -> what its BatchNorm sees: mean 2 on rank 0, 12 on rank 1


def norm(momentum=1.0):
    return nn.BatchNorm1d(1, momentum=momentum).double()


def batch(world):
    return torch.tensor(SIDE[world.rank]).double()[:, None]


def start(world):
    """Built from other seeds: then equal, parameters and buffers of every type."""
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))
    module[1].running_mean.normal_()
    module[1].num_batches_tracked += world.rank
    module.register_buffer("table", torch.randn(2, 3).t(), persistent=False)
    module.register_buffer("mask", torch.rand(5) > 0.5)
    frozen = module[0].bias.requires_grad_(False)
    before = [frozen.tolist(), module.mask.tolist()]
    md.DataParallel(module, world)
    return before, [t.tolist() for t in [*module.parameters(), *module.buffers()]]


def statistics(world, wrap):
    """running_mean after a forward pass, after its backward pass, and what rank 0's state_dict holds."""
    replica = wrap(norm(), world)
    out = replica(batch(world))
    after = [replica.module.running_mean.item()]
    out.square().sum().backward()
    return [*after, replica.module.running_mean.item(), int(replica.module.num_batches_tracked)]


def theirs(module, world):
    return DistributedDataParallel(module)


def own_buffers(module, world):
    return md.DataParallel(module, world, broadcast_buffers=False)


def replaced_buffer(world):
    """A buffer is looked up by its name each time, so one that a module replaces is still the one that is sent."""
    replica = md.DataParallel(norm(), world)
    for _ in range(2):
        replica.module.running_mean = torch.full((1,), 100.0 * world.rank).double()
        replica.eval()
        replica(batch(world)).sum().backward()
    return replica.module.running_mean.item()


def two_graphs(world):
    """Two forward passes, then two averaged backward passes: the first may not spoil what the second needs."""
    replica = md.DataParallel(norm(), world)
    losses = [(replica(batch(world) + k) ** 3).sum() for k in range(2)]
    for loss in losses:
        loss.backward()
    alone = norm()
    sum((alone(batch(world) + k) ** 3).sum() for k in range(2)).backward()
    return (world.all_reduce(alone.weight.grad, op="mean") - replica.module.weight.grad).item()


def evaluate_on_rank_0(world):
    """Neither evaluation nor state_dict sends anything, so one rank may do it alone."""
    replica = md.DataParallel(norm(), world)
    replica(batch(world)).sum().backward()
    world.recorder.clear()
    if world.rank == 0:
        replica.eval()
        with torch.no_grad():
            replica(batch(world))
        replica.state_dict()
    return len(world.recorder.calls)


def micro_batches(world):
    """Statistics see micro-batches, not their union: momentum 0.1 over batches [1, 3], [11, 13] of one rank."""
    replica = md.DataParallel(norm(momentum=0.1), world)
    with replica.no_sync():
        replica(torch.tensor([[1.0], [3.0]]).double()).sum().backward()
    replica(torch.tensor([[11.0], [13.0]]).double()).sum().backward()
    whole = norm(momentum=0.1)
    whole(torch.tensor([[1.0], [3.0], [11.0], [13.0]]).double())
    return replica.module.running_mean.item(), whole.running_mean.item()


def buffers(world):
    found = {
        "start": start(world),
        "ours": statistics(world, md.DataParallel),
        "torch": statistics(world, theirs),
        "own": statistics(world, own_buffers),
        "replaced": replaced_buffer(world),
        "two graphs": two_graphs(world),
        "alone": evaluate_on_rank_0(world),
        "micro-batches": micro_batches(world),
    }
    with mock.patch.object(data, "broadcast_tensors", return_value=None):
        found["fault: nothing broadcast"] = (start(world), statistics(world, md.DataParallel))
    return found


def test_parameters_and_buffers_are_rank_0s():
    zero, one = md.launch(buffers, ranks=2)
    assert zero["start"][0] != one["start"][0]
    assert zero["start"][1] == one["start"][1]
    assert zero["fault: nothing broadcast"][0][1] != one["fault: nothing broadcast"][0][1]

    # After the forward pass each rank has its own mean, as in torch's; after the backward pass all have rank 0's.
    assert (zero["ours"], one["ours"]) == ([2, 2, 1], [12, 2, 1])
    assert (zero["torch"], one["torch"]) == ([2, 2, 1], [12, 12, 1])
    assert (zero["own"], one["own"]) == ([2, 2, 1], [12, 12, 1])
    assert one["fault: nothing broadcast"][1] == [12, 12, 1]
    assert (zero["replaced"], one["replaced"]) == (0, 0)
    assert zero["two graphs"] == one["two graphs"] == pytest.approx(0, abs=1e-12)
    assert (zero["alone"], one["alone"]) == (0, 0)
    assert one["micro-batches"] == (pytest.approx(1.38), pytest.approx(0.7))


# ---- drift -----------------------------------------------------------------------------------------------------------


def drift(world):
    """An optimizer step on gradients that were never averaged; and one number changed in its last bit."""
    replica = md.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), world)
    replica.check_replicas()
    with torch.no_grad():
        weight = replica.module[1].weight
        if world.rank == 2:
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    with pytest.raises(RuntimeError) as one_bit:
        replica.check_replicas()
    replica = md.DataParallel(nn.Linear(2, 2), world)
    with replica.no_sync():
        replica(torch.ones(1, 2) * world.rank).sum().backward()
    md.SGD(replica.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError) as unsynced:
        replica.check_replicas()
    return str(one_bit.value), str(unsynced.value)


def different_modules(world):
    md.DataParallel(nn.Linear(2, 2 + (world.rank == 1)), world)


def test_drift_is_named():
    for one_bit, unsynced in md.launch(drift, ranks=3):
        assert "1.weight differs from rank 0's on ranks [2]" in one_bit
        assert "weight differs from rank 0's on ranks [1, 2]" in unsynced


def test_different_modules_are_refused():
    with pytest.raises(md.LaunchError, match=r"rank 0 has weight \[2, 2\].*where rank 1 has weight \[3, 2\]"):
        md.launch(different_modules, ranks=2)


# ---- as if it were the module ----------------------------------------------------------------------------------------


def test_names_have_no_prefix(solo):
    module = md.GPT(md.GPTConfig(layers=1, dim=16, heads=2))
    replica = md.DataParallel(module, solo)
    assert list(replica.state_dict()) == list(module.state_dict())
    assert [n for n, _ in replica.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert list(replica.parameters()) == list(module.parameters())
    saved = copy.deepcopy(replica.state_dict())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert replica.load_state_dict(saved).missing_keys == []
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        replica.load_state_dict({})


def test_converting_or_copying_it_is_refused(solo):
    replica = md.DataParallel(nn.Linear(2, 2), solo)
    with pytest.raises(TypeError, match=r"copy or save its \.module"):
        copy.deepcopy(replica)
    copied = copy.deepcopy(replica.module)
    replica.double()
    with pytest.raises(RuntimeError, match=r"weight, bias: .* another dtype .* wrap the module again"):
        replica(torch.ones(1, 2, dtype=torch.float64))
    md.DataParallel(copied.double(), solo)(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert copied.weight.grad.dtype is torch.float64


def test_a_larger_module_saves_and_loads_it(solo):
    larger = nn.ModuleDict({"body": md.DataParallel(nn.Linear(2, 2), solo), "head": nn.Linear(2, 1)})
    plain = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    assert list(larger.state_dict()) == list(plain.state_dict())
    larger.load_state_dict(plain.state_dict())
    assert torch.equal(larger["body"].module.weight, plain["body"].weight)
    plain.load_state_dict(larger.state_dict())


def test_train_and_eval_reach_the_module(solo):
    replica = md.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), solo)
    assert replica.eval().module[1].training is False
    assert replica.train().module[1].training is True
