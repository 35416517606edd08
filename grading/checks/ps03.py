"""Checks of assignment 03: data parallelism in four steps."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from grading.checks import gradients, tokens
from grading.checks.common import first
from grading.checks.gradients import FROZEN, PLAIN, SHAPES, TYPES, UNUSED, Parameter, draw, greedy, right_gradients
from grading.exercise import Case, Criterion, Exercise, Finding, equal, show
from grading.ranks.run import Run

ALLOWED = frozenset({"all_reduce"})
BUCKET = 8  # elements


# ---- 03.1 one all-reduce for each parameter --------------------------------------------------------------------------


def draw_naive(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [draw(rng, PLAIN, n, "all parameters used") for n in (3, 2)],
        "unused": [draw(rng, UNUSED, 3, "p1 unused on rank 1")],
        "frozen": [draw(rng, FROZEN, 2, "p1 frozen")],
        "types": [draw(rng, TYPES, 2, "bfloat16, float32 and float64")],
    }


def traffic(case: Case, run: Run) -> Finding | None:
    """Each gradient is averaged once, in its own type."""
    for call, label in enumerate(case.labels):
        named, _, _ = case.facts[call]
        most = sum(p.size * p.dtype.itemsize for p in named.values())
        for rank in range(case.ranks):
            nbytes = sum(part.nbytes for part in run.collectives_of(call, rank))
            if nbytes > most:
                why = "Every gradient has to be averaged once, in its own type, and nothing else."
                return Finding(why, "averages-too-much", label, rank, f"{most} bytes to average", f"{nbytes}")
    return None


UNUSED_CRITERION = Criterion("unused parameters", 1, "unused", right_gradients, explain=gradients.explain_unused)
TYPES_CRITERION = Criterion("dtypes", 1, "types", right_gradients)

NAIVE = Exercise(
    id="03.1",
    function="average_gradients",
    task="average_gradients(module, comm): replace every gradient by its average over the ranks.",
    criteria=(
        Criterion("basic", 3, "basic", right_gradients, basic=True),
        UNUSED_CRITERION,
        Criterion("nothing else", 1, "frozen", gradients.weights_stay),
        Criterion("traffic", 1, "basic", traffic),
        TYPES_CRITERION,
    ),
    draw=draw_naive,
    body=gradients.averaged,
    allowed=ALLOWED,
)


# ---- 03.2 buckets ----------------------------------------------------------------------------------------------------


def draw_buckets(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [draw(rng, PLAIN, n, "buckets of 8", bucket=BUCKET) for n in (3, 2)],
        "unused": [draw(rng, UNUSED, 3, "p1 unused on rank 1", bucket=BUCKET)],
        "types": [draw(rng, TYPES, 2, "bfloat16, float32 and float64", bucket=100)],
        "shapes": [draw(rng, SHAPES, 2, "p1 a scalar, p2 not contiguous", bucket=BUCKET)],
    }


def bucket_sizes(case: Case, run: Run) -> Finding | None:
    """One all-reduce for each bucket, and buckets filled by the rule."""
    for call, label in enumerate(case.labels):
        named, _, _ = case.facts[call]
        expected = [sum(named[name].size for name in bucket) for bucket in greedy(named, BUCKET)]
        for rank in range(case.ranks):
            got = [part.elements for part in run.collectives_of(call, rank)]
            if got != expected:
                mistake, why = _bucket_mistake(got, named)
                sizes = [p.size for p in named.values()]
                why = f"{why} The parameters have {sizes} elements, in the order of the module."
                return Finding(why, mistake, label, rank, f"buckets of {expected}", f"{got}")
    return None


def _bucket_mistake(got: list[int], named: Mapping[str, Parameter]) -> tuple[str, str]:
    forward = [sum(named[name].size for name in bucket) for bucket in greedy(named, BUCKET, forward=True)]
    if len(got) == 1:
        return "one-bucket-is-best", "Everything is in one bucket, which could not leave before the backward pass ends."
    if sorted(got) == sorted(p.size for p in named.values()):
        return "bucket-of-one", "Every parameter has a bucket of its own, so there are as many messages as before."
    if got == forward:
        return "first-layer-first", (
            "The buckets were filled from the first parameter on. A backward pass meets the last one first."
        )
    return "bucket-too-full", "A parameter that no longer fits begins a new bucket, and a full bucket stays as it is."


BUCKETS = Exercise(
    id="03.2",
    function="average_in_buckets",
    task="average_in_buckets(module, comm, elements): the same, with one all-reduce for each bucket.",
    criteria=(
        Criterion("basic", 3, "basic", right_gradients, basic=True),
        Criterion("buckets", 2, "basic", bucket_sizes),
        UNUSED_CRITERION,
        TYPES_CRITERION,
        Criterion("shapes", 1, "shapes", right_gradients, explain=gradients.explain_shapes),
    ),
    draw=draw_buckets,
    body=gradients.bucketed,
    allowed=ALLOWED,
)


# ---- 03.3 buckets that leave during the backward pass ----------------------------------------------------------------

LAYERS = (Parameter((2,)), Parameter((3,)), Parameter((4,)), Parameter((2, 2)), Parameter((3,)))
TWINS = (Parameter((3,)), Parameter((3,)), Parameter((3,)), Parameter((3,)))
LAYER_BUCKET = 5


def draw_chain(
    rng: random.Random,
    parameters: Sequence[Parameter],
    orders: Sequence[Sequence[str]],
    bucket: int,
    label: str,
    steps=1,
) -> Case:
    """A backward pass through layers, in an order of its own on each rank. A layer may be missing from one.

    facts: the parameters, the orders, and for each step everyone's gradients.
    """
    n = len(orders)
    case = draw(rng, parameters, n, label, bucket=bucket, steps=steps)
    named, grads, _ = case.facts[0]
    keys = [f"{step} {name}" for step in range(steps) for name in named]
    secrets = {key: rng.choice((1.0, 2.0, 3.0)) for key in keys}
    found = []
    for step in range(steps):
        of_step = []
        for rank, order in enumerate(orders):
            scale, mine = float(step + 1), {name: grads[rank][name] * 0 for name in named}
            for name in reversed(order):
                mine[name] = grads[rank][name] * scale
                scale *= secrets[f"{step} {name}"]
            of_step.append(mine)
        found.append(of_step)
    calls = (tuple({**inputs, "order": list(orders[rank])} for rank, inputs in enumerate(case.calls[0])),)
    return Case(calls, ((named, orders, found),), case.labels, (tuple(dict(secrets) for _ in range(n)),))


def draw_overlap(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    layers, twins = [f"p{i}" for i in range(5)], [f"p{i}" for i in range(4)]
    crossed = [twins, ["p0", "p2", "p1", "p3"]]
    return {
        "basic": [draw_chain(rng, LAYERS, [layers] * n, LAYER_BUCKET, "one step") for n in (3, 2)],
        "steps": [draw_chain(rng, LAYERS, [layers] * 2, LAYER_BUCKET, "two steps", steps=2)],
        "order": [draw_chain(rng, TWINS, crossed, 3, "another order of layers on rank 1")],
        "unused": [draw_chain(rng, LAYERS, [layers, layers[1:]], LAYER_BUCKET, "p0 unused on rank 1")],
    }


def right_steps(case: Case, run: Run) -> Finding | None:
    """Whether the gradients are right after every step."""
    named, orders, found = case.facts[0]
    for rank, steps in enumerate(run.results[0]):
        if not isinstance(steps, list) or len(steps) != len(found):
            return Finding("The gradients of each step are missing.", "no-result", case.labels[0], rank)
        for step, got in enumerate(steps):
            for name in named:
                right = torch.stack([grads[name] for grads in found[step]]).sum(0) / case.ranks
                if equal(got.get(name), right, 1e-6):
                    continue
                own = found[step][rank][name] if name in orders[rank] else None
                mistake, why = gradients.known_mistake(got.get(name), own, [each[name] for each in found[step]], right)
                why = why or "The gradient is not the average over the ranks."
                if step:
                    mistake, why = (
                        "state-left-over",
                        (
                            "The first step was right, this one is not. What belongs to one backward pass (which "
                            "gradients have come, buckets, handles) has to be begun anew for the next."
                        ),
                    )
                elif not mistake and list(orders[0]) != list(orders[-1]):
                    mistake, why = (
                        "sends-as-they-fill",
                        (
                            "The ranks' all-reduces were paired with one another's: they met these layers in different "
                            "orders. Buckets have to leave in one fixed order, each one after those before it."
                        ),
                    )
                label = f"{case.labels[0]}, step {step + 1}"
                shown = (show(right), show(got.get(name)))
                return Finding(f"{name}: {why}", mistake or "wrong-values", label, rank, *shown)
    return None


def leaves_early(case: Case, run: Run) -> Finding | None:
    """Whether each bucket was on its way before the backward pass came to the next layer, and nobody waited for it."""
    named, _, _ = case.facts[0]
    buckets = greedy(named, LAYER_BUCKET)
    for rank in range(case.ranks):
        parts = run.collectives_of(0, rank)
        asked = {note.key: note.when for note in run.asked if note.rank == rank}
        ready = 0
        for bucket in buckets[:-1]:
            ready += sum(named[name].size for name in bucket)
            gate = asked[f"0 {bucket[-1]}"]
            if sum(part.elements for part in parts if part.begun < gate) < ready:
                why = (
                    f"The backward pass went on from {bucket[-1]}, and the {ready} gradients that were there had not "
                    "all left. A bucket has to leave in the hook that fills it, and it must be filled from the last "
                    "parameter on."
                )
                return Finding(why, "nothing-overlaps", case.labels[0], rank)
        end = max(asked.values())
        if any(part.waited is not None and part.waited < end for part in parts):
            why = (
                "A hook waited for its all-reduce while the backward pass stood still. Begin it with async_op=True, "
                "keep the handle, and wait in finish."
            )
            return Finding(why, "waits-in-the-hook", case.labels[0], rank)
    return None


def explain_hooks(case: Case, run: Run) -> Finding | None:
    """Why a run fails in its hooks."""
    if "NoneType" not in run.why:
        return None
    why = (
        f"{run.why}\nThe hook ran before parameter.grad was there. register_hook comes with the gradient on its way, "
        "register_post_accumulate_grad_hook when it has arrived."
    )
    return Finding(why, "hook-comes-too-early", case.labels[run.call], run.rank)


def explain_order(case: Case, run: Run) -> Finding | None:
    if run.mistake in ("different-shapes", "different-collectives", "not-all-join"):
        why = f"{run.why}\nBuckets have to leave in one fixed order on all ranks, each one after those before it."
        return Finding(why, "sends-as-they-fill", case.labels[run.call], run.rank)
    return None


def explain_steps(case: Case, run: Run) -> Finding | None:
    why = f"{run.why}\nWhat belongs to one backward pass has to be begun anew for the next one."
    return Finding(why, "state-left-over", case.labels[run.call], run.rank)


OVERLAP = Exercise(
    id="03.3",
    function="overlap",
    task="overlap(module, comm, elements): from now on buckets leave during the backward pass; returns finish().",
    criteria=(
        Criterion("basic", 3, "basic", right_steps, basic=True, explain=explain_hooks),
        Criterion("overlap", 3, "basic", leaves_early),
        Criterion("two steps", 1, "steps", right_steps, explain=explain_steps),
        Criterion("one order", 1, "order", right_steps, explain=explain_order),
        Criterion("unused parameters", 1, "unused", right_steps, explain=gradients.explain_unused),
    ),
    draw=draw_overlap,
    body=gradients.overlapped,
    allowed=ALLOWED,
)


# ---- 03.4 accumulation -----------------------------------------------------------------------------------------------


def given_average_gradients(module: nn.Module, comm: Any) -> None:
    """In the place of the learner's own."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = parameter.detach() * 0
            comm.all_reduce(parameter.grad, op="mean")


ACCUMULATE = Exercise(
    id="03.4",
    function="accumulate",
    task="accumulate(module, comm, micro_batches): the gradient of the mean over all valid tokens, averaged once.",
    criteria=(
        Criterion("basic", 3, "basic", first(tokens.ran, tokens.right), basic=True),
        Criterion("token rule", 2, "unequal", tokens.right),
        Criterion("averages once", 2, "basic", tokens.once),
        Criterion("no tokens", 1, "empty", tokens.right_or_known, explain=tokens.explain_empty),
    ),
    draw=tokens.draw,
    body=tokens.body,
    allowed=ALLOWED,
    given={"average_gradients": given_average_gradients},
    uses=("03.1",),
)
EXERCISES = (NAIVE, BUCKETS, OVERLAP, ACCUMULATE)
