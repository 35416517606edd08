"""Paced runs: what is sent is right, takes the modelled time, and says that it was paced."""

from time import monotonic, sleep

import pytest
import torch

import minidist as md
from minidist.comm.pace import Pace

# Two machines of two chips. A kilobyte takes 0.2 s inside a machine and 0.5 s between; latency 0.05 s.
SLOW = md.Cluster(
    machines=2,
    chips=2,
    chip=md.Chip(flops_per_s=1e6),
    inside=md.Link(alpha_s=0.05, bytes_per_s=1000 / 0.2),
    between=md.Link(alpha_s=0.05, bytes_per_s=1000 / 0.5),
)
INSIDE, BETWEEN = 0.25, 0.55  # of a message of 1000 bytes


def kilobyte(value=1):
    return torch.full((1000,), value, dtype=torch.uint8)


def seconds_of(world, function):
    world.barrier()
    start = monotonic()
    function()
    return monotonic() - start


def message(world, src, dst):
    if world.rank == src:
        world.send(kilobyte(7), dst)
    elif world.rank == dst:
        assert world.recv(kilobyte(), src).tolist() == [7] * 1000


def two_links(world):
    """Rank 0 sends inside and between at the same time."""
    if world.rank == 0:
        handles = [world.isend(kilobyte(), 1), world.isend(kilobyte(), 2)]
    else:
        handles = [world.irecv(kilobyte(), 0)] if world.rank in (1, 2) else []
    for handle in handles:
        handle.wait()


def one_link(world):
    """Rank 0 sends to ranks 2 and 3 over its one link between machines: one after the other."""
    if world.rank == 0:
        handles = [world.isend(kilobyte(), dst) for dst in (2, 3)]
    else:
        handles = [world.irecv(kilobyte(), 0)] if world.rank >= 2 else []
    for handle in handles:
        handle.wait()


def hidden(world):
    """Two all-reduces under a computation that takes as long as both."""
    with world.compute("idle", seconds=0.01):
        pass
    handles = [world.all_reduce(kilobyte(), async_op=True) for _ in range(2)]
    with world.compute("backward", seconds=1.4):
        pass
    for handle in handles:
        handle.wait()


def measure(world):
    world.recorder.clear()
    times = {
        "inside": seconds_of(world, lambda: message(world, 0, 1)),
        "between": seconds_of(world, lambda: message(world, 1, 2)),
        "two links": seconds_of(world, lambda: two_links(world)),
        "one link": seconds_of(world, lambda: one_link(world)),
        "all_reduce": seconds_of(world, lambda: world.all_reduce(kilobyte())),
        "late": seconds_of(world, lambda: (sleep(0.4) if world.rank == 3 else None, world.all_reduce(kilobyte()))),
    }
    world.recorder.clear()
    times["hidden"] = seconds_of(world, lambda: hidden(world))
    timeline = world.recorder.timeline()
    return times, timeline.overlap, timeline.paced, world.recorder.paced


# A ring of four with the link between machines in it: 2 * 3 steps of 250 bytes.
ALL_REDUCE = 6 * (0.05 + 250 / 2000)


@pytest.fixture(scope="module")
def measured():
    return md.launch(measure, 4, pace=SLOW)


def took(measured, name, rank):
    return measured[rank][0][name]


def near(seconds):
    """Not shorter than modelled; longer by what a busy machine adds."""
    return pytest.approx(seconds + 0.2, abs=0.205)


def test_a_message_takes_its_links_time(measured):
    for rank in (0, 1):
        assert took(measured, "inside", rank) == near(INSIDE)
    for rank in (1, 2):
        assert took(measured, "between", rank) == near(BETWEEN)
    assert took(measured, "inside", 3) < INSIDE - 0.05, "a rank that has no part in it does not wait"


def test_two_links_work_at_the_same_time_and_one_does_not(measured):
    assert took(measured, "two links", 0) == near(BETWEEN)
    assert took(measured, "two links", 1) == near(INSIDE)
    assert took(measured, "one link", 0) == near(2 * BETWEEN)
    assert sorted(round(took(measured, "one link", rank) / BETWEEN) for rank in (2, 3)) == [1, 2]


def test_a_collective_takes_its_ring_over_the_slowest_link(measured):
    for rank in range(4):
        assert took(measured, "all_reduce", rank) == near(ALL_REDUCE)


def test_it_starts_when_the_last_rank_comes(measured):
    for rank in range(4):
        assert took(measured, "late", rank) == near(0.4 + ALL_REDUCE)


def test_communication_hides_under_computation(measured):
    times, overlap, *_ = measured[0]
    assert 2 * ALL_REDUCE > 1.4
    assert times["hidden"] == near(2 * ALL_REDUCE + 0.01)
    assert overlap > 0.6


def test_the_recorder_and_the_timeline_say_so(measured):
    assert all(paced and recorded for *_, paced, recorded in measured)
    assert md.launch(lambda world: (world.recorder.paced, world.recorder.timeline().paced), 1) == [(False, False)]


def computed(world):
    """(by flops, given, neither, on a timeline)"""
    spans = []
    for options in ({"flops": 3e5}, {"seconds": 0.2}, {}):
        with world.compute("forward 0", **options):
            pass
        spans.append(world.recorder.spans[-1])
    return [span.end - span.start for span in spans], str(spans[0].action), spans[0].lane, spans[0].rank


def test_a_computation_takes_its_modelled_time():
    (by_flops, given, neither), *span = md.launch(computed, 1, pace=SLOW)[0]
    assert by_flops == near(0.3)
    assert given == near(0.2)
    assert neither < 0.1
    assert span == ["forward 0", "compute", 0]
    assert max(md.launch(computed, 1)[0][0]) < 0.1, "an unpaced run does not sleep"


def groups(world):
    """Both machines reduce inside at the same time; then the pairs between machines."""
    near = world.subgroups([[0, 1], [2, 3]], name="near")
    far = world.subgroups([[0, 2], [1, 3]], name="far")
    return seconds_of(world, lambda: near.all_reduce(kilobyte())), seconds_of(world, lambda: far.all_reduce(kilobyte()))


def test_groups_take_the_links_among_their_ranks():
    for inside, between in md.launch(groups, 4, pace=SLOW, check=False):
        assert inside == near(2 * (0.05 + 500 / 5000))
        assert between == near(2 * (0.05 + 500 / 2000))


def test_a_queue_on_one_link_without_ranks():
    """Three messages called at once leave one after the other; a receiver takes no link."""
    pace = Pace(SLOW)
    called = [pace.call("isend", 1000, (0, 2)) for _ in range(3)]
    assert [later - called[0] for later in called] == pytest.approx([0, BETWEEN, 2 * BETWEEN], abs=0.01)
    assert pace.call("isend", 1000, (0, 1)) < called[0] + 0.1, "the other link is free"
    assert pace.call("irecv", 1000, (2, 0)) < called[0] + 0.1
    start, end = pace.times("isend", 1000, (0, 2), called[0])
    assert (start, end - start) == (called[0], pytest.approx(BETWEEN))
    # The peer of the second was late by a second: it and what waits behind it move.
    assert pace.times("isend", 1000, (0, 2), called[1] + 1)[0] == called[1] + 1
    assert pace.times("isend", 1000, (0, 2), called[2])[0] == pytest.approx(called[1] + 1 + BETWEEN)


def test_the_check_notices_a_run_that_is_not_paced():
    unpaced = md.launch(measure, 4, pace=md.Cluster(machines=2, chips=2))
    for name, seconds in (("inside", INSIDE), ("between", BETWEEN), ("all_reduce", ALL_REDUCE)):
        assert took(unpaced, name, 1) != near(seconds)
