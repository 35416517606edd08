"""Judging a cell from outside the learner's kernel: exercises by trusted checks on sandboxed ranks, tests by a key."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from nbformat.notebooknode import NotebookNode

from grading.bank import Bank
from grading.course.likeness import same_as_package
from grading.course.marking import Rules, find_answers, mark
from grading.course.outcome import Item, Outcome, Uncollected, Unwritten
from grading.course.settings import PUBLIC, Course, CourseError
from grading.course.source import exercise_of, test_of
from grading.question import QuestionError

Collect = Callable[[list[str]], dict[str, bytes]]


@dataclass(frozen=True)
class Checks:
    """What an assignment is judged by: its exercises and the questions of its test."""

    exercises: Mapping[str, Any] = field(default_factory=dict)
    bank: Bank = field(default_factory=Bank)

    @classmethod
    def load(cls, course: Course, name: str) -> Self:
        """Read checks/NAME.py, public and then private, and all questions. Raises CourseError."""
        exercises: dict[str, Any] = {}
        for folder in course.checks:
            for path in sorted({*folder.glob(f"{name}.py"), *folder.glob(f"{name}_*.py")}):
                exercises |= {exercise.id: exercise for exercise in _exercises(path)}
        try:
            bank = Bank.load(*course.questions, seed=course.seed)
        except QuestionError as error:
            raise CourseError(f"the questions cannot be used; nothing was graded or released:\n{error}") from error
        return cls(exercises, bank)

    def points(self, kind: str, part: str) -> float:
        """What an exercise or a test is worth. Raises CourseError for one that is not there."""
        if kind == "exercise":
            if part not in self.exercises:
                raise CourseError(
                    f'check("{part}"): no check has this id; there are {", ".join(self.exercises) or "none"}'
                )
            return float(self.exercises[part].points)
        try:
            count = len(self.bank.of(part, "test"))
        except KeyError as error:
            raise CourseError(str(error)) from None
        if not count:
            raise CourseError(f'submit("{part}"): module {part} has no test questions')
        return float(count)


def _exercises(path: Path) -> list[Any]:
    """The exercises that a file of checks defines."""
    from grading.exercise import Exercise

    try:
        if path.parent == PUBLIC / "checks":
            module = importlib.import_module(f"grading.checks.{path.stem}")
        else:
            module = _load(path)
    except (Exception, SystemExit) as error:
        line = next((f", line {frame.tb_lineno}" for frame in _frames(error) if _is_in(frame, path)), "")
        line = line or (f", line {error.lineno}" if isinstance(error, SyntaxError) else "")
        raise CourseError(
            f"the checks in {path}{line} are broken ({type(error).__name__}: {error}). Nothing was graded; grades are "
            "as they were"
        ) from error
    found = [value for value in vars(module).values() if isinstance(value, Exercise)]
    if not found:
        raise CourseError(f"{path} defines no exercise: assign an Exercise(...) to a name in it")
    return found


def _load(path: Path) -> Any:
    name = f"private_checks_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _frames(error: BaseException) -> list[Any]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames[::-1]


def _is_in(frame: Any, path: Path) -> bool:
    return Path(frame.tb_frame.f_code.co_filename) == path


class Examiner:
    """Judges the cells of one learner's notebook, on the ranks of `host`."""

    def __init__(
        self,
        course: Course,
        checks: Checks,
        name: str,
        learner: str,
        notebook: NotebookNode,
        folder: Path,
        host: Any,
    ) -> None:
        self.course, self.checks, self.name, self.learner = course, checks, name, learner
        self.notebook, self.folder, self.host = notebook, folder, host

    def part(self, cell: NotebookNode) -> tuple[str, str] | None:
        """What a cell is judged by: ("exercise", id) or ("test", module); None if it is run."""
        about = cell.metadata.get("nbgrader", {})
        if not about.get("grade") or about.get("solution"):
            return None
        if test_of(cell):
            return "test", test_of(cell)
        exercise = exercise_of(cell)
        return ("exercise", exercise) if exercise in self.checks.exercises else None

    def judge(self, part: tuple[str, str], collect: Collect) -> Outcome:
        """The outcome of a cell; the learner's functions are asked for by `collect`."""
        kind, name = part
        return self._test(name) if kind == "test" else self._exercise(name, collect)

    def _test(self, module: str) -> Outcome:
        rules = self.course.assignment(self.name)
        due = self.course.deadline(self.name, self.learner)
        closes = due + timedelta(days=rules.late_days) if due else None
        found, notes = find_answers(self.notebook, self.folder, module)
        return mark(self.checks.bank, module, found, Rules(rules.test_attempts, closes), notes)

    def _exercise(self, name: str, collect: Collect) -> Outcome:
        from grading.check import judge

        exercise = self.checks.exercises[name]
        try:
            functions = collect([exercise.function])
        except Uncollected as error:
            mistakes = ("not-written",) if isinstance(error, Unwritten) else ()
            items = tuple(
                Item(each.name, "failed", 0.0, float(each.points), mistakes=mistakes) for each in exercise.criteria
            )
            text = f"{name} {exercise.function}: 0 of {exercise.points} points\n  It was not judged: {error}."
            return Outcome(name, items, text, () if mistakes else (str(error),))
        report = judge(exercise, functions, self.host)
        mistakes = {each.name: (each.mistake,) if each.mistake else () for each in report.results}
        items = tuple(
            Item(each.name, each.state, float(each.points), float(each.most), mistakes=mistakes[each.name])
            for each in report.results
        )
        sources = [cell.source for cell in self.notebook.cells if cell.cell_type == "code"]
        same = same_as_package(sources, exercise.function)
        notes = (f"{exercise.function} has the same syntax tree as {same}",) if same else ()
        return Outcome(name, items, report.text(), notes)
