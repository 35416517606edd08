"""The questions at hand: sealed ones from the workspace or beside an assignment, else the repository's own.

`.minidist/questions/NN.json` at or above the notebook's folder is what a learner was given, the nearest first. Where
there is none, as in a notebook opened outside of the workspace, the repository's questions are read as they are.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from grading import draw, fill, verdict
from grading.bank import Bank
from grading.draw import Answer, AnswerError, Drawn, variant_for
from grading.log import log, shelves
from grading.question import Question, QuestionError
from grading.seal import Sealed, SealError
from grading.text import in_full
from grading.verdict import Part, Verdict

QUESTIONS = "questions"  # the folder in .minidist


class ShelfError(RuntimeError):
    """The questions that were asked for cannot be had; the message says how to get them. Nothing was recorded."""


@dataclass(frozen=True)
class Unsealed:
    """A module's questions as they are written, with the methods of a sealed file."""

    module: str
    title: str
    concepts: tuple[str, ...]
    questions: dict[str, Question]
    edition: str

    def ids(self, use: str | None = None) -> tuple[str, ...]:
        return tuple(name for name, question in self.questions.items() if use in (None, question.use))

    def variants(self, question_id: str) -> int:
        return len(fill.variants(self.questions[question_id]))

    def withheld(self, question_id: str) -> bool:
        return False

    def drawn(self, question_id: str, variant: int, learner: str = "") -> Drawn:
        return draw.draw(self.questions[question_id], variant, learner)

    def judge(self, question_id: str, variant: int, answer: Answer) -> Verdict:
        return verdict.judge(self.questions[question_id], variant, answer)

    def explain(self, question_id: str, variant: int) -> tuple[Part, ...]:
        return verdict.explain(self.questions[question_id], variant)


Questions = Sealed | Unsealed


@dataclass(frozen=True)
class Asked:
    """A question as this learner has it: drawn, with what judges an answer to it."""

    drawn: Drawn
    source: Questions

    def judge(self, answer: Answer) -> Verdict:
        """Raises grading.seal.Withheld where no verdict was handed out, AnswerError for what is no answer."""
        return self.source.judge(self.drawn.id, self.drawn.variant, answer)

    def fits(self, answer: Answer) -> bool:
        """Whether an earlier answer is still one to this question: options may have been reworded since."""
        try:
            self.drawn.checked(answer)
        except AnswerError:
            return False
        return True

    def explain(self) -> tuple[Part, ...]:
        """Everything there is to explain about it. Raises grading.seal.Withheld."""
        return self.source.explain(self.drawn.id, self.drawn.variant)


def module(number: str) -> Questions:
    """The questions of a module ("03"). Raises ShelfError."""
    for folder in shelves():
        path = folder / QUESTIONS / f"{number}.json"
        if path.is_file():
            return _open(path)
    own = _own()
    if number not in own:
        meant = f' Did you mean "{in_full(number)}"?' if in_full(number) in own else ""
        known = ", ".join(sorted(own))
        raise ShelfError(f"There are no questions for module {number!r}; there are some for {known}.{meant}")
    return own[number]


def modules() -> list[Questions]:
    """The questions of every module, in order. Raises ShelfError."""
    found = {path.stem for folder in shelves() for path in (folder / QUESTIONS).glob("[0-9][0-9].json")}
    return [module(number) for number in sorted(found or _own())]


def ask(question: str, attempt: int = 0, variant: int | None = None) -> Asked:
    """A question as this learner sees it at an attempt (from 0), or one variant of it. Raises ShelfError."""
    for source in modules():
        if question in source.ids():
            return asked(source, question, attempt, variant)
    raise ShelfError(
        f"No question here is called {question!r}. If the course was updated, run `make course` to get its questions."
    )


def asked(source: Questions, question: str, attempt: int = 0, variant: int | None = None) -> Asked:
    """The same where the module is known."""
    learner = log().learner()
    number = variant_for(question, learner, attempt, source.variants(question)) if variant is None else variant
    return Asked(source.drawn(question, number, learner), source)


def _open(path: Path) -> Sealed:
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, SealError) as error:
        reason = f"The questions in {path} cannot be read: {str(error).rstrip('.')}."
        raise ShelfError(f"{reason} Run `make course` to get them anew; your progress stays.") from error


@lru_cache(maxsize=64)
def _read(path: Path, _changed: int) -> Sealed:
    return Sealed.load(path.read_bytes())


@lru_cache(maxsize=1)
def _own() -> dict[str, Unsealed]:
    """The repository's own questions, by module. Raises ShelfError."""
    try:
        written = Bank.load()
    except QuestionError as error:
        raise ShelfError(
            f"There are no questions at or above {Path.cwd()}, and the repository's own cannot be read:\n{error}"
        ) from error
    return {
        number: Unsealed(
            number, one.title, one.concepts, {question.id: question for question in one.questions}, written.edition
        )
        for number, one in written.modules.items()
    }


def link(number: str, cell: str) -> str:
    """Markdown that leads to a cell of a module's lesson and says under which heading it stands, where its notebook can
    be found; else the cell's name."""
    name = _notebook(number)
    if not name:
        return f"cell `{cell}`"
    heading = _heading(Path.cwd() / name, cell)
    return f"[cell `{cell}`]({name}#cell-id={cell})" + (f" under *{heading}*" if heading else "")


def linked(drawn: Drawn) -> str:
    """The stem of a question, in which each cell that it names is a link to it."""
    return re.sub(r"\bcell `([a-z0-9-]+)`", lambda match: link(drawn.module, match[1]), drawn.stem)


def _heading(notebook: Path, cell: str) -> str:
    """The last heading before a cell, "" where there is none: tags cannot be seen in a notebook, headings can."""
    try:
        return _headings(notebook, notebook.stat().st_mtime_ns).get(cell, "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@lru_cache(maxsize=8)
def _headings(notebook: Path, _changed: int) -> dict[str, str]:
    headings, last = {}, ""
    for cell in json.loads(notebook.read_bytes())["cells"]:
        if cell["cell_type"] == "markdown":
            found = re.findall(r"^#+ (.+)$", "".join(cell["source"]), re.MULTILINE)
            last = re.sub(r" \(\d+ minutes\)$", "", found[-1]) if found else last
        headings[cell.get("id", "")] = last
    return headings


def _notebook(number: str) -> str | None:
    """The file name of a module's lesson: the notebook this kernel belongs to, or one in the workspace."""
    mine = Path(os.environ.get("JPY_SESSION_NAME", "")).name  # set by the notebook server
    if mine.startswith(f"{number}_") and mine.endswith(".ipynb"):
        return mine
    lessons = sorted(path.name for path in Path.cwd().glob(f"{number}_*.ipynb"))
    return next((name for name in lessons if name.count(".") == 1), None)
