"""Linear layers cut by columns and by rows: cases of 05.1 and 05.2, and what known mistakes give."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grading.checks.blocks import Facts, Known, case_of, cut, dense, gradients_right, passes, said
from grading.exercise import Case, Finding
from grading.ranks.run import Run

IN, OUT = 6, 12  # divisible by 2 and 3


def draws(rng: random.Random) -> Any:
    """A function that makes small whole numbers of a shape, different each time."""
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    return lambda *shape: torch.randint(-4, 5, shape, generator=seed).double() + 0.5


# ---- by columns ------------------------------------------------------------------------------------------------------


def columns(
    rng: random.Random, ranks: int, label: str, lead: Sequence[int] = (3,), bias: bool = True, backward: bool = True
) -> Case:
    """x is whole on every rank, weight and bias are cut along the output."""
    new = draws(rng)
    inputs = {"x": new(*lead, IN), "weight": new(OUT, IN), "bias": new(OUT) if bias else None}
    grad = new(*lead, OUT)
    whole = dense(_linear, inputs, grad)
    grads = [cut(grad, ranks, rank, -1) for rank in range(ranks)]
    mine = [_cut_columns(inputs, ranks, rank) for rank in range(ranks)]
    right = [
        {"x": whole["x"]}
        | {"y": cut(whole["y"], ranks, rank, -1)}
        | _cut_columns(_only(whole, "weight", "bias"), ranks, rank)
        for rank in range(ranks)
    ]
    known = _known_columns(inputs, mine, grads, right, whole)
    return case_of(label, mine, Facts(right, known), grads if backward else None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _only(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _cut_columns(values: Mapping[str, Any], ranks: int, rank: int) -> dict[str, Any]:
    """weight and bias cut along the output; the rest as it is."""
    return {
        name: cut(x, ranks, rank) if name in ("weight", "bias") and x is not None else x for name, x in values.items()
    }


def _known_columns(
    inputs: Mapping[str, Any],
    mine: Sequence[Mapping[str, Any]],
    grads: Sequence[Tensor],
    right: Sequence[Mapping[str, Tensor]],
    whole: Mapping[str, Tensor],
) -> list[Known]:
    ranks = len(mine)
    parts = [dense(_linear, each, grad) for each, grad in zip(mine, grads, strict=True)]
    total = sum(part["y"] for part in parts)
    found = [
        Known(
            "gathers-the-output",
            "y",
            lambda r: whole["y"],
            "That is the whole output. Each rank keeps its columns: what comes next is cut the same way.",
        ),
        Known(
            "sums-the-columns",
            "y",
            lambda r: total,
            "The ranks' outputs were added. They are different columns of one output, not parts of a sum: forward "
            "needs no message.",
        ),
        Known("bias-forgotten", "y", lambda r: F.linear(inputs["x"], mine[r]["weight"]), "The bias is missing."),
        Known(
            "local-is-global",
            "x",
            lambda r: parts[r]["x"],
            "That is what this rank's columns add to it. x goes into all columns, on all ranks, so the parts have to "
            "be added up: where forward copies, backward sums.",
        ),
        Known(
            "mean-for-sum",
            "x",
            lambda r: whole["x"] / ranks,
            'The parts were averaged. Each comes from other columns, so they add up: op="sum".',
        ),
    ]
    for name in ("weight", "bias"):
        if name in whole:
            shards = sum(right[r][name] for r in range(ranks))
            why = (
                "It was added up over the ranks. Each rank has columns of its own, and their gradient is complete on "
                "that rank."
            )
            found.append(Known("own-slice-is-a-part", name, lambda r, shards=shards: shards, why))
            found.append(Known("own-slice-is-a-part", name, lambda r, shards=shards: shards / ranks, why))
    return found


def one_sum_back(case: Case, run: Run) -> Finding | None:
    """Whether forward sent nothing, and backward one all-reduce of the size of x."""
    size = case.calls[0][0]["args"][0].numel()
    for rank in range(case.ranks):
        forward, backward = passes(run, rank)
        if forward:
            why = "x is there on every rank, and each computes columns of its own: forward needs no message."
            return Finding(why, "sends-in-forward", case.labels[0], rank, "none in forward", said(forward))
        if gradients_right(case, run) and [(part.name, part.elements) for part in backward] != [("all_reduce", size)]:
            why = "One all-reduce of the gradient of x is enough: the parts of the ranks, added up."
            expected = f"all_reduce of {size} in backward"
            return Finding(why, "moves-more-than-needed", case.labels[0], rank, expected, said(backward))
    return None


def explain_shapes(case: Case, run: Run) -> Finding | None:
    """Why a run without bias and with more dims fails."""
    label = case.labels[run.call]
    if "NoneType" in run.why:
        why = f"{run.why}\nThere is no bias here: it is None. F.linear takes that as it is."
        return Finding(why, "bias-is-optional", label, run.rank)
    why = f"{run.why}\nx may have any dims before the last one, as [B, S, D]: F.linear multiplies the last."
    return Finding(why, "two-dims-only", label, run.rank)


# ---- by rows ---------------------------------------------------------------------------------------------------------


def rows(rng: random.Random, ranks: int, label: str, bias: bool = False) -> Case:
    """x and weight are cut along the input, bias is whole on every rank."""
    new = draws(rng)
    inputs = {"x": new(3, IN), "weight": new(OUT, IN), "bias": new(OUT) if bias else None}
    grad = new(3, OUT)
    whole = dense(_linear, inputs, grad)

    def mine(values: Mapping[str, Any], rank: int) -> dict[str, Any]:
        return {name: cut(x, ranks, rank, -1) if name in ("x", "weight") else x for name, x in values.items()}

    args = [mine(inputs, rank) for rank in range(ranks)]
    right = [mine(whole, rank) for rank in range(ranks)]
    return case_of(label, args, Facts(right, _known_rows(args, whole, right)), [grad] * ranks)


def _known_rows(
    args: Sequence[Mapping[str, Any]], whole: Mapping[str, Tensor], right: Sequence[Mapping[str, Tensor]]
) -> list[Known]:
    ranks, bias = len(args), args[0]["bias"]
    parts = [F.linear(each["x"], each["weight"]) for each in args]
    shift = 0 if bias is None else bias
    inputs = torch.stack([each["x"] for each in args]).sum(0)
    found = [
        Known(
            "local-is-global",
            "y",
            lambda r: parts[r] + shift,
            "That is this rank's part. Every output is a sum over all inputs, and those lie on all ranks.",
        ),
        Known(
            "mean-for-sum",
            "y",
            lambda r: sum(parts) / ranks + shift,
            'The parts were averaged. Each is of other inputs, so they add up: op="sum".',
        ),
        Known(
            "sums-the-inputs",
            "y",
            lambda r: F.linear(inputs, args[r]["weight"]) + shift,
            "The inputs were added, before the multiplication. They are different features: multiply first, and add "
            "the products.",
        ),
        *(
            Known(
                "reduces-in-both-directions",
                name,
                lambda r, name=name: right[r][name] * ranks,
                "n times too large: the gradient was added up over the ranks. They all have the same one, that of one "
                "loss. Where forward sums, backward hands the gradient on.",
            )
            for name in ("x", "weight")
        ),
        *(
            Known(
                "mean-for-sum",
                name,
                lambda r, name=name: right[r][name] / ranks,
                "n times too small. Every part goes into the sum with weight 1, so each gets the gradient as it is.",
            )
            for name in ("x", "weight")
        ),
    ]
    if bias is not None:
        found += [
            Known(
                "bias-on-each-rank",
                "y",
                lambda r: sum(parts) + ranks * bias,
                "The bias is in it n times: once in the part of each rank. Add it after the sum.",
            ),
            Known("bias-forgotten", "y", lambda r: sum(parts), "The bias is missing."),
            Known(
                "bias-divided",
                "bias",
                lambda r: whole["bias"] / ranks,
                "n times too small. A bias divided by n gives the right output, and learns n times too slowly. Add it "
                "once, whole, after the sum.",
            ),
            Known(
                "replicas-drift",
                "bias",
                lambda r: whole["bias"] if r == 0 else None,
                "Only rank 0 has one. The bias is on all ranks, and they all need its gradient, or the copies drift "
                "apart: add it after the sum, on every rank.",
            ),
        ]
    return found


def one_sum_forward(case: Case, run: Run) -> Finding | None:
    """Whether forward sent one all-reduce of the size of the output, and backward nothing."""
    size = case.facts[0].right[0]["y"].numel()
    for rank in range(case.ranks):
        forward, backward = passes(run, rank)
        if backward and gradients_right(case, run):
            why = "Every rank has the whole gradient of the output, and needs no more: backward sends nothing."
            return Finding(why, "reduces-in-both-directions", case.labels[0], rank, "none in backward", said(backward))
        if [(part.name, part.elements) for part in forward] != [("all_reduce", size)]:
            why = "One all-reduce of the ranks' parts of the output is enough."
            expected = f"all_reduce of {size} in forward"
            return Finding(why, "moves-more-than-needed", case.labels[0], rank, expected, said(forward))
    return None
