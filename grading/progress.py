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
import textwrap
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
    passed = {str(entry.get("exercise")) for entry in entries if entry["kind"] == "checked" and entry.get("passed")}
    return Module(
        number,
        source.title,
        _minutes(mine),
        tuple(_concept(source, concept, mine) for concept in source.concepts),
        tuple(sum(entry["right"].values()) if isinstance(entry.get("right"), dict) else None for entry in submitted),
        len(source.ids("test")),
        tuple(sorted(exercise for exercise in passed if exercise.startswith(number))),
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
        print(f"There is no workspace at or above {Path.cwd()}: this is what the kernel remembers.")
    if text.widgets_run():
        from IPython.display import Markdown, display

        display(Markdown(as_markdown(modules)))
    else:
        print(as_text(modules))


CONCEPT_HEAD = ("", "cells run", "predicted", "answered right")
MODULE_HEAD = ("module", "minutes", *CONCEPT_HEAD[1:], "test", "built")


def _of(done: int, there: int) -> str:
    return f"{done} of {there}" if there else ""


def _counts(one: Concept | Module) -> tuple[str, str, str]:
    """Cells run, predictions made and questions answered right, of a concept or of all of a module's."""
    done = one.total if isinstance(one, Module) else lambda field: getattr(one, field)
    pairs = (("ran", "cells"), ("predicted", "predictions"), ("right", "questions"))
    return tuple(_of(done(some), done(every)) for some, every in pairs)  # type: ignore[return-value]


def _row(module: Module) -> tuple[str, ...]:
    """One module's row of the panel."""
    built = ", ".join(module.exercises)
    return f"{module.number} {module.title}", str(module.minutes), *_counts(module), _test(module), built


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
    """The panel: a row for each module, and below it the concepts, folded."""
    blocks = [_table(MODULE_HEAD, [_row(module) for module in modules])]
    for module in modules:
        table = _table(CONCEPT_HEAD, [(concept.name, *_counts(concept)) for concept in module.concepts])
        blocks.append(
            f"<details><summary>{module.number} {module.title}, by concept</summary>\n\n{table}\n\n</details>"
        )
    return "\n\n".join(blocks)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("|" + "|".join(row) + "|" for row in [head, ("---",) * len(head), *rows])


def as_text(modules: list[Module]) -> str:
    """The same for a terminal."""
    lines = [_line(*CONCEPT_HEAD)]
    for module in modules:
        built = f", built {', '.join(module.exercises)}" if module.exercises else ""
        lines += ["", f"{module.number} {module.title}: {module.minutes} min, test {_test(module)}{built}"]
        lines += [_line(concept.name, *_counts(concept)) for concept in module.concepts]
        lines.append(_line("together", *_counts(module)))
    return "\n".join(lines)


def _line(name: str, *counts: str) -> str:
    """A name, on as many lines as it needs, and what is counted."""
    *before, last = textwrap.wrap(name, 52, subsequent_indent="  ") or [""]
    return "\n".join([*(f"  {each}" for each in before), "  {:52s} {:>9s} {:>9s} {:>14s}".format(last, *counts)])


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
