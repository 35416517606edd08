"""grading report: how an assignment went: which criteria and questions were hard, which tell learners apart."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grading.bank import Bank
from grading.course.outcome import Item, Outcome
from grading.course.plain import plain
from grading.course.regrade import judged
from grading.course.settings import Course, CourseError, load
from grading.files import write_atomically
from grading.question import Choice, key

FEW = 10  # below so many learners the figures say little


@dataclass(frozen=True)
class Row:
    """One criterion or question over all learners.

    right: share of its points that learners got, 1 is easy; None: nobody answered. Those who did not take a test do not
    count. discrimination: correlation of these with the rest of their points; near 0 or below, it does not tell the
    strong from the weak, or its key is wrong. None: all alike.
    """

    part: str
    name: str
    count: int
    blocked: int
    right: float | None
    discrimination: float | None
    mistakes: tuple[tuple[str, int], ...]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading report", description="Show how an assignment went.")
    parser.add_argument("assignment")
    options = parser.parse_args(argv)
    course = load(Path.cwd())
    text = report(course, options.assignment)
    target = course.root / f"report-{options.assignment}.md"
    write_atomically(target, text.encode())
    print(text)
    print(f"Also in {target.name}.")
    return 0


def report(course: Course, name: str) -> str:
    """The report as markdown."""
    from grading.course.examine import Checks

    course.assignment(name)
    results = judged(course, name)
    if not results:
        raise CourseError(f"nothing was graded yet: run grading grade {name} first")
    rows = summarise(results)
    picked = picks(results)
    nobody = unpicked(picked, Checks.load(course, name).bank)
    lines = [f"# {name}: {len(results)} learners", ""]
    if len(results) < FEW:
        lines += [f"With fewer than {FEW} learners, shares and discrimination are anecdotes.", ""]
    lines += [
        "| part | criterion or question | share right | discrimination | blocked | mistakes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        right, apart = ("-" if each is None else f"{each:.2f}" for each in (row.right, row.discrimination))
        mistakes = ", ".join(f"{name} ({count})" for name, count in row.mistakes)
        lines.append(f"| {row.part} | {row.name} | {right} | {apart} | {row.blocked} | {mistakes} |")
    lines += ["", "## Options that nobody picked", ""]
    lines += [f"- {line}" for line in nobody] or ["None." if picked else "Nobody answered."]
    return plain("\n".join([*lines, "", "## Criterion by learner", "", *_matrix(results, rows), ""]))


def summarise(results: Mapping[str, Mapping[str, Outcome]]) -> list[Row]:
    """A row for each item, in the order of the assignment."""
    table = {learner: _items(outcomes) for learner, outcomes in results.items()}
    keys = list(dict.fromkeys(key for items in table.values() for key in items))
    totals = {learner: sum(item.points for item in items.values() if item) for learner, items in table.items()}
    rows = []
    for part, name in keys:
        mine = {learner: item for learner, items in table.items() if (item := items.get((part, name)))}
        decided = {learner: item for learner, item in mine.items() if item.state != "blocked"}
        shares = [item.points / item.possible if item.possible else 0.0 for item in decided.values()]
        rest = [totals[learner] - item.points for learner, item in decided.items()]
        counts: dict[str, int] = {}
        for mistake in (mistake for item in mine.values() for mistake in item.mistakes):
            counts[mistake] = counts.get(mistake, 0) + 1
        ranked = tuple(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
        mean = sum(shares) / len(shares) if shares else None
        rows.append(Row(part, name, len(mine), len(mine) - len(decided), mean, correlation(shares, rest), ranked))
    return rows


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation; None where one of them does not vary.

    >>> correlation([0, 1, 1], [1, 2, 2])
    1.0
    """
    if len(xs) < 2:
        return None
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    sx, sy = math.sqrt(sum((x - mx) ** 2 for x in xs)), math.sqrt(sum((y - my) ** 2 for y in ys))
    if sx < 1e-12 or sy < 1e-12:
        return None
    return round(sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / (sx * sy), 6)


def picks(results: Mapping[str, Mapping[str, Outcome]]) -> dict[str, set[str]]:
    """Question -> what learners answered; only those that somebody did."""
    picked: dict[str, set[str]] = {}
    for outcomes in results.values():
        for outcome in outcomes.values():
            for item in outcome.items if outcome.part.startswith("test-") else ():
                if item.chosen:
                    picked.setdefault(item.name, set()).update(item.chosen)
    return picked


def unpicked(picked: Mapping[str, set[str]], bank: Bank) -> Iterator[str]:
    """Options of choice questions that no learner picked: they cost reading time and test nothing."""
    for name, keys in picked.items():
        try:
            body = bank.question(name).body
        except KeyError:
            continue  # no longer asked
        if isinstance(body, Choice):
            for option in body.options:
                if key(name, option.value) not in keys:
                    yield f"{name}: {' '.join(option.value.split())}"


def _items(outcomes: Mapping[str, Outcome]) -> dict[tuple[str, str], Item | None]:
    """A learner's items, None for those of a test that was not taken."""
    return {
        (outcome.part, item.name): item if _taken(outcome) else None
        for outcome in outcomes.values()
        for item in outcome.items
    }


def _taken(outcome: Outcome) -> bool:
    return not outcome.part.startswith("test-") or any(item.chosen for item in outcome.items)


def _matrix(results: Mapping[str, Mapping[str, Outcome]], rows: Sequence[Row]) -> list[str]:
    """Learners against items: + passed, - failed, ? blocked, a blank for a test that was not taken."""
    marks = {"passed": "+", "failed": "-", "blocked": "?"}
    lines = [f"{place:3} {row.part} {row.name}" for place, row in enumerate(rows, 1)]
    width = max(map(len, results))
    for learner, outcomes in results.items():
        items = _items(outcomes)
        states = (items.get((row.part, row.name)) for row in rows)
        lines.append(f"{learner:{width}}  " + "".join(" " if item is None else marks[item.state] for item in states))
    return ["```", *lines, "```"]
