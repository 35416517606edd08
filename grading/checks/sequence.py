"""A feed-forward block between which tokens are cut over the ranks: cases of 05.5, and what known mistakes give."""

import random
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist as md
from grading.checks.blocks import Facts, Known, case_of, cut, dense, passes, said, wrong
from grading.exercise import Case, Finding, equal
from grading.ranks.run import Collective, Run

DIM, HIDDEN = 3, 12


def block(x: Tensor, gain: Tensor, shift: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One process's. x [S, D], gain and shift [D], up [F, D], down [D, F]."""
    return F.linear(F.gelu(F.linear(F.layer_norm(x, gain.shape, gain, shift), up)), down)


def draw(rng: random.Random, tokens: int, ranks: int) -> Case:
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    shapes = {"x": (tokens, DIM), "gain": (DIM,), "shift": (DIM,), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
    inputs = {name: torch.randn(*shape, generator=seed, dtype=torch.float64) for name, shape in shapes.items()}
    grad = torch.randn(tokens, DIM, generator=seed, dtype=torch.float64)
    whole = dense(block, inputs, grad)

    def mine(values: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        dims = {"x": 0, "y": 0, "up": 0, "down": 1}
        return {name: cut(x, ranks, rank, dims[name]) if name in dims else x for name, x in values.items()}

    args = [mine(inputs, rank) for rank in range(ranks)]
    right = [mine(whole, rank) for rank in range(ranks)]
    known = _known(inputs, args, grad, right, whole)
    grads = [cut(grad, ranks, rank) for rank in range(ranks)]
    return case_of(f"{tokens} tokens", args, Facts(right, known, {"tokens": tokens}), grads)


def _known(
    inputs: Mapping[str, Tensor],
    args: Sequence[Mapping[str, Tensor]],
    grad: Tensor,
    right: Sequence[Mapping[str, Tensor]],
    whole: Mapping[str, Tensor],
) -> list[Known]:
    ranks = len(args)
    cuts = md.partition(len(grad), ranks)

    def part(rank: int, rows: slice | None = None) -> dict[str, Tensor]:
        """What one rank's features give, with the gradient of these rows of the output only."""
        masked = grad if rows is None else torch.zeros_like(grad)
        if rows is not None:
            masked[rows] = grad[rows]
        return dense(block, {**inputs, "up": args[rank]["up"], "down": args[rank]["down"]}, masked)

    parts, own_rows = [part(r) for r in range(ranks)], [part(r, cuts[r]) for r in range(ranks)]
    norms = [dense(block, {**inputs, "x": args[r]["x"]}, grad[cuts[r]]) for r in range(ranks)]
    found = [
        Known(
            "local-is-global",
            "y",
            lambda r: parts[r]["y"][cuts[r]],
            "That is what this rank's features add to it. Every output is a sum over all features: the reduce-scatter "
            "adds while it cuts.",
        ),
        Known(
            "mean-for-sum",
            "y",
            lambda r: whole["y"][cuts[r]] / ranks,
            'The parts were averaged. Each is of other features, so they add up: op="sum".',
        ),
        Known(
            "whole-sum",
            "y",
            lambda r: whole["y"],
            "That is the output for all tokens. This rank's are asked for: the sum is scattered, not handed to all.",
        ),
        Known(
            "slices-the-gradient",
            "x",
            lambda r: parts[r]["x"][cuts[r]],
            "That is what this rank's features add to it. What was gathered is used by other features on each rank, so "
            "the gradients of all ranks are added when they are cut: backward of an all-gather is a reduce-scatter.",
        ),
        Known(
            "mean-for-sum",
            "x",
            lambda r: right[r]["x"] / ranks,
            'The parts were averaged. Each comes from other features, so they add up: op="sum".',
        ),
    ]
    for name in ("up", "down"):
        found += [
            Known(
                "own-tokens-only",
                name,
                lambda r, name=name: own_rows[r][name],
                "Only this rank's tokens are in it. Its features work for all of them, so they need the gradient of "
                "the whole output: backward of a reduce-scatter is an all-gather.",
            ),
            Known(
                "mean-for-sum",
                name,
                lambda r, name=name: right[r][name] / ranks,
                "n times too small. Each rank's features are its own, and their gradient is complete.",
            ),
        ]
    for name in ("gain", "shift"):
        found += [
            Known(
                "norm-gradients-local",
                name,
                lambda r, name=name: norms[r][name],
                "Only this rank's tokens are in it. The norm's weights are the same on all ranks, and each uses them "
                "for other tokens: their gradients have to be added up, or the copies drift apart.",
            ),
            Known(
                "mean-for-sum",
                name,
                lambda r, name=name: whole[name] / ranks,
                'The parts were averaged. Each is of other tokens, so they add up: op="sum".',
            ),
            Known(
                "sums-twice",
                name,
                lambda r, name=name: whole[name] * ranks,
                "n times too large: it was added up, and what came was added up again.",
            ),
        ]
    return found


# ---- judging ---------------------------------------------------------------------------------------------------------


def norms_right(case: Case, run: Run) -> Finding | None:
    """Whether gain and shift have the whole gradient on every rank. Where other gradients are wrong, which has cost
    its points, it is enough that the ranks agree."""
    others = [wrong(case, run, name) for name in ("x", "up", "down")]
    for name in ("gain", "shift"):
        found = wrong(case, run, name)
        if found is None:
            continue
        got = [result["grads"].get(name) for result in run.results[0]]
        if any(others) and all(isinstance(each, Tensor) and equal(each, got[0], 1e-9) for each in got):
            continue
        return found
    return None


def _moved(parts: Sequence[Collective], ranks: int, tokens: int) -> float:
    """Whole activations that moved, in units of (n - 1) / n. Weights of norms are small, and not counted."""
    whole = tokens * DIM
    weight = {"all_gather": ranks / whole, "reduce_scatter": 1 / whole, "all_reduce": 2 / whole, "broadcast": 1 / whole}
    return sum(part.elements * weight.get(part.name, 0) for part in parts if part.elements * ranks >= whole)


def two_each_way(case: Case, run: Run) -> Finding | None:
    """Whether each direction moves one all-gather and one reduce-scatter."""
    for rank in range(case.ranks):
        for what, parts in zip(("forward", "backward"), passes(run, rank), strict=True):
            if what == "backward" and any(wrong(case, run, name) for name in ("x", "up", "down")):
                continue
            got = _moved(parts, case.ranks, case.facts[0].sizes["tokens"])
            if got > 2:
                why = (
                    f"In {what} one all-gather and one reduce-scatter of the tokens are enough. An all-reduce is as "
                    "much as both together."
                )
                expected = f"one all_gather and one reduce_scatter in {what}"
                return Finding(why, "moves-more-than-needed", case.labels[0], rank, expected, said(parts))
    return None


def right_tokens(case: Case, run: Run) -> Finding | None:
    """Whether each rank has the output for its tokens, where they differ in number."""
    found = wrong(case, run, "y")
    if found is not None and found.mistake == "wrong-shape":
        why = "What filled the tokens up to equal parts is still there: cut it off, or do not fill up at all."
        return Finding(why, "leaves-padding-in", found.label, found.rank, found.expected, found.got)
    return found


def explain_tokens(case: Case, run: Run) -> Finding | None:
    """Why a run fails in which ranks have different numbers of tokens."""
    why = (
        f"{run.why}\nn need not divide the number of tokens: the last rank has fewer, as md.partition cuts. all_gather "
        "finds the lengths out by itself, and reduce_scatter cuts in the same way."
    )
    return Finding(why, "all-parts-equal", case.labels[run.call], run.rank)
