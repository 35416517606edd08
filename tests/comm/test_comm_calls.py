"""Handles, groups, gradients, and what is refused."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import minidist as md
from minidist.comm.comm import Comm


def texts_of(calls):
    """What each of these calls raises, as text; "" where it raises nothing."""
    texts = []
    for call in calls:
        try:
            call()
            texts.append("")
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def refused(world):
    x, whole = torch.ones(4), torch.ones(4, dtype=torch.int64)
    return texts_of(
        [
            lambda: world.all_reduce([1, 2]),
            lambda: world.all_reduce(x.to_sparse()),
            lambda: world.all_reduce(x.to(torch.int16)),
            lambda: world.send(x.to(torch.float8_e4m3fn), 1 - world.rank),
            lambda: world.all_reduce(torch.ones(4, device="meta")),
            lambda: world.all_reduce(x, "average"),
            lambda: world.all_reduce(whole, "mean"),
            lambda: world.all_reduce(x.to(torch.complex64), "max"),
            lambda: world.broadcast(x, 2),
            lambda: world.broadcast(x, -1),
            lambda: world.reduce(x, 1.0),
            lambda: world.send(x, world.rank),
            lambda: world.recv(x, 1 - world.rank, tag=-1),
            lambda: world.all_to_all(x, [1, 2]),
            lambda: world.all_to_all(x, [4]),
            lambda: world.all_to_all(x, [2, 2], [1 + world.rank, 1]),
            lambda: world.all_gather(x, [3, 3]),
            lambda: world.all_reduce(x.unfold(0, 3, 1)),
            lambda: world.subgroups([[0, 1], [1]]),
            lambda: world.subgroups([[1, 0]]),
            lambda: world.subgroups([[0, 2]]),
            lambda: Comm(None, [1, 0], 0),
            lambda: Comm(None, [0, 1], 2),
        ]
    )


WORDS = (
    "TypeError: all_reduce takes a tensor, not list: torch.as_tensor",
    "TypeError: all_reduce takes a dense tensor, not torch.sparse_coo: use x.to_dense",
    "TypeError: all_reduce does not carry int16: convert x to one of float64",
    "TypeError: send does not carry float8_e4m3fn",
    "ValueError: all_reduce: x is on meta and this Comm works on cpu: use x.to(comm.device)",
    "ValueError: all_reduce: op='average' is none of sum, mean, min, max, product",
    "TypeError: all_reduce: a mean of int64",
    "TypeError: all_reduce: op='max' is not defined for complex64",
    "ValueError: broadcast: src=2 is no rank of this Comm: they are 0 to 1",
    "ValueError: broadcast: src=-1",
    "ValueError: reduce: dst=1.0",
    "ValueError: send: dst=0 is this rank itself",
    "ValueError: recv: tag=-1",
    "ValueError: all_to_all: send_sizes [1, 2] add up to 3, x has 4 rows",
    "ValueError: all_to_all: send_sizes [4] must be 2 lengths",
    "ValueError: all_to_all: rank 0 sends itself 2 rows and expects 1",
    "ValueError: all_gather: sizes [3, 3] must be 2 lengths, that of rank 0 4",
    "ValueError: all_reduce writes into x, and several indices of x reach one element",
    "ValueError: rank 1 is in two groups",
    "ValueError: group [1, 0] must be in ascending order",
    "ValueError: group [0, 2] must hold ranks of this Comm, which are 0 to 1",
    "ValueError: ranks must be ascending",
    "ValueError: rank 2 is no index",
)


def test_numbers_of_numpy_are_ranks():
    def numbered(world):
        last = np.int64(world.size - 1)
        pair = world.subgroups(np.arange(2).reshape(1, 2) if world.rank else [[0, 1]], name="pair")
        return world.broadcast(torch.tensor([float(world.rank)]), last).item(), pair.ranks

    assert md.launch(numbered, 2) == [(1.0, (0, 1))] * 2


def test_what_cannot_work_is_refused_before_anything_is_sent():
    texts = md.launch(refused, 2, timeout=30)
    for text, words in zip(texts[0], WORDS, strict=True):
        assert text.startswith(words), text
    assert len(texts[1]) == len(WORDS)


def asynchronous(world):
    x = torch.arange(6.0)[::2] + world.rank
    first = world.all_reduce(x, "mean", async_op=True)
    others = [
        world.reduce_scatter(torch.ones(4), async_op=True),
        world.all_gather(torch.ones(1 + world.rank), async_op=True),
        world.all_to_all(torch.ones(2) * world.rank, async_op=True),
        world.broadcast(torch.ones(2) * world.rank, 1, async_op=True),
        world.reduce(torch.ones(2), 1, async_op=True),
    ]
    results = [handle.wait().tolist() for handle in reversed(others)]
    return first.wait() is x, first.wait().tolist(), results


def test_handles_in_any_order_and_as_often_as_asked():
    for rank, (same, mean, results) in enumerate(md.launch(asynchronous, 2)):
        assert same
        assert mean == [0.5, 2.5, 4.5]
        assert results == [[2.0, 2.0] if rank else [1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0] * 3, [2.0, 2.0]]


class Watching:
    """A watch that notes what was waited for."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def waiting(self, op):
        self.seen.append(op)
        yield


def watched(world):
    watch = world.watch = Watching()
    x = torch.ones(3)
    world.all_reduce(x)
    handle = world.all_reduce(x, async_op=True)
    before = list(watch.seen)
    handle.wait()
    handle.wait()
    world.barrier()
    world.all_gather(torch.ones(world.rank))
    world.send(x, 1) if world.rank == 0 else world.recv(x, 0)
    return before, watch.seen


def test_every_wait_is_seen_under_its_name():
    for rank, (before, seen) in enumerate(md.launch(watched, 2)):
        assert before == ["all_reduce"]
        message = "recv" if rank else "send"
        assert seen == ["all_reduce", "all_reduce.wait()", "barrier", "all_gather", "all_gather", message]


def divided(world):
    """Groups of unequal size, one rank left out, messages inside a group; then groups in both groups at once."""
    group = world.subgroups([[0, 3], [1, 2, 5]], name="g")
    if group is None:
        return "left out"
    total = group.all_reduce(torch.tensor([float(world.rank)])).item()
    here = (group.name, group.rank, group.ranks, total)
    x = torch.full((2,), float(world.rank))
    group.broadcast(x, group.size - 1)
    if group.rank == 0:
        group.send(x + 1, 1)
    if group.rank == 1:
        group.recv(x, 0)
    inner = group.subgroups([[0, 1], *([[2]] if group.size == 3 else [])])
    return (*here, x[0].item(), inner.ranks, inner.all_reduce(torch.tensor([1.0 + world.rank])).item())


def test_groups():
    results = md.launch(divided, 6)
    assert results == [
        ("g", 0, (0, 3), 3.0, 3.0, (0, 3), 5.0),
        ("g", 0, (1, 2, 5), 8.0, 5.0, (1, 2), 5.0),
        ("g", 1, (1, 2, 5), 8.0, 6.0, (1, 2), 5.0),
        ("g", 1, (0, 3), 3.0, 4.0, (0, 3), 5.0),
        "left out",
        ("g", 2, (1, 2, 5), 8.0, 5.0, (5,), 6.0),
    ]


def through_the_graph(world):
    """Parameters may be written; a backward pass through what a call wrote into is refused."""
    w = torch.full((2,), 1.0 + world.rank, requires_grad=True)
    world.broadcast(w, 0)
    loss = (w * 3).sum()
    value = world.all_reduce(loss.detach().clone()).item()
    loss.backward()
    gathered = world.all_gather(w)
    hidden = w * 2
    world.all_reduce(hidden)
    try:
        hidden.sum().backward()
    except RuntimeError as error:
        return w.tolist(), value, w.grad.tolist(), gathered.requires_grad, str(error)


def test_no_gradient_goes_silently_wrong():
    for w, value, grad, gathered, refusal in md.launch(through_the_graph, 2):
        assert (w, value, grad, gathered) == ([1.0, 1.0], 12.0, [3.0, 3.0], False)
        assert "all_reduce wrote into" in refusal
        assert "x.detach()" in refusal


def test_a_world_of_one_needs_no_process_group():
    comm = Comm(None, [7], 0)
    x = torch.arange(3.0)
    assert comm.all_reduce(x, "mean") is x
    assert torch.equal(comm.reduce_scatter(x), x)
    assert comm.reduce_scatter(x) is not x
    assert torch.equal(comm.all_gather(torch.tensor(2.0)), torch.tensor([2.0]))
    assert torch.equal(comm.all_to_all(x, [3]), x)
    assert comm.lengths(5) == [5]
    assert comm.broadcast(x, 0, async_op=True).wait() is x
    comm.barrier()
    assert comm.recorder.bytes_sent() == 0
    assert comm.subgroups([[0]]).ranks == (7,)
    with pytest.raises(ValueError, match="dst=0 is this rank itself"):
        comm.send(x, 0)
    with pytest.raises(ValueError, match="a paced Comm needs a board"):
        Comm(None, [0], 0, pace=object())


def uneven(world):
    """Ranks 1 and 2 are in different numbers of groups when their part of the world divides."""
    world.subgroups([[0, 1]])
    right = world.subgroups([[1, 2]])
    return None if right is None else right.subgroups([[0, 1]]).all_reduce(torch.ones(1)).item()


def test_groups_that_torch_would_name_differently_are_refused():
    with pytest.raises(md.LaunchError, match="are in different numbers of groups: divide the world instead"):
        md.launch(uneven, 3)


def told(world):
    return world.lengths(10 + world.rank), world.all_gather(torch.ones(world.rank)).shape[0]


def without_board(world):
    """As under torchrun: lengths travel as messages."""
    return told(Comm(world.group, world.ranks, world.rank))


def test_lengths_with_and_without_shared_memory():
    for way in (told, without_board):
        assert md.launch(way, 3) == [([10, 11, 12], 3)] * 3
