"""Wrong solutions that learners write, each with the criterion that it must lose and the mistake that is made.

A mutant is a function under `@mutant` in a file of its assignment, ps02/*.py and so on. It is judged like a learner's
answer.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A wrong solution of `exercise`: it loses `criterion`, and the report names `mistake`."""

    exercise: str
    criterion: str
    mistake: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return f"{self.exercise} {self.criterion}: {self.function.__name__}"


def mutant(exercise: str, criterion: str, mistake: str) -> Callable[[Callable[..., Any]], Mutant]:
    """Make a function a mutant."""
    return lambda function: Mutant(exercise, criterion, mistake, function)


def mutants(assignment: str = "") -> list[Mutant]:
    """All mutants, or those of one assignment, in the order in which they are written."""
    names = [info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.") if not info.ispkg]
    modules = [importlib.import_module(name) for name in names if assignment in name]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Mutant)]
