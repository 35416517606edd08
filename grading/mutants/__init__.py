"""Wrong solutions that learners write, each with the criterion that it must lose and the mistake that is made.

A mutant is a function under `@mutant` in a file of its assignment, ps02/*.py and so on. It is judged like a learner's
answer.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A wrong solution of `exercise`: it loses `criterion`, and the report names `mistake`.

    also: criteria that this mistake cannot but lose as well, such as the time of a program that it makes slower.
    """

    exercise: str
    criterion: str
    mistake: str
    function: Callable[..., Any]
    also: tuple[str, ...] = ()

    def loses(self, criteria: Sequence[str]) -> list[str]:
        """Which of its exercise's criteria it loses: all of them, where it loses the first."""
        return [each for each in criteria if self.criterion == criteria[0] or each in (self.criterion, *self.also)]

    @property
    def name(self) -> str:
        return f"{self.exercise} {self.criterion}: {self.function.__name__}"


def mutant(
    exercise: str, criterion: str, mistake: str, also: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Mutant]:
    """Make a function a mutant."""
    return lambda function: Mutant(exercise, criterion, mistake, function, also)


def mutants(assignment: str = "") -> list[Mutant]:
    """All mutants, or those of one assignment, in the order in which they are written."""
    names = [info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.") if not info.ispkg]
    modules = [importlib.import_module(name) for name in names if assignment in name]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Mutant)]
