"""grading regrade: grade again after a check or a question was fixed, and say what changed for whom."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grading.course.grade import grade
from grading.course.outcome import Outcome
from grading.course.plain import plain
from grading.course.record import graded_notebooks, outcomes
from grading.course.settings import Course, load


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading regrade", description="Grade again and show what changed.")
    parser.add_argument("assignment")
    parser.add_argument("learners", nargs="*")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--no-sandbox", action="store_true")
    options = parser.parse_args(argv)
    lines = regrade(
        load(Path.cwd()), options.assignment, options.learners, jobs=options.jobs, sandboxed=not options.no_sandbox
    )
    print(plain("\n".join(lines)) if lines else "Nothing changed.")
    return 0


def regrade(
    course: Course, name: str, learners: Sequence[str] = (), *, jobs: int = 1, sandboxed: bool = True
) -> list[str]:
    """Grade again; returns a line for each criterion or question that came out differently."""
    before = judged(course, name)
    grade(course, name, learners, jobs=jobs, sandboxed=sandboxed)
    return list(differences(before, judged(course, name)))


def judged(course: Course, name: str) -> dict[str, dict[str, Outcome]]:
    """What was judged of each learner's submission, by cell."""
    found: dict[str, dict[str, Outcome]] = {}
    for folder in sorted(course.folder("autograded").glob(f"*/{name}")):
        mine = found.setdefault(folder.parent.name, {})
        for notebook in graded_notebooks(folder).values():
            mine |= outcomes(notebook)
    return found


def differences(
    before: Mapping[str, Mapping[str, Outcome]], after: Mapping[str, Mapping[str, Outcome]]
) -> Iterator[str]:
    """A line for each item whose state or points differ."""
    for learner in sorted({*before, *after}):
        old = _items(before.get(learner, {}))
        new = _items(after.get(learner, {}))
        for key in dict.fromkeys((*old, *new)):
            was, now = old.get(key, ("not graded", 0.0)), new.get(key, ("not graded", 0.0))
            if was != now:
                yield f"{learner}: {key[0]} {key[1]}: {was[0]} -> {now[0]}, {was[1]:g} -> {now[1]:g} points"


def _items(outcomes: Mapping[str, Outcome]) -> dict[tuple[str, str], tuple[str, float]]:
    return {
        (outcome.part, item.name): (item.state, item.points) for outcome in outcomes.values() for item in outcome.items
    }
