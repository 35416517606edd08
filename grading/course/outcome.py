"""What judging one cell came to: points and criteria, kept in the graded notebook's cell for regrade and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grading.course.plain import plain

STATES = ("passed", "failed", "blocked")


class Uncollected(Exception):
    """A learner's functions could not be taken from the kernel; the message says why."""


class Unwritten(Uncollected):
    """The notebook is as it was handed out."""


@dataclass(frozen=True)
class Item:
    """One criterion of an exercise, or one question of a test. chosen: keys of the options picked, for the report.

    state: passed, failed, or blocked, where this machine lacks what is needed to decide.
    """

    name: str
    state: str
    points: float
    possible: float
    chosen: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.state not in STATES or not 0 <= self.points <= self.possible:
            raise ValueError(f"{self.name}: state {self.state!r}, {self.points:g} of {self.possible:g} points")


@dataclass(frozen=True)
class Outcome:
    """How one cell was judged. part: an exercise's or a test's id. text: what the learner reads. notes: what only the
    instructor does. held: why a person has to look at the points, "" if nobody has."""

    part: str
    items: tuple[Item, ...]
    text: str
    notes: tuple[str, ...] = ()
    held: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", plain(self.text))  # what a learner's code raised stands in it
        object.__setattr__(self, "notes", tuple(map(plain, self.notes)))

    @property
    def points(self) -> float:
        return sum(item.points for item in self.items)

    @property
    def possible(self) -> float:
        return sum(item.possible for item in self.items)

    @property
    def blocked(self) -> float:
        return sum(item.possible for item in self.items if item.state == "blocked")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Outcome:
        """The outcome that to_json wrote."""
        items = tuple(
            Item(**{**item, "chosen": tuple(item["chosen"]), "mistakes": tuple(item["mistakes"])})
            for item in data["items"]
        )
        return Outcome(data["part"], items, data["text"], tuple(data["notes"]), data.get("held", ""))
