"""nbgrader, set up for a course folder: for its own commands and formgrader (nbgrader_config.py) and for ours."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config

from grading.course.scratch import exchange
from grading.course.settings import Course, CourseError

EMPTY_SOLUTION = "# YOUR CODE HERE\nraise NotImplementedError"
DAMAGED = ("not a database", "malformed", "no such table", "no such column")
ANEW = (
    "put your copy of it back. Without one, run grading release {0} and grading grade {0} again; scores given by hand "
    "are in the copy only"
)
LONGEST_OUTPUT = 1000  # lines of a cell


def configure(config: Config, course: Course, *, sandboxed: bool = True) -> Config:
    """Add to an nbgrader configuration what this course needs; returns it."""
    config.CourseDirectory.root = str(course.root)
    config.CourseDirectory.course_id = course.id
    config.CourseDirectory.db_url = course.gradebook_url
    config.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", ".DS_Store"]
    config.Exchange.root = str(exchange(course.root))
    config.ClearSolutions.code_stub = {"python": EMPTY_SOLUTION}
    config.OverwriteCells.add_missing_cells = True
    config.SafeExecute.course_root = str(course.root)
    config.SafeExecute.sandboxed = sandboxed
    config.LimitOutput.max_lines = LONGEST_OUTPUT
    config.Autograde.autograde_preprocessors = [
        "grading.course.execute.SafeExecute",
        "nbgrader.preprocessors.IgnorePattern",
        "nbgrader.preprocessors.LimitOutput",
        "nbgrader.preprocessors.SaveAutoGrades",
        "nbgrader.preprocessors.CheckCellMetadata",
    ]
    return config


def course_directory(course: Course, **folders: Path) -> CourseDirectory:
    """nbgrader's view of the folder. folders: submitted_directory=..., and so on, where they differ."""
    config = configure(Config(), course)
    for name, path in folders.items():
        config.CourseDirectory[name] = str(path)
    return CourseDirectory(config=config)


@contextlib.contextmanager
def gradebook(course: Course) -> Iterator[Any]:  # a Gradebook, whose annotations do not fit what it takes
    """The course's gradebook, made where there is none. What fails inside leaves it as it was.

    Raises CourseError where it cannot be used, or lacks what it was asked for.
    """
    from sqlalchemy.exc import SAWarning, SQLAlchemyError

    find_commands()
    warnings.filterwarnings("ignore", category=SAWarning)  # of nbgrader's own models
    try:
        with Gradebook(f"{course.gradebook_url}?timeout=60", course.id) as book:
            try:
                yield book
            except BaseException:
                book.db.rollback()
                raise
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        what = f"the gradebook {course.root / 'gradebook.db'} cannot be used ({reason})"
        if any(word in reason for word in DAMAGED):
            raise CourseError(f"{what}: it is damaged. Move it away, and {ANEW.format('ASSIGNMENT')}") from error
        raise CourseError(
            f"{what}. What it holds is as it was. "
            "Check that its folder can be written to and has space, then run the same command again"
        ) from error
    except MissingEntry as error:
        raise CourseError(f"the gradebook lacks something ({error}): {ANEW.format('ASSIGNMENT')}") from error


def entry(course: Course, book: Any, name: str) -> Any:
    """An assignment's entry in the gradebook. Raises CourseError with what puts it there."""
    try:
        return book.find_assignment(name)
    except MissingEntry:
        known = ", ".join(assignment.name for assignment in book.assignments) or "none"
        raise CourseError(
            f"the gradebook {course.root / 'gradebook.db'} has no assignment {name}, but {known}. If it was deleted, "
            + ANEW.format(name)
        ) from None


def find_commands() -> None:
    """nbgrader runs `alembic` by name: let it find the one of this Python."""
    here = str(Path(sys.executable).parent)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", "")])


def enter_roster(course: Course) -> None:
    """Bring the gradebook's learners up to the roster; nobody is removed."""
    with gradebook(course) as book:
        for learner in course.roster().values():
            book.update_or_create_student(
                learner.id, first_name=learner.first_name, last_name=learner.last_name, email=learner.email
            )


class Messages(logging.Handler):
    """Keeps what nbgrader logs, so that a failure can be told in its words."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logger(messages: Messages) -> logging.Logger:
    """A logger for nbgrader's converters that goes nowhere else."""
    log = logging.Logger("nbgrader", logging.WARNING)
    log.addHandler(messages)
    return log
