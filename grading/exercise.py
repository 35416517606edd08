"""What an exercise asks for, and how an answer is taken apart: criteria, the worlds they look at, what they find."""

import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grading.ranks.run import Limits, Run

MESSAGES = frozenset({"isend", "irecv"})


@dataclass(frozen=True)
class Case:
    """One world of ranks and the calls it makes.

    calls: for each call and rank the named inputs. facts: for each call what the criteria judge it by. labels: for each
    call what a report calls it ("n = 3, N = 7"). answers: see Job.
    """

    calls: tuple[tuple[Mapping[str, Any], ...], ...]
    facts: tuple[Any, ...]
    labels: tuple[str, ...]
    answers: tuple[tuple[Mapping[str, Any], ...], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.calls) == len(self.facts) == len(self.labels):
            raise ValueError(f"{len(self.calls)} calls need as many facts and labels")

    @property
    def ranks(self) -> int:
        return len(self.calls[0])


@dataclass(frozen=True)
class Finding:
    """What is wrong, for the learner: where, what was expected, what came, and what usually causes it.

    mistake: its id in misconceptions.yaml.
    """

    why: str
    mistake: str
    label: str = ""
    rank: int | None = None
    expected: str = ""
    got: str = ""

    def text(self) -> str:
        """The lines of a report below its first."""
        rows = []
        if self.expected or self.got:
            first = f"  expected  {self.expected}"
            fits = len(first) + len(self.got) < 80
            rows.append(f"{first:<38}    got  {self.got}" if fits else f"{first}\n  got       {self.got}")
        for row in self.why.splitlines():
            margin = "  " + row[: len(row) - len(row.lstrip())]
            rows.append(textwrap.fill(row.strip(), 100, initial_indent=margin, subsequent_indent=margin))
        return "\n".join(rows)


Judge = Callable[[Case, Run], Finding | None]


@dataclass(frozen=True)
class Criterion:
    """One thing that an answer has to do, worth points of its own.

    on: the name of the cases it looks at. judge: what is wrong with a run that came to its end. explain: names the
    mistake where a run did not, None where it cannot. basic: the others only count once this one holds.
    """

    name: str
    points: int
    on: str
    judge: Judge
    basic: bool = False
    explain: Judge = field(default=lambda case, run: None)

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ValueError(f"criterion {self.name!r} needs at least one point")


@dataclass(frozen=True)
class Exercise:
    """An exercise and how it is judged.

    id: as in check("02.3"). function: the name of what the learner writes. task: what it has to do, in a sentence.
    draw: new cases by name, from random numbers. allowed: calls of comm that the learner may make. given: functions of
    earlier exercises, by name, that a right one takes the place of. body: makes the call in a rank, see Job.
    """

    id: str
    function: str
    task: str
    criteria: tuple[Criterion, ...]
    draw: Callable[[random.Random], Mapping[str, Sequence[Case]]]
    body: Callable[..., Any]
    allowed: frozenset[str] = MESSAGES
    given: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if [criterion.basic for criterion in self.criteria] != [True] + [False] * (len(self.criteria) - 1):
            raise ValueError(f"exercise {self.id}: the first criterion is the basic one, and no other is")
        if len({criterion.name for criterion in self.criteria}) != len(self.criteria):
            raise ValueError(f"exercise {self.id}: two criteria have one name")

    @property
    def points(self) -> int:
        return sum(criterion.points for criterion in self.criteria)

    @property
    def cell(self) -> str:
        """The grade_id of its check cell."""
        return f"check-{self.id.replace('.', '-')}"


# ---- comparing tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A wrong result that a known mistake gives: what rank `rank` then returns for everyone's inputs `xs`."""

    mistake: str
    gives: Callable[[Sequence[Tensor], int], Any]
    why: str


def show(value: Any, most: int = 12) -> str:
    """A value as a report shows it.

    >>> show(torch.tensor([1.0, 2.5]))
    '[1., 2.5]'
    >>> show(torch.arange(30).reshape(5, 6)), show(None)
    ('[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...] of shape [5, 6]', 'None')
    """
    if not isinstance(value, Tensor):
        return repr(value)[:120]
    flat = value.flatten().tolist()
    words = [_number(number) for number in (flat if len(flat) <= most else flat[: most - 2])]
    text = f"[{', '.join([*words, '...'] if len(flat) > most else words)}]"
    return text if value.dim() == 1 else f"{text} of shape {list(value.shape)}"


def _number(number: Any) -> str:
    if isinstance(number, float):
        return f"{number:.0f}." if number == int_or_none(number) and abs(number) < 1e9 else f"{number:.9g}"
    return str(number)


def int_or_none(number: float) -> int | None:
    """number as an int, None where it is none (also for infinity and NaN).

    >>> int_or_none(3.0), int_or_none(3.5), int_or_none(float("nan"))
    (3, None, None)
    """
    return int(number) if number == number and abs(number) != float("inf") and number == int(number) else None


def equal(got: Any, expected: Tensor, tolerance: float = 0.0) -> bool:
    """Whether got is a tensor of this shape and these values, whatever its type."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.is_complex():
        return False
    if not (got.is_floating_point() or expected.is_floating_point()):
        return torch.equal(got.to(torch.int64), expected.to(torch.int64))
    one, other = got.to(torch.float64), expected.to(torch.float64)
    if tolerance == 0.0:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def find_wrong(
    results: Sequence[Any],
    expected: Sequence[Tensor],
    xs: Sequence[Tensor],
    known: Sequence[Known],
    label: str,
    otherwise: str,
) -> Finding | None:
    """The first rank whose result is wrong, and the known mistake that explains all ranks' results, if one does."""
    wrong = [rank for rank, got in enumerate(results) if not equal(got, expected[rank])]
    if not wrong:
        return None
    rank = wrong[0]
    got = results[rank]
    shown = {"label": label, "rank": rank, "expected": show(expected[rank]), "got": show(got)}
    if not isinstance(got, Tensor):
        kind = "nothing" if got is None else f"a {type(got).__name__}"
        return Finding(
            f"Your function returned {kind} where a tensor is asked for: end it with return.", "no-result", **shown
        )
    for each in known:
        alternatives = [_try(each, xs, r) for r in range(len(xs))]
        if all(isinstance(a, Tensor) and equal(results[r], a) for r, a in enumerate(alternatives)):
            return Finding(each.why, each.mistake, **shown)
    if got.shape != expected[rank].shape:
        why = f"The shape is {list(got.shape)} where {list(expected[rank].shape)} is asked for."
        return Finding(f"{why} {otherwise}", "wrong-shape", **shown)
    return Finding(otherwise, "wrong-values", **shown)


def _try(known: Known, xs: Sequence[Tensor], rank: int) -> Any:
    try:
        return known.gives(xs, rank)
    except (RuntimeError, IndexError, ValueError):
        return None  # this mistake is not possible here
