"""What this learner has read, predicted, answered and built, per module and concept.

Counted from the log (grading/log.py), whose entries have a `kind`:

- opened, ran: a lesson was opened (module); a cell of it was run (module, cell)
- predicted, measured: a prediction was made (question, variant, answer); its run was compared (question, value)
- answered: a card was answered (question, variant, answer, right, mistakes)
- drafted, retake, submitted: an answer in a test was kept, a retake begun, an attempt submitted (module, attempt; right
  and of: which of how many questions)
- checked, hinted: an exercise was checked (exercise, passed); a hint was read (exercise)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grading import shelf, text
from grading.log import FOLDER, Entry, Log, home, log
from grading.log import record as record

PAUSE_S = 600  # a longer gap between two entries is a break, not time spent


@dataclass(frozen=True)
class Concept:
    """How far a learner is with one concept. Of its questions: the cells run that show the answer, predictions made,
    and cards and test questions whose latest answer is right."""

    name: str
    ran: int
    cells: int
    predicted: int
    predictions: int
    right: int
    questions: int


@dataclass(frozen=True)
class Module:
    """How far a learner is with one module. scores: right answers of each submitted test, None where withheld."""

    number: str
    title: str
    minutes: int
    concepts: tuple[Concept, ...]
    scores: tuple[int | None, ...]
    test_questions: int
    exercises: tuple[str, ...]  # passed

    def total(self, field: str) -> int:
        """The sum of a field over the concepts."""
        return sum(getattr(concept, field) for concept in self.concepts)


def summary(entries: list[Entry]) -> list[Module]:
    """Every module that has questions, in order. Raises ShelfError."""
    return [_module(source, entries) for source in shelf.modules()]


def _module(source: shelf.Questions, entries: list[Entry]) -> Module:
    number = source.module
    mine = [entry for entry in entries if entry.get("module") == number]
    submitted = [entry for entry in mine if entry["kind"] == "submitted"]
    passed = {
        entry["exercise"]: bool(entry.get("passed"))
        for entry in entries
        if entry["kind"] == "checked" and str(entry.get("exercise", "")).startswith(number)
    }
    return Module(
        number,
        source.title,
        _minutes(mine),
        tuple(_concept(source, concept, mine) for concept in source.concepts),
        tuple(sum(entry["right"].values()) if isinstance(entry.get("right"), dict) else None for entry in submitted),
        len(source.ids("test")),
        tuple(sorted(name for name, ok in passed.items() if ok)),
    )


def _concept(source: shelf.Questions, name: str, mine: list[Entry]) -> Concept:
    about = [asked for asked in (source.drawn(each, 0) for each in source.ids()) if asked.concept == name]
    cells = {asked.cell for asked in about}
    ran = {entry.get("cell") for entry in mine if entry["kind"] == "ran"}
    predicted = {entry.get("question") for entry in mine if entry["kind"] == "predicted"}
    latest: dict[Any, Any] = {}
    for entry in mine:
        if entry["kind"] == "answered":
            latest[entry.get("question")] = entry.get("right")
        elif entry["kind"] == "submitted" and isinstance(entry.get("right"), dict):
            latest |= entry["right"]
    judged = [asked.id for asked in about if asked.use != "predict"]
    foretold = [asked.id for asked in about if asked.use == "predict"]
    return Concept(
        name,
        len(cells & ran),
        len(cells),
        len(predicted.intersection(foretold)),
        len(foretold),
        sum(bool(latest.get(question)) for question in judged),
        len(judged),
    )


def _minutes(entries: list[Entry]) -> int:
    times = sorted(entry["at"] for entry in entries)
    gaps = (after - before for before, after in itertools.pairwise(times))
    return round(sum(gap for gap in gaps if gap < PAUSE_S) / 60)


# ---- showing it ------------------------------------------------------------------------------------------------------


def progress() -> None:
    """Show what this learner has done, by module and concept."""
    try:
        modules = summary(log().entries())
    except shelf.ShelfError as error:
        print(error)
        return
    if home() is None:
        print(log_is_memory())
    if text.widgets_run():
        from IPython.display import Markdown, display

        display(Markdown(as_markdown(modules)))
    else:
        print(as_text(modules))


def log_is_memory() -> str:
    return f"There is no workspace at or above {Path.cwd()}: this is what the kernel remembers."


HEAD = ("", "cells run", "predicted", "answered right")


def _rows(module: Module) -> list[tuple[str, str, str, str]]:
    every = [(concept.name, concept) for concept in module.concepts]
    return [
        (
            name,
            f"{one.ran} of {one.cells}" if one.cells else "",
            f"{one.predicted} of {one.predictions}" if one.predictions else "",
            f"{one.right} of {one.questions}" if one.questions else "",
        )
        for name, one in every
    ]


def _outline(module: Module) -> str:
    """One module on one line."""
    parts = [
        f"{module.minutes} min",
        f"cells run {module.total('ran')} of {module.total('cells')}",
        f"predicted {module.total('predicted')} of {module.total('predictions')}",
        f"answered right {module.total('right')} of {module.total('questions')}",
        f"test {_test(module)}",
    ]
    if module.exercises:
        parts.append(f"built {', '.join(module.exercises)}")
    return "; ".join(parts)


def _test(module: Module) -> str:
    """The test's scores, the best and, if it differs, the first."""
    if not module.scores:
        return "not submitted"
    known = [score for score in module.scores if score is not None]
    if not known:
        return f"submitted ({len(module.scores)}), explained with the feedback"
    first = f" (first attempt {known[0]})" if max(known) != known[0] else ""
    return f"{max(known)} of {module.test_questions}{first}"


def as_markdown(modules: list[Module]) -> str:
    """The panel: a line for each module, its concepts folded below."""
    blocks = []
    for module in modules:
        table = ["|" + "|".join(HEAD) + "|", "|---|---|---|---|"]
        table += ["|" + "|".join(row) + "|" for row in _rows(module)]
        fold = "<details><summary>its concepts</summary>\n\n" + "\n".join(table) + "\n\n</details>"
        blocks.append(f"**{module.number} {module.title}**: {_outline(module)}\n\n{fold}")
    return "\n\n".join(blocks)


def as_text(modules: list[Module]) -> str:
    """The same for a terminal."""
    lines = []
    for module in modules:
        lines.append(f"{module.number} {module.title}: {_outline(module)}")
        lines += [f"    {row[0][:56]:56s} {row[1]:>9s} {row[2]:>9s} {row[3]:>14s}" for row in _rows(module)]
    head = f"    {'':56s} {'cells run':>9s} {'predicted':>9s} {'answered right':>14s}"
    return "\n".join([head, *lines])


def main(argv: list[str] | None = None) -> int:
    """`grading progress [FOLDER]`: print it for the workspace that FOLDER lies in."""
    parser = argparse.ArgumentParser(prog="grading progress", description="Print what was done in a workspace.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of the workspace; default: here, or ./workspace")
    folder = parser.parse_args(argv).folder or Path.cwd()
    found = home(folder) or home(folder / "workspace")
    if found is None:
        print(f"No workspace at or above {folder} (it would hold a folder {FOLDER}). Run `make course` to make one.")
        return 1
    with contextlib.chdir(found.parent):  # its questions, not those of where the command was typed
        try:
            print(as_text(summary(Log(found).entries())))
        except shelf.ShelfError as error:
            print(error)
            return 1
    return 0


# ---- which cells were run --------------------------------------------------------------------------------------------


def follow(module: str) -> None:
    """From now on log which cells of the lesson are run, each once in a kernel: what was read, and the time it took."""
    shell = text.shell()
    if shell is None or getattr(shell, "kernel", None) is None:
        return
    for follower in [each for each in shell.events.callbacks["pre_run_cell"] if isinstance(each, _Follower)]:
        shell.events.unregister("pre_run_cell", follower)
    shell.events.register("pre_run_cell", _Follower(module))


class _Follower:
    """What IPython calls before each cell."""

    def __init__(self, module: str) -> None:
        self.module, self.seen = module, set[str]()

    def __call__(self, info: Any) -> None:
        cell = getattr(info, "cell_id", None)
        if cell and cell not in self.seen and info.store_history:
            self.seen.add(cell)
            log().append("ran", module=self.module, cell=cell)
