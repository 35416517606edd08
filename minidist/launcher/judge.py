"""When is a world over, and why? Decides from what is seen from outside; starts, reads and ends nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minidist.launcher.activity import Stillness
from minidist.launcher.job import Failure
from minidist.launcher.slots import Snapshot, State

_GRACE = 0.3  # seconds in which other ranks' failures are still collected
_GRACE_FOR_CAUSE = 3.0  # the same while the only failures say that another rank went away
_START = 60.0  # seconds in which the first rank must have joined; the timeout counts from then
_STALL_WITH_THREADS = 10.0  # a rank with more Python threads may be waiting for one of them that sleeps


@dataclass
class Findings:
    """What came from the ranks so far. ``returned`` holds ranks whose function returned."""

    ranks: int
    returned: set[int] = field(default_factory=set)
    failures: dict[int, Failure] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)

    def hear(self, rank: int, failure: Failure | None) -> None:
        """A rank says how its function ended: None if it returned."""
        if failure is None:
            self.returned.add(rank)
        else:
            self.failures[rank] = failure

    @property
    def settled(self) -> set[int]:
        """Ranks of which nothing more will come."""
        return self.returned | self.failures.keys() | self.exits.keys()

    @property
    def lost(self) -> set[int]:
        """Ranks whose process ended, and not because of an exception. While others run, a rank must stay."""
        return self.exits.keys() - self.failures.keys()


class Judge:
    """Asked again and again, it says None until a world is over, then the verdict.

    Deadlock: every rank is waiting or done, and for ``stall`` seconds no slot changed and no thread worked or was kept
    from working.
    """

    def __init__(self, timeout: float, stall: float, stillness: Stillness):
        self._timeout, self._stall, self._stillness = timeout, stall, stillness
        self._asked: float | None = None
        self._deadline = 0.0
        self._failed: float | None = None
        self._signature: object = None

    def verdict(self, found: Findings, slots: Sequence[Snapshot], now: float) -> str | None:
        self._count_from(slots, now)
        if len(found.returned) == found.ranks:
            return "ok"
        if found.failures or found.lost:
            return "error" if self._failure_is_complete(found, now) else None
        if now > self._deadline:
            return "timeout"
        return "deadlock" if self._is_stuck(slots, now) else None

    def _count_from(self, slots: Sequence[Snapshot], now: float) -> None:
        self._asked = now if self._asked is None else self._asked
        starting = all(slot.state == State.STARTING for slot in slots)
        if self._deadline == 0.0 or (starting and now < self._asked + _START):
            self._deadline = now + self._timeout

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
        if signature != self._signature:
            self._signature = signature
            self._stillness.reset()
        still, longer = self._stillness.seconds(now)
        stall = self._stall * longer
        if any(slot.threads for slot in waiting):
            stall = max(stall, _STALL_WITH_THREADS)
        return still > stall
