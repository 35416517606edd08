"""Whether an answer is right, and why. From a question, which authors and graders have; learners have sealed ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grading.draw import Answer, Drawn, drawn
from grading.fill import Filled, values_of
from grading.formulas import quantity
from grading.question import Choice, Number, Order, Question, Trace, key

EXACT = 1e-9  # relative: what floating-point arithmetic may be off


@dataclass(frozen=True)
class Part:
    """One thing explained. right: of an option whether it is a right one, of a place or row whether the answer has it.

    text: the option, number or item; of a row what is asked and its right answer. mistake: an id of
    misconceptions.yaml. cell: the tag of the lesson cell that shows it.
    """

    key: str
    text: str
    right: bool
    why: str
    mistake: str | None = None
    cell: str | None = None


@dataclass(frozen=True)
class Verdict:
    """right: full marks or none. parts: what there is to explain. mistakes: what this answer shows, by id.

    Parts of a choice: the picked option. several: every option. number: the answer, or the mistake that gives this
    number, or what to check. order, trace: all places if right, else up to the first wrong one, which comes last.
    expected: the right number of a `number`, None for other kinds.
    """

    right: bool
    parts: tuple[Part, ...] = ()
    mistakes: tuple[str, ...] = ()
    expected: float | None = None


@dataclass(frozen=True)
class Entry:
    """A part, and what it is judged by. value: its number, met within so much; or the key that belongs to this place.

    missed: the mistake of not having this place right.
    """

    part: Part
    value: float | str | None = None
    within: float = 0.0
    missed: str | None = None


def judge(question: Question, variant: int, answer: Answer) -> Verdict:
    """The verdict on an answer to one variant; None is no answer: wrong, with nothing to explain.

    Raises AnswerError for what cannot be an answer, IndexError for a variant that the question does not have.
    """
    filled = Filled(question, values_of(question, variant))
    return weigh(drawn(filled, variant), entries(filled), answer)


def explain(question: Question, variant: int) -> tuple[Part, ...]:
    """Everything there is to explain about a variant: every option, number, place or row."""
    return tuple(entry.part for entry in entries(Filled(question, values_of(question, variant))))


def weigh(drawn: Drawn, entries: Sequence[Entry], answer: Answer) -> Verdict:
    """The verdict on an answer by the entries of its variant; for a choice the picked option's is enough."""
    if answer is None:
        return Verdict(False)
    answer = drawn.checked(answer)
    if drawn.kind == "choice":
        return _one_part(next(entry for entry in entries if entry.part.key == answer))
    if drawn.kind == "several":
        parts = tuple(entry.part for entry in entries)
        right = answer == sorted(part.key for part in parts if part.right)
        return Verdict(right, parts, _distinct(part.mistake for part in parts if part.key in answer))
    if drawn.kind == "number":
        met = (e for e in entries if isinstance(e.value, float) and abs(answer - e.value) <= e.within)
        verdict = _one_part(next(met, entries[-1]))  # the last one says what to check
        return replace(verdict, expected=entries[0].value)
    return _weigh_places(entries, answer if drawn.kind == "order" else [answer[entry.part.key] for entry in entries])


def _weigh_places(entries: Sequence[Entry], given: Sequence[str]) -> Verdict:
    parts: list[Part] = []
    for entry, key_given in zip(entries, given, strict=True):
        if key_given != entry.value:
            parts.append(replace(entry.part, right=False, mistake=entry.missed))
            return Verdict(False, tuple(parts), _distinct([entry.missed]))
        parts.append(entry.part)
    return Verdict(True, tuple(parts))


def _one_part(entry: Entry) -> Verdict:
    return Verdict(entry.part.right, (entry.part,), _distinct([entry.part.mistake]))


def _distinct(mistakes) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mistake for mistake in mistakes if mistake))


def entries(filled: Filled) -> tuple[Entry, ...]:
    """All there is to judge and explain one draw by: options by key; the right number, those of known mistakes,
    and what to say of any other; items or rows in their order. Raises QuestionError for what cannot be filled in."""
    body = filled.question.body
    if isinstance(body, Choice):
        return tuple(sorted(_options(filled, body), key=lambda entry: entry.part.key))
    if isinstance(body, Number):
        return tuple(_numbers(filled, body))
    return tuple(_items(filled, body) if isinstance(body, Order) else _rows(filled, body))


def _options(filled: Filled, body: Choice) -> Iterator[Entry]:
    for i, option in enumerate(body.options):
        text = filled.text(f"options[{i}].value", option.value)
        why = filled.text(f"options[{i}].why", option.why)
        name, cell = key(filled.question.id, option.value), option.cell or filled.question.cell
        yield Entry(Part(name, text, option.right, why, option.mistake, cell))


def _numbers(filled: Filled, body: Number) -> Iterator[Entry]:
    here = filled.question.cell

    def entry(value: float, right: bool, why: str, mistake: str | None, cell: str) -> Entry:
        relative = EXACT if body.tolerance is None else body.tolerance
        within = abs(value) * relative if body.tolerance_abs is None else body.tolerance_abs
        return Entry(Part("", quantity(value, body.unit), right, why, mistake, cell), value, within)

    why = f"{filled.text('why', body.why)} {filled.text('derivation', body.derivation)}".strip()
    yield entry(filled.number("answer", body.answer), True, why, None, here)
    for i, wrong in enumerate(body.wrong):
        value, why = filled.number(f"wrong[{i}].value", wrong.value), filled.text(f"wrong[{i}].why", wrong.why)
        yield entry(value, False, why, wrong.mistake, wrong.cell or here)
    yield Entry(Part("", "another number", False, filled.text("otherwise", body.otherwise), None, here))


def _items(filled: Filled, body: Order) -> Iterator[Entry]:
    for i, item in enumerate(body.items):
        name, text = key(filled.question.id, item.value), filled.text(f"items[{i}].value", item.value)
        why = filled.text(f"items[{i}].why", item.why)
        yield Entry(Part(name, text, True, why, None, item.cell or filled.question.cell), name, missed=body.mistake)


def _rows(filled: Filled, body: Trace) -> Iterator[Entry]:
    texts = {filled.text(f"choices[{i}]", choice): choice for i, choice in enumerate(body.choices)}
    for i, row in enumerate(body.rows):
        ask, answer = filled.text(f"rows[{i}].ask", row.ask), filled.text(f"rows[{i}].answer", row.answer)
        if answer not in texts:
            raise filled.problem(f"rows[{i}].answer", f"reads {answer!r}, which is none of the choices: {list(texts)}")
        name, right = key(filled.question.id, row.ask), key(filled.question.id, texts[answer])
        why, cell = filled.text(f"rows[{i}].why", row.why), row.cell or filled.question.cell
        yield Entry(Part(name, f"{ask}: {answer}", True, why, None, cell), right, missed=body.mistake)
