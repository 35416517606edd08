"""Has anything moved? Told from how the kernel ran the ranks' threads, so that a busy machine does not look stuck.

A rank blocked in gloo is not quite at rest: gloo's own thread looks at its sockets a hundred times a second. So the
question is asked of every thread: did it sleep through, or run often and each time only for a look? A thread that has
work but no processor, or waits for a disk, is neither.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_SHARE = 0.02  # of the time: a thread that runs no longer than this only looks
_SLICE = 0.0005  # seconds: a look is shorter; a thread that works uses the processor for as long as it is let
_SLACK = 0.002  # seconds a thread may run in any case
_BUSY, _BLIND = 2.5, 10.0  # how many times longer to look on a busy machine, and where threads cannot be seen
_TICK = 1 / 100  # seconds, the unit of the processor times in /proc/PID/stat


@dataclass(frozen=True)
class Thread:
    """A thread as the kernel accounts for it. ``ran`` and ``queued`` in seconds; ``slices`` counts its turns."""

    state: str
    ran: float
    queued: float = 0.0
    slices: int | None = None  # None: this kernel does not say


Threads = Mapping[tuple[int, int], Thread]


class Stillness:
    """For how long has nothing moved? Reads the threads each time it is asked."""

    def __init__(self, read: Callable[[], Threads]):
        self._read = read
        self._first: tuple[float, Threads] | None = None
        self._last: Threads = {}

    def reset(self) -> None:
        """Something has moved."""
        self._first = None

    def seconds(self, now: float) -> tuple[float, float]:
        """How long nothing has moved, and how many times longer than usual one should look to be sure of it."""
        threads = self._read()
        if self._first is None or moved(self._first[1], self._last, threads, now - self._first[0]):
            self._first = (now, threads)
        self._last = threads
        since, first = self._first
        queued = sum(thread.queued - first[key].queued for key, thread in threads.items())
        unsure = any(thread.slices is None for thread in threads.values())
        busy = unsure or queued > 0.1 * (now - since)
        return now - since, _BUSY if busy else 1.0 if threads else _BLIND


def moved(first: Threads, last: Threads, current: Threads, seconds: float) -> bool:
    """Whether any thread worked, or was kept from working, between ``first``, ``last`` and ``current``.

    >>> asleep, looked = Thread("S", 1.0, 0.0, 10), Thread("S", 1.01, 0.2, 110)
    >>> moved({(1, 1): asleep}, {(1, 1): asleep}, {(1, 1): looked}, seconds=1.0)
    False
    >>> worked, kept_waiting = Thread("S", 1.01, 0.9, 13), Thread("R", 1.0, 0.0, 10)
    >>> moved({(1, 1): asleep}, {(1, 1): asleep}, {(1, 1): worked}, seconds=1.0)
    True
    >>> moved({(1, 1): asleep}, {(1, 1): kept_waiting}, {(1, 1): kept_waiting}, seconds=1.0)
    True
    """
    if first.keys() != current.keys() or last.keys() != current.keys():
        return True
    return any(_moved(first[key], last[key], current[key], seconds) for key in current)


def _moved(first: Thread, last: Thread, current: Thread, seconds: float) -> bool:
    if current.state in "DTt":
        return True
    ran = current.ran - first.ran
    if current.slices is None or first.slices is None:
        return current.state == "R" or ran > _SHARE * seconds + _TICK
    kept_waiting = current.state == last.state == "R" and current.slices == last.slices
    turns = max(current.slices - first.slices, 1)
    worked = ran > _SLACK and (ran > _SHARE * seconds + _SLACK or ran / turns > _SLICE)
    return kept_waiting or worked


def threads_of(pids: Iterable[int]) -> Threads:
    """All threads of these processes. Linux: /proc/PID/task/TID/schedstat (kernel docs: scheduler/sched-stats)."""
    found: dict[tuple[int, int], Thread] = {}
    for pid in pids:
        try:
            for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                found[pid, tid] = _thread(f"/proc/{pid}/task/{tid}")
        except OSError:
            continue
    return found


def _thread(folder: str) -> Thread:
    with open(f"{folder}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    try:
        with open(f"{folder}/schedstat") as file:
            ran, queued, slices = map(int, file.read().split())
        return Thread(fields[0], ran / 1e9, queued / 1e9, slices)
    except (OSError, ValueError):
        return Thread(fields[0], (int(fields[11]) + int(fields[12])) * _TICK)
