"""An instructor's course folder: where things lie in it, and what course.toml, roster.csv and extensions.csv say."""

import csv
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

PUBLIC = Path(__file__).resolve().parents[1]  # grading/: what everyone can read, answers included
PRACTICE = "practice_"  # in front of an assignment's name: a public copy to practise with, which nobody hands in


class CourseError(Exception):
    """Something in the course folder has to be changed by the instructor; the message says what."""


@dataclass(frozen=True)
class Learner:
    """A line of roster.csv. also: other names a learning system has for this learner, such as a number."""

    id: str
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """What course.toml says about one assignment. due: with a time zone, None for never."""

    name: str
    due: datetime | None = None
    test_attempts: int = 3
    late_days: int = 0  # accepted this long after it is due
    late_penalty: float = 0.0  # share of the points, for each day begun

    def __post_init__(self) -> None:
        where = f"course.toml, [assignments.{self.name}]"
        if self.due is not None and (not isinstance(self.due, datetime) or self.due.tzinfo is None):
            raise CourseError(f"{where}: due needs a time and a zone, such as 2027-03-12T23:59:00+01:00")
        if not isinstance(self.test_attempts, int) or self.test_attempts < 1:
            raise CourseError(f"{where}: test_attempts is a number of at least 1")
        if not isinstance(self.late_days, int) or self.late_days < 0:
            raise CourseError(f"{where}: late_days is a whole number, 0 for none")
        if not 0 <= self.late_penalty <= 1:
            raise CourseError(f"{where}: late_penalty is a share of the points per day, from 0 to 1")


@dataclass(frozen=True)
class Limits:
    """How long grading one submission may take, in seconds."""

    cell_s: float = 20.0  # one cell of the learner's
    notebook_s: float = 120.0  # all cells and checks of one notebook
    submission_s: float = 240.0  # everything; then its process is ended

    def __post_init__(self) -> None:
        if not 0 < self.cell_s <= self.notebook_s <= self.submission_s:
            raise CourseError("course.toml, [limits]: 0 < cell_s <= notebook_s <= submission_s is needed")

    def on_a_busy_machine(self) -> "Limits":
        """The same, longer where more processes want to run than there are cores, so that nobody fails for that."""
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
        factor = max(1.0, waiting)
        return Limits(self.cell_s * factor, self.notebook_s * factor, self.submission_s * factor)


@dataclass(frozen=True)
class Course:
    """One course folder. Paths below it have nbgrader's names."""

    root: Path
    id: str = "minidist"
    seed: str = ""  # of the questions' values; empty: the public ones
    limits: Limits = field(default_factory=Limits)
    assignments: Mapping[str, Assignment] = field(default_factory=dict)

    def folder(self, step: str, assignment: str = "", learner: str = ".") -> Path:
        """Where nbgrader keeps a step (source, release, submitted, autograded, feedback) of one learner."""
        return self.root / step / learner / assignment if assignment else self.root / step

    @property
    def gradebook_url(self) -> str:
        return f"sqlite:///{self.root / 'gradebook.db'}"

    @property
    def questions(self) -> tuple[Path, ...]:
        """Folders with questions, the private one last: what it has replaces what is public."""
        return tuple(path for path in (PUBLIC / "questions", self.root / "questions") if path.is_dir())

    @property
    def checks(self) -> tuple[Path, ...]:
        return tuple(path for path in (PUBLIC / "checks", self.root / "checks") if path.is_dir())

    def assignment(self, name: str) -> Assignment:
        """What is set for an assignment; without an entry in course.toml the defaults hold."""
        if not name or name != Path(name).name or name.startswith((".", "-")) or "+" in name:
            raise CourseError(f"{name!r} cannot be an assignment's name: use letters, digits, - and _, such as ps02")
        return self.assignments.get(name) or Assignment(name)

    def source(self, name: str) -> Path:
        """The py:percent source of an assignment: NAME.py or NAME_topic.py, private before public."""
        folders = (self.root / "assignments", PUBLIC / "src")
        for folder in folders:
            found = sorted([*folder.glob(f"{name}.py"), *folder.glob(f"{name}_*.py")])
            if len(found) > 1:
                raise CourseError(f"{folder} has {len(found)} sources of {name}: keep one of {_names(found)}")
            if found:
                return found[0]
        known = sorted({path.stem.split("_")[0] for folder in folders for path in folder.glob("[!_]*.py")})
        raise CourseError(f"no source of {name} in {folders[0]} or {folders[1]}; there are: {', '.join(known)}")

    def roster(self) -> dict[str, Learner]:
        """The learners of roster.csv by id."""
        learners: dict[str, Learner] = {}
        for line, row in _rows(self.root / "roster.csv", ("id",)):
            name = row["id"]
            if name != Path(name).name or name.startswith((".", "-")) or any(char in name for char in '*?[]{},+"\\'):
                raise CourseError(f"roster.csv, line {line}: {name!r} cannot be an id; use letters, digits, . _ and -")
            if name in learners:
                raise CourseError(f"roster.csv, line {line}: {name} is there twice; keep one line")
            also = tuple(word for word in row.get("also", "").split() if word)
            learners[name] = Learner(
                name, row.get("first_name", ""), row.get("last_name", ""), row.get("email", ""), also
            )
        return learners

    def extensions(self) -> dict[tuple[str, str], timedelta]:
        """Extra time by (learner, assignment), from extensions.csv; an assignment of * means each."""
        path = self.root / "extensions.csv"
        extra: dict[tuple[str, str], timedelta] = {}
        for line, row in _rows(path, ("learner", "assignment", "days")) if path.exists() else ():
            try:
                extra[row["learner"], row["assignment"]] = timedelta(days=float(row["days"]))
            except ValueError:
                raise CourseError(f"extensions.csv, line {line}: days is a number, not {row['days']!r}") from None
        return extra

    def deadline(self, name: str, learner: str) -> datetime | None:
        """When an assignment is due for one learner, extensions included."""
        due, extra = self.assignment(name).due, self.extensions()
        longer = [extra[key] for key in ((learner, name), (learner, "*")) if key in extra]
        return due + max(longer, default=timedelta()) if due else None


def load(root: Path) -> Course:
    """The course in folder root, checked. Raises CourseError with what to change."""
    path = root / "course.toml"
    if not path.is_file():
        raise CourseError(
            f"{root} is no course folder: it has no course.toml. Change into yours, or make one: grading new-course DIR"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CourseError(f"{path} cannot be read: {error}") from None
    entries = data.pop("assignments", {})
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CourseError(f"{path}: write an assignment as [assignments.NAME] with its settings below")
    assignments = {
        name: _build(Assignment, entry, f"[assignments.{name}]", name=name) for name, entry in entries.items()
    }
    limits = _build(Limits, data.pop("limits", {}), "[limits]")
    return _build(Course, data, "", root=root.resolve(), limits=limits, assignments=assignments)


def _build(kind: Any, entries: Mapping[str, Any], where: str, **given: Any) -> Any:
    known = {field.name for field in fields(kind)} - given.keys()
    for key in entries:
        if key not in known:
            raise CourseError(f"course.toml {where}: {key} is not known; there is {', '.join(sorted(known))}")
    try:
        return kind(**given, **entries)
    except TypeError as error:
        raise CourseError(f"course.toml {where}: a value has the wrong type ({error})") from None


def _rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and row of a CSV file, stripped; empty lines are passed over."""
    if not path.is_file():
        raise CourseError(f"{path} is missing: make it, with the columns {', '.join(needed)}")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise CourseError(f"{path.name}: the first line names the columns; it lacks {', '.join(missing)}")
            for row in reader:
                clean = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
                if any(clean.values()):
                    if not clean[needed[0]]:
                        raise CourseError(f"{path.name}, line {reader.line_num}: {needed[0]} is empty")
                    yield reader.line_num, clean
    except (UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path.name} is not a UTF-8 CSV file: {error}") from None


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
