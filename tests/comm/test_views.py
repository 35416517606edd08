"""C11: any view is a legal tensor, for every call; and what torch does with the same views."""

import pytest
import torch
import torch.distributed as dist

import minidist as md


def views(rank):
    """Name -> (a base, the view of it that is passed); the values differ per rank and per element."""
    base = torch.arange(24.0).reshape(4, 6) + 100 * rank
    pairs = torch.view_as_complex(torch.arange(8.0).reshape(4, 2) + 10 * rank)
    return {
        "every second": (base.clone(), lambda x: x.view(-1)[::2]),
        "columns": (base.clone(), lambda x: x[:, 1:3]),
        "transposed": (base.clone(), lambda x: x.t()),
        "permuted": (base.clone().view(2, 3, 4), lambda x: x.permute(2, 0, 1)),
        "one column": (base.clone(), lambda x: x[:, 2]),
        "scalar": (base.clone(), lambda x: x[1, 2]),
        "empty": (base.clone(), lambda x: x[:, 3:3]),
        "expanded": (torch.full((1,), 5.0 + rank), lambda x: x.expand(3, 4)),
        "expanded dim": (torch.arange(3.0).reshape(3, 1) + 7 * rank, lambda x: x.expand(3, 2)),
        "conjugate": (pairs.clone(), lambda x: x.conj()),
        "minus imaginary": (pairs.clone(), lambda x: x.conj().imag),
        "one minus imaginary": (pairs.clone(), lambda x: x[1:2].conj().imag),
        "bool columns": (base.clone() % 3 == 0, lambda x: x[:, ::2]),
    }


def check_views(world, calls, names=None):
    """Names of call and view for which the view, or what lies around it in the base, is not as it should be."""
    wrong = []
    for call, (function, expected_of) in calls.items():
        for name in names or views(0):
            everyone = [view(base) for base, view in (views(r)[name] for r in range(world.size))]
            expected = expected_of([x.clone() for x in everyone], world.rank)
            base, view = views(world.rank)[name]
            before = base.clone()
            got = function(view(base))
            got = view(base) if got is None else got
            if got.shape != expected.shape or not torch.equal(got, expected):
                wrong.append(f"{call}, {name}: {got.tolist()} for {expected.tolist()}")
            if not base.is_complex():
                around = torch.ones(base.numel(), dtype=torch.bool)
                around[view(torch.arange(base.numel()).view(base.shape))] = False
                if not torch.equal(base.flatten()[around], before.flatten()[around]):
                    wrong.append(f"{call}, {name}: wrote beside the view")
    return wrong


def total(parts, rank):
    return sum(parts[1:], parts[0])


def on_rank_1(parts, rank):
    return total(parts, rank) if rank == 1 else parts[rank]


def from_rank_1(parts, rank):
    return parts[1]


def rows(x):
    return x.reshape(1) if x.dim() == 0 else x


def piece(parts, rank):
    whole = rows(total(parts, rank))
    return whole[md.partition(len(whole), len(parts))[rank]]


def together(parts, rank):
    return torch.cat([rows(part) for part in parts])


def swapped(parts, rank):
    return torch.cat([rows(part)[md.partition(len(rows(part)), len(parts))[rank]] for part in parts])


def ours(world):
    def message(x):
        other = 1 - world.rank
        if world.rank == 0:
            world.send(x, other)
            return world.recv(x, other)
        got = world.recv(torch.empty_like(x), other)
        world.send(x, other)
        return got

    calls = {
        "all_reduce": (world.all_reduce, total),
        "reduce": (lambda x: world.reduce(x, 1), on_rank_1),
        "broadcast": (lambda x: world.broadcast(x, 1), from_rank_1),
        "reduce_scatter": (world.reduce_scatter, piece),
        "all_gather": (world.all_gather, together),
        "all_to_all": (world.all_to_all, swapped),
        "recv": (message, lambda parts, rank: parts[1 - rank]),
    }
    return check_views(world, calls)


def test_every_call_takes_every_view():
    assert md.launch(ours, 2) == [[], []]


def torchs(world):
    calls = {
        "all_reduce": (lambda x: dist.all_reduce(x), total),
        "reduce": (lambda x: dist.reduce(x, 1), on_rank_1),
        "broadcast": (lambda x: dist.broadcast(x, 1), from_rank_1),
    }
    found = check_views(world, calls, ("every second", "columns", "transposed"))
    return {call: any(fault.startswith(call) for fault in found) for call in calls}


def test_the_check_notices_what_torch_does_with_views():
    """If one of these is right one day, Comm can drop a copy."""
    ranks = md.launch(torchs, 2, check=False)
    assert {call for rank in ranks for call, wrong in rank.items() if wrong} == {"all_reduce", "reduce", "broadcast"}


def oracle(world):
    x = (torch.arange(6) + 100 * world.rank)[::2]
    return world.all_reduce(x).tolist()


def test_c11_oracle():
    assert md.launch(oracle, 2) == [[100, 104, 108]] * 2


def expanded_gradient(world):
    w = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(w.sum() * (world.rank + 1), w)
    assert grad.stride() == (0,)
    return world.all_reduce(grad, "mean").tolist()


def test_an_expanded_gradient():
    """The gradient of a sum is one element seen n times."""
    assert md.launch(expanded_gradient, 2) == [[1.5] * 3] * 2


def differs(world):
    x = torch.zeros(1).expand(2) if world.rank == 0 else torch.tensor([1.0, 2.0])
    return world.all_reduce(x).tolist()


def test_a_result_that_an_expanded_view_cannot_hold_is_refused():
    with pytest.raises(md.LaunchError, match=r"pass x\.contiguous"):
        md.launch(differs, 2)
