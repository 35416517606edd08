"""A question as it is written: what is asked, every possible answer, and why each is right or wrong.

A file of questions is YAML and read by `grading.read`. Texts are Jinja templates and `let`, `answer` and `wrong` values
are expressions, both over the question's params and `grading.formulas`; what a learner sees is made by `grading.draw`.
Everything checks itself on construction: ValueError, "FIELD: what is wrong and what to change".
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

USES = ("card", "test", "predict")
KINDS = ("choice", "several", "number", "order", "trace")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

Scalar = int | float | str


@dataclass(frozen=True)
class Option:
    """One answer of a choice: its text, and why it is right or which mistake leads to it."""

    value: str
    why: str
    right: bool = False
    mistake: str | None = None
    cell: str | None = None

    def __post_init__(self) -> None:
        _texts(self, "value", "why")
        _one_mistake(self.right, self.mistake)


@dataclass(frozen=True)
class Wrong:
    """A number that a known mistake gives: `value` is an expression."""

    value: str
    why: str
    mistake: str
    cell: str | None = None

    def __post_init__(self) -> None:
        _texts(self, "value", "why", "mistake")


@dataclass(frozen=True)
class Item:
    """One thing to put in order, and why its place is this one."""

    value: str
    why: str
    cell: str | None = None

    def __post_init__(self) -> None:
        _texts(self, "value", "why")


@dataclass(frozen=True)
class Row:
    """One line of a trace: what is asked, the answer (it reads as one of the choices), and why it is that."""

    ask: str
    answer: str
    why: str
    cell: str | None = None

    def __post_init__(self) -> None:
        _texts(self, "ask", "answer", "why")


@dataclass(frozen=True)
class Choice:
    """Options of which one is right or, if several, any number from one."""

    options: tuple[Option, ...]
    several: bool = False

    def __post_init__(self) -> None:
        if len(self.options) < 2:
            raise ValueError(f"options: at least 2 are needed, here are {len(self.options)}")
        right = sum(option.right for option in self.options)
        if right == 0:
            raise ValueError("options: none is right; write `right: true` on the one that is")
        if right > 1 and not self.several:
            raise ValueError(f"options: {right} are right; leave one `right: true`, or make it `kind: several`")
        _different("options", [option.value for option in self.options])


@dataclass(frozen=True)
class Number:
    """A number with a unit. `answer` is an expression; `otherwise` says what to check when no known mistake fits.

    derivation: how the number comes about, step by step in numbers; shown after `why`, and beside a measured result.
    tolerance: relative to the answer. tolerance_abs: in the unit. With neither the number has to be exact.
    """

    answer: str
    why: str
    otherwise: str
    unit: str = ""
    tolerance: float | None = None
    tolerance_abs: float | None = None
    wrong: tuple[Wrong, ...] = ()
    derivation: str = ""

    def __post_init__(self) -> None:
        _texts(self, "answer", "why", "otherwise")
        if self.tolerance is not None and self.tolerance_abs is not None:
            raise ValueError("tolerance_abs: leave out this or tolerance, one decides")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance: relative, so from 0 to below 1 (0.02 is 2 %), got {self.tolerance}")
        if self.tolerance_abs is not None and not 0 <= self.tolerance_abs < math.inf:
            raise ValueError(f"tolerance_abs: 0 or more, in the unit of the answer, got {self.tolerance_abs}")
        _different("wrong", [wrong.value for wrong in self.wrong])


@dataclass(frozen=True)
class Order:
    """Items in their right order; `mistake` is what a wrong order shows."""

    items: tuple[Item, ...]
    mistake: str

    def __post_init__(self) -> None:
        _texts(self, "mistake")
        if len(self.items) < 3:
            raise ValueError(f"items: at least 3 are needed, here are {len(self.items)}")
        _different("items", [item.value for item in self.items])


@dataclass(frozen=True)
class Trace:
    """Rows to fill from a shared list of choices, from the first to the last; `mistake` is what a wrong row shows."""

    rows: tuple[Row, ...]
    choices: tuple[str, ...]
    mistake: str

    def __post_init__(self) -> None:
        _texts(self, "mistake")
        if len(self.rows) < 2:
            raise ValueError(f"rows: at least 2 are needed, here are {len(self.rows)}")
        if len(self.choices) < 2:
            raise ValueError(f"choices: at least 2 are needed, here are {len(self.choices)}")
        _different("rows", [row.ask for row in self.rows])
        _different("choices", list(self.choices))


Body = Choice | Number | Order | Trace


@dataclass(frozen=True)
class Place:
    """Where a question is written: a file and the line it begins on."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" if self.line else self.file


@dataclass(frozen=True)
class Question:
    """One question of a module, with its body by kind.

    use: card, test or predict. cell: the tag of the lesson cell that demonstrates the answer. params: values to draw
    from. let: expressions, in order. examples: cases worked out by hand, that the validator recomputes. seed: changes
    which values are drawn, and nothing else.
    """

    id: str
    module: str
    use: str
    kind: str
    concept: str
    cell: str
    stem: str
    body: Body
    params: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict, hash=False)
    let: Mapping[str, str] = field(default_factory=dict, hash=False)
    examples: tuple[Mapping[str, Scalar], ...] = field(default=(), hash=False)
    seed: str = ""
    place: Place = field(default=Place(), compare=False)

    def __post_init__(self) -> None:
        _texts(self, "concept", "cell", "stem")
        if not ID.fullmatch(self.id):
            raise ValueError(f"id: lower case letters and digits with single - between, got {self.id!r}")
        if self.use not in USES:
            raise ValueError(f"use: one of {', '.join(USES)}, got {self.use!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind: one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, values in self.params.items():
            if not values:
                raise ValueError(f"params.{name}: an empty list; give at least one value")
            _different(f"params.{name}", [repr(value) for value in values])
        for where, names in (("params", self.params), ("let", self.let)):
            for name in names:
                if not NAME.fullmatch(name):
                    raise ValueError(f"{where}.{name}: a name is letters, digits and _, not beginning with a digit")
        for name in self.let:
            if name in self.params:
                raise ValueError(f"let.{name}: is already a param; take another name")


@dataclass(frozen=True)
class Module:
    """The questions of one lesson, and the concepts that its head lists."""

    id: str
    title: str
    concepts: tuple[str, ...]
    questions: tuple[Question, ...] = ()

    def __post_init__(self) -> None:
        _texts(self, "title")
        if not re.fullmatch(r"\d\d", self.id):
            raise ValueError(f'module: two digits in quotes, such as "03", got {self.id!r}')
        if not self.concepts:
            raise ValueError("concepts: none; list the names that the head of the lesson prints")
        _different("concepts", list(self.concepts))


@dataclass(frozen=True)
class Problem:
    """Something to change in a question file."""

    place: Place
    question: str
    field: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), self.question, self.field, self.text) if part)


class QuestionError(ValueError):
    """A question file cannot be used; `problems` says where and what to change."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def key(question_id: str, template: str) -> str:
    """The name of an option, item, row or choice in stored answers. It depends on nothing but its text as written.

    >>> key("dp-traffic", "twice"), key("dp-traffic", "once")
    ('fe4045', '30cf01')
    """
    return hashlib.sha256(f"{question_id}\0{template}".encode()).hexdigest()[:6]


def _texts(thing: object, *fields: str) -> None:
    for name in fields:
        if not getattr(thing, name).strip():
            raise ValueError(f"{name}: is empty; write it")


def _one_mistake(right: bool, mistake: str | None) -> None:
    if right and mistake:
        raise ValueError("mistake: a right option has none; leave it out, or leave out `right: true`")
    if not right and not mistake:
        raise ValueError("mistake: a wrong option names one of misconceptions.yaml (or is it right: true?)")


def _different(where: str, values: list[str]) -> None:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"{where}: {twice[0]!r} is there twice; keep one")
