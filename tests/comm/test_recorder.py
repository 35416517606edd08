"""What the recorder says of every call: payload, bytes a bandwidth-optimal algorithm sends, group, times."""

from time import monotonic, sleep

import torch

import minidist as md
from minidist.comm.recorder import Call, Recorder


def calls(world):
    """One of each, 16 elements of 4 bytes; with 4 ranks."""
    x, piece, rank = torch.zeros(16), torch.zeros(4), world.rank
    world.recorder.clear()
    before = monotonic()
    world.all_reduce(x)
    world.reduce(x, 1)
    world.broadcast(x, 1)
    world.all_gather(piece)
    world.reduce_scatter(x)
    world.all_to_all(x)
    world.all_to_all(x, [16 if dst == (rank + 1) % 4 else 0 for dst in range(4)])
    world.barrier()
    receiving = world.irecv(torch.zeros(3), (rank - 1) % 4)
    world.isend(torch.zeros(3), (rank + 1) % 4).wait()
    receiving.wait()
    after = monotonic()
    rows = [(call.op, call.nbytes, call.sent) for call in world.recorder.calls]
    whole = all(call.group == (0, 1, 2, 3) and call.rank == rank for call in world.recorder.calls)
    starts = [call.start for call in world.recorder.calls]
    timed = all(before <= call.start <= call.end <= after for call in world.recorder.calls) and starts == sorted(starts)
    total = world.recorder.bytes_sent()
    world.recorder.clear()
    return rows, total, whole, timed, world.recorder.bytes_sent(), world.recorder.calls


EXPECTED = [
    ("all_reduce", 64, 96),
    ("reduce", 64, 64),
    ("broadcast", 64, 64),
    ("all_gather", 64, 48),
    ("reduce_scatter", 64, 48),
    ("all_to_all", 64, 48),
    ("all_to_all", 64, 64),
    ("barrier", 0, 0),
    ("irecv", 12, 0),
    ("isend", 12, 12),
]


def test_every_call_is_recorded_once_with_its_bytes():
    for rows, total, whole, timed, cleared, left in md.launch(calls, 4):
        assert rows == EXPECTED
        assert total == sum(sent for _, _, sent in EXPECTED)
        assert whole
        assert timed
        assert (cleared, left) == (0, [])


def in_groups(world):
    pair = world.subgroups([[0, 2], [1]])
    world.recorder.clear()
    pair.all_reduce(torch.zeros(4))
    world.all_reduce(torch.zeros(3))
    return [(call.group, call.sent, call.rank) for call in world.recorder.calls]


def test_a_group_records_its_world_ranks_in_the_worlds_recorder():
    a, b, c = md.launch(in_groups, 3)
    assert a == [((0, 2), 16, 0), ((0, 1, 2), 16, 0)]
    assert b == [((1,), 0, 1), ((0, 1, 2), 16, 1)]
    assert c == [((0, 2), 16, 2), ((0, 1, 2), 16, 2)]


def overlapped(world):
    """A communication that is over long before anyone waits for it."""
    world.barrier()
    world.recorder.clear()
    if world.rank == 1:
        sleep(0.2)
    handle = world.all_reduce(torch.zeros(1000), async_op=True)
    under_way = world.recorder.calls[0].end is None or world.recorder.calls[0].end >= world.recorder.calls[0].start
    with world.compute("meanwhile"):
        sleep(0.5)
    handle.wait()
    (call,) = world.recorder.calls
    timeline = world.recorder.timeline()
    lanes = sorted((span.lane, str(span.action), span.nbytes) for span in timeline.spans)
    return under_way, call.end - call.start, timeline.overlap, lanes


def test_an_asynchronous_call_ends_when_it_is_over_not_when_waited_for():
    results = md.launch(overlapped, 2)
    assert results[0][2] > 0.2, "rank 0 waits for rank 1 under its computation"
    for under_way, seconds, _, lanes in results:
        assert under_way
        assert seconds < 0.45
        assert lanes == [("comm", "all_reduce", 4000), ("compute", "meanwhile", 0)]


def test_a_long_run_forgets_its_beginning_but_not_the_bytes():
    recorder = Recorder(limit=10)
    for i in range(100):
        recorder.add(Call("all_reduce", 4, 3, (0, 1), i, i + 1.0, 0))
        recorder.add_span(md.Span(0, "forward", i, i + 1.0))
    assert len(recorder.calls) <= 10
    assert len(recorder.spans) <= 10
    assert recorder.calls[-1].start == 99
    assert recorder.bytes_sent() == 300
    recorder.clear()
    assert recorder.bytes_sent() == 0
