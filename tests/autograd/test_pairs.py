"""Each conjugate pair against one process that holds everything: value and gradients, in float64, for any lengths."""

import warnings
from unittest import mock

import pytest
import torch
from torch.distributed.nn.functional import all_reduce as torch_all_reduce

import minidist as md
from minidist import autograd

N = 5  # along the dim that is cut: 3 + 2, 2 + 2 + 1, and 2 + 2 + 1 + 0 on four ranks


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x, world, dim=0):
    return x.chunk(world.size, dim)[world.rank] if world.rank < len(x.chunk(world.size, dim)) else x.narrow(dim, 0, 0)


def leaf(x):
    return x.detach().clone().requires_grad_()


def weights(world):
    """One tensor for each rank, all unlike."""
    return [numbers(3, N, seed=10 + r) for r in range(world.size)]


# Every case: the loss that all ranks compute from this rank's leaf; and what one process makes of it. Both give
# (loss, gradient), and the one process the gradient of what this rank holds.


def copy_case(world):
    x = leaf(numbers(3, N))
    loss = autograd.reduce((weights(world)[world.rank] * autograd.copy(x, world) ** 2).sum(), world)
    dense = leaf(numbers(3, N))
    whole = sum((w * dense**2).sum() for w in weights(world))
    return loss, x, whole, dense, lambda grad: grad


def reduce_case(world):
    """The gradient that comes back is not contiguous."""
    x = leaf(weights(world)[world.rank])
    loss = (autograd.reduce(x, world).t() ** 2 * numbers(N, 3)).sum()
    dense = [leaf(w) for w in weights(world)]
    whole = (sum(dense).t() ** 2 * numbers(N, 3)).sum()
    return loss, x, whole, dense[world.rank], lambda grad: grad


def reduce_into_case(world):
    x = leaf(weights(world)[world.rank])
    loss = (autograd.reduce_(x * 3, world) ** 2 * numbers(3, N)).sum()
    dense = [leaf(w) for w in weights(world)]
    whole = (sum(3 * d for d in dense) ** 2 * numbers(3, N)).sum()
    return loss, x, whole, dense[world.rank], lambda grad: grad


def gather_case(world, dim=1, **options):
    """All ranks go on alike; the gradient of a sum is expanded, not contiguous."""
    x = leaf(part(numbers(3, N), world, dim))
    whole_x = autograd.gather(x, world, dim, **options)
    dense = leaf(numbers(3, N))
    loss, whole = (((y**3).sum() + y.sum()) for y in (whole_x, dense))
    return loss, x, whole, dense, lambda grad: part(grad, world, dim)


def gather_differ_case(world, dim=1):
    x = leaf(part(numbers(3, N), world, dim))
    mine = weights(world)[world.rank]
    loss = autograd.reduce((mine * autograd.gather(x, world, dim, differ=True) ** 2).sum(), world)
    dense = leaf(numbers(3, N))
    whole = sum((w * dense**2).sum() for w in weights(world))
    return loss, x, whole, dense, lambda grad: part(grad, world, dim)


def scatter_case(world, dim=1):
    x = leaf(numbers(3, N))
    mine = part(weights(world)[0], world, dim)
    loss = autograd.reduce((mine * autograd.scatter(x, world, dim) ** 2).sum(), world)
    dense = leaf(numbers(3, N))
    return loss, x, (weights(world)[0] * dense**2).sum(), dense, lambda grad: grad


def reduce_scatter_case(world, dim=1):
    x = leaf(weights(world)[world.rank])
    loss = autograd.reduce((part(numbers(3, N), world, dim) * autograd.reduce_scatter(x, world, dim) ** 2).sum(), world)
    dense = [leaf(w) for w in weights(world)]
    return loss, x, (numbers(3, N) * sum(dense) ** 2).sum(), dense[world.rank], lambda grad: grad


def all_to_all_case(world, sizes=True):
    """Rank r has r + s rows for rank s. The one process knows where each of them goes."""
    n = world.size
    rows = lambda r, s: r + s if sizes else len(range(N)[md.partition(N, n)[s]])
    x = [leaf(numbers(sum(rows(r, s) for s in range(n)), 2, seed=r)) for r in range(n)]
    send, recv = [rows(world.rank, s) for s in range(n)], [rows(r, world.rank) for r in range(n)]
    got = autograd.all_to_all(x[world.rank], world, *([send, recv] if sizes else []))
    loss = autograd.reduce((got**2 * numbers(len(got), 2, seed=world.rank)).sum(), world)
    dense = [leaf(t) for t in x]
    whole = torch.zeros((), dtype=torch.float64)
    for s in range(n):
        arrived = torch.cat([dense[r].split([rows(r, q) for q in range(n)])[s] for r in range(n)])
        whole = whole + (arrived**2 * numbers(len(arrived), 2, seed=s)).sum()
    return loss, x[world.rank], whole, dense[world.rank], lambda grad: grad


def swap_case(world, **options):
    """From a slice along dim 0 to one along dim 2, of [5, 2, 6]."""
    full = numbers(N, 2, 6)
    x = leaf(part(full, world, 0))
    swapped = autograd.swap_shards(x, world, split=2, join=0, **options)
    assert torch.equal(swapped, part(full, world, 2))
    loss = autograd.reduce((swapped**2 * part(numbers(N, 2, 6, seed=1), world, 2)).sum(), world)
    dense = leaf(full)
    return loss, x, (dense**2 * numbers(N, 2, 6, seed=1)).sum(), dense, lambda grad: part(grad, world, 0)


CASES = {
    "copy": copy_case,
    "reduce": reduce_case,
    "reduce into": reduce_into_case,
    "gather": gather_case,
    "gather, dim 0": lambda world: gather_case(world, 0),
    "gather, length": lambda world: gather_case(world, -1, length=N),
    "gather, differ": gather_differ_case,
    "gather, differ, dim 0": lambda world: gather_differ_case(world, 0),
    "scatter": scatter_case,
    "scatter, dim 0": lambda world: scatter_case(world, 0),
    "reduce-scatter": reduce_scatter_case,
    "reduce-scatter, dim 0": lambda world: reduce_scatter_case(world, 0),
    "all-to-all, sizes": all_to_all_case,
    "all-to-all": lambda world: all_to_all_case(world, sizes=False),
    "swap": swap_case,
    "swap, length": lambda world: swap_case(world, length=N),
}


def distance(world, case):
    loss, x, whole, dense, held = case(world)
    x.grad = dense.grad = None
    loss.backward()
    whole.backward()
    wrong = (x.grad - held(dense.grad)).abs().max().item() if x.numel() else 0.0
    return max(abs(loss.item() - whole.item()), wrong)


# ---- faults: what people write instead -------------------------------------------------------------------------------


def there_and_there(x, there, back, apply=autograd._Pair.apply):
    """What goes forward goes back as well: reduce is differentiated as an all-reduce."""
    return apply(x, there, there)


def averaged(x, comm):
    return comm.all_reduce(x.clone(), op="mean")


def no_slice(x, comm, dim):
    return x.narrow(dim, 0, part(x, comm, dim).shape[dim]).clone()


FAULTS = {
    "copy that sums nothing": ("_all_reduce", lambda x, comm: comm.all_reduce(x.clone(), op="max"), copy_case),
    "copy that averages": ("_all_reduce", averaged, copy_case),
    "gather that forgets that consumers differ": (
        "_reduce_scatter",
        lambda grad, comm, dim: autograd._slice(grad, comm, dim),
        gather_differ_case,
    ),
    "gather that sums what is alike": (
        "_slice",
        lambda grad, comm, dim: autograd._reduce_scatter(grad, comm, dim),
        gather_case,
    ),
    "everyone takes the first slice": ("_slice", no_slice, scatter_case),
    "reduce that sums twice": ("_Pair.apply", there_and_there, reduce_case),
    "all-to-all that does not go back": ("_Pair.apply", there_and_there, lambda w: all_to_all_case(w, sizes=False)),
}


def faulty(world, name, wrong, case):
    """The distance with the fault in place; infinite where it does not even fit."""
    with mock.patch(f"minidist.autograd.{name}", wrong):
        try:
            return distance(world, case)
        except (ValueError, RuntimeError):
            return float("inf")


def everything(world):
    found = {name: distance(world, case) for name, case in CASES.items()}
    faults = {name: faulty(world, *fault) for name, fault in FAULTS.items() if world.size in (2, 3)}
    return found, faults


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pairs_equal_one_process(ranks):
    everywhere = md.launch(everything, ranks=ranks)
    for found, _ in everywhere:
        assert all(value <= 1e-12 for value in found.values()), found
    for name in everywhere[0][1]:
        assert max(faults[name] for _, faults in everywhere) > 1e-3, name


# ---- oracles ---------------------------------------------------------------------------------------------------------


def one_loss(world):
    """dL/dx of L = reduce(x): ours, and torch's, which differentiates the sum of the ranks' losses."""
    ours, theirs = (torch.tensor([1.0 + world.rank], requires_grad=True) for _ in range(2))
    autograd.reduce(ours, world).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch_all_reduce(theirs).backward()
    return ours.grad.item(), theirs.grad.item(), world.all_gather(ours).requires_grad


def test_the_loss_convention():
    assert md.launch(one_loss, ranks=2) == [(1.0, 2.0, False)] * 2


def pieces_that_do_not_fit(world):
    """Lengths 2, 1, 2: no cut of five that md.partition makes; every rank says so, before anything is sent."""
    with pytest.raises(ValueError, match=r"md.partition cuts 5 into \[2, 2, 1\]"):
        autograd.gather(torch.ones([2, 1, 2][world.rank]), world)
    with pytest.raises(ValueError, match="holds 2 along the dim"):
        autograd.gather(torch.ones(2), world, length=9)
    with pytest.raises(ValueError, match="both send_sizes and recv_sizes"):
        autograd.all_to_all(torch.ones(3), world, [1, 1, 1])
    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad((autograd.copy(x, world) ** 3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_what_cannot_work_is_refused():
    md.launch(pieces_that_do_not_fit, ranks=3)
