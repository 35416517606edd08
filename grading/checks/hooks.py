"""Gradients that rest in slices: how ranks of 04.2 run their backward passes, and what was held when."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import minidist as md
from grading.checks import gradients
from grading.checks.gradients import Parameter, module_of
from grading.checks.layers import Held, moved
from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Run


def stage_two(
    function: Callable[..., Any], comm: Any, ask: Any, parameters: Any, order: Any, passes: int, steps: int
) -> dict[str, Any]:
    """Body of 04.2, in a rank: backward passes through a chain of layers, the last of `order` first.

    What a layer's gradient is multiplied by is asked of the grader when the backward pass is there. `held` says for
    each layer whose gradients were still in memory when the next one's turn came.
    """

    class Gate(torch.autograd.Function):  # without annotations, whose names a class inside a function would lose
        @staticmethod
        def forward(ctx, h, key):
            ctx.key = key
            return h.clone()

        @staticmethod
        def backward(ctx, *grads):
            log.append([ctx.key, memory.others(ctx.key.split(" ")[1])])
            return grads[0] * ask(ctx.key), None

    module = module_of(parameters)
    wanted = {each["name"]: each["grad"] for each in parameters}
    named = dict(module.named_parameters())
    memory, log = Held(), []
    for name, parameter in named.items():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: memory.note(name, p.grad))
    shards = [p.detach().flatten()[md.partition(p.numel(), comm.size)[comm.rank]] * 0 for p in named.values()]
    finish = function(module, comm, shards)
    found = []
    for step in range(steps):
        for x in shards:
            x.zero_()
        for number in range(step * passes, (step + 1) * passes):
            h = torch.ones((), requires_grad=True)
            for name in order:
                h = Gate.apply(h, f"{number} {name}")
                h = h + (named[name] * (wanted[name] * (number + 1))).sum()
            h.backward()
            finish()
        found.append([x.clone() for x in shards])
    return {"shards": found, "log": log, "left": [name for name, p in named.items() if p.grad is not None]}


# ---- cases: facts hold the parameters, the orders, and everyone's gradients of each pass -----------------------------


def draw_passes(
    rng: random.Random,
    parameters: Sequence[Parameter],
    orders: Sequence[Sequence[str]],
    label: str,
    passes: int = 1,
    steps: int = 1,
) -> Case:
    """Backward passes through layers, in an order of its own on each rank. A layer may be missing from one."""
    n = len(orders)
    case = gradients.draw(rng, parameters, n, label, passes=passes, steps=steps)
    named, grads, _ = case.facts[0]
    secrets = {f"{i} {name}": rng.choice((1.0, 2.0, 4.0)) for i in range(passes * steps) for name in named}
    found = []
    for number in range(passes * steps):
        of_pass = []
        for rank, order in enumerate(orders):
            scale, mine = float(number + 1), {name: grads[rank][name] * 0 for name in named}
            for name in reversed(order):
                mine[name] = grads[rank][name] * scale
                scale *= secrets[f"{number} {name}"]
            of_pass.append(mine)
        found.append(of_pass)
    calls = (tuple({**inputs, "order": list(orders[rank])} for rank, inputs in enumerate(case.calls[0])),)
    return Case(calls, ((named, orders, found, passes),), case.labels, (tuple(dict(secrets) for _ in range(n)),))


# ---- judging ---------------------------------------------------------------------------------------------------------


def right_slices(case: Case, run: Run) -> Finding | None:
    """Whether every rank's slices hold the sum over the passes of a step of the average over the ranks."""
    named, _, found, passes = case.facts[0]
    for rank, result in enumerate(run.results[0]):
        for step, got in enumerate(result["shards"]):
            of_step = found[step * passes : (step + 1) * passes]
            for i, name in enumerate(named):
                right = _slice(_mean(of_step, name), case.ranks, rank)
                if equal(got[i], right, 1e-6):
                    continue
                known = _mistake(case, got, i, rank, step)
                mistake, why = known or ("wrong-values", "The slice is not that of the average over the ranks.")
                label = f"{case.labels[0]}, step {step + 1}" if len(result["shards"]) > 1 else case.labels[0]
                return Finding(f"shards[{i}], {name}: {why}", mistake, label, rank, show(right), show(got[i]))
    return None


def _mean(of_step: Sequence[Sequence[Mapping[str, Tensor]]], name: str) -> Tensor:
    """The sum over the passes of the average over the ranks, flat."""
    return sum(torch.stack([mine[name] for mine in each]).mean(0) for each in of_step).flatten()  # type: ignore[union-attr]


def _slice(x: Tensor, ranks: int, rank: int) -> Tensor:
    return x[md.partition(len(x), ranks)[rank]]


def _mistake(case: Case, got: Sequence[Tensor], i: int, rank: int, step: int) -> tuple[str, str] | None:
    """What gives these slices; if nothing explains them all, what gives slice i."""
    named, orders, found, passes = case.facts[0]
    of_step, n, name = found[step * passes : (step + 1) * passes], case.ranks, list(named)[i]
    if step and not bool(got[i].any()):
        return "state-left-over", (
            "The first step was right, and in this one nothing came. What belongs to one backward pass has to be begun "
            "anew for the next."
        )
    known = _known(of_step, n, rank)
    for looked_at in (range(len(named)), [i]):
        for mistake, gives, why in known:
            if all(equal(got[j], _slice(gives(list(named)[j]), n, rank), 1e-6) for j in looked_at):
                return mistake, why
    if any(set(order) != set(named) for order in orders):
        return "sends-as-they-fill", (
            "Gradients of different parameters were averaged: collectives are paired by their order. All ranks reduce "
            "in one order, also where one of them has no gradient."
        )
    others = [_slice(_mean(of_step, other), n, rank) for other in named if other != name]
    if any(equal(got[i], other, 1e-6) for other in others):
        return "mixed-up-order", "That is another parameter's. shards are in the order of module.parameters()."
    if not bool(got[i].any()):
        return "no-result", "Nothing came here: the slice is still zero."
    return None


def _known(of_step: Sequence[Sequence[Mapping[str, Tensor]]], n: int, rank: int) -> list[tuple[str, Any, str]]:
    """Mistake, the flat gradient that it gives by name, and the sentence."""
    found = [
        (
            "sum-not-mean",
            lambda name: _mean(of_step, name) * n,
            'That is the sum over the ranks. Average them: op="mean".',
        ),
        (
            "divided-twice",
            lambda name: _mean(of_step, name) / n,
            'That has been divided by the number of ranks twice: op="mean" divides already.',
        ),
        (
            "local-is-global",
            lambda name: torch.stack([each[rank][name] for each in of_step]).sum(0).flatten(),
            "That is a slice of this rank's own gradient, which was not averaged.",
        ),
    ]
    if len(of_step) == 1:
        return found
    return [
        (
            "last-micro-batch-only",
            lambda name: _mean(of_step[-1:], name),
            "Only the last micro-batch is in it. The slices are what the gradients of a step add up in: shards[i] += "
            "..., not copied over.",
        ),
        (
            "state-left-over",
            lambda name: _mean(of_step[:1], name),
            "Only the first micro-batch is in it. What belongs to one backward pass has to be begun anew for the next.",
        ),
        (
            "micro-batch-as-step",
            lambda name: _mean(of_step, name) / len(of_step),
            "The micro-batches were averaged. They add up; their losses are divided already by what belongs to the "
            "whole step.",
        ),
        (
            "counts-twice",
            lambda name: _mean(of_step, name) + _mean(of_step[:1], name),
            "The first micro-batch is in it twice. grad keeps it and the next backward pass adds to it: set grad to "
            "None once its slice has been taken.",
        ),
        *found,
    ]


def frees(case: Case, run: Run) -> Finding | None:
    """Whether each whole gradient was reduced and given up while the backward pass went on."""
    named, *_ = case.facts[0]
    for rank, result in enumerate(run.results[0]):
        parts = run.collectives_of(0, rank)
        asked = [(note.key.split(" ")[1], note.when) for note in run.asked if note.rank == rank]
        due = 0
        for name, when in asked:
            if sum(part.elements for part in parts if part.begun < when) < due:
                why = (
                    f"The backward pass went on from {name}, and the gradients before it had not been reduced yet. "
                    "Reduce each one in its hook, as soon as it is there."
                )
                return Finding(why, "gradients-at-the-end", case.labels[0], rank)
            due += named[name].size
        for key, others in result["log"]:
            if len(others) > 1:
                why = (
                    f"When the backward pass went on from {key.split(' ')[1]}, the whole gradients of "
                    f"{', '.join(others)} were still in memory. Once its slice is taken a gradient goes: "
                    "parameter.grad = None, and no other name or list that holds it."
                )
                return Finding(why, "keeps-full-gradients", case.labels[0], rank)
    return None


def one_psi(case: Case, run: Run) -> Finding | None:
    """Whether each gradient was reduce-scattered once in each pass, in its own type."""
    named, _, found, _ = case.facts[0]
    limit = sum(p.size for p in named.values()) * len(found)
    for rank in range(case.ranks):
        parts = run.collectives_of(0, rank)
        got = moved(parts, case.ranks)
        if got > limit or any(part.dtype != "float32" for part in parts):
            why = (
                "Each rank needs only its slice, which a reduce-scatter brings at half the price of an all-reduce; "
                "once for each gradient, and in its own type."
            )
            types = ", ".join(sorted({part.dtype for part in parts} - {"float32"}))
            expected = f"{limit} elements"
            return Finding(why, "moves-more-than-needed", case.labels[0], rank, expected, f"{got} {types}".strip())
    return None
