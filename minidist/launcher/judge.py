"""When is a world over, and why? Decides from what is seen from outside; starts, reads and ends nothing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minidist.launcher.job import Failure
from minidist.launcher.slots import Snapshot, State

_GRACE = 0.3  # seconds in which other ranks' failures are still collected
_GRACE_FOR_CAUSE = 3.0  # the same while the only failures say that another rank went away
_IDLE = 0.02  # seconds of work in a stall window that still count as nothing
_STALL_WITH_THREADS = 10.0  # a rank with more Python threads may be waiting for one of them that sleeps


@dataclass
class Findings:
    """What came from the ranks so far. ``returned`` holds ranks whose function returned."""

    ranks: int
    returned: set[int] = field(default_factory=set)
    failures: dict[int, Failure] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)

    @property
    def settled(self) -> set[int]:
        """Ranks of which nothing more will come."""
        return self.returned | self.failures.keys() | self.exits.keys()

    @property
    def lost(self) -> set[int]:
        """Ranks that ended without a word."""
        return self.exits.keys() - self.returned - self.failures.keys()


class Judge:
    """Asked again and again, it says None until a world is over, then the verdict.

    Deadlock: every rank is waiting or done, nothing moved for ``stall`` seconds, and in that time no thread of any rank
    ran, was ready to run, or waited for a disk. A rank that a busy machine keeps from running is ready to run.
    """

    def __init__(self, timeout: float, stall: float, work: Callable[[], float | None]):
        self._timeout, self._stall, self._work = timeout, stall, work
        self._start = self._failed = self._still = None
        self._signature: object = None
        self._worked: float = 0.0

    def verdict(self, found: Findings, slots: Sequence[Snapshot], now: float) -> str | None:
        self._start = now if self._start is None else self._start
        if len(found.returned) == found.ranks:
            return "ok"
        if found.failures or found.lost:
            return "error" if self._failure_is_complete(found, now) else None
        if now - self._start > self._timeout:
            return "timeout"
        return "deadlock" if self._is_stuck(slots, now) else None

    def _failure_is_complete(self, found: Findings, now: float) -> bool:
        self._failed = now if self._failed is None else self._failed
        if len(found.settled) == found.ranks:
            return True
        cause_known = found.lost or any(not failure.peer for failure in found.failures.values())
        return now - self._failed > (_GRACE if cause_known else _GRACE_FOR_CAUSE)

    def _is_stuck(self, slots: Sequence[Snapshot], now: float) -> bool:
        waiting = [slot for slot in slots if slot.state == State.WAITING]
        if not waiting or any(slot.state not in (State.WAITING, State.DONE) for slot in slots):
            self._signature = None
            return False
        signature = tuple(slot.changes for slot in slots)
        worked = self._work()  # None: a thread is ready to run right now
        moved = signature != self._signature or worked is None or worked - self._worked > _IDLE
        if moved:
            self._signature, self._still, self._worked = signature, now, worked or 0.0
            if worked is None:
                self._signature = None
        with_threads = any(slot.threads for slot in waiting)
        stall = max(self._stall, _STALL_WITH_THREADS) if with_threads else self._stall
        return self._signature is not None and now - (self._still or now) > stall


def work_of(pids: Iterable[int]) -> float | None:
    """Seconds that all threads of these processes have run or waited for a processor; None if one could run now.

    Linux: the first two fields of /proc/PID/task/TID/schedstat (kernel docs: sched-stats), the processor times of
    /proc/PID/stat where that is missing.
    """
    total = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
            try:
                state = (task / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if state[0] in "RDTt":
                return None
            total += _seconds(task, state)
    return total


def _seconds(task: Path, stat: list[str]) -> float:
    try:
        ran, queued, _ = (task / "schedstat").read_text().split()
        return (int(ran) + int(queued)) / 1e9
    except (OSError, ValueError):
        ticks = int(stat[11]) + int(stat[12])
        return ticks / 100
