"""Checks of assignment 04: ZeRO, the three stages, and a norm that counts each parameter once."""

import random
from collections.abc import Mapping, Sequence

from grading.checks import layers
from grading.exercise import Case, Criterion, Exercise

ALLOWED = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


# ---- 04.3 weights rest in slices, too --------------------------------------------------------------------------------


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
EXERCISES = (STAGE_THREE,)
