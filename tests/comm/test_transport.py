"""The two transports against each other: torch's own collectives, which other backends use, and gloo's parts."""

import pytest
import torch

import minidist as md
from minidist.comm.transport import Alone, Gloo, Started, Torch, Transport, transport


def finished(started):
    for work in started.works:
        work.wait()
    started.finish()


def compare(world):
    """Names of what Torch and Gloo give differently on the same group."""
    rank, size = world.rank, world.size
    ways = {"torch": Torch(world.group, rank, size), "gloo": Gloo(world.group, rank, size)}
    wrong = []
    for length in (0, 1, size, 2 * size + 1, 50_000):
        parts = [part.stop - part.start for part in md.partition(length, size)]
        x = (torch.arange(2.0 * length).reshape(length, 2) + rank) * (rank + 1)
        for op in ("sum", "min", "max", "product"):
            got = {}
            for name, way in ways.items():
                whole, piece = x.clone(), torch.empty(parts[rank], 2)
                finished(way.all_reduce(whole, op))
                finished(way.reduce_scatter(piece, x, op, parts))
                got[name] = (whole, piece)
            if not all(torch.allclose(a, b) for a, b in zip(got["torch"], got["gloo"], strict=True)):
                wrong.append(f"{op} {length}")
        got = []
        for way in ways.values():
            got.append(x.new_empty(size * length, 2))
            finished(way.all_gather(got[-1], x, [length] * size))
        if not torch.equal(*got):
            wrong.append(f"all_gather {length}")
    return wrong, type(transport(world.group, rank, size)) is Gloo


def test_torch_and_gloo_agree():
    assert md.launch(compare, 3) == [([], True)] * 3


def test_a_group_of_one_has_no_transport():
    assert type(transport(None, 0, 1)) is Alone


class Mirror(Transport):
    """A transport for one rank that believes it has a twin which does the same: sums double."""

    def all_reduce(self, data, op):
        return Started(finish=lambda: data.mul_(2))

    def isend(self, data, dst, tag):
        return Started([Work()])


class Work:
    """A work that can only be waited for."""

    waited = 0

    def wait(self):
        Work.waited += 1


def test_a_comm_takes_a_transport_of_someone_elses_in_place_of_a_group():
    comm = md.Comm(Mirror(), (0, 1), 0)
    x = torch.arange(6.0).reshape(2, 3).t()
    assert comm.all_reduce(x) is x
    assert x.tolist() == [[0, 6], [2, 8], [4, 10]]
    assert comm.all_reduce(torch.ones(2), op="mean", async_op=True).wait().tolist() == [1, 1]
    comm.isend(x, 1).wait()
    assert Work.waited == 1
    assert comm.recorder.calls[-1].sent == x.nbytes
    with pytest.raises(NotImplementedError):
        comm.barrier()


def test_also_for_a_comm_of_one_rank():
    assert md.Comm(Mirror(), (0,), 0).all_reduce(torch.ones(1)).item() == 2
