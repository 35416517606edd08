"""Writing a graded submission into the gradebook: all of its grades at once, or none."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode
from nbgrader import utils
from nbgrader.api import MissingEntry

from grading.course.outcome import Outcome
from grading.course.settings import Course, CourseError

BLOCKED = "Could not be decided on the machine that graded, and is graded by hand: {}."


@dataclass(frozen=True)
class Score:
    """What a submission came to in points. blocked: of those possible, still to be decided by hand."""

    points: float
    possible: float
    blocked: float
    penalty: float = 0.0

    @property
    def final(self) -> float:
        return max(0.0, self.points - self.penalty)


def outcomes(notebook: NotebookNode) -> dict[str, Outcome]:
    """What was judged in a graded notebook, by the name of the cell."""
    return {
        cell.metadata.nbgrader.grade_id: Outcome.from_json(cell.metadata["grading"])
        for cell in notebook.cells
        if "grading" in cell.metadata and "nbgrader" in cell.metadata
    }


def graded_notebooks(folder: Path) -> dict[str, NotebookNode]:
    """The notebooks of a graded submission by name; none where there is none. Raises CourseError."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.ipynb"))}


def _read(path: Path) -> NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CourseError(
            f"{path} is damaged: run grading grade {path.parent.name} {path.parent.parent.name} again"
        ) from error


def submitted_at(folder: Path) -> datetime | None:
    """When a submission was handed in, in UTC without a zone as nbgrader keeps it; None if it cannot be told."""
    try:
        return utils.parse_utc((folder / "timestamp.txt").read_text(encoding="utf-8").strip())
    except (OSError, ValueError, OverflowError):
        return None


def enter(course: Course, book: Any, name: str, learner: str, graded: Path) -> Score:
    """Enter the graded notebooks in a folder; the gradebook changes when all are in. Returns the new score."""
    submission = book.update_or_create_submission(name, learner, timestamp=submitted_at(graded))
    for title, notebook in graded_notebooks(graded).items():
        with contextlib.suppress(MissingEntry):  # a notebook that is no part of the assignment
            book.find_submission_notebook(title, name, learner)
            _enter_notebook(book, name, learner, title, notebook)
    book.db.flush()
    book.db.expire_all()
    penalty(course, submission)
    book.db.commit()
    return score(submission, graded)


def _enter_notebook(book: Any, name: str, learner: str, title: str, notebook: NotebookNode) -> None:
    judged = outcomes(notebook)
    solution = ""
    remarks: dict[str, list[str]] = {}
    for cell in notebook.cells:
        if utils.is_solution(cell):
            solution = cell.metadata.nbgrader.grade_id
            remarks.setdefault(solution, [])
        if not utils.is_grade(cell):
            continue
        grade_id = cell.metadata.nbgrader.grade_id
        grade = book.find_grade(grade_id, title, name, learner)
        grade.auto_score, _ = utils.determine_grade(cell)
        blocked = (
            [item.name for item in judged[grade_id].items if item.state == "blocked"] if grade_id in judged else []
        )
        held = judged[grade_id].held if grade_id in judged else ""
        grade.needs_manual_grade = bool(blocked or held) or grade.auto_score is None or grade.manual_score is not None
        if blocked and solution:
            remarks[solution].append(BLOCKED.format(", ".join(blocked)))
    for grade_id, lines in remarks.items():
        book.find_comment(grade_id, title, name, learner).auto_comment = "\n\n".join(lines) or None


def for_a_person(book: Any, name: str, learner: str, handed_in: Path) -> None:
    """Mark a submission that could not be graded: every cell waits for a person, no score of before is lost."""
    submission = book.update_or_create_submission(name, learner, timestamp=submitted_at(handed_in))
    for notebook in submission.notebooks:
        for grade in notebook.grades:
            grade.needs_manual_grade = True
    book.db.commit()


def penalty(course: Course, submission: Any) -> None:
    """Set what is taken off for lateness: a share of the points per day begun, all of them after the last late day."""
    rules = course.assignment(submission.name)
    late = lateness(course, submission.name, submission.student.id, submission.timestamp)
    days = -(-late // timedelta(days=1))
    share = 1.0 if days > rules.late_days else min(1.0, days * rules.late_penalty)
    for notebook in submission.notebooks:
        notebook.late_submission_penalty = round(share * notebook.score, 4) if days > 0 else None


def lateness(course: Course, name: str, learner: str, submitted: datetime | None) -> timedelta:
    """How long after its deadline a submission came; zero if in time, or if that cannot be told."""
    due = course.deadline(name, learner)
    if due is None or submitted is None:
        return timedelta()
    return max(timedelta(), submitted - due.astimezone(UTC).replace(tzinfo=None))


def score(submission: Any, graded: Path) -> Score:
    """The score in the gradebook. Points that are blocked count as such until a person gave a grade."""
    judged = {
        (title, grade_id): outcome
        for title, notebook in graded_notebooks(graded).items()
        for grade_id, outcome in outcomes(notebook).items()
    }
    blocked = 0.0
    for notebook in submission.notebooks:
        for grade in notebook.grades:
            outcome = judged.get((notebook.name, grade.name))
            blocked += outcome.blocked if outcome is not None and grade.manual_score is None else 0.0
    return Score(submission.score, submission.max_score, blocked, submission.late_submission_penalty or 0.0)


def replace_folder(new: Path, place: Path) -> None:
    """Put folder new where place is: a crash leaves the old one, or the new one, under its name or beside it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f".{place.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if place.exists():
        os.replace(place, aside)
    try:
        os.replace(new, place)
    except OSError:
        if aside.exists():
            os.replace(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)
