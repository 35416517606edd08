"""Deadlocks are told within seconds, name the rank that is different, and are never seen where there is none."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.launcher.activity import Stillness, Thread, moved
from minidist.launcher.judge import Findings, Judge
from minidist.launcher.report import odd_one_out
from minidist.launcher.slots import Snapshot, State


def stuck(fn, ranks: int = 2, **options) -> str:
    md.launch(lambda world: None, ranks=1)
    start = time.monotonic()
    with pytest.raises(md.LaunchError) as caught:
        md.launch(fn, ranks=ranks, **options)
    assert caught.value.verdict == "deadlock"
    assert time.monotonic() - start < 4
    return str(caught.value)


def test_a_rank_that_returned_early():
    def early(world):
        world.all_reduce(torch.ones(2))
        if world.rank != 2:
            world.barrier()  # rank 2 forgot

    text = stuck(early, ranks=4)
    assert text.count("waits in barrier, its communication call number 2") == 3
    assert text.count("in early:  world.barrier()  # rank 2 forgot") == 3
    assert "rank 2: returned, after 1 communication call" in text
    assert "Look at rank 2: it returned, and ranks 0, 1 and 3 still wait." in text


class Exchange:
    def swap(self, world):
        world.send(torch.ones(10), 1 - world.rank)  # both send first


def test_two_sends_from_a_method():
    def swaps(world):
        (lambda: Exchange().swap(world))()

    text = stuck(swaps)
    assert text.count("in swap:  world.send(torch.ones(10), 1 - world.rank)  # both send first") == 2
    assert "Post irecv first" in text


def test_another_operation_without_checks_and_raw():
    def differs(world):
        if world.rank == 1:
            world.broadcast(torch.ones(2), 0)
        else:
            world.barrier()

    text = stuck(differs, ranks=3, check=False)
    assert "Look at rank 1: it is in broadcast, the others are in barrier." in text

    def raw(world):
        works = [dist.irecv(torch.ones(2), 1 - world.rank)]
        works[0].wait()

    text = stuck(raw)
    assert text.count("waits in irecv.wait()") == 2
    assert "All of them wait in irecv.wait(): each for a message that none has sent." in text


def test_the_axes_of_a_mesh_in_a_circle():
    def circle(world):
        mesh = md.Mesh({"dp": 2, "tp": 2}, world)
        axes = [mesh["tp"], mesh["dp"]] if world.rank in (0, 3) else [mesh["dp"], mesh["tp"]]
        for axis in axes:
            axis.all_reduce(torch.ones(2))

    text = stuck(circle, ranks=4)
    assert text.count("waits in all_reduce in 'tp', ") == 2
    assert text.count("waits in all_reduce in 'dp', ") == 2


def test_a_group_that_only_its_members_make():
    def alone(world):
        dist.new_group([0, 1]) if world.rank == 0 else world.barrier()

    assert "waits in new_group" in stuck(alone)


def test_a_rank_that_sleeps_or_computes_is_no_deadlock():
    def slow(world):
        if world.rank == 0:
            time.sleep(2)  # the others wait, and nothing moves, but rank 0 will go on
        world.barrier()
        if world.rank == 1:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass
        return world.all_reduce(torch.ones(1)).item()

    assert md.launch(slow, ranks=3) == [3.0] * 3


def starved(world) -> float:
    """Seconds of the longest single call of ranks that hardly get a processor."""
    os.nice(19)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write("19")  # where each session gets its share, nice counts only inside it
    x, longest, total = torch.ones(2_000_000), 0.0, 0.0
    while longest < 2.5 and total < 60:
        start = time.monotonic()
        world.all_reduce(x, "mean")
        took = world.all_reduce(torch.tensor(time.monotonic() - start), "max").item()
        longest, total = max(longest, took), total + took
    return longest


@pytest.mark.slow  # keeps every core busy until the ranks have starved
def test_a_busy_machine_is_no_deadlock():
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    hogs = [subprocess.Popen(spin, start_new_session=True) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        longest = md.launch(starved, ranks=3, timeout=150)[0]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert longest > 2  # all ranks sat in one call for longer than a deadlock takes to be told


def test_a_thread_that_waits_does_not_make_the_rank_wait():
    def work(world):
        x = torch.zeros(1)
        if world.rank == 0:
            receiver = threading.Thread(target=lambda: world.recv(x, 1))
            receiver.start()
            time.sleep(2)  # in the main thread, which then goes on
            world.send(torch.ones(1), 1)
            receiver.join()
        else:
            world.recv(x, 0)
            world.send(torch.ones(1), 0)
        return x.item()

    assert md.launch(work, ranks=2) == [1.0, 1.0]


def test_a_thread_that_sleeps_before_it_sends_is_no_deadlock():
    def late(world):
        x = torch.zeros(1)
        if world.rank == 0:
            later = threading.Thread(target=lambda: (time.sleep(2.5), world.send(torch.ones(1), 1)))
            later.start()
            later.join()
        else:
            world.recv(x, 0)
        return x.item()

    assert md.launch(late, ranks=2) == [0.0, 1.0]


ASLEEP = Thread("S", ran=1.0, queued=0.0, slices=10)


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (ASLEEP, False),
        (Thread("S", 1.005, 0.0, 110), False),  # gloo looks at its sockets 100 times a second
        (Thread("S", 1.005, 0.8, 110), False),  # and on a busy machine waits for each look
        (Thread("S", 1.300, 0.0, 400), True),  # it works
        (Thread("S", 1.010, 0.9, 13), True),  # it works as far as it is let
        (Thread("D", 1.0, 0.0, 10), True),  # it waits for a disk
        (Thread("T", 1.0, 0.0, 10), True),  # someone has stopped it
        (Thread("S", 1.005), False),  # a kernel without schedstat
        (Thread("R", 1.005), True),
        (Thread("S", 1.1), True),
    ],
)
def test_what_counts_as_movement(current: Thread, expected: bool):
    assert moved({(1, 1): ASLEEP}, {(1, 1): ASLEEP}, {(1, 1): current}, seconds=1.0) is expected


def test_a_thread_without_a_processor_moves():
    ready = Thread("R", 1.0, 0.0, 10)
    assert moved({(1, 1): ASLEEP}, {(1, 1): ready}, {(1, 1): ready}, seconds=1.0)
    assert not moved({(1, 1): ASLEEP}, {(1, 1): ASLEEP}, {(1, 1): ready}, seconds=1.0)  # just woke for a look
    assert moved({(1, 1): ASLEEP}, {(1, 1): ASLEEP}, {(1, 1): ASLEEP, (1, 2): ASLEEP}, seconds=1.0)  # a new thread


def verdicts(slots, threads, seconds: float, found: Findings | None = None) -> list[str | None]:
    """What a judge says ten times a second about slots that do not change."""
    judge = Judge(timeout=60, stall=1.0, stillness=Stillness(lambda: threads))
    return [judge.verdict(found or Findings(len(slots)), slots, now / 10) for now in range(int(seconds * 10))]


def waiting(calls: int = 1, threads: int = 0) -> Snapshot:
    return Snapshot(State.WAITING, calls, "barrier", "f.py", 3, threads=threads, changes=calls)


def test_the_judge():
    still = {(1, 1): ASLEEP}
    assert "deadlock" in verdicts([waiting(), waiting()], still, 2)
    assert "deadlock" in verdicts([waiting(), Snapshot(State.DONE)], still, 2)
    assert "deadlock" not in verdicts([waiting(), waiting()], still, 1)
    assert "deadlock" not in verdicts([waiting(), Snapshot(State.RUNNING)], still, 30)
    assert "deadlock" not in verdicts([waiting(), waiting(threads=1)], still, 9)
    assert "deadlock" not in verdicts([waiting(), waiting()], {(1, 1): Thread("R", 1.0, 0.0, 10)}, 30)
    assert "deadlock" not in verdicts([waiting(), waiting()], {}, 9)  # a system that shows no threads
    assert "deadlock" in verdicts([waiting(), waiting()], {}, 11)
    assert "timeout" in verdicts([Snapshot(State.RUNNING)], still, 61)


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ([waiting(2), waiting(2), waiting(1)], "Look at rank 2: it is at call number 1"),
        ([waiting(2), waiting(1)], "The ranks disagree: rank 0 is at call number 2, rank 1 is at call number 1."),
        ([waiting(), waiting()], "All of them wait in barrier"),
    ],
)
def test_the_odd_one_out(slots, said: str):
    assert odd_one_out(slots).startswith(said)
