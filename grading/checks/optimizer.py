"""An optimizer whose state rests in slices: how ranks of 04.1 are called, and what known mistakes give."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import minidist as md
from grading.checks.common import numbers
from grading.checks.layers import moved
from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Run

MU = 0.5
RATES = (0.5, 0.25, 0.125)


def stage_one(
    function: Callable[..., Any], comm: Any, ask: Any, weight: Any, momentum: Any, rates: Any, mu: float
) -> dict[str, Any]:
    """Body of 04.1, in a rank: a step for each rate. The gradient of each is asked for when it is there."""
    found = []
    for step, lr in enumerate(rates):
        function(comm, weight, ask(f"gradient {step}"), momentum, lr, mu)
        found.append([weight.clone(), momentum.clone()])
    return {"steps": found}


# ---- cases: facts hold the weight, everyone's gradients of each step, the rates, and the rule ------------------------


def draw_steps(rng: random.Random, size: int, ranks: int, steps: int) -> Case:
    """A weight of this size, zero momentum, and gradients whose averages are exact."""
    weight = numbers(rng, size, torch.float64)
    grads = [[numbers(rng, size, torch.float64) * ranks for _ in range(ranks)] for _ in range(steps)]
    rates = RATES[:steps]
    parts = md.partition(size, ranks)
    calls = tuple(
        {
            "weight": weight.clone(),
            "momentum": weight[parts[rank]] * 0,
            "rates": list(rates),
            "mu": MU,
        }
        for rank in range(ranks)
    )
    answers = tuple({f"gradient {step}": grads[step][rank] for step in range(steps)} for rank in range(ranks))
    label = f"n = {ranks}, N = {size}" + (f", {steps} steps" if steps > 1 else "")
    return Case((calls,), ((weight, grads, rates, False),), (label,), (answers,))


def looking_ahead(case: Case) -> Case:
    """The same numbers, by Nesterov's rule."""
    weight, grads, rates, _ = case.facts[0]
    return replace(case, facts=((weight, grads, rates, True),))


def after(weight: Tensor, grads: Sequence[Sequence[Tensor]], rates: Sequence[float], nesterov: bool) -> list[Tensor]:
    """Weights after each step of one process that has everyone's gradients."""
    found, momentum = [], weight * 0
    for of_step, lr in zip(grads, rates, strict=True):
        mean = torch.stack(list(of_step)).mean(0)
        momentum = MU * momentum + mean
        weight = weight - lr * (mean + MU * momentum if nesterov else momentum)
        found.append(weight)
    return found


# ---- judging ---------------------------------------------------------------------------------------------------------


def right_weights(case: Case, run: Run) -> Finding | None:
    """Whether every rank has the whole new weight after every step."""
    weight, grads, rates, nesterov = case.facts[0]
    right = after(weight, grads, rates, nesterov)
    for step in range(len(rates)):
        for rank, result in enumerate(run.results[0]):
            got, momentum = result["steps"][step]
            if equal(got, right[step]):
                continue
            several, later = len(rates) > 1, step > 0
            known = _later_mistake(case, got, momentum, step) if later else _mistake(case, got, rank)
            mistake, why = known or ("wrong-values", "Every rank ends with weight - lr * momentum, of all N elements.")
            label = f"{case.labels[0]}, step {step + 1}" if several else case.labels[0]
            return Finding(why, mistake, label, rank, show(right[step]), show(got))
    return None


def _mistake(case: Case, got: Tensor, rank: int) -> tuple[str, str] | None:
    """What gives this weight after the first step."""
    weight, grads, rates, _ = case.facts[0]
    n, lr, own = case.ranks, rates[0], grads[0][rank]
    mean, parts = torch.stack(grads[0]).mean(0), md.partition(len(weight), case.ranks)
    mixed = torch.cat([grads[0][r][part] for r, part in enumerate(parts)])
    only_own, by_length = weight.clone(), weight.clone()
    only_own[parts[rank]] -= lr * mean[parts[rank]]
    by_length = torch.cat([weight[_at(parts, r)] - lr * mean[part] for r, part in enumerate(parts)])
    known = (
        ("sum-not-mean", weight - lr * n * mean, 'The sum of the gradients was used. Average them: op="mean".'),
        (
            "local-is-global",
            weight - lr * mixed,
            "Every slice was updated with its owner's own gradient. It has to be averaged over the ranks before.",
        ),
        (
            "local-is-global",
            weight - lr * own,
            "That is a step with this rank's own gradient. It has to be averaged over the ranks before.",
        ),
        (
            "weights-not-gathered",
            only_own,
            "This rank's slice is right, and the others' are as they were. Every rank updates one slice: an all-gather "
            "hands the new slices round.",
        ),
        (
            "rebinds-the-name",
            weight,
            "The weight is as it was. weight = ... gives a name in your function to another tensor; weight.copy_(...) "
            "writes into the caller's.",
        ),
        ("wrong-sign", weight + lr * mean, "A step goes against the gradient: weight - lr * momentum."),
        (
            "own-length-as-step",
            by_length,
            "A slice was taken from the wrong place. Rank r's begins at r times the longest slice's length, "
            "ceil(N / n), also where its own is shorter: md.partition(N, n)[r].",
        ),
    )
    return next(((mistake, why) for mistake, other, why in known if equal(got, other)), None)


def _at(parts: Sequence[slice], rank: int) -> slice:
    """Where a slice lies if its own length is taken for everyone's."""
    length = parts[rank].stop - parts[rank].start
    return slice(rank * length, (rank + 1) * length)


def _later_mistake(case: Case, got: Tensor, momentum: Tensor, step: int) -> tuple[str, str] | None:
    """What gives this weight after a later step, where the first was right."""
    weight, grads, rates, _ = case.facts[0]
    plain = weight - sum(lr * torch.stack(each).mean(0) for each, lr in zip(grads[: step + 1], rates, strict=False))
    inside, state = weight, weight * 0
    for each, lr in zip(grads[: step + 1], rates, strict=False):
        state = MU * state + lr * torch.stack(each).mean(0)
        inside = inside - state
    if equal(got, plain) and not bool(momentum.any()):
        return "rebinds-the-name", (
            "The momentum is still zero, so every step is one of plain SGD. momentum = ... gives a name in your "
            "function to another tensor; what is to be there in the next step has to be written into the caller's."
        )
    if equal(got, plain):
        return "state-is-lost", (
            "That is plain SGD: what momentum held before this step is not in it. momentum = mu * momentum + gradient."
        )
    if equal(got, inside):
        return "rate-in-the-state", (
            "The rate was multiplied into the momentum, so that later steps use earlier rates. As long as the rate "
            "stays the same nobody sees it: the momentum sums gradients, and the rate is applied when it is used."
        )
    return None


def explain_cuts(case: Case, run: Run) -> Finding | None:
    """Why a run with other sizes does not end."""
    label = case.labels[run.call]
    if run.mistake in ("not-all-join", "different-collectives"):
        why = (
            f"{run.why}\nThe last ranks may own nothing: their slice is empty. They take part in every collective all "
            "the same, and need the new weight like the others."
        )
        return Finding(why, "absent-are-skipped", label, run.rank)
    if run.mistake == "raises" or "sizes" in run.why:
        why = (
            f"{run.why}\nn need not divide N, so slices differ in length: ceil(N / n), the last ones fewer or none, as "
            "md.partition(N, n) cuts and reduce_scatter and all_gather do."
        )
        return Finding(why, "all-parts-equal", label, run.rank)
    return None


def two_psi(case: Case, run: Run) -> Finding | None:
    """Whether a step moves one reduce-scatter and one all-gather, and no more."""
    weight, _, rates, _ = case.facts[0]
    limit = 2 * len(weight) * len(rates)
    for rank in range(case.ranks):
        parts = run.collectives_of(0, rank)
        got = moved(parts, case.ranks)
        if got <= limit:
            continue
        if sum(part.name == "all_gather" for part in parts) > len(rates):
            mistake = "gathers-the-state"
            why = "More was gathered than the weight. Momentum stays where it is used: nobody needs the others' slices."
        else:
            mistake = "moves-more-than-needed"
            why = (
                "Each rank needs only its slice of the average, which a reduce-scatter gives at half the price of an "
                "all-reduce; and new slices need only be gathered, not added."
            )
        expected = f"{limit} elements, 2 x {len(weight)}"
        return Finding(why, mistake, case.labels[0], rank, expected, f"{got}")
    return None
