"""Initial weights and dropout do not depend on the number of tp ranks, and differ between replicas."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.mesh import groups_along
from minidist.parallel import tensor
from minidist.parallel.tensor import replica_number
from minidist.sharded import layers as sharded
from minidist.sharded.roles import Between, Column, Enter, Inside, Row

CONFIG = md.GPTConfig(layers=2, dim=16, heads=4, seq=8, vocab=19, dropout=0.3)
SEED = 7


def tokens():
    return torch.randint(CONFIG.vocab, (2, 7), generator=torch.Generator().manual_seed(2))


def plain_logits(replica=0, steps=2):
    """One process: torch's own dropout, from torch's global generator."""
    module = md.GPT(CONFIG).double()
    torch.manual_seed(SEED + replica)
    return [module(tokens()).detach() for _ in range(steps)]


def logits(world, tp=None, sequence=False, draws=True, seed=SEED):
    """The same, cut; rank 1 takes more random numbers between forward passes, as a data loader might."""
    mesh = md.Mesh({"dp": world.size // (tp or world.size), "tp": tp or world.size}, world)
    tp_comm = mesh["tp"]
    module = md.tensor_parallel(md.GPT(CONFIG).double(), tp_comm, sequence=sequence, seed=seed)
    found = []
    for _ in range(2):
        if draws and world.rank == 1:
            torch.rand(5)
        found.append(md.autograd.gather(module(tokens()).detach(), tp_comm, -1)[..., : CONFIG.vocab])
    before = torch.get_rng_state()
    module.eval()(tokens())
    assert torch.equal(before, torch.get_rng_state())  # a forward pass leaves the rank's own numbers alone
    return found


class Hidden(nn.Module):
    """Dropout inside a region, on the cut hidden numbers, and behind it."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop, self.after = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.after(self.down(self.drop(self.up(x))))


class Twice(nn.Module):
    """Two of them, each computed again in the backward pass if asked for."""

    def __init__(self, recompute):
        super().__init__()
        self.recompute, self.parts = recompute, nn.ModuleList([Hidden(), Hidden()])

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.recompute else part(x)
        return x


INSIDE = {"": Enter(), "up": Column(), "drop": Inside(), "down": Row(), "after": Between()}
TWICE = {f"parts.*.{name}".rstrip("."): role for name, role in INSIDE.items()}


def hidden(world, recompute):
    """Output and weight gradients in one process, without recomputing, and cut."""
    x, found = torch.linspace(-1, 1, 12).view(3, 4).double(), []
    for cut in (False, True):
        module = Twice(cut and recompute).double()
        torch.manual_seed(SEED)
        if cut:
            md.tensor_parallel(module, world, TWICE, seed=SEED)
        out = module(x)
        torch.rand(world.rank)
        (out**2).sum().backward()
        grads = md.full_grads(module) if cut else {n: p.grad for n, p in module.named_parameters()}
        found.append([out.detach(), *grads.values()])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


def recomputed_whole(world):
    """The whole module a second time would not find the numbers of the first: refused, where it drops something."""
    module = md.tensor_parallel(Twice(False), world, TWICE)
    with pytest.raises(RuntimeError, match="checkpoint its parts"):
        checkpoint(module, torch.ones(1, 4), use_reentrant=False).sum().backward()
    checkpoint(module.eval(), torch.ones(1, 4), use_reentrant=False).sum().backward()


def ones(world):
    """The mask on ones(8), in every replica and for every rank of tp."""
    mesh = md.Mesh({"dp": 2, "tp": 2}, world)
    module = md.tensor_parallel(nn.Sequential(nn.Dropout(0.5)), mesh["tp"], {"0": Between()}, seed=SEED)
    return module(torch.ones(8)).tolist()


def shards(world):
    """Cut weights are slices of the whole init, also where ranks built models of other seeds."""
    whole = md.GPT(CONFIG, seed=0).state_dict()
    module = md.tensor_parallel(md.GPT(CONFIG, seed=world.rank), world)
    found = md.full_state_dict(module)
    assert found.keys() == whole.keys()
    assert found["embed.weight"].shape == (CONFIG.vocab, CONFIG.dim)  # the true vocabulary, nothing filled up
    assert module.head.weight is module.embed.weight
    return all(torch.equal(found[name], whole[name]) for name in whole)


def own_generators(module, border, seed):
    """A fault: every rank draws from its own global generator."""
    border.shape = None


def local_mask(shape, p, like):
    """A fault: each rank draws a mask for its slice alone."""
    return torch.nn.functional.dropout(torch.ones(shape, dtype=like.dtype), p).roll(1, 0)


def everything(world):
    found = {
        "logits": [logits(world), logits(world, sequence=True)],
        "hidden": [hidden(world, recompute=False), hidden(world, recompute=True)],
        "shards": shards(world),
    }
    with mock.patch.object(tensor, "_share_randomness", own_generators):
        found["fault: own generators"] = logits(world)
    with mock.patch.object(sharded, "_mask", local_mask):
        found["fault: local masks"] = [logits(world, sequence=True), hidden(world, recompute=False)]
    return found


def same(found, reference):
    return all((a - b).abs().max() <= 1e-12 for a, b in zip(found, reference, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_process_and_any_number_of_ranks_drop_the_same(ranks):
    reference = plain_logits()
    assert not same(reference[:1], reference[1:])  # every step drops something else
    for found in md.launch(everything, ranks=ranks):
        assert all(same(each, reference) for each in found["logits"])
        assert max(found["hidden"]) <= 1e-12
        assert found["shards"]
        if ranks > 1:
            assert not same(found["fault: own generators"], reference)
            assert not same(found["fault: local masks"][0], reference)
            assert found["fault: local masks"][1] > 1e-3


def replicas(world):
    return logits(world, tp=2), logits(world, tp=1), ones(world), logits(world, tp=4, seed=None)


def test_replicas_drop_something_else():
    everywhere = md.launch(replicas, ranks=4, seed=SEED)
    for rank, (tp2, tp1, _, tp4) in enumerate(everywhere):
        assert same(tp2, plain_logits(replica=rank // 2))
        assert same(tp1, plain_logits(replica=rank))
        assert same(tp4, plain_logits())  # seed=None: that of torch's generators
    masks = [mask for _, _, mask, _ in everywhere]
    assert masks[0] == masks[1] != masks[2] == masks[3]


def test_recomputing_the_whole_module_is_refused(solo):
    recomputed_whole(solo)


def test_replicas_are_numbered_along_any_axis():
    for axes in ({"dp": 3, "tp": 2}, {"tp": 2, "dp": 3}, {"pp": 2, "tp": 2, "dp": 2}):
        groups = groups_along(("tp",), axes)
        assert sorted(replica_number(group) for group in groups) == list(range(len(groups)))
