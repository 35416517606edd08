"""Rows of a pipeline's program: how ranks of 06.1, 06.2 and 06.5 are called, and what is wrong with what they return.

All the rows of a program are asked of one rank, row by row, since a row follows from three numbers. They come back as
text, and what they do is found by `minidist.schedule`.
"""

import itertools
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import minidist as md
from grading.exercise import Case, Finding, Judge
from grading.ranks.run import Run
from minidist.schedule import Action, Program

_CELL = re.compile(r"(\d{1,4})([FBIW])(\d{1,4})")
Rows = list[list[Action]]


# ---- inside ranks ----------------------------------------------------------------------------------------------------


def text_of(action: Any) -> str:
    """An action as text, "2F0"; what it is instead in angle brackets."""
    if isinstance(action, str):
        return action.strip()[:40]
    if isinstance(action, tuple | list) and len(action) == 3 and isinstance(action[1], str):
        try:
            return f"{operator.index(action[0])}{action[1][:8]}{operator.index(action[2])}"[:40]
        except (TypeError, ValueError):  # no whole number, or one of thousands of digits
            pass
    try:
        return f"<{type(action).__name__} {action!r:.30}>"
    except Exception:  # whatever its own __repr__ does
        return f"<{type(action).__name__}>"


def texts_of(answer: Any, most: int) -> list[str] | None:
    """The actions of a row as text, one more than `most` at most; None where it is no row at all."""
    if isinstance(answer, str):
        answer = [cell for cell in answer.split(",") if cell.strip()]
    try:
        return [text_of(action) for action in itertools.islice(answer, most + 1)]
    except TypeError:
        if isinstance(answer, Iterator):  # an exception of the learner's own
            raise
        return None


def rows_of(function: Callable[..., Any], comm: Any, ask: Any, ranks: int, microbatches: int) -> dict[str, Any]:
    """Body of 06.1 and 06.2: every rank's row."""
    answers = [function(rank, ranks, microbatches) for rank in range(ranks)]
    return {"rows": [texts_of(answer, 2 * microbatches) for answer in answers]}


def split_rows(function: Callable[..., Any], comm: Any, ask: Any, ranks: int, microbatches: int) -> dict[str, Any]:
    """Body of 06.5: every rank's row, made from its row of 1F1B."""
    program = md.schedule.build("1f1b", ranks, microbatches)
    answers = [function(list(row), rank, ranks) for rank, row in enumerate(program)]
    return {"rows": [texts_of(answer, 3 * microbatches) for answer in answers]}


# ---- cases: facts are the numbers of ranks and micro-batches ---------------------------------------------------------


def case_of(sizes: Sequence[tuple[int, int]]) -> Case:
    """A call for each (ranks, micro-batches)."""
    calls = tuple(({"ranks": ranks, "microbatches": m},) for ranks, m in sizes)
    return Case(calls, tuple(sizes), tuple(f"P = {ranks}, M = {m}" for ranks, m in sizes))


def many(rng: random.Random, times: int = 1) -> Case:
    """More micro-batches than so many times the ranks."""
    return case_of([(ranks, times * ranks + rng.randint(2, 4)) for ranks in (4, rng.choice((3, 5)))])


def any_number(rng: random.Random) -> Case:
    """Beside one program with many: fewer micro-batches than ranks, one, as many, and a rank alone."""
    return case_of([(4, 7), (4, rng.choice((2, 3))), (rng.choice((3, 5)), 1), (3, 3), (1, rng.choice((2, 3)))])


# ---- rows, from text -------------------------------------------------------------------------------------------------


def read(case: Case, run: Run, call: int, kinds: str = "FB") -> Rows | Finding:
    """The rows of a call, if every action is there once, in an order that can be; else what is wrong."""
    _, microbatches = case.facts[call]
    label, example = case.labels[call], f"0{kinds[0]}0"
    rows: Rows = []
    for rank, said in enumerate(run.results[call][0]["rows"]):
        if said is None:
            why = (
                f"Return the actions of this rank, a list of Action(stage, kind, micro-batch) or of texts ({example})."
            )
            return Finding(why, "no-result", label, rank)
        row = []
        for cell in said:
            found = _CELL.fullmatch(cell)
            if found is None or found[2] not in kinds:
                why = f"{cell} is no action here: stage, kind, micro-batch. The kinds are {', '.join(kinds)}."
                mistake = "backward-kept" if found and found[2] == "B" else "wrong-values"
                return Finding(why, mistake, label, rank, example, cell)
            row.append(Action(int(found[1]), found[2], int(found[3])))
        if (wrong := _incomplete(row, rank, microbatches, kinds)) is not None:
            mistake, why = wrong
            expected = f"{len(kinds) * microbatches} actions"
            return Finding(why, mistake, label, rank, expected, shown(row))
        rows.append(row)
    try:
        md.schedule.validate(Program.of(rows))
    except ValueError as error:
        return Finding(
            f"Nobody can go on: {error}. Ranks that follow this order wait for one another for ever.",
            "waits-for-the-later",
            label,
        )
    return rows


def shown(row: Sequence[Action], most: int = 16) -> str:
    """A row as a report shows it."""
    cells = [str(action) for action in row[:most]]
    return " ".join([*cells, "..."] if len(row) > most else cells) or "nothing"


def _incomplete(row: Sequence[Action], rank: int, microbatches: int, kinds: str) -> tuple[str, str] | None:
    """What of a row is missing, too much, or before what it needs: the mistake and why."""
    asked = [Action(rank, kind, m) for kind in kinds for m in range(microbatches)]
    count = Counter(row)
    if others := [action for action in row if action.stage != rank]:
        return (
            "wrong-stage",
            f"Rank {rank} has stage {rank} and no other, and {others[0]} is of stage {others[0].stage}.",
        )
    if beyond := [action for action in row if action.microbatch >= microbatches]:
        return (
            "micro-batch-too-many",
            f"{beyond[0]}: there are {microbatches} micro-batches, 0 to {microbatches - 1}.",
        )
    missing = [action for action in asked if action not in count]
    of_kind = {kind: [action for action in missing if action.kind == kind] for kind in kinds}
    if missing and not of_kind["F"]:
        return _without(of_kind, microbatches)
    if missing:
        why = (
            f"Missing: {shown(missing)}. Micro-batches are 0 to {microbatches - 1}, and each goes through every stage."
        )
        return "micro-batch-left-out", why
    if twice := [action for action, times in count.items() if times > 1]:
        return "done-twice", f"{twice[0]} is there {count[twice[0]]} times."
    place = {action: i for i, action in enumerate(row)}
    for action in row:
        for before in kinds[: kinds.index(action.kind)]:
            if place[action._replace(kind=before)] > place[action]:
                what = "needs what F has left" if before == "F" else "needs what I has left"
                return "backward-before-forward", f"{action} comes before {action._replace(kind=before)}, and {what}."
    return None


def _without(of_kind: dict[str, list[Action]], microbatches: int) -> tuple[str, str]:
    """Why backward passes, or halves of them, are missing."""
    missing = [action for actions in of_kind.values() for action in actions]
    kind = missing[0].kind
    if kind == "W":
        if len(missing) == microbatches:
            return "weights-forgotten", "There is no W at all: the stage's weights would get no gradient."
        return (
            "weights-left-over",
            f"Missing: {shown(missing)}. What is still put off when the row of 1F1B is over comes at the end.",
        )
    if len(of_kind[kind]) == microbatches:
        return "forgets-the-backward", f"There is no {kind} at all: every micro-batch goes back through the stage too."
    return (
        "cool-down-missing",
        f"Missing: {shown(missing)}. After the last forward pass the micro-batches that are still in flight go back.",
    )


# ---- what a program does ---------------------------------------------------------------------------------------------


def in_flight(row: Sequence[Action], end: str) -> int:
    """The most micro-batches between F and `end`.

    >>> in_flight([Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)], "B")
    2
    """
    changes = ({"F": 1, end: -1}.get(action.kind, 0) for action in row)
    return max(itertools.accumulate(changes), default=0)


def makespan(rows: Sequence[Sequence[Action]], comm: float = 0.0) -> float:
    """With F = I = W = 1, and so B = 2."""
    return md.schedule.simulate(Program.of(rows), comm=comm).makespan


Property = Callable[[Rows, int, int], tuple[str, str, str, str, int | None] | None]
"""(rows, ranks, micro-batches) -> (mistake, why, expected, got, rank), None where nothing is wrong."""


def complete(kinds: str = "FB") -> Judge:
    """A judge: every action is there once, and the program can run."""

    def judge(case: Case, run: Run) -> Finding | None:
        found = (read(case, run, call, kinds) for call in range(len(case.calls)))
        return next((each for each in found if isinstance(each, Finding)), None)

    return judge


def has(wanted: Property, kinds: str = "FB") -> Judge:
    """A judge: every program of a case has this property."""

    def judge(case: Case, run: Run) -> Finding | None:
        for call, label in enumerate(case.labels):
            rows = read(case, run, call, kinds)
            if isinstance(rows, Finding):
                return rows
            if (wrong := wanted(rows, *case.facts[call])) is not None:
                mistake, why, expected, got, rank = wrong
                return Finding(why, mistake, label, rank, expected, got)
        return None

    return judge


def for_any(*properties: Property, kinds: str = "FB") -> Judge:
    """A judge: what holds for the case's first program, which has many micro-batches, holds for the others too."""

    def judge(case: Case, run: Run) -> Finding | None:
        first = read(case, run, 0, kinds)
        if isinstance(first, Finding):
            return first
        kept = [each for each in properties if each(first, *case.facts[0]) is None]
        for call in range(1, len(case.calls)):
            rows = read(case, run, call, kinds)
            if isinstance(rows, Finding):
                return _few(case, call, rows.why, rows)
            for each in kept:
                if (wrong := each(rows, *case.facts[call])) is not None:
                    _, why, expected, got, rank = wrong
                    return _few(case, call, why, Finding(why, "", case.labels[call], rank, expected, got))
        return None

    return judge


def explain_any(case: Case, run: Run) -> Finding | None:
    """Why a function fails for few micro-batches, or for one rank."""
    return _few(case, run.call, run.why, Finding(run.why, run.mistake, case.labels[run.call]))


def _few(case: Case, call: int, why: str, found: Finding) -> Finding:
    """This finding, with the reason that the numbers of ranks and micro-batches are."""
    ranks, microbatches = case.facts[call]
    mistake, more = found.mistake or "wrong-values", ""
    if ranks == 1:
        mistake, more = (
            "alone-is-special",
            "\nOne rank has one stage, the first and the last: it runs forward and backward.",
        )
    elif microbatches < ranks:
        mistake = "few-micro-batches"
        more = (
            f"\nWith M = {microbatches} a rank can run no more than {microbatches} forward passes ahead, whatever P is."
        )
    return Finding(why + more, mistake, found.label, found.rank, found.expected, found.got)
