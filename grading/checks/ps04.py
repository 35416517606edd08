"""Checks of assignment 04: ZeRO, the three stages, and a norm that counts each parameter once."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from grading.checks import gradients, hooks, layers, norm, optimizer
from grading.checks.gradients import Parameter
from grading.exercise import Case, Criterion, Exercise

ALLOWED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "lengths"})


# ---- 04.1 the optimizer's state in slices ----------------------------------------------------------------------------


def draw_stage_one(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    def of(size: int, ranks: int, steps: int = 1) -> Case:
        return optimizer.draw_steps(rng, size, ranks, steps)

    return {"basic": [of(6, 3), of(4, 2)], "lengths": [of(7, 3), of(5, 4)], "steps": [of(4, 2, 3)]}


STAGE_ONE = Exercise(
    id="04.1",
    function="stage1_step",
    task="stage1_step(comm, weight, grad, momentum, lr, mu): a step of SGD whose momentum rests in slices.",
    criteria=(
        Criterion("basic", 3, "basic", optimizer.right_weights, basic=True),
        Criterion("any N", 2, "lengths", optimizer.right_weights, explain=optimizer.explain_cuts),
        Criterion("momentum", 2, "steps", optimizer.right_weights),
        Criterion("traffic", 2, "basic", optimizer.two_psi),
    ),
    draw=draw_stage_one,
    body=optimizer.stage_one,
    allowed=ALLOWED,
)


# ---- 04.2 gradients in slices ----------------------------------------------------------------------------------------

LAYERS = (Parameter((6,)), Parameter((2, 3)), Parameter((6,)), Parameter((3, 2)), Parameter((6,)))


def draw_stage_two(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    names = [f"p{i}" for i in range(len(LAYERS))]
    without = [name for name in names if name != "p2"]

    def of(orders: Sequence[Sequence[str]], label: str, passes: int = 1, steps: int = 1) -> Case:
        return hooks.draw_passes(rng, LAYERS, orders, label, passes, steps)

    return {
        "basic": [of([names] * n, "one backward pass") for n in (3, 2)],
        "passes": [of([names] * 2, "3 micro-batches", passes=3), of([names] * 2, "one micro-batch", steps=2)],
        "unused": [of([names, without], "p2 unused on rank 1"), of([names, names[1:]], "p0 unused on rank 1")],
    }


STAGE_TWO = Exercise(
    id="04.2",
    function="shard_gradients",
    task="shard_gradients(module, comm, shards): from now on gradients end as slices, during the backward pass; "
    "returns finish().",
    criteria=(
        Criterion("basic", 3, "basic", hooks.right_slices, basic=True),
        Criterion("frees", 2, "basic", hooks.frees),
        Criterion("accumulation", 2, "passes", hooks.right_slices),
        Criterion("unused parameters", 1, "unused", hooks.right_slices, explain=gradients.explain_unused),
        Criterion("traffic", 1, "basic", hooks.one_psi),
    ),
    draw=draw_stage_two,
    body=hooks.stage_two,
    allowed=ALLOWED,
)


# ---- 04.3 weights in slices ------------------------------------------------------------------------------------------


def draw_stage_three(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    even = (3, 4, 3, 6, 2, 3)
    return {
        "basic": [layers.draw_stage_three(rng, even, n, "5 layers") for n in (3, 2)],
        "sizes": [layers.draw_stage_three(rng, (5, 1, 2, 2), 3, "layers of 5, 2 and 4 elements")],
    }


STAGE_THREE = Exercise(
    id="04.3",
    function="stage3_gradients",
    task="stage3_gradients(comm, layers, shards, x, loss_gradient): this rank's slices of the average gradients, with "
    "each weight gathered just before it is used, and released after.",
    criteria=(
        Criterion("basic", 3, "basic", layers.right_shards, basic=True, explain=layers.explain_whole),
        Criterion("gathers late", 2, "basic", layers.gathers_late),
        Criterion("releases", 2, "basic", layers.releases),
        Criterion("gradients leave", 1, "basic", layers.gradients_leave),
        Criterion("traffic", 1, "basic", layers.three_psi),
        Criterion("any size", 1, "sizes", layers.right_shards, explain=layers.explain_sizes),
    ),
    draw=draw_stage_three,
    body=layers.stage_three,
    allowed=ALLOWED,
)


# ---- 04.4 one norm over slices and copies ----------------------------------------------------------------------------


def draw_norm(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    def of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [norm.whole_numbers(rng, size, dtype) for size in sizes]

    def fine(size: int) -> torch.Tensor:
        return torch.tensor([rng.randrange(129, 255, 2) / 128 for _ in range(size)], dtype=torch.bfloat16)

    return {
        "basic": [
            norm.case_of("slices only", [of(3, 2), of(3, 2), of(2)], []),
            norm.case_of("slices only", [of(1), of(1)], []),
        ],
        "replicas": [norm.case_of("slices, and two whole gradients", [of(2, 3), of(2, 2)], of(3, 1))],
        "clips": [
            norm.case_of("max_norm = 1", [of(2, 3), of(2, 2)], of(3), most=1.0),
            norm.case_of("max_norm = 1000", [of(2, 3), of(2, 2)], of(3), most=1000.0),
        ],
        "none": [norm.case_of("rank 1 holds no slice", [of(3), [], of(2)], [])],
        "types": [norm.case_of("bfloat16", [[fine(40), fine(3)], [fine(40)]], [])],
    }


NORM = Exercise(
    id="04.4",
    function="clip_gradients",
    task="clip_gradients(comm, sharded, replicated, max_norm): the norm of all gradients, each counted once; they are "
    "scaled in place.",
    criteria=(
        Criterion("basic", 2, "basic", norm.right_norm, basic=True),
        Criterion("replicas", 2, "replicas", norm.right_norm),
        Criterion("clips", 2, "clips", norm.scaled),
        Criterion("no slice", 1, "none", norm.right_norm, explain=norm.explain_nothing),
        Criterion("float32", 1, "types", norm.in_float32),
        Criterion("traffic", 1, "basic", norm.one_number),
    ),
    draw=draw_norm,
    body=norm.clipped,
    allowed=ALLOWED,
)
EXERCISES = (STAGE_ONE, STAGE_TWO, STAGE_THREE, NORM)


# ---- variants, for instructors to draw: other tasks under the same number --------------------------------------------


def draw_nesterov(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    drawn = draw_stage_one(rng)
    return {name: [optimizer.looking_ahead(case) for case in cases] for name, cases in drawn.items()}


NESTEROV = "Nesterov's rule: the weight goes by lr * (gradient + mu * momentum), with the new momentum."
LAST = "The last layer's weight stays between its forward and its backward, and is gathered once."
VARIANTS = {
    each.id: each
    for each in (
        replace(STAGE_ONE, id="04.1-nesterov", task=f"{STAGE_ONE.task} {NESTEROV}", draw=draw_nesterov),
        replace(
            STAGE_THREE,
            id="04.3-last",
            task=f"{STAGE_THREE.task} {LAST}",
            criteria=(*STAGE_THREE.criteria, Criterion("last layer", 1, "basic", layers.last_stays)),
        ),
    )
}
"""To use one, assign it to a name in a private folder's checks: `STAGE_ONE = ps04.VARIANTS["04.1-nesterov"]`."""
