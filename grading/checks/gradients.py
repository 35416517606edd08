"""Gradients for the checks of assignment 03: how ranks get them, and what known mistakes make of them.

The bodies run inside ranks, where nothing of this package's checks can be imported: they travel by value.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grading.checks.common import fine_numbers
from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Run


@dataclass(frozen=True)
class Parameter:
    """A parameter of the module that ranks are given. shape, dtype: its own. trainable: False is frozen. unused_on:
    ranks whose loss did not reach it. turned: its gradient's memory is that of its transpose."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    unused_on: tuple[int, ...] = ()
    turned: bool = False

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


PLAIN = (Parameter((2, 3)), Parameter((3,)), Parameter((4, 1)), Parameter((5,)), Parameter((2, 2)))
UNUSED = (Parameter((2, 3)), Parameter((3,), unused_on=(1,)), Parameter((4,)))
FROZEN = (Parameter((2, 3)), Parameter((4,), trainable=False), Parameter((3,)))
TYPES = (
    Parameter((3,), torch.bfloat16),
    Parameter((4,)),
    Parameter((3,), torch.float64),
    Parameter((2,), torch.float64),
)
SHAPES = (Parameter((3,)), Parameter(()), Parameter((2, 3), turned=True), Parameter((4,)))


def draw(rng: random.Random, parameters: Sequence[Parameter], ranks: int, label: str, **more: Any) -> Case:
    """A world whose gradients are whole multiples of the number of ranks, so that the mean is exact. facts: the
    parameters, everyone's gradients, and the weights."""
    named = {f"p{i}": parameter for i, parameter in enumerate(parameters)}
    grads = [{name: _gradient(rng, p, ranks) for name, p in named.items()} for _ in range(ranks)]
    weights = [{name: _numbers(rng, p) for name, p in named.items()} for _ in range(ranks)]
    inputs = tuple(
        {
            "parameters": [
                {
                    "name": name,
                    "weight": weights[rank][name],
                    "grad": grads[rank][name] if p.trainable and rank not in p.unused_on else None,
                    "trainable": p.trainable,
                    "turned": p.turned,
                }
                for name, p in named.items()
            ],
            **more,
        }
        for rank in range(ranks)
    )
    return Case((inputs,), ((named, grads, weights),), (f"n = {ranks}, {label}",))


def _numbers(rng: random.Random, parameter: Parameter) -> Tensor:
    return fine_numbers(rng, max(parameter.size, 1), parameter.dtype).view(parameter.shape)


def _gradient(rng: random.Random, parameter: Parameter, ranks: int) -> Tensor:
    return _numbers(rng, parameter) * ranks


# ---- inside ranks ----------------------------------------------------------------------------------------------------


def module_of(parameters: Sequence[Mapping[str, Any]]) -> nn.Module:
    """A module with these parameters, after a backward pass that gave them these gradients."""
    module = nn.Module()
    for each in parameters:
        parameter = nn.Parameter(each["weight"].clone(), requires_grad=each["trainable"])
        module.register_parameter(each["name"], parameter)
        if each["grad"] is not None:
            grad = each["grad"].clone()
            parameter.grad = grad.t().contiguous().t() if each["turned"] else grad
    return module


def left(module: nn.Module) -> dict[str, Any]:
    """What is left in a module: gradients and weights."""
    named = dict(module.named_parameters())
    return {
        "grads": {name: p.grad for name, p in named.items()},
        "weights": {name: p.detach() for name, p in named.items()},
    }


def averaged(function: Callable[..., Any], comm: Any, ask: Any, parameters: Any) -> dict[str, Any]:
    """Body of 03.1: the backward pass is over."""
    module = module_of(parameters)
    function(module, comm)
    return left(module)


def bucketed(function: Callable[..., Any], comm: Any, ask: Any, parameters: Any, bucket: int) -> dict[str, Any]:
    """Body of 03.2: the same, with buckets of at most so many elements."""
    module = module_of(parameters)
    function(module, comm, bucket)
    return left(module)


def overlapped(
    function: Callable[..., Any], comm: Any, ask: Any, parameters: Any, bucket: int, order: Any, steps: int
) -> list[Any]:
    """Body of 03.3: backward passes through a chain of layers, the last of `order` first.

    What a layer's gradient is multiplied by is asked of the grader when the backward pass is there, so nobody can know
    it earlier: what was sent before the question was sent during the backward pass.
    """

    class Gate(torch.autograd.Function):  # without annotations, whose names a class inside a function would lose
        @staticmethod
        def forward(ctx, h, key):
            ctx.key = key
            return h.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * ask(ctx.key), None

    module = module_of(parameters)
    wanted = {each["name"]: each["grad"] for each in parameters}
    module.zero_grad()
    finish = function(module, comm, bucket)
    found = []
    for step in range(steps):
        h = torch.ones((), dtype=torch.float32, requires_grad=True)
        for name in order:
            h = Gate.apply(h, f"{step} {name}")
            h = h + (getattr(module, name) * (wanted[name] * (step + 1))).sum()
        h.backward()
        finish()
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()})
        module.zero_grad()
    return found


# ---- judging ---------------------------------------------------------------------------------------------------------


def mean(grads: Sequence[Mapping[str, Tensor]], named: Mapping[str, Parameter], name: str) -> Tensor:
    """The average over the ranks of one parameter's gradient; who did not use it takes part with zeros."""
    used = [each[name] for rank, each in enumerate(grads) if rank not in named[name].unused_on]
    return torch.stack(used).sum(0, dtype=used[0].dtype) / len(grads)


def known_mistake(got: Any, own: Tensor | None, grads: Sequence[Tensor], right: Tensor) -> tuple[str, str]:
    """The mistake that makes this of a gradient, and the sentence for it; empty where none is known."""
    n = len(grads)
    if not isinstance(got, Tensor):
        return "replicas-drift", (
            "The gradient is missing here. A rank that did not use a parameter gets the average all the same: the "
            "others apply it, and without it this replica drifts away from theirs."
        )
    if equal(got, right * n):
        return "sum-not-mean", 'That is the sum. Divide by the number of ranks: op="mean", or / comm.size.'
    if n > 1 and equal(got, right / n, 1e-6):
        return "divided-twice", 'That has been divided by the number of ranks twice: op="mean" divides already.'
    if own is not None and equal(got, own):
        return "averages-a-copy", (
            "That is still this rank's own gradient. What was averaged was another tensor, or it was not written back: "
            "the result has to end in parameter.grad."
        )
    return "", ""


def right_gradients(case: Case, run: Run) -> Finding | None:
    """Whether every gradient is the average over the ranks."""
    for call, label in enumerate(case.labels):
        named, grads, weights = case.facts[call]
        for rank, result in enumerate(run.results[call]):
            found = _wrong_gradient(result, named, grads, rank, label)
            if found is None:
                continue
            if found.mistake == "averages-a-copy" and not _same_weights(result, weights[rank]):
                why = "The weights were averaged. They are equal on all ranks; what differs is the gradient."
                return replace(found, why=why, mistake="averages-weights")
            if found.mistake == "wrong-values" and _reordered(result, named, grads):
                why = (
                    "All numbers are right, in other places. What is written back must come in the order in which the "
                    "bucket was filled."
                )
                return replace(found, why=why, mistake="mixed-up-order")
            return found
    return None


def _same_weights(result: Any, weights: Mapping[str, Tensor]) -> bool:
    return all(equal(result["weights"].get(name), weight) for name, weight in weights.items())


def _reordered(result: Any, named: Mapping[str, Parameter], grads: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether this rank has the right numbers in the wrong places."""
    got = [value for grad in result["grads"].values() for value in grad.flatten().tolist()]
    right = [value for name in named for value in mean(grads, named, name).flatten().tolist()]
    return sorted(got) == sorted(right)


def _wrong_gradient(
    result: Any, named: Mapping[str, Parameter], grads: Sequence[Mapping[str, Tensor]], rank: int, label: str
) -> Finding | None:
    found = result.get("grads") if isinstance(result, dict) else None
    for name, parameter in named.items():
        if not parameter.trainable:
            continue
        right = mean(grads, named, name)
        got = found.get(name) if isinstance(found, dict) else None
        if equal(got, right) and isinstance(got, Tensor) and got.dtype == parameter.dtype:
            continue
        own = grads[rank][name] if rank not in parameter.unused_on else None
        mistake, why = known_mistake(got, own, [each[name] for each in grads], right)
        if mistake == "averages-a-copy" and len(named) == len(SHAPES) and not parameter.shape:
            mistake, why = "forgets-scalars", "A parameter without dims is one as well: one element, numel() is 1."
        if mistake == "averages-a-copy" and parameter.turned:
            mistake, why = (
                "flatten-is-a-copy",
                (
                    "This gradient is not contiguous, so flatten() and reshape(-1) give a copy, and what is written "
                    "into that is lost. Write into the gradient itself: grad.copy_(piece.view_as(grad))."
                ),
            )
        if not mistake and parameter.dtype is not torch.float32:
            mistake, why = (
                "loses-the-dtype",
                (
                    "Digits are lost on the way: every gradient must be averaged in its own type, and so share a "
                    "bucket only with gradients of that type."
                ),
            )
        why = why or "Every rank ends with the average over the ranks of each gradient."
        shown = (show(right), show(got))
        return Finding(f"{name}: {why}", mistake or "wrong-values", label, rank, *shown)
    return None


def weights_stay(case: Case, run: Run) -> Finding | None:
    """Whether weights are as they were, and frozen parameters have no gradient and were not sent."""
    for call, label in enumerate(case.labels):
        named, _, weights = case.facts[call]
        for rank in range(case.ranks):
            result = run.results[call][rank]
            for name, parameter in named.items():
                got = result["weights"].get(name)
                if not equal(got, weights[rank][name]):
                    why = (
                        f"{name}: the weight itself was changed. Averaging is for gradients; the optimizer comes later."
                    )
                    return Finding(why, "averages-weights", label, rank, show(weights[rank][name]), show(got))
                if not parameter.trainable and result["grads"].get(name) is not None:
                    why = f"{name} is frozen (requires_grad is False) and has a gradient now: leave it out."
                    return Finding(why, "averages-frozen", label, rank, "None", show(result["grads"][name]))
            most = sum(p.size for p in named.values() if p.trainable)
            sent = sum(part.elements for part in run.collectives_of(call, rank))
            if sent % most:
                why = "More was averaged than the gradients of the parameters that are trained."
                return Finding(why, "averages-frozen", label, rank, f"{most} elements", f"{sent}")
    return None


def explain_unused(case: Case, run: Run) -> Finding | None:
    """Why a run fails in which a rank did not use a parameter."""
    label = case.labels[run.call]
    if run.mistake in ("different-shapes", "not-all-join", "different-collectives"):
        why = (
            f"{run.why}\nRank 1's loss did not reach one parameter: its grad is None there. Leaving it out makes the "
            "calls of the ranks differ. It has to take part, with zeros."
        )
        return Finding(why, "absent-are-skipped", label, run.rank)
    if "NoneType" in run.why:
        why = f"{run.why}\nA parameter that the loss did not reach has grad None: put zeros in its place."
        return Finding(why, "grad-is-none", label, run.rank)
    return None


def explain_shapes(case: Case, run: Run) -> Finding | None:
    """Why a run fails with gradients of other shapes and memory orders."""
    if "view size is not compatible" in run.why:
        why = f"{run.why}\nThis gradient is not contiguous, and view(-1) needs that it is: use flatten() to read it."
        return Finding(why, "view-needs-contiguous", case.labels[run.call], run.rank)
    return None


def greedy(named: Mapping[str, Parameter], limit: int, forward: bool = False) -> list[list[str]]:
    """Names in buckets of at most `limit` elements, or one parameter, filled from the last parameter on."""
    buckets: list[list[str]] = [[]]
    for name in list(named) if forward else reversed(list(named)):
        size = sum(named[each].size for each in buckets[-1])
        if buckets[-1] and size + named[name].size > limit:
            buckets.append([])
        buckets[-1].append(name)
    return buckets
