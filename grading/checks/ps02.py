"""Checks of assignment 02: the ring, from messages. Every expected value is computed here, from everyone's inputs."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grading.checks import common, rings
from grading.checks.common import first, numbers, world
from grading.checks.rings import Xs, slices, total
from grading.exercise import MESSAGES, Case, Criterion, Exercise, Finding, Judge, Known, find_wrong
from grading.ranks.run import Run

TYPES = (torch.float64, torch.bfloat16, torch.int64)
Expected = Callable[[Xs], Sequence[Tensor]]


def values(known: Sequence[Known], otherwise: str) -> Judge:
    """A judge of results: facts hold what each rank has to return."""

    def judge(case: Case, run: Run) -> Finding | None:
        for call, label in enumerate(case.labels):
            xs = [inputs["x"] for inputs in case.calls[call]]
            found = find_wrong(common.parts_of(run, call), case.facts[call], xs, known, label, otherwise)
            if found is not None:
                other = _from_messages(case, run, call) if found.mistake.startswith("wrong-") else None
                return found if other is None else replace(other, expected=found.expected, got=found.got)
        return None

    return judge


def _from_messages(case: Case, run: Run, call: int) -> Finding | None:
    """What the messages say about a wrong result."""
    n = case.ranks
    sent = [sum(message.src == rank for message in run.messages_of(call)) for rank in range(n)]
    if n > 1 and not any(sent) and not any(part.call == call for part in run.collectives):
        why = "No rank sent anything, so nobody can know more than its own x. Begin with one step: isend and irecv."
        return Finding(why, "sends-nothing", case.labels[call], 0)
    if n > 1 and set(sent) == {n - 2}:
        why = (
            f"The last step is missing: every rank made {n - 2} of {n - 1}. range(1, n) makes n - 1 steps, "
            "range(1, n - 1) one fewer."
        )
        return Finding(why, "one-step-short", case.labels[call], 0)
    return common.never_waited(case, run)


def explain_ring(case: Case, run: Run) -> Finding | None:
    """An exception that everyone meets once who builds a ring."""
    if "is no rank of this Comm" not in run.why:
        return None
    why = f"{run.why}\nThe ring closes: the neighbours of rank r are (r + 1) % n and (r - 1) % n."
    return Finding(why, "no-wraparound", case.labels[run.call], run.rank)


def explain_cuts(case: Case, run: Run) -> Finding | None:
    """Why other lengths fail with an exception or with messages that do not fit."""
    label = case.labels[run.call]
    if "IndexError" in run.why:
        why = f"{run.why}\ntorch.chunk gives fewer than n pieces where x is short; here the missing ones are empty."
        return Finding(why, "chunk-gives-fewer", label, run.rank)
    if "same length on every rank" in run.why or run.mistake in ("different-shapes", "wrong-buffer-size"):
        why = (
            f"{run.why}\nThe slices differ in length where n does not divide N. Fill x up to a multiple of n, and cut "
            "the result."
        )
        return Finding(why, "unequal-pieces", label, run.rank)
    return None


def draw_cases(expected: Expected, lengths: Callable[[int], Sequence[int]], any_length: bool = False):
    """A `draw`: worlds for the basic criterion, other world sizes, other types and, if asked for, any length."""

    def draw(rng: random.Random) -> Mapping[str, Sequence[Case]]:
        def of(ranks: int, *sizes: int) -> Case:
            return world([[numbers(rng, size) for _ in range(ranks)] for size in sizes], expected)

        typed = [[common.fine_numbers(rng, 6, dtype) for _ in range(3)] for dtype in TYPES]
        found = {
            "basic": [of(3, *lengths(3)), of(2, *lengths(2))],
            "sizes": [of(1, 5), of(8, 16)],
            "types": [world(typed, expected)],
        }
        return {**found, "lengths": [of(3, 7, 0), of(4, 5, 1)]} if any_length else found

    return draw


def basic(points: int, known: Sequence[Known], otherwise: str, needs: Any = None) -> Criterion:
    """The first criterion: right results, that came in messages."""

    def heard(case: Case, run: Run) -> Finding | None:
        return common.by_messages(case, run, needs)

    judge = first(values(known, otherwise), common.touched, heard)
    return Criterion("basic", points, "basic", judge, basic=True, explain=explain_ring)


def other_sizes(points: int) -> Criterion:
    """A world of one rank, and one larger than those of the basic criterion."""
    otherwise = "One rank has nobody to talk to, and its result is already there; 8 ranks make 7 steps."
    return Criterion("n = 1 and 8", points, "sizes", values((), otherwise), explain=common.one_rank)


def other_types(points: int) -> Criterion:
    return Criterion("dtypes", points, "types", common.exact_types, explain=common.explain_types)


def left_alone(points: int) -> Criterion:
    return Criterion("x unchanged", points, "basic", common.unchanged)


# ---- the exercises ---------------------------------------------------------------------------------------------------

SHIFT = Exercise(
    id="02.1",
    function="shift",
    task="shift(comm, x): send x to the right neighbour of the ring, and return what the left neighbour sent.",
    criteria=(
        basic(2, rings.SHIFT, "Rank r returns what rank (r - 1) % n has.", lambda r, n: {(r - 1) % n}),
        left_alone(1),
        other_types(1),
    ),
    draw=draw_cases(lambda xs: [xs[r - 1] for r in range(len(xs))], lambda n: (4,)),
    body=common.body,
)

ALL_GATHER = Exercise(
    id="02.2",
    function="all_gather",
    task="all_gather(comm, x): x [K], the same K on every rank -> everyone's x in the order of the ranks, [n K].",
    criteria=(
        basic(3, rings.GATHER, "The result is rank 0's x, then rank 1's, and so on: [n K] on every rank."),
        other_sizes(1),
        Criterion(
            "messages",
            2,
            "basic",
            common.message_counts(
                lambda case, call: len(case.calls[call][0]["x"]),
                "In each of the n - 1 steps one piece of K elements is passed on, the one that came last.",
            ),
        ),
        left_alone(1),
        other_types(1),
    ),
    draw=draw_cases(lambda xs: [torch.cat(list(xs))] * len(xs), lambda n: (4,)),
    body=common.body,
)


def summed(owner: Callable[[int, int], int]) -> Expected:
    """What a reduce-scatter gives where rank r of n owns slice owner(r, n)."""
    return lambda xs: [slices(total(xs), len(xs))[owner(r, len(xs))] for r in range(len(xs))]


REDUCE_SCATTER = Exercise(
    id="02.3",
    function="reduce_scatter",
    task="reduce_scatter(comm, x): x [N] on every rank, any N -> this rank's slice of the sum over the ranks, "
    "[ceil(N/n)]; the last ones may be shorter or empty.",
    criteria=(
        basic(3, rings.REDUCE, "Rank r returns slice r of the sum over all ranks."),
        Criterion(
            "any N",
            2,
            "lengths",
            values(rings.CUTS, "Slices have ceil(N / n) elements, the last ones fewer or none, as md.partition cuts."),
            explain=explain_cuts,
        ),
        other_sizes(1),
        Criterion(
            "messages",
            2,
            "basic",
            common.message_counts(
                lambda case, call: -(-len(case.calls[call][0]["x"]) // case.ranks),
                "In each of the n - 1 steps one partial sum of one slice is passed on: ceil(N / n) elements.",
            ),
        ),
        left_alone(1),
        other_types(1),
    ),
    draw=draw_cases(summed(lambda r, n: r), lambda n: (2 * n, 3 * n), any_length=True),
    body=common.body,
)


def given_all_gather(comm: Any, x: Tensor) -> Tensor:
    """In the place of the learner's own: as 02.2 asks for, so the same length on every rank."""
    sizes = comm.lengths(len(x))
    if len(set(sizes)) > 1:
        raise ValueError(f"all_gather takes the same length on every rank, and got {sizes}")
    return comm.all_gather(x, sizes)


def given_reduce_scatter(comm: Any, x: Tensor) -> Tensor:
    return comm.reduce_scatter(x)


def traffic(case: Case, run: Run) -> Finding | None:
    """At most 2 (n - 1) ceil(N / n) elements leave each rank; a given half counts what a ring of it sends."""
    n = case.ranks
    for call, label in enumerate(case.labels):
        limit = 2 * (n - 1) * -(-len(case.calls[call][0]["x"]) // n)
        sent = [_elements_sent(run, call, rank, n) for rank in range(n)]
        if max(sent) > limit:
            rank = sent.index(max(sent))
            why = (
                "Each half of the ring sends (n - 1) slices of ceil(N / n) elements, and no all-reduce needs more. "
                "Reduce-scatter once, all-gather the slices once."
            )
            mistake = "everyone-to-everyone" if min(sent) > limit else "ring-sends-whole"
            return Finding(why, mistake, label, rank, f"at most {limit} elements sent", str(sent[rank]))
    return None


def _elements_sent(run: Run, call: int, rank: int, ranks: int) -> int:
    sent = sum(message.elements for message in run.messages_of(call) if message.src == rank)
    for part in run.collectives_of(call, rank):
        piece = {"all_gather": part.elements, "reduce_scatter": -(-part.elements // ranks)}
        sent += (ranks - 1) * piece.get(part.name, 0)
    return sent


ALL_REDUCE = Exercise(
    id="02.4",
    function="all_reduce",
    task="all_reduce(comm, x): x [N] on every rank, any N -> the sum over the ranks, [N], a new tensor. "
    "Made of reduce_scatter and all_gather.",
    criteria=(
        basic(3, rings.BOTH, "Every rank returns the sum of everyone's x."),
        Criterion(
            "any N",
            2,
            "lengths",
            values(rings.BOTH_CUTS, "The result has x's length, also where n does not divide it."),
            explain=explain_cuts,
        ),
        Criterion("traffic", 1, "basic", traffic),
        left_alone(1),
        other_types(1),
    ),
    draw=draw_cases(lambda xs: [total(xs)] * len(xs), lambda n: (2 * n, 3 * n), any_length=True),
    body=common.body,
    given={"all_gather": given_all_gather, "reduce_scatter": given_reduce_scatter},
    uses=("02.2", "02.3"),
    allowed=MESSAGES,
)


# ---- variants, for instructors to draw: other tasks under the same number --------------------------------------------


def variant(exercise: Exercise, suffix: str, task: str, criteria: tuple[Criterion, ...], draw: Any = None) -> Exercise:
    """The exercise with another sentence, more criteria and, if given, other expected values."""
    criteria = (*exercise.criteria, *criteria)
    task = f"{exercise.task} {task}"
    return replace(exercise, id=f"{exercise.id}-{suffix}", task=task, criteria=criteria, draw=draw or exercise.draw)


LEFT = "Every message goes to the left neighbour, rank (r - 1) % n."
NEXT = "Rank r ends with slice (r + 1) % n."
NEXT_DRAW = draw_cases(summed(lambda r, n: (r + 1) % n), lambda n: (2 * n, 3 * n), any_length=True)
VARIANTS = {
    each.id: each
    for each in (
        variant(ALL_GATHER, "left", LEFT, (common.goes_to(-1),)),
        variant(REDUCE_SCATTER, "left", LEFT, (common.goes_to(-1),)),
        replace(
            variant(REDUCE_SCATTER, "next", NEXT, (), NEXT_DRAW),
            criteria=(basic(3, (), f"{NEXT} The sum of another slice was returned."), *REDUCE_SCATTER.criteria[1:]),
        ),
    )
}
"""To use one, assign it to a name in a private folder's checks: `REDUCE_SCATTER = ps02.VARIANTS["02.3-left"]`."""
