"""Which values a question can take, and its texts and numbers with one set of values filled in."""

import hashlib
import itertools
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

from grading.formulas import FORMULAS
from grading.question import Problem, Question, QuestionError
from grading.template import FillError, evaluate, render

VARIANTS = 8  # a question keeps at most so many of its draws
T = TypeVar("T")


def all_draws(question: Question) -> list[dict[str, Any]]:
    """Every combination of the params' values, each a dict from param to value."""
    return [dict(zip(question.params, values, strict=True)) for values in itertools.product(*question.params.values())]


def variants(question: Question) -> list[dict[str, Any]]:
    """The draws that are used: at most VARIANTS, in an order that only the question's id and seed decide."""
    order = lambda draw: digest(question.id, question.seed, json.dumps(draw, sort_keys=True))
    return sorted(all_draws(question), key=order)[:VARIANTS]


def values_of(question: Question, variant: int) -> dict[str, Any]:
    """What a variant of the question draws. Raises IndexError for one that it does not have."""
    draws = variants(question)
    return draws[checked_variant(question.id, variant, len(draws))]


def checked_variant(question_id: str, variant: object, variants: int) -> int:
    """The variant, if it is one of 0 to variants - 1; else raises IndexError."""
    if isinstance(variant, bool) or not isinstance(variant, int) or not 0 <= variant < variants:
        raise IndexError(f"{question_id} has the variants 0 to {variants - 1}, and none {reprlib.repr(variant)}")
    return variant


def digest(*parts: object) -> str:
    """A hash of these parts, as hex digits.

    >>> digest("ada", "dp-traffic")[:8]
    '3239541c'
    """
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


class Filled:
    """A question with the values of one draw: formulas, params and `let`, in order, are what its fields may name.

    Raises QuestionError, with the name of the field, for a `let` that cannot be computed; so do its methods.
    """

    def __init__(self, question: Question, draw: Mapping[str, Any]) -> None:
        self.question = question
        self.names: dict[str, Any] = {**FORMULAS, **draw}
        for name, expression in question.let.items():
            self.names[name] = self._try(f"let.{name}", lambda expression=expression: evaluate(expression, self.names))

    def text(self, field: str, template: str) -> str:
        """The text of a field."""
        return self._try(field, lambda: render(template, self.names))

    def number(self, field: str, expression: str) -> float:
        """The value of a field that has to be a number."""
        value = self._try(field, lambda: evaluate(expression, self.names))
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise self.problem(field, f"{expression!r} gives {value!r}; it has to give a finite number")
        return float(value)

    def problem(self, field: str, text: str) -> QuestionError:
        """An error about a field of this question."""
        return QuestionError(Problem(self.question.place, self.question.id, field, text))

    def _try(self, field: str, fill: Callable[[], T]) -> T:
        try:
            return fill()
        except FillError as error:
            raise self.problem(field, f"cannot be filled in: {error}") from error
