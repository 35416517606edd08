"""The published schedules, each a few lines that say in which order a rank does what.

P ranks, M micro-batches, V stages a rank. Sources: GPipe, Huang et al. (arXiv 1811.06965); 1F1B, Narayanan et al.,
PipeDream-Flush (arXiv 2006.09503); interleaved, Narayanan et al. (arXiv 2104.04473); zero bubble, Qi et al. (arXiv
2401.10241), and V-shaped, Qi et al. (arXiv 2405.15362); DualPipe, DeepSeek-V3 (arXiv 2412.19437), cut in half to a V as
in github.com/deepseek-ai/DualPipe.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from minidist.schedule.program import Action, Program, check_counts

Actions = Iterator[Action]


def gpipe(rank: int, ranks: int, microbatches: int) -> Actions:
    """All forward passes, then all backward passes."""
    yield from (Action(rank, "F", m) for m in range(microbatches))
    yield from (Action(rank, "B", m) for m in range(microbatches))


def one_forward_one_backward(ahead: int, forward: list[Action], backward: list[Action]) -> Actions:
    """`ahead` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    ahead = min(ahead, len(forward))
    yield from forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        yield f
        yield b
    yield from backward[len(forward) - ahead :]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Actions:
    """1F1B: no more forward passes ahead than it takes until the first gradient comes back."""
    forward, backward = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FB")
    yield from one_forward_one_backward(ranks - 1 - rank, forward, backward)


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Actions:
    """1F1B over several stages a rank, each P micro-batches at a time."""

    def visits(kind: str, stages: list[int]) -> list[Action]:
        rounds = range(0, microbatches, ranks)
        return [Action(s, kind, m) for first in rounds for s in stages for m in range(first, first + ranks)]

    stages = [turn * ranks + rank for turn in range(stages_per_rank)]
    ahead = (stages_per_rank - 1) * ranks + (2 if stages_per_rank > 1 else 1) * (ranks - 1 - rank)
    yield from one_forward_one_backward(ahead, visits("F", stages), visits("B", stages[::-1]))


def zb_h1(rank: int, ranks: int, microbatches: int) -> Actions:
    """Zero bubble with 1F1B's memory: 1F1B with its backward split, and weight gradients put off by `rank`."""
    return _weights_later(one_f_one_b(rank, ranks, microbatches), lag=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Actions:
    """Zero bubble with twice the memory: forward passes fill the wait for the first gradient, weights the end."""
    forward, backward = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FB")
    ahead = 2 * (ranks - 1 - rank)
    return _weights_later(one_forward_one_backward(ahead, forward, backward), lag=2 * rank)


def _weights_later(actions: Actions, lag: int) -> Actions:
    """Each B as an I, and the W of the micro-batch `lag` before it; what is put off comes at the end."""
    put_off: deque[Action] = deque()
    for action in actions:
        if action.kind == "F":
            yield action
            continue
        yield action._replace(kind="I")
        put_off.append(action._replace(kind="W"))
        if len(put_off) > lag:
            yield put_off.popleft()
    yield from put_off


class _Vee:
    """A rank's two stages of a V, and which micro-batch each of them comes to next. 0: on the way down, 1: up."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage = (rank, 2 * ranks - 1 - rank)
        self.next = {(way, kind): 0 for way in (0, 1) for kind in "FB"}
        self.put_off: deque[Action] = deque()

    def _take(self, way: int, kind: str, name: str) -> Action:
        action = Action(self.stage[way], name, self.next[way, kind])
        self.next[way, kind] += 1
        return action

    def forward(self, way: int) -> Action:
        return self._take(way, "F", "F")

    def backward(self, way: int) -> Action:
        return self._take(way, "B", "B")

    def split(self, way: int) -> Action:
        """The first half of a backward pass; the other half is put off."""
        action = self._take(way, "B", "I")
        self.put_off.append(action._replace(kind="W"))
        return action

    def weight(self, way: int | None = None) -> Action:
        """What was put off first, on either way or on this one."""
        action = next(action for action in self.put_off if way is None or action.stage == self.stage[way])
        self.put_off.remove(action)
        return action

    def rest(self) -> Actions:
        """All that is put off, of the way up first."""
        yield from sorted(self.put_off, key=lambda action: -action.stage)


def zb_v(rank: int, ranks: int, microbatches: int) -> Actions:
    """Zero bubble with 1F1B's memory, if F, I and W take the same time: a V, so that the loss is next to the data."""
    v = _Vee(rank, ranks)
    for _ in range(2 * (ranks - rank) - 1):
        yield v.forward(0)
    for _ in range(rank):
        yield v.forward(1)
        yield v.forward(0)
    for _ in range(ranks - rank):
        yield v.forward(1)
        yield v.split(1)
        yield v.weight()
    while v.next[1, "F"] < microbatches:
        if v.next[0, "F"] < microbatches:
            yield v.forward(0)
        yield v.split(0)
        yield v.weight()
        yield v.forward(1)
        yield v.split(1)
        yield v.weight()
    for _ in range(rank):
        yield v.split(0)
        yield v.split(1)
    for _ in range(ranks - rank):
        yield v.split(0)
        yield v.weight(0)
    yield from v.rest()


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Actions:
    """DualPipe as a V: a forward pass of one way beside a backward pass of the other, whose messages they hide."""
    v, below = _Vee(rank, ranks), ranks - 1 - rank
    for _ in range(2 * below):
        yield v.forward(0)
    for _ in range(rank + 1):
        yield v.forward(0)
        yield v.forward(1)
    for _ in range(below):
        yield v.split(1)
        yield v.weight()
        yield v.forward(1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        yield v.forward(0)
        yield v.backward(1)
        yield v.forward(1)
        yield v.backward(0)
    for _ in range(below):
        yield v.backward(1)
        yield v.forward(1)
        yield v.backward(0)
    for turn in range(2 * (rank + 1)):
        yield v.backward(1 - turn % 2) if turn < rank + 1 else v.split(1 - turn % 2)
    for _ in range(below):
        yield v.weight()
        yield v.split(0)
    yield from v.put_off


@dataclass(frozen=True)
class Schedule:
    """A published schedule. stages_per_rank: how many it has; None: as many as asked.

    order: what a rank does. fewest: the least number of micro-batches for which `order` is right; a program for fewer
    is one for `fewest` without the others.
    """

    order: Callable[..., Actions]
    stages_per_rank: int | None = 1
    fewest: Callable[[int], int] = lambda ranks: 1


SCHEDULES = MappingProxyType(
    {
        "gpipe": Schedule(gpipe),
        "1f1b": Schedule(one_f_one_b),
        "interleaved": Schedule(interleaved, stages_per_rank=None),
        "zb_h1": Schedule(zb_h1),
        "zb_h2": Schedule(zb_h2),
        "zb_v": Schedule(zb_v, stages_per_rank=2, fewest=lambda ranks: 2 * ranks - 1),
        "dualpipe_v": Schedule(dualpipe_v, stages_per_rank=2, fewest=lambda ranks: 2 * ranks),
    }
)


def build(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Program:
    """The program of a published schedule: one of SCHEDULES.

    Raises: ValueError for a combination the schedule is not made for, with the nearest one that it is.

    >>> print(build("1f1b", ranks=2, microbatches=3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}: they are {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name]
    check_counts(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    if schedule.stages_per_rank not in (None, stages_per_rank):
        several = ": interleaved takes any number" if schedule.stages_per_rank == 1 else ", on the way down and up"
        raise ValueError(
            f"{name} has {schedule.stages_per_rank} on every rank{several}, not stages_per_rank={stages_per_rank}"
        )
    if schedule.stages_per_rank is None and microbatches % ranks:
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        nearest = " or ".join(str(m) for m in (below, above) if m)
        raise ValueError(
            f"{name} visits each stage with {ranks} micro-batches at a time: {microbatches} is no multiple of {ranks}, "
            f"take {nearest}"
        )
    extra = (stages_per_rank,) if schedule.stages_per_rank is None else ()
    enough = max(microbatches, schedule.fewest(ranks))
    return Program.of(schedule.order(rank, ranks, enough, *extra) for rank in range(ranks)).first(microbatches)
