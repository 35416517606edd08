"""Marking a graded test: which answers were handed in, which attempts count, and what to say about each answer."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbformat.notebooknode import NotebookNode

from grading.answers import AnswersError, Attempt, Submission, decode
from grading.bank import Bank
from grading.course.outcome import Item, Outcome
from grading.draw import AnswerError, draw, variant_for
from grading.fill import variants
from grading.question import Question
from grading.text import answer as in_words
from grading.verdict import Verdict, judge

LONGEST = 2_000_000  # bytes of a file of answers
OTHERS = "answered were other questions than this course's, such as the public ones; a person has to look at the points"


@dataclass(frozen=True)
class Rules:
    """Which attempts count: the first so many, made until closes (None: whenever)."""

    attempts: int
    closes: datetime | None = None

    def allowed(self, attempts: Sequence[Attempt]) -> tuple[list[Attempt], list[str]]:
        """The attempts that count, and a note on the others."""
        notes, in_time = [], list(attempts)
        if self.closes is not None:
            in_time = [attempt for attempt in attempts if attempt.time <= self.closes.timestamp()]
            if len(in_time) < len(attempts):
                late = len(attempts) - len(in_time)
                notes.append(f"{_count(late)} made after {_when(self.closes)} did not count")
        if len(in_time) > self.attempts:
            notes.append(f"{_count(len(in_time) - self.attempts)} beyond the {self.attempts} allowed did not count")
        return in_time[: self.attempts], notes


def calls(sources: Sequence[str], function: str) -> list[tuple[str, ...]]:
    """The text arguments of every call of a function, such as submit, in notebook cells, in order.

    >>> calls(["quiz('02')", "x = 1\\nsubmit('02', 't1.abc')"], "submit")
    [('02', 't1.abc')]
    """
    found: list[tuple[str, ...]] = []
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # a magic, or half a line: look for the text
            pattern = rf"""\b{function}\(\s*(["'])([^"']*)\1(?:\s*,\s*(["'])([^"']*)\3)?"""
            found += [tuple(word for word in match.group(2, 4) if word) for match in re.finditer(pattern, source)]
            continue
        for node in nodes:
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name == function:
                given = [*node.args, *(word.value for word in node.keywords)]
                values = (each.value for each in given if isinstance(each, ast.Constant))
                found.append(tuple(value for value in values if isinstance(value, str)))
    return found


def find_answers(notebook: NotebookNode, folder: Path, module: str) -> tuple[Submission | None, list[str]]:
    """What was submitted for a module's test: from the notebook's source, else from the file beside it; and notes.

    The two are compared where both are there.
    """
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    texts = [call[1] for call in calls(sources, "submit") if len(call) > 1 and call[0] == module]
    notes: list[str] = []
    inside = _readable(texts, module, "the notebook", notes)
    path = folder / f"answers-{module}.txt"
    beside: list[Submission] = []
    if path.is_file() and not path.is_symlink() and path.stat().st_size < LONGEST:
        beside = _readable([path.read_text(encoding="utf-8", errors="replace")], module, path.name, notes)
    if len(inside) > 1 and inside[-1] != inside[0]:
        notes.append(f"the notebook holds {len(inside)} different submissions of test {module}; the last one counts")
    if inside and beside and inside[-1] != beside[-1]:
        notes.append(f"{path.name} differs from the answers in the notebook ({_differ(inside[-1], beside[-1])})")
    if not inside and beside:
        notes.append(f"the answers were taken from {path.name}, since the notebook holds none")
    found = inside or beside
    return (found[-1] if found else None), notes


def _readable(texts: Sequence[str], module: str, where: str, notes: list[str]) -> list[Submission]:
    found = []
    for text in texts:
        try:
            submission = decode(text)
        except AnswersError as error:
            notes.append(f"answers of test {module} in {where} cannot be read: {error}")
            continue
        if submission.module == module:
            found.append(submission)
        else:
            notes.append(f"{where} has answers of test {submission.module} in the place of test {module}")
    return found


def _differ(one: Submission, other: Submission) -> str:
    if not one.fits(other.edition):
        return "to other questions"
    if one.learner != other.learner:
        return "made by someone else"
    if len(one.attempts) != len(other.attempts):
        return f"{len(one.attempts)} and {len(other.attempts)} attempts"
    return "other answers"


@dataclass(frozen=True)
class Marked:
    """One attempt, judged: for each question its item and what the learner reads about it."""

    items: tuple[Item, ...]
    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> float:
        return sum(item.points for item in self.items)


def mark(bank: Bank, module: str, submission: Submission | None, rules: Rules, notes: Sequence[str] = ()) -> Outcome:
    """The outcome of a module's test: the best attempt that counts, one point a question, all or nothing."""
    questions = bank.of(module, "test")
    nothing = tuple(Item(question.id, "failed", 0.0, 1.0) for question in questions)
    if submission is None:
        text = f'No answers were found: run the cell submit("{module}") before you save and hand in.'
        return Outcome(f"test-{module}", nothing, text, (*notes, f"no answers for test {module}"))
    held = "" if submission.fits(bank.edition) else OTHERS
    notes = (*notes, held) if held else notes
    attempts, dropped = rules.allowed(submission.attempts)
    if not attempts:
        text = f"Test {module}: 0 points. {'. '.join(dropped)}."
        return Outcome(f"test-{module}", nothing, text, (*notes, *dropped), held)
    marked = [_mark(questions, attempt, number, submission.learner) for number, attempt in enumerate(attempts)]
    best = max(marked, key=lambda each: each.points)  # the first of equals
    scores = ", ".join(f"{each.points:g}" for each in marked)
    head = f"Test {module}: {best.points:g} of {len(questions)} right."
    if len(marked) > 1:
        head += f" Your attempts: {scores}. The best counts."
    remarks = [f"attempts: {scores}" if len(marked) > 1 else "", *dropped, *(note for m in marked for note in m.notes)]
    return Outcome(
        f"test-{module}",
        best.items,
        "\n\n".join([" ".join([head, *(f"Note: {note}." for note in [held, *dropped] if note)]), *best.lines]),
        (*notes, *(dict.fromkeys(remark for remark in remarks if remark))),
        held,
    )


def _mark(questions: Sequence[Question], attempt: Attempt, number: int, learner: str) -> Marked:
    items, lines, notes = [], [], []
    for place, question in enumerate(questions, 1):
        variant, answer = attempt.variants.get(question.id), attempt.answers.get(question.id)
        if variant is None:
            variant, answer = 0, None
        elif variant != variant_for(question.id, learner, number, len(variants(question))):
            notes.append(f"attempt {number + 1}: the draw of {question.id} is not the one this learner was shown")
        try:
            verdict = judge(question, variant, answer)
            drawn = draw(question, variant, learner)
            mine = "left open" if answer is None else in_words(drawn, answer)
        except (AnswerError, IndexError, KeyError, TypeError):
            notes.append(f"attempt {number + 1}: what stands for {question.id} cannot be an answer to it")
            verdict, drawn, mine = Verdict(False), draw(question, 0, learner), "not readable"
            answer = None
        items.append(_item(question, verdict, answer))
        lines.append(_explained(place, drawn.stem, mine, verdict))
    return Marked(tuple(items), tuple(lines), tuple(notes))


def _item(question: Question, verdict: Verdict, answer: Any) -> Item:
    state = "passed" if verdict.right else "failed"
    return Item(question.id, state, float(verdict.right), 1.0, _chosen(answer), verdict.mistakes)


def _chosen(answer: Any) -> tuple[str, ...]:
    if isinstance(answer, Mapping):
        return tuple(f"{row}={key}" for row, key in sorted(answer.items()))
    if isinstance(answer, list | tuple):
        return tuple(map(str, answer))
    return () if answer is None else (str(answer),)


def _explained(place: int, stem: str, mine: str, verdict: Verdict) -> str:
    """One question as the learner gets it back: only what concerns their own answer."""
    lines = [f"{place}. {' '.join(stem.split())}", f"   Your answer: {mine}", f"   {_word(verdict)}"]
    several = len(verdict.parts) > 1
    for part in verdict.parts:
        about = f"{part.text}: {'right' if part.right else 'not right'}. " if several else ""
        lines.append(f"   {about}{' '.join(part.why.split())}")
    return "\n".join(lines)


def _word(verdict: Verdict) -> str:
    return "Right." if verdict.right else "Not right."


def _count(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _when(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
