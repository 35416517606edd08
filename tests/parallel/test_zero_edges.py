"""Unusual models and callers: ZeRO's gradients are right, or it says what to change."""

import pytest
import torch
from torch import nn

import minidist as md

SGD = lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)


def x_of(rank, i=0, rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * rank + i), dtype=torch.float64)


class Two(nn.Module):
    """Two layers in one unit, of which a call uses one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x, which):
        return getattr(self, which)(x)


def sharded(world, module, stage, **options):
    torch.manual_seed(0)
    return md.Zero(module().double(), world, stage, SGD, **options)


def one_process(ranks, calls):
    """Gradients of Two after these (micro-batch, which), averaged over the ranks."""
    torch.manual_seed(0)
    module = Two().double()
    for rank in range(ranks):
        for i, which in calls:
            (module(x_of(rank, i), which).square().sum() / ranks).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def one_of_two_in_each_micro_batch(world):
    """For each stage: gradients after micro-batches that use one layer each; after forgetting; and after two passes."""
    found = {}
    for stage in range(4):
        z = sharded(world, Two, stage)
        for _ in range(2):
            z.zero_grad()
            with z.no_sync():
                z(x_of(world.rank, 0), "a").square().sum().backward()
            z(x_of(world.rank, 1), "b").square().sum().backward()
            found[stage, "each"] = z.full_grads()
        with z.no_sync():
            z(x_of(world.rank, 0), "a").square().sum().backward()
        z.zero_grad()
        z(x_of(world.rank, 1), "a").square().sum().backward()
        found[stage, "forgotten"] = z.full_grads()
        z(x_of(world.rank, 2), "a").square().sum().backward()
        found[stage, "twice"] = z.full_grads()
        b = {name: p.grad for name, p in z.named_parameters()}.get("b.weight")
        z.step()
        state = z.full_state_dict()
        found[stage, "moved"] = b is not None, state.get("b.weight")
    return found


def test_micro_batches_that_use_different_layers():
    found = md.launch(one_of_two_in_each_micro_batch, ranks=2)
    expected = {
        "each": one_process(2, [(0, "a"), (1, "b")]),
        "forgotten": one_process(2, [(1, "a")]),
        "twice": one_process(2, [(1, "a"), (2, "a")]),
    }
    torch.manual_seed(0)
    start = Two().double().b.weight
    for stage in range(4):
        for case, grads in expected.items():
            for name, grad in grads.items():
                ours = found[0][stage, case][name]
                assert (ours is None) == (grad is None), (stage, case, name)
                if grad is not None:
                    torch.testing.assert_close(ours, grad, rtol=0, atol=1e-12)
        assert not any(rank[stage, "moved"][0] for rank in found), "a gradient for what nobody used"
        torch.testing.assert_close(found[0][stage, "moved"][1], start.data, rtol=0, atol=0)


class ChangedView(nn.Module):
    """Blocks return a view, which is changed in place: autograd then forgets what was hung on it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Flatten()) for _ in "ab")

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


class Elsewhere(nn.Module):
    """A block's weight is used, and the block is not called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return nn.functional.linear(x, self.blocks[0].weight)


class Nested(nn.Module):
    """Lists in a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in "ab")

    def forward(self, x):
        for one, other in self.layers:
            x = x + other(torch.tanh(one(x)))
        return x


def backward(world, module, stage):
    z = sharded(world, module, stage)
    z(x_of(world.rank)).square().sum().backward()
    return z.full_grads()


@pytest.mark.parametrize("module", [ChangedView, Elsewhere])
def test_parameters_that_may_have_been_away_are_refused(module):
    assert md.launch(backward, ranks=2, args=(module, 2))[0]
    with pytest.raises(md.LaunchError, match=r"block blocks\.[01] computed while its parameters may have been away"):
        md.launch(backward, ranks=2, args=(module, 3), timeout=20)


def test_items_of_lists_in_lists_are_blocks():
    two, three = (md.launch(backward, ranks=2, args=(Nested, stage))[0] for stage in (2, 3))
    assert two.keys() == three.keys()
    for name, grad in two.items():
        torch.testing.assert_close(three[name], grad, rtol=0, atol=1e-12)


def misuse(world, what):
    if what == "two passes":
        z = sharded(world, Nested, 3)
        (z(x_of(0)).sum() + z(x_of(1)).sum()).backward()
    elif what == "not synced":
        z = sharded(world, Two, 1)
        with z.no_sync():
            z(x_of(0), "a").sum().backward()
        z.clip_grad_norm_(1.0)
    elif what == "whole numbers":
        module = Two().double()
        module.table = nn.Parameter(torch.arange(3), requires_grad=False)
        state = md.Zero(module, world, 3).full_state_dict()
        assert world.rank > 0 or state["table"].tolist() == [0, 1, 2]
    else:
        md.Zero(
            Two(),
            *{"mesh": (md.Mesh({"dp": 2}, world), 2), "optimizer": (world, 2, md.SGD([torch.ones(1)], 0.1))}[what],
        )


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("two passes", "if from two forward passes, give each a backward pass before the next, or use stage 2"),
        ("not synced", "gradients are this rank's alone: run the last backward outside no_sync"),
        ("mesh", r"comm is an axis of the mesh, as mesh\['dp'\], not Mesh"),
        ("optimizer", "optimizer makes one.*lambda groups"),
    ],
)
def test_misuse_says_what_to_change(what, words):
    with pytest.raises(md.LaunchError, match=words):
        md.launch(misuse, ranks=2, args=(what,), timeout=20)


def test_frozen_whole_numbers():
    md.launch(misuse, ranks=2, args=("whole numbers",))


# ---- around tensor parallelism ---------------------------------------------------------------------------------------

CONFIG = md.GPTConfig(layers=2, dim=16, heads=2, seq=8)


def trained_over_both(world, stage):
    """Whole weights and gradients of a GPT that is cut over tp and sharded over dp, after two steps."""
    mesh = md.Mesh({"dp": 2, "tp": 2}, world)
    model = md.tensor_parallel(md.GPT(CONFIG, seed=0).double(), mesh["tp"])
    z = md.Zero(model, mesh["dp"], stage, lambda groups: torch.optim.SGD(groups, lr=0.5))
    for step in range(2):
        tokens, targets = md.stdlib_tokens(seq=CONFIG.seq).batch(step, mesh["dp"].rank, 2)
        z.zero_grad()
        md.token_loss(z(tokens), targets, mesh["dp"], tp=mesh["tp"]).backward()
        z.step()
    return z.full_state_dict(), z.full_grads()


def trained_whole(world, stage):
    z = md.Zero(md.GPT(CONFIG, seed=0).double(), world, stage, lambda groups: torch.optim.SGD(groups, lr=0.5))
    for step in range(2):
        tokens, targets = md.stdlib_tokens(seq=CONFIG.seq).batch(step, world.rank, 2)
        z.zero_grad()
        md.token_loss(z(tokens), targets, world).backward()
        z.step()
    return z.full_state_dict(), z.full_grads()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_cut_over_tp_comes_out_whole(stage):
    first, *others = md.launch(trained_over_both, ranks=4, args=(stage,))
    assert all(found == ({}, {}) for found in others)
    for ours, theirs in zip(first, md.launch(trained_whole, ranks=2, args=(0,))[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)


def over_the_wrong_axis(world, wrap):
    mesh = md.Mesh({"dp": 1, "tp": 2}, world)
    model = md.tensor_parallel(md.GPT(CONFIG, seed=0), mesh["tp"])
    if wrap == "slices":
        z = md.Zero(model, mesh["dp"], 3)
        md.full_state_dict(z.module)
    elif wrap == "full_grads":
        md.full_grads(md.Zero(model, mesh["dp"], 3))
    else:
        {"Zero": lambda: md.Zero(model, world, 1), "DataParallel": lambda: md.DataParallel(model, world)}[wrap]()


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (
            "Zero",
            r"(?s)part 0 over 'tp', where rank 1 has .* part 1 over 'tp'.*is the same along another axis of the mesh",
        ),
        ("DataParallel", "is the same along another axis of the mesh: pass that"),
        ("slices", r"is not here: call the full_state_dict\(\)"),
        ("full_grads", r"Zero has slices of its own: call its full_grads\(\)"),
    ],
)
def test_slices_of_another_axis_are_not_taken_for_replicas(wrap, words):
    with pytest.raises(md.LaunchError, match=words):
        md.launch(over_the_wrong_axis, ranks=2, args=(wrap,), timeout=20)
