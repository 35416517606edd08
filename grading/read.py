"""Question files: YAML in, questions out, and for everything that is not as it should be where it is and what to write.

module: "03"                                an instructor's file beside a public one may leave out title and
title: Data parallelism                     concepts, and may drop public questions: replace: [test]
concepts: [identical replicas, buckets]
questions:
- {id: ..., use: ..., kind: ..., concept: ..., cell: ..., stem: ..., ...}
"""

import re
from dataclasses import dataclass
from pathlib import Path

from grading import yamlfile
from grading.fields import FieldError, Fields, make_at
from grading.question import (
    KINDS,
    USES,
    Choice,
    Item,
    Number,
    Option,
    Order,
    Place,
    Problem,
    Question,
    QuestionError,
    Row,
    Trace,
    Wrong,
)

EXPONENT = re.compile(r"[-+]?[\d.]*\d[\d.]*[eE][-+]?\d+")  # numbers to a person, and to YAML only if 1.0e+6


@dataclass(frozen=True)
class File:
    """What one file says. title, concepts: empty where left out. replace: uses whose earlier questions are dropped."""

    place: Place
    module: str
    title: str
    concepts: tuple[str, ...]
    replace: tuple[str, ...]
    questions: tuple[Question, ...]
    problems: tuple[Problem, ...] = ()


def read(path: Path, name: str = "") -> File:
    """A question file. Questions that cannot be used are left out and listed in `problems`.

    name: what errors call the file. Raises QuestionError where it is no question file at all.
    """
    name = name or path.name
    raw, lines = yamlfile.load(path, name, items="questions")
    try:
        return make_at("", raw, lambda fields: _file(fields, name, lines))
    except FieldError as error:
        raise QuestionError(Problem(Place(name, 1), "", error.field, error.text)) from error


def _file(fields: Fields, name: str, lines: list[int]) -> File:
    module = fields.take("module")
    if not isinstance(module, str):
        raise fields.error("module", f'has to be two digits in quotes, module: "03", got {module!r:.40} without')
    title, concepts = fields.maybe("title") or "", fields.texts("concepts", needed=False)
    replace = fields.texts("replace", needed=False)
    if unknown := set(replace) - set(USES):
        raise fields.error("replace", f"{sorted(unknown)[0]!r} is none of {', '.join(USES)}")
    questions, problems = [], []
    for raw, line in zip(fields.listed("questions"), lines, strict=True):
        try:
            questions.append(question(raw, module, Place(name, line)))
        except QuestionError as error:
            problems += error.problems
    return File(Place(name, 1), module, title, concepts, replace, tuple(questions), tuple(problems))


def question(raw: object, module: str, place: Place = Place()) -> Question:  # noqa: B008
    """One question from its YAML mapping. Raises QuestionError."""
    name = str(raw.get("id", "")) if isinstance(raw, dict) else ""
    try:
        return make_at("", raw, lambda fields: _question(fields, module, place))
    except FieldError as error:
        raise QuestionError(Problem(place, name, error.field, error.text)) from error


def _question(fields: Fields, module: str, place: Place) -> Question:
    kind = fields.text("kind")
    if kind not in KINDS:
        raise fields.error("kind", f"{kind!r} is none of {', '.join(KINDS)}")
    params = {name: tuple(_scalars(fields, name, values)) for name, values in fields.mapping("params").items()}
    let = {name: fields.as_text(f"let.{name}", value) for name, value in fields.mapping("let").items()}
    examples = [_example(fields, i, example) for i, example in enumerate(fields.listed("examples", needed=False))]
    return Question(
        id=fields.text("id"),
        module=module,
        use=fields.text("use"),
        kind=kind,
        concept=fields.text("concept"),
        cell=fields.text("cell"),
        stem=fields.text("stem"),
        body=_body(fields, kind),
        params=params,
        let=let,
        examples=tuple(examples),
        place=place,
    )


def _body(fields: Fields, kind: str) -> Choice | Number | Order | Trace:
    if kind in ("choice", "several"):
        return Choice(fields.each("options", _option), several=kind == "several")
    if kind == "number":
        return Number(
            answer=fields.text("answer"),
            why=fields.text("why"),
            otherwise=fields.text("otherwise"),
            unit=fields.maybe("unit") or "",
            tolerance=fields.number("tolerance"),
            tolerance_abs=fields.number("tolerance_abs"),
            wrong=fields.each("wrong", _wrong, needed=False),
            derivation=fields.maybe("derivation") or "",
        )
    if kind == "order":
        return Order(fields.each("items", _item), fields.text("mistake"))
    return Trace(fields.each("rows", _row), fields.texts("choices"), fields.text("mistake"))


def _option(fields: Fields) -> Option:
    return Option(
        value=fields.text("value"),
        why=fields.text("why"),
        right=fields.flag("right"),
        mistake=fields.maybe("mistake"),
        cell=fields.maybe("cell"),
    )


def _wrong(fields: Fields) -> Wrong:
    return Wrong(fields.text("value"), fields.text("why"), fields.text("mistake"), fields.maybe("cell"))


def _item(fields: Fields) -> Item:
    return Item(fields.text("value"), fields.text("why"), fields.maybe("cell"))


def _row(fields: Fields) -> Row:
    return Row(fields.text("ask"), fields.text("answer"), fields.text("why"), fields.maybe("cell"))


def _scalars(fields: Fields, name: str, values: object) -> list[int | float | str]:
    """What a param is drawn from: numbers or texts, one alone being a list of one."""
    return [_scalar(fields, f"params.{name}", value) for value in (values if isinstance(values, list) else [values])]


def _scalar(fields: Fields, name: str, value: object) -> int | float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise fields.error(name, f"takes numbers and texts, got {value!r:.40}")
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        raise fields.error(name, f"YAML reads {value} as a text; as a number it is {float(value):.1e}")
    return value


def _example(fields: Fields, i: int, example: object) -> dict[str, int | float | str]:
    if not isinstance(example, dict):
        raise fields.error(f"examples[{i}]", "has to be names with values: {ranks: 4, answer: 1.5}")
    return {str(name): _scalar(fields, f"examples[{i}].{name}", value) for name, value in example.items()}
