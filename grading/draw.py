"""A question as a learner sees it: numbers drawn, options in this learner's order, and nothing that tells the answer.

Everything follows from names by hashing, so there is no random state: a learner sees the same question again, and a
grader sees what the learner saw.
"""

import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grading.fill import Filled, digest, values_of
from grading.question import Choice, Number, Order, Question, Trace, key

Answer = Any  # choice: key; several: sorted keys; number: float; order: keys; trace: {row key: choice key}


class AnswerError(ValueError):
    """This cannot be an answer to this question; the message says what one looks like."""


@dataclass(frozen=True)
class Shown:
    """A text to pick, to put in order or to answer, and its key in stored answers."""

    key: str
    text: str


@dataclass(frozen=True)
class Drawn:
    """One variant of a question. options: what to pick from or to put in order. rows: of a trace, each to be answered
    by one of the options."""

    id: str
    module: str
    use: str
    kind: str
    concept: str
    cell: str
    variant: int
    stem: str
    unit: str = ""
    options: tuple[Shown, ...] = ()
    rows: tuple[Shown, ...] = ()

    def text(self, key: str) -> str:
        """The text of an option or row. Raises KeyError for a key that is none's."""
        return {shown.key: shown.text for shown in (*self.rows, *self.options)}[key]

    def shuffled(self, learner: str) -> "Drawn":
        """The same with the options in this learner's order. The choices of a trace keep theirs, shared by its rows."""
        if self.kind == "trace":
            return self
        order = lambda shown: digest(learner, self.id, self.variant, shown.key)
        return replace(self, options=tuple(sorted(self.options, key=order)))

    def checked(self, answer: Answer) -> Answer:
        """The answer in its stored form: existing keys, each once, those of `several` sorted; a number as a float.

        Raises AnswerError for what cannot be an answer.
        """
        if self.kind == "number":
            return _number(answer, self.unit)
        options = {shown.key for shown in self.options}
        if self.kind == "choice":
            return _one_of(answer, options, "answer")
        if self.kind == "several":
            return sorted(_keys(answer, options))
        if self.kind == "order":
            if len(keys := _keys(answer, options)) != len(options):
                raise AnswerError(f"put all {len(options)} in order; here are {len(keys)}")
            return keys
        if not isinstance(answer, Mapping) or set(answer) != {row.key for row in self.rows}:
            raise AnswerError(f"answer each of the {len(self.rows)} rows: a dict from row key to choice key")
        return {row.key: _one_of(answer[row.key], options, row.text) for row in self.rows}


def variant_for(question_id: str, learner: str, attempt: int, variants: int) -> int:
    """Which of its variants a learner sees at an attempt, counted from 0: another each time until all were seen.

    >>> [variant_for("dp-traffic", "ada", attempt, 3) for attempt in range(4)]
    [1, 2, 0, 1]
    """
    return (int(digest(learner, question_id)[:12], 16) + attempt) % variants


def draw(question: Question, variant: int = 0, learner: str = "") -> Drawn:
    """The question as this learner sees this variant. Raises IndexError for a variant that it does not have."""
    return drawn(Filled(question, values_of(question, variant)), variant).shuffled(learner)


def drawn(filled: Filled, variant: int) -> Drawn:
    """What is shown of a question with its values filled in; options are sorted by key, which says nothing."""
    question, body = filled.question, filled.question.body

    def shown(field: str, templates: Iterable[str]) -> tuple[Shown, ...]:
        return tuple(
            Shown(key(question.id, template), filled.text(f"{field}[{i}]", template))
            for i, template in enumerate(templates)
        )

    options, rows, unit = (), (), ""
    if isinstance(body, Choice):
        options = shown("options", [option.value for option in body.options])
    elif isinstance(body, Order):
        options = shown("items", [item.value for item in body.items])
    elif isinstance(body, Trace):
        options, rows = shown("choices", body.choices), shown("rows", [row.ask for row in body.rows])
    elif isinstance(body, Number):
        unit = body.unit
    return Drawn(
        id=question.id,
        module=question.module,
        use=question.use,
        kind=question.kind,
        concept=question.concept,
        cell=question.cell,
        variant=variant,
        stem=filled.text("stem", question.stem),
        unit=unit,
        options=options if isinstance(body, Trace) else tuple(sorted(options, key=lambda option: option.key)),
        rows=rows,
    )


def _number(answer: Answer, unit: str) -> float:
    if isinstance(answer, int | float) and not isinstance(answer, bool) and abs(answer) <= sys.float_info.max:
        return float(answer)
    raise AnswerError(f"answer with a number{f' of {unit}' if unit else ''}, got {_few(answer)}")


def _one_of(answer: Answer, keys: set[str], what: str) -> str:
    if not isinstance(answer, str) or answer not in keys:
        raise AnswerError(f"{what}: {_few(answer)} is no option here; take one of {', '.join(sorted(keys))}")
    return answer


def _keys(answer: Answer, keys: set[str]) -> list[str]:
    if not isinstance(answer, list | tuple):
        raise AnswerError(f"answer with a list of keys, got {_few(answer)}")
    found = [_one_of(each, keys, "answer") for each in answer]
    if len(set(found)) < len(found):
        raise AnswerError(f"each option at most once, got {found}")
    return found


def _few(answer: Answer) -> str:
    """An answer that came from outside, whatever it is, in few characters."""
    try:
        return reprlib.repr(answer)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
