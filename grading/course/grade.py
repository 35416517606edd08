"""grading grade: from what was handed in to grades in the gradebook, whatever was handed in."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode

from grading.course import sandbox
from grading.course.harmless import harmless
from grading.course.nbgrader_settings import (
    Messages,
    configure,
    course_directory,
    enter_roster,
    entry,
    find_commands,
    gradebook,
    logger,
)
from grading.course.plain import plain
from grading.course.pool import Ended, run_each, uninterrupted
from grading.course.record import Score, enter, for_a_person, outcomes, replace_folder
from grading.course.repair import repair
from grading.course.scratch import LOGS, WORK, scratch, short_scratch
from grading.course.settings import Course, CourseError, load

USUAL_S = 5.0  # for one submission on a quiet machine, measured with ps02: most of it is importing torch
LOG_BYTES = 1 << 20  # kept of what was printed while grading one


@dataclass(frozen=True)
class Graded:
    """What became of one submission. score: None if it could not be graded; then a person has to look."""

    learner: str
    score: Score | None
    seconds: float
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        if self.score is None:
            what = "not graded"
        else:
            what = f"{self.score.final:g} of {self.score.possible:g}"
            what += f", {self.score.blocked:g} blocked" if self.score.blocked else ""
            what += f", {self.score.penalty:g} taken off for lateness" if self.score.penalty else ""
        lines = [f"{self.learner:16} {what}  ({self.seconds:.1f} s)", *(f"    {note}" for note in self.notes)]
        return plain("\n".join(lines))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading grade", description="Grade what was handed in of an assignment.")
    parser.add_argument("assignment")
    parser.add_argument("learners", nargs="*", help="only these; otherwise everyone who handed in")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="so many at a time")
    parser.add_argument("--no-sandbox", action="store_true", help="run the learners' code with all your rights")
    options = parser.parse_args(argv)
    course = load(Path.cwd())
    results = grade(course, options.assignment, options.learners, jobs=options.jobs, sandboxed=not options.no_sandbox)
    return 1 if any(result.score is None for result in results) else 0


def grade(
    course: Course, name: str, learners: Sequence[str] = (), *, jobs: int = 1, sandboxed: bool = True
) -> list[Graded]:
    """Grade the submissions of an assignment, and print a line for each. Raises CourseError before anything starts."""
    if jobs < 1:
        raise CourseError("--jobs is a number of at least 1")
    released(course, name)
    found, notes = submissions(course, name, learners)
    for note in notes:
        print(plain(note))
    if not found:
        raise CourseError(
            f"nothing to grade: there is no submitted/LEARNER/{name}; collect first: grading collect {name}"
        )
    print(announced(name, len(found), jobs), flush=True)
    started = time.monotonic()
    checks = ready(course, name, sandboxed=sandboxed)
    enter_roster(course)
    logs = course.root / WORK / LOGS / name
    logs.mkdir(parents=True, exist_ok=True)
    results = []
    with scratch(course.root, name) as staging, short_scratch(staging) as short:
        tasks = {
            learner: lambda learner=learner: grade_one(
                course, checks, name, learner, staging, short, sandboxed=sandboxed
            )
            for learner in found
        }
        for ended in run_each(tasks, jobs, course.limits.on_a_busy_machine().submission_s, logs):
            with uninterrupted():
                results.append(_settle(course, name, ended, staging, logs))
            passed = time.monotonic() - started
            print(f"{len(results)} of {len(found)}, {passed:.0f} s: {results[-1].line()}", flush=True)
    print(f"{len(results)} graded in {time.monotonic() - started:.0f} s")
    return results


def announced(name: str, count: int, jobs: int) -> str:
    """What is about to be done, and about how long it takes.

    >>> announced("ps02", 22, 2)
    '22 submissions of ps02, 2 at a time: about 60 s on a quiet machine'
    """
    rounds = -(-count // jobs)
    seconds = round(max(1, rounds) * USUAL_S + USUAL_S, -1)
    about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    some = "1 submission" if count == 1 else f"{count} submissions"
    return f"{some} of {name}, {min(jobs, count)} at a time: about {about} on a quiet machine"


def released(course: Course, name: str) -> None:
    """Raises CourseError where an assignment's release is not there or damaged, or the gradebook does not have it."""
    course.assignment(name)
    paths = sorted(course.folder("release", name).glob("*.ipynb"))
    if not paths:
        raise CourseError(f"{name} was not released: run grading release {name} first")
    for path in paths:
        try:
            nbformat.read(path, as_version=4)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise CourseError(f"{path} is damaged: run grading release {name} again") from error
    with gradebook(course) as book:
        entry(course, book, name)


def ready(course: Course, name: str, *, sandboxed: bool) -> Any:
    """Find whatever would make every submission fail, and load what each needs, once. Raises CourseError."""
    import nbgrader.converters  # noqa: F401

    import grading.course.execute  # noqa: F401
    from grading.course.examine import Checks
    from grading.course.likeness import package_functions

    checks = Checks.load(course, name)
    course.roster()
    course.extensions()
    if sandboxed and sandbox.problem():
        raise CourseError(
            f"no sandbox can be had here ({sandbox.problem()}). `grading doctor` says how to get one. To run the "
            "learners' code without, with your rights, on your files: add --no-sandbox"
        )
    if not sandboxed:
        warning = (
            "WARNING: no sandbox. What learners handed in runs with your rights: it can read and change your files,"
        )
        print(
            f"{warning}\nthe gradebook too, and reach the network. Do this only in a machine made for it.",
            file=sys.stderr,
        )
    package_functions()
    return checks


def submissions(course: Course, name: str, only: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Who handed in and is in the roster; and notes on those who are not."""
    roster = course.roster()
    folder = course.folder("submitted")
    there = sorted(path.parent.name for path in folder.glob(f"*/{name}") if path.is_dir())
    notes = [f"{who}: not in roster.csv, so not graded" for who in there if who not in roster]
    for who in only:
        if who not in there:
            raise CourseError(f"{who} has handed in nothing: there is no {folder / who / name}")
    return [who for who in there if who in roster and (not only or who in only)], notes


def grade_one(
    course: Course, checks: Any, name: str, learner: str, staging: Path, short: str, *, sandboxed: bool
) -> None:
    """Repair and run one submission, all within staging and short. For a process of its own."""
    from nbgrader.converters import Autograde
    from traitlets.config import Config

    from grading.course.execute import SafeExecute

    SafeExecute.prepared = checks
    tempfile.tempdir = short
    notes = repair(
        course.folder("submitted", name, learner),
        course.folder("release", name),
        staging / "repaired" / learner / name,
    )
    (staging / "repaired" / learner / "notes.json").write_text(json.dumps(notes), encoding="utf-8")
    find_commands()
    folders = course_directory(
        course, submitted_directory=staging / "repaired", autograded_directory=staging / "graded"
    )
    folders.assignment_id, folders.student_id = name, learner
    messages = Messages()

    config = configure(Config(), course, sandboxed=sandboxed)
    config.Autograde.autograde_preprocessors = [
        each for each in config.Autograde.autograde_preprocessors if not each.endswith("SaveAutoGrades")
    ]
    converter = Autograde(coursedir=folders, config=config, log=logger(messages))
    converter.force = True
    try:
        converter.start()
    finally:
        print("\n".join(messages.lines))


def _settle(course: Course, name: str, ended: Ended, staging: Path, logs: Path) -> Graded:
    """Enter what a process left behind into the gradebook and the course folder."""
    who, log = ended.name, logs / f"{ended.name}.log"
    graded = staging / "graded" / who / name
    handed_in = course.folder("submitted", name, who)
    _clean(log)
    if ended.code != 0 or not list(graded.glob("*.ipynb")):
        over = f"it took more than {course.limits.submission_s:g} s" if ended.code is None else f"see {log}"
        with gradebook(course) as book:
            for_a_person(book, name, who, handed_in)
        return Graded(who, None, ended.seconds, (f"could not be graded ({over}); look at it by hand",))
    notes = _notes(staging / "repaired" / who / "notes.json")
    remarks = []
    for path in sorted(graded.glob("*.ipynb")):
        path.chmod(0o644)
        notebook = nbformat.read(path, as_version=4)
        remarks += [f"{cell}: {note}" for cell, outcome in outcomes(notebook).items() for note in outcome.notes]
        nbformat.write(with_notes(harmless(notebook), notes), path)
    with gradebook(course) as book:
        score = enter(course, book, name, who, graded)
    replace_folder(graded, course.folder("autograded", name, who))
    return Graded(who, score, ended.seconds, (*notes, *remarks))


def _clean(log: Path) -> None:
    """Make a log one that can be read in a terminal: a learner's code may have printed into it."""
    with open(log, "rb+") as file:
        text = file.read(LOG_BYTES).decode("utf-8", "replace")
        file.seek(0)
        file.write(plain(text).encode())
        file.truncate()


def _notes(path: Path) -> tuple[str, ...]:
    try:
        return tuple(map(str, json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return ()


def with_notes(notebook: NotebookNode, notes: Sequence[str]) -> NotebookNode:
    """The graded notebook, which learners get back, with what was noted at its head."""
    if notes:
        text = "**Notes from grading**\n\n" + "\n".join(f"- {note}" for note in notes)
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell(source=text, id="notes-from-grading"))
    return notebook
