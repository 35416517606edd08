"""What makes one question a good one, looked at with every value that can be drawn.

Each rule yields problems; a problem that several draws have is reported once. `validate` runs them all.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations
from types import MappingProxyType
from typing import Any

from grading.draw import AnswerError, Drawn, drawn
from grading.fill import Filled, all_draws
from grading.formulas import FORMULAS, quantity
from grading.question import Choice, Number, Order, Problem, Question, QuestionError, Trace
from grading.template import FillError, names_in
from grading.text import possible
from grading.verdict import Entry, entries, weigh

MOST_DRAWS = 1000
FEWEST_WORDS = 10  # of an explanation
FEWEST_NEW_WORDS = 7  # of them not in what it explains
EXAMPLE = 1e-3  # relative: how near to a case worked out by hand
VERDICT = re.compile(r"(correct|incorrect|right|wrong|true|false|yes|no|exactly|not quite)\s*[.,!:;]", re.IGNORECASE)
HOLE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
RAW_NUMBER = re.compile(r"\d\.\d{5,}|\d\.0(?![\d.])|\de[+-]?\d+|(?<![\d.])\d{7,}")
QUANTITY = re.compile(r"([\d,]*\.?\d+)\s*(kB|MB|GB|TB|bytes?|ns|us|ms|s|million|billion|trillion|)")
SIZES = MappingProxyType(
    {"byte": 1, "bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    | {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "": 1, "million": 1e6, "billion": 1e9, "trillion": 1e12}
)

Found = Iterator[tuple[str, str]]  # a field, and what to change in it


def problems(question: Question, mistakes: Collection[str] | None, cells: Collection[str] | None) -> list[Problem]:
    """All that is to change in a question. mistakes: ids of the catalogue. cells: the lesson's tags. None: unknown."""
    found = dict.fromkeys(
        [
            *points_to_what_exists(question, mistakes, cells),
            *explains_why(question),
            *(names := list(names_exist_and_are_used(question))),
            *in_every_draw(question, known={field for field, _ in names}),
            *examples_come_out(question),
        ]
    )
    return [Problem(question.place, question.id, field, text) for field, text in found]


def texts(question: Question) -> Found:
    """Every template of a question with its field."""
    yield "stem", question.stem
    yield from shown(question)
    yield from ((field, why) for field, why, _ in explanations(question))
    if isinstance(question.body, Trace):
        yield from ((f"rows[{i}].answer", row.answer) for i, row in enumerate(question.body.rows))
    elif isinstance(question.body, Number) and question.body.derivation:
        yield "derivation", question.body.derivation


def shown(question: Question) -> Found:
    """The templates of what can be picked or is asked."""
    body = question.body
    if isinstance(body, Choice):
        yield from ((f"options[{i}].value", option.value) for i, option in enumerate(body.options))
    elif isinstance(body, Order):
        yield from ((f"items[{i}].value", item.value) for i, item in enumerate(body.items))
    elif isinstance(body, Trace):
        yield from ((f"choices[{i}]", choice) for i, choice in enumerate(body.choices))
        yield from ((f"rows[{i}].ask", row.ask) for i, row in enumerate(body.rows))


def explanations(question: Question) -> Iterator[tuple[str, str, str]]:
    """Every explanation: its field, its template, and the template of what it explains."""
    body = question.body
    if isinstance(body, Choice):
        yield from ((f"options[{i}].why", option.why, option.value) for i, option in enumerate(body.options))
    elif isinstance(body, Order):
        yield from ((f"items[{i}].why", item.why, item.value) for i, item in enumerate(body.items))
    elif isinstance(body, Trace):
        yield from ((f"rows[{i}].why", row.why, f"{row.ask} {row.answer}") for i, row in enumerate(body.rows))
    else:
        yield "why", body.why, body.answer
        yield from ((f"wrong[{i}].why", wrong.why, wrong.value) for i, wrong in enumerate(body.wrong))
        yield "otherwise", body.otherwise, ""


def expressions(question: Question) -> Found:
    """Every expression of a question with its field."""
    yield from ((f"let.{name}", expression) for name, expression in question.let.items())
    if isinstance(question.body, Number):
        yield "answer", question.body.answer
        yield from ((f"wrong[{i}].value", wrong.value) for i, wrong in enumerate(question.body.wrong))


# ---- as written ------------------------------------------------------------------------------------------------------


def points_to_what_exists(question: Question, mistakes: Collection[str] | None, cells: Collection[str] | None) -> Found:
    """Mistakes are in the catalogue, cells in the lesson."""
    body = question.body
    parts: list[tuple[str, Any]] = [("", question)]
    if isinstance(body, Choice):
        parts += [(f"options[{i}].", option) for i, option in enumerate(body.options)]
    elif isinstance(body, Number):
        parts += [(f"wrong[{i}].", wrong) for i, wrong in enumerate(body.wrong)]
    elif isinstance(body, Order):
        parts += [("", body), *((f"items[{i}].", item) for i, item in enumerate(body.items))]
    else:
        parts += [("", body), *((f"rows[{i}].", row) for i, row in enumerate(body.rows))]
    for where, part in parts:
        cell, mistake = getattr(part, "cell", None), getattr(part, "mistake", None)
        if cell and cells is not None and cell not in cells:
            yield f"{where}cell", f"no cell of the lesson has the tag {cell!r}" + _like(cell, cells)
        if mistake and mistakes is not None and mistake not in mistakes:
            yield f"{where}mistake", f"{mistake!r} is not in misconceptions.yaml" + _like(mistake, mistakes)


def explains_why(question: Question) -> Found:
    """An explanation says why: in enough words, other ones than what it explains, and not first of all a verdict."""
    seen: dict[str, str] = {}
    for field, why, explained in explanations(question):
        words = _words(why)
        if len(words) < FEWEST_WORDS:
            yield field, f"{len(words)} words; say why in at least {FEWEST_WORDS}"
        elif len(set(words) - set(_words(explained))) < FEWEST_NEW_WORDS:
            yield field, "repeats what it explains; say why it is so"
        if verdict := VERDICT.match(why):
            yield field, f"begins with {verdict[0]!r}: that is shown anyway; begin with the reason"
        if why in seen:
            yield field, f"is the same as {seen[why]}; say what is different about this one"
        seen[why] = field


def names_exist_and_are_used(question: Question) -> Found:
    """No param or let hides a formula or is idle, and nothing else is named."""
    own = {**question.params, **question.let}
    for name in own:
        where = "params" if name in question.params else "let"
        if name in FORMULAS:
            yield f"{where}.{name}", f"{name} is a formula that questions can call; take another name"
    used: set[str] = set()
    for field, source in [*texts(question), *((field, f"{{{{ {text} }}}}") for field, text in expressions(question))]:
        try:
            named = names_in(source)
        except FillError as error:
            yield field, f"cannot be filled in: {error}"
            continue
        used |= named
        for name in sorted(named - set(own) - set(FORMULAS)):
            yield field, f"{name!r} is no param, let or formula" + _like(name, [*own, *FORMULAS])
    for name in own:
        if name not in used:
            yield f"{'params' if name in question.params else 'let'}.{name}", "is used nowhere; use it or delete it"
    for field, text in texts(question):
        for name, values in question.params.items():
            for value in values if len(values) > 1 else ():
                if re.search(rf"(?<![\w.,]){re.escape(str(value))} {name}\b", HOLE.sub("", text)):
                    yield field, f"says '{value} {name}', but {name} is drawn: write {{{{ {name} }}}}"


def examples_come_out(question: Question) -> Found:
    """Cases worked out by hand are what the expressions give; a number has at least one."""
    if isinstance(question.body, Number) and not any("answer" in example for example in question.examples):
        yield "examples", "has no answer worked out by hand; write one, such as - {ranks: 4, answer: 6}"
    for i, example in enumerate(question.examples):
        if missing := [name for name in question.params if name not in example]:
            yield f"examples[{i}]", f"gives no {missing[0]}; give every param a value"
            continue
        try:
            filled = Filled(question, {name: example[name] for name in question.params})
            for name, expected in example.items():
                if name in question.params:
                    continue
                computed = _computed(filled, question, name)
                if not _near(computed, expected):
                    yield f"examples[{i}].{name}", f"is {expected} here and {computed} when computed; one is wrong"
        except QuestionError as error:
            yield from ((f"examples[{i}].{problem.field}", problem.text) for problem in error.problems)


def _computed(filled: Filled, question: Question, name: str) -> Any:
    if name == "answer" and isinstance(question.body, Number):
        return filled.number("answer", question.body.answer)
    if name not in question.let:
        raise filled.problem(name, "is no param, no let and not the answer")
    return filled.names[name]


def _near(computed: Any, expected: Any) -> bool:
    if isinstance(computed, str) or isinstance(expected, str):
        return computed == expected
    return abs(computed - expected) <= EXAMPLE * abs(expected)


# ---- with values drawn -----------------------------------------------------------------------------------------------


def in_every_draw(question: Question, known: Collection[str]) -> Found:
    """What goes wrong with some values, once for each field; known: fields already found to be wrong."""
    draws = all_draws(question)
    if len(draws) > MOST_DRAWS:
        yield "params", f"make {len(draws)} combinations; at most {MOST_DRAWS}, so give fewer values"
    reported = set(known)
    for draw in draws[:MOST_DRAWS]:
        here = ", ".join(f"{name} = {value}" for name, value in draw.items())
        for field, text in in_one_draw(question, draw):
            if field not in reported:
                reported.add(field)
                yield field, text + (f" (with {here})" if len(draws) > 1 else "")


def in_one_draw(question: Question, draw: Mapping[str, Any]) -> Found:
    """What is wrong with these values filled in."""
    try:
        filled = Filled(question, draw)
        display, judged = drawn(filled, 0), entries(filled)
        yield from reads_well(filled)
    except QuestionError as error:
        yield from ((problem.field, problem.text) for problem in error.problems)
        return
    yield from options_differ(filled)
    if isinstance(question.body, Number):
        yield from numbers_differ(question.body, judged)
        yield from numbers_can_be_typed(question.body, judged)
        yield from is_derived(filled)
    elif not right_is_right(display, judged):
        yield "id", "two options have the same key; reword one of them"


def reads_well(filled: Filled) -> Found:
    """Numbers that are computed are printed as a person would write them."""
    for field, template in texts(filled.question):
        literal, text = HOLE.sub("", template), CODE.sub("", filled.text(field, template))
        for match in RAW_NUMBER.finditer(text):
            rounded = match[0].endswith(".0") and "round" in template  # 2.0 where others are 1.5 says how exact it is
            if match[0] not in literal and not rounded:
                number = re.search(rf"[\d.,]*{re.escape(match[0])}[\d.]*", text)
                yield field, f"reads {number[0] if number else match[0]!r}; use nbytes, seconds, count, round or int"


def options_differ(filled: Filled) -> Found:
    """No two things to pick from read the same or are the same quantity."""
    read: dict[str | float, str] = {}
    for field, template in shown(filled.question):
        text = " ".join(filled.text(field, template).split())
        group = field.split("[")[0] + field.partition("]")[2]
        quantity = _quantity(text)
        for seen in {f"{group}:{text.casefold()}"} | ({f"{group}={quantity:.9g}"} if quantity is not None else set()):
            if seen in read:
                yield field, f"reads {text!r}, and so does {read[seen]}"
            read[seen] = field


def numbers_differ(body: Number, judged: Sequence[Entry]) -> Found:
    """The numbers of known mistakes are told from the right one and from each other."""
    fields = ["answer", *(f"wrong[{i}].value" for i in range(len(body.wrong)))]
    numbers = [
        (field, e.value, e.within) for field, e in zip(fields, judged, strict=False) if isinstance(e.value, float)
    ]
    if numbers[0][1] == 0 and body.tolerance:
        yield "tolerance", "is relative, and the answer is 0: use tolerance_abs"
    for (first, a, within_a), (second, b, within_b) in combinations(numbers, 2):
        if abs(a - b) <= max(within_a, within_b):
            yield second, f"is {b:,.6g}, which counts as {first} too ({a:,.6g}, within {within_a:.3g})"


def numbers_can_be_typed(body: Number, judged: Sequence[Entry]) -> Found:
    """The right number is one that forms accept."""
    value = judged[0].value
    assert isinstance(value, float)
    try:
        possible(value, body.unit, f"{value:,.6g}")
    except AnswerError as error:
        yield "answer", f"{error} Ask for such an amount, or in another unit"


def is_derived(filled: Filled) -> Found:
    """A prediction says how its number comes about, and that ends in the number: the run alone only shows it."""
    body = filled.question.body
    assert isinstance(body, Number)
    if not body.derivation:
        if filled.question.use == "predict":
            yield "derivation", "is missing: write how the number comes about, as 2 * 3 / 4 * 493 kB = 739 kB"
        return
    last = filled.text("derivation", body.derivation).rpartition("=")[2].strip(" *.`")
    wanted = quantity(filled.number("answer", body.answer), body.unit)
    if last not in (wanted, wanted.split(" (")[0]):
        yield "derivation", f"ends in {last!r}; what stands after its last = has to be the answer, {wanted!r}"


def right_is_right(display: Drawn, judged: Sequence[Entry]) -> bool:
    """Whether exactly what is declared right is judged right."""
    keys = [entry.part.key for entry in judged]
    if display.kind == "choice":
        verdicts = [weigh(display, judged, entry.part.key).right == entry.part.right for entry in judged]
        return all(verdicts) and len(set(keys)) == len(keys)
    if display.kind == "several":
        right = {entry.part.key for entry in judged if entry.part.right}
        others = [weigh(display, judged, list(right ^ {key})).right for key in keys]
        return weigh(display, judged, list(right)).right and not any(others)
    if display.kind == "order":
        swapped = [[*keys[:i], keys[i + 1], keys[i], *keys[i + 2 :]] for i in range(len(keys) - 1)]
        return weigh(display, judged, keys).right and not any(weigh(display, judged, each).right for each in swapped)
    right = {entry.part.key: entry.value for entry in judged}
    others = [{**right, key: o.key} for key in keys for o in display.options if o.key != right[key]]
    return weigh(display, judged, right).right and not any(weigh(display, judged, each).right for each in others)


def _quantity(text: str) -> float | None:
    """The size of a text that is a number with a unit, so that 1.5 GB is 1500 MB."""
    match = QUANTITY.fullmatch(text)
    return float(match[1].replace(",", "")) * SIZES[match[2]] if match else None


def _words(text: str) -> list[str]:
    return re.findall(r"[\w.'-]*\w", HOLE.sub("1", text).lower())


def _like(name: str, known: Collection[str]) -> str:
    like = get_close_matches(name, known, 1)
    return f"; {like[0]!r} is one" if like else ""
