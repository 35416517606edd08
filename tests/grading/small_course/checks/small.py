"""Checks of a small assignment: two functions on a ring of ranks."""

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grading.checks import common
from grading.exercise import Case, Criterion, Exercise, Finding, Judge, find_wrong
from grading.ranks.run import Run


def values(otherwise: str) -> Judge:
    def judge(case: Case, run: Run) -> Finding | None:
        for call, label in enumerate(case.labels):
            xs = [inputs["x"] for inputs in case.calls[call]]
            found = find_wrong(common.parts_of(run, call), case.facts[call], xs, (), label, otherwise)
            if found is not None:
                return found
        return None

    return judge


def cases(expected):
    def draw(rng: random.Random) -> Mapping[str, Sequence[Case]]:
        def of(ranks: int, length: int) -> Case:
            return common.world([[common.numbers(rng, length) for _ in range(ranks)]], expected)

        return {"basic": [of(2, 3), of(3, 3)], "sizes": [of(5, 2)]}

    return draw


def from_the_left(xs: Sequence[Tensor]) -> list[Tensor]:
    secret_neighbours = [xs[rank - 1] for rank in range(len(xs))]
    return secret_neighbours  # noqa: RET504 - a name to be searched for


def sums(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(xs)).sum(0) for _ in xs]


PASS_ON = Exercise(
    "S.1",
    "pass_on",
    "pass_on(comm, x): send x to the right neighbour, return what the left one sent",
    (
        Criterion("basic", 2, "basic", values("Rank r returns the x of rank (r - 1) % n."), basic=True),
        Criterion("x unchanged", 1, "basic", common.unchanged),
    ),
    cases(from_the_left),
    common.body,
)
TOTAL = Exercise(
    "S.2",
    "total",
    "total(comm, x): the sum of everyone's x, on every rank",
    (
        Criterion("basic", 3, "basic", values("Every rank returns the sum over all ranks."), basic=True),
        Criterion("five ranks", 1, "sizes", values("The same with five ranks.")),
        Criterion("x unchanged", 1, "basic", common.unchanged),
    ),
    cases(sums),
    common.body,
)
