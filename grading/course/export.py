"""grading export: the gradebook as a CSV file for a learning system."""

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nbgrader.api import MissingEntry

from grading.course.nbgrader_settings import ANEW, entry, gradebook
from grading.course.record import penalty, score
from grading.course.settings import Course, CourseError, load
from grading.files import write_atomically

COLUMNS: tuple[str, ...] = (
    "id",
    "first_name",
    "last_name",
    "email",
    "assignment",
    "points",
    "points_possible",
    "points_blocked",
    "late_penalty",
    "by_hand",
    "submitted",
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading export", description="Write the grades to a CSV file.")
    parser.add_argument("assignments", nargs="*", help="only these")
    parser.add_argument("--to", type=Path, default=Path("grades.csv"))
    options = parser.parse_args(argv)
    count = export(load(Path.cwd()), options.to, options.assignments)
    print(f"{count} rows in {options.to}")
    return 0


def export(course: Course, target: Path, names: Sequence[str] = ()) -> int:
    """Write a row for each learner of the roster and assignment; returns how many.

    points: what counts, lateness taken off. points_blocked: of those possible, what no machine here could decide and
    no person has yet. by_hand: cells that wait for a person.
    """
    with gradebook(course) as book:
        known = [assignment.name for assignment in book.assignments]
        for name in names:
            course.assignment(name)
            entry(course, book, name)
        if not known:
            raise CourseError(
                f"the gradebook has no assignment, so {target} was not written. If it was deleted, "
                + ANEW.format("ASSIGNMENT")
            )
        rows = [row for name in known if not names or name in names for row in _rows(course, book, name)]
        book.db.commit()
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(target, text.getvalue().encode())
    return len(rows)


def _rows(course: Course, book: Any, name: str) -> Iterator[dict[str, object]]:
    possible = book.find_assignment(name).max_score
    for learner in course.roster().values():
        row: dict[str, object] = {
            "id": learner.id,
            "first_name": _text(learner.first_name),
            "last_name": _text(learner.last_name),
            "email": _text(learner.email),
            "assignment": name,
        }
        row |= {"points": 0, "points_possible": f"{possible:g}", "points_blocked": 0, "late_penalty": 0, "by_hand": 0}
        try:
            submission = book.find_submission(name, learner.id)
        except MissingEntry:
            yield {**row, "submitted": ""}
            continue
        penalty(course, submission)
        book.db.flush()
        counted = score(submission, course.folder("autograded", name, learner.id))
        waiting = sum(grade.needs_manual_grade for notebook in submission.notebooks for grade in notebook.grades)
        when = submission.timestamp
        yield {
            **row,
            "points": f"{counted.final:g}",
            "points_blocked": f"{counted.blocked:g}",
            "late_penalty": f"{counted.penalty:g}",
            "by_hand": waiting,
            "submitted": when.strftime("%Y-%m-%d %H:%M UTC") if when else "",
        }


def _text(text: str) -> str:
    """A spreadsheet must not take a name for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
