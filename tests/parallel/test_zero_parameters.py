"""Every kind of parameter and pass under ZeRO: tiny, tied, frozen, unused, 16-bit; one rank alone; what is refused."""

import copy
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.units.flat import Flat

SGD = lambda groups: md.SGD(groups, lr=0.25, momentum=0.5, weight_decay=0.125)
STAGES = range(4)


def inputs(rank, width=3):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(rank)).double()


def dense(make, loss, ranks, steps=3):
    """The same training in one process: the mean over the ranks' gradients. Full weights by name."""
    module = make()
    optimizer = SGD(module.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(loss(module, inputs(rank), rank) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
    return module.state_dict()


def sharded(world, make, loss, stage, steps=3, **options):
    z = md.Zero(make(), world, stage=stage, optimizer=SGD, **options)
    for _ in range(steps):
        z.zero_grad()
        loss(z, inputs(world.rank), world.rank).backward()
        z.step()
    return z


def distance(world, make, loss, stage, **options):
    found = sharded(world, make, loss, stage, **options).full_state_dict()
    reference = dense(make, loss, world.size)
    if world.rank:
        return found == {}
    assert list(found) == list(reference)
    return max((found[name] - reference[name]).abs().max().item() for name in reference)


# ---- modules ---------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of 1, 3, 6 and 10 elements, in two blocks: none divides by 4."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scale(*sizes) for sizes in ((1, 3), (6, 10)))
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Scale(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(n) for n in sizes)

    def forward(self, x):
        for weight in self.weights:
            x = (x * weight.square().sum() + weight.mean()).tanh()
        return x


class Tied(nn.Module):
    """An embedding [3, 2] whose matrix the head uses, both of them inside blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3, bias=False)])
        self.blocks[2].weight = self.blocks[0].weight
        self.double()

    def forward(self, tokens):
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


class Branches(nn.Module):
    """Blocks that hold two layers; `order` says which of them is used. The last layer is never used."""

    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "never": nn.Linear(3, 3)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(3)
        for block in self.blocks:
            block["a"].requires_grad_(not frozen)
            block.forward = lambda x, order, block=block: _through(block, x, order)
        self.double()

    def forward(self, x, order="ab"):
        for block in self.blocks:
            x = block(x, order)
        return self.norm(x)


def _through(block, x, order):
    for name in order:
        x = block[name](x).tanh()
    return x


def plain(model, x, rank):
    return model(x).square().sum()


def tied_loss(model, x, rank):
    return model(torch.tensor([[0, 1], [2, 2]][rank % 2])).square().sum() / 50


def other_branch(model, x, rank):
    return model(x, "ab"[rank % 2]).square().sum()


def more_on_rank_0(model, x, rank):
    """On rank 0 all gradients of a block come, and on the others less than half of them: still one order of messages.

    It is not if the block before is sent for only after the reduction where less than half have come.
    """
    return model(x, ["a", "b", "never"] if rank == 0 else "a").square().sum()


def recomputed(model, x, rank):
    """Each block is computed again in the backward pass."""
    module = getattr(model, "module", model)
    for block in module.blocks:
        original = block.forward
        if not hasattr(block, "recomputes"):
            block.recomputes = True
            block.forward = lambda *args, original=original: checkpoint(original, *args, use_reentrant=False)
    return model(x).square().sum()


def all_kinds(world):
    found = {}
    for stage in STAGES:
        found[stage, "odd"] = distance(world, Odd, plain, stage)
        found[stage, "tied"] = distance(world, Tied, tied_loss, stage)
        found[stage, "branches"] = distance(world, Branches, other_branch, stage)
        found[stage, "more on rank 0"] = distance(world, Branches, more_on_rank_0, stage)
        found[stage, "frozen"] = distance(world, lambda: Branches(frozen=True), plain, stage)
        found[stage, "recomputed"] = distance(world, Branches, recomputed, stage)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_of_parameter(ranks):
    """Unused parameters keep their weights, in spite of weight decay: the distance counts them too."""
    first, *others = md.launch(all_kinds, ranks=ranks)
    assert all(value <= 1e-10 for value in first.values()), first
    assert all(all(found.values()) for found in others)


def gathered_shards(world):
    """gather(shard(p)) is p: sizes 1, 3, 6 and 10 on 4 ranks, whose last ones own nothing of the small ones."""
    found = {}
    for n in (1, 3, 6, 10):
        module = nn.ParameterList([torch.arange(float(n)) + 1])
        z = md.Zero(module, world, stage=3, optimizer=SGD)
        owned = sum(piece.numel() for piece in z.parameters())
        found[n] = (owned, {name: value.tolist() for name, value in z.full_state_dict().items()})
    return found


def test_shards_of_any_size_come_together():
    everywhere = md.launch(gathered_shards, ranks=4)
    for n, owned in {1: [1, 0, 0, 0], 3: [1, 1, 1, 0], 6: [2, 2, 2, 0], 10: [3, 3, 3, 1]}.items():
        assert [found[n][0] for found in everywhere] == owned
        assert everywhere[0][n][1] == {"0": [1.0 + i for i in range(n)]}


def tie_kept(world):
    z = sharded(world, Tied, tied_loss, 3)
    saved = z.full_state_dict()
    other = md.Zero(Tied(), world, stage=3, optimizer=SGD)
    other.load_state_dict(saved)
    module = other.module
    again = other.full_state_dict()
    same = all(torch.equal(saved[name], again[name]) for name in saved)
    pieces = {name for name, _ in other.named_parameters()}
    return module.blocks[0].weight is module.blocks[2].weight, same, sorted(saved), pieces


def test_a_tied_parameter_stays_one():
    """One parameter, two keys, in one unit around both users; loading keeps `is`."""
    found = md.launch(tie_kept, ranks=2)
    assert all(tied and same for tied, same, _, _ in found)
    assert found[0][2] == ["blocks.0.weight", "blocks.1.bias", "blocks.1.weight", "blocks.2.weight"]
    assert found[1][2] == []
    assert set.union(*(pieces for *_, pieces in found)) == {"blocks.0.weight", "blocks.1.bias", "blocks.1.weight"}


def unused_grads(world):
    z = md.Zero(Branches(), world, stage=3, optimizer=SGD)
    other_branch(z, inputs(world.rank), world.rank).backward()
    full = z.full_grads()
    return sorted(name for name, grad in full.items() if grad is None), {
        name for name, p in z.named_parameters() if p.grad is None
    }


def test_what_no_rank_used_has_no_gradient():
    never = [f"blocks.{i}.never.{kind}" for i in (0, 1) for kind in ("bias", "weight")]
    found = md.launch(unused_grads, ranks=2)
    assert found[0][0] == never
    assert set.union(*(pieces for _, pieces in found)) == set(never)


# ---- 16 bit ----------------------------------------------------------------------------------------------------------


class One(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return self.w * x


def small_updates(world):
    """100 steps of 1e-3 from 1. Right: 0.9. Without master weights every step is lost, and it stays 1."""
    z = md.Zero(One(), world, stage=world.size, optimizer=lambda groups: md.SGD(groups, lr=1e-3))
    alone = One()
    for _ in range(100):
        z.zero_grad()
        z(torch.ones(1, dtype=torch.bfloat16)).sum().backward()
        z.step()
        alone.w.data -= 1e-3 * torch.ones(1, dtype=torch.bfloat16)
    masters = [piece.item() for piece in z.parameters()]
    return masters, alone.w.item(), {name: value.item() for name, value in z.full_state_dict().items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_small_updates_reach_the_master_weights(ranks):
    masters, without, saved = md.launch(small_updates, ranks=ranks)[0]
    assert masters == pytest.approx([0.9], abs=1e-5)
    assert without == 1.0
    assert saved == {"w": pytest.approx(0.8984, abs=1e-4)}


def small_sums(world):
    """1 + 300 / 512 over 301 micro-batches, by stage. In bfloat16 it is 1, and 1000 ones are 256."""
    found = {}
    for stage in STAGES:
        for grad_dtype in (None, torch.bfloat16):
            z = md.Zero(One(), world, stage=stage, optimizer=SGD, grad_dtype=grad_dtype)
            with z.no_sync():
                for x in [1.0] + 299 * [2**-9]:
                    z(torch.tensor([x], dtype=torch.bfloat16)).sum().backward()
            z(torch.tensor([2**-9], dtype=torch.bfloat16)).sum().backward()
            found[stage, grad_dtype] = z.full_grads()["w"].item()
    return found


def test_small_gradients_add_up_in_float32():
    (found,) = md.launch(small_sums, ranks=1)
    assert [round(found[stage, None], 4) for stage in STAGES] == [1.5859] * 4
    assert [found[stage, torch.bfloat16] for stage in STAGES] == [1.0] * 4  # asked for, and lost


# ---- one rank alone --------------------------------------------------------------------------------------------------


def only_rank_0(world):
    z = md.Zero(Odd(), world, stage=3, optimizer=SGD)
    return z.full_state_dict() if world.rank == 0 else None


def test_a_state_dict_on_one_rank_alone_names_what_is_collective():
    start = time.monotonic()
    with pytest.raises(md.LaunchError, match="full_state_dict, which all ranks have to call"):
        md.launch(only_rank_0, ranks=2, timeout=15)
    assert time.monotonic() - start < 60


# ---- refused ---------------------------------------------------------------------------------------------------------


def refusals(world):
    found = []
    z = md.Zero(Branches(), world, stage=1, optimizer=SGD)

    def note(action):
        try:
            action()
            found.append("nothing")
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(str(error))

    with z.no_sync():
        plain(z, inputs(world.rank), 0).backward()
    note(z.step)
    note(lambda: z.float())
    note(z.state_dict)
    note(lambda: copy.deepcopy(z))
    note(lambda: z.load_state_dict({"norm.weight": torch.zeros(2), "what": torch.zeros(1)} if world.rank == 0 else {}))
    note(lambda: md.Zero(Branches(), world, stage=4))
    note(lambda: md.Zero(Branches().requires_grad_(False), world))
    note(lambda: md.Zero(Branches(), world, blocks=[nn.Linear(1, 1)]))
    note(lambda: md.Zero(nn.Linear(2 + world.rank, 2), world))
    note(lambda: md.Zero(nn.Linear(2, 2), world).step())
    third = md.Zero(Branches(), world, stage=3, optimizer=SGD)
    x = inputs(world.rank).requires_grad_()
    note(lambda: torch.autograd.grad(third(x).sum(), x, create_graph=True))
    return found


def test_what_cannot_work_says_what_to_change():
    for found in md.launch(refusals, ranks=2):
        expected = [
            "outside no_sync",
            "before it is wrapped",
            "full_state_dict()",
            "cannot be copied",
            "blocks.0.a.weight is missing",
            "stage=4 is none of 0, 1, 2, 3",
            "nothing to train",
            "Linear is no part of this module",
            "the ranks wrap different modules",
            "there is no optimizer",
            "use stage 2",
        ]
        assert [want in got for want, got in zip(expected, found, strict=True)] == [True] * len(expected), found


def after_an_error(world):
    """A backward pass that raises on all ranks leaves nothing behind."""
    z = md.Zero(Odd(), world, stage=3, optimizer=SGD)
    out = z(inputs(world.rank, 1))
    out.register_hook(lambda grad: 1 / 0)
    z.module.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    z.module.blocks[0]._backward_hooks.clear()
    z.zero_grad()
    z(inputs(world.rank, 1)).square().sum().backward()
    found = z.full_grads()
    module = Odd()
    (sum(module(inputs(r, 1)).square().sum() for r in range(world.size)) / world.size).backward()
    return max((found[n] - p.grad).abs().max().item() for n, p in module.named_parameters()) if world.rank == 0 else 0


def test_a_failed_backward_pass_leaves_nothing_behind():
    assert max(md.launch(after_an_error, ranks=2)) <= 1e-12


def evaluated(world):
    """Without gradients, between a forward and its backward pass, and with the optimizer's schedule going on."""
    z = md.Zero(Odd(), world, stage=3, optimizer=SGD)
    schedule = torch.optim.lr_scheduler.ExponentialLR(z.optimizer, 0.5)
    loss = z(inputs(world.rank, 1)).square().sum()
    with torch.no_grad():
        z(inputs(7, 1))
    held = z.memory()["params"]
    loss.backward()
    z.step()
    schedule.step()
    reference = dense(Odd, lambda model, x, rank: model(inputs(rank, 1)).square().sum(), world.size, steps=1)
    full = z.full_state_dict()
    error = max((full[n] - reference[n]).abs().max().item() for n in reference) if world.rank == 0 else 0
    return error, held, z.optimizer.param_groups[0]["lr"]


def test_evaluation_between_forward_and_backward():
    for error, held, lr in md.launch(evaluated, ranks=2):
        assert error <= 1e-12
        assert held == 20 * 8 / 2
        assert lr == 0.125


# ---- torch's ---------------------------------------------------------------------------------------------------------


def beside_fully_shard(world):
    """Weights after three steps in float32 of ours and of fully_shard: largest relative difference."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config = md.GPTConfig(layers=2, dim=32, heads=2, vocab=64, seq=16)
    tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(world.rank))
    z = md.Zero(md.GPT(config), world, optimizer=lambda groups: md.SGD(groups, lr=0.5, momentum=0.9))
    theirs = md.GPT(config)
    mesh = init_device_mesh("cpu", (world.size,))
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        z.zero_grad()
        md.token_loss(z(tokens), tokens, world).backward()
        z.step()
        optimizer.zero_grad()
        md.token_loss(theirs(tokens), tokens, world).backward()
        optimizer.step()
    ours = z.full_state_dict()
    full = {name: p.full_tensor() for name, p in theirs.named_parameters()}
    if world.rank:
        return 0.0
    return max(((ours[name] - full[name]).norm() / full[name].norm()).item() for name in full)


@pytest.mark.slow
def test_equals_fully_shard_within_rounding():
    assert max(md.launch(beside_fully_shard, ranks=4, timeout=300)) <= 1e-6


# ---- faults ----------------------------------------------------------------------------------------------------------


def faulty(world):
    """What goes wrong with tied parameters and unused ones if they are not treated as they are."""
    found = {}
    with mock.patch("minidist.parallel.zero.divide", _first_user):
        found["tied parameter in its first user's unit"] = _outcome(world, Tied, tied_loss)
    with mock.patch("minidist.units.flat.is_unused", return_value=False):
        found["an unused parameter decays"] = _outcome(world, Branches, other_branch)
    with mock.patch.object(Flat, "load", return_value=None):
        z = sharded(world, Tied, tied_loss, 3)
        other = md.Zero(Tied(), world, stage=3)
        other.load_state_dict(saved := z.full_state_dict())
        again = other.full_state_dict()
        found["nothing is loaded"] = world.rank > 0 or not all(torch.equal(saved[n], again[n]) for n in saved)
    return found


def _first_user(module, blocks):
    units = {path: {} for path in ("", *blocks)}
    for name, parameter in module.named_parameters():
        units[".".join(name.split(".")[:2])][name] = parameter
    return units


def _outcome(world, make, loss):
    """Whether it is noticed: by an error, or a distance."""
    try:
        value = distance(world, make, loss, 3)
    except RuntimeError:
        return True
    return world.rank > 0 or not value <= 1e-12


def test_faults_are_seen():
    for found in md.launch(faulty, ranks=2, timeout=60):
        assert all(found.values()), found
