"""A norm over gradients of which some rest in slices: how ranks of 04.4 are called, and what known mistakes give."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Run

TOLERANCE = 1e-5


def clipped(
    function: Callable[..., Any], comm: Any, ask: Any, sharded: Any, replicated: Any, most: float
) -> dict[str, Any]:
    """Body of 04.4, in a rank."""
    norm = function(comm, list(sharded), list(replicated), most)
    norm = norm.detach().double().reshape(-1) if isinstance(norm, torch.Tensor) else norm
    value = float(norm) if isinstance(norm, (torch.Tensor, float, int)) else None
    return {"norm": value, "sharded": list(sharded), "replicated": list(replicated)}


# ---- cases: facts hold everyone's slices, what is the same everywhere, and the limit ---------------------------------


def case_of(
    label: str, sharded: Sequence[Sequence[Tensor]], replicated: Sequence[Tensor], most: float = math.inf
) -> Case:
    """sharded: for each rank its slices."""
    calls = tuple(
        {
            "sharded": [x.clone() for x in mine],
            "replicated": [x.clone() for x in replicated],
            "most": most,
        }
        for mine in sharded
    )
    return Case((calls,), ((sharded, replicated, most),), (f"n = {len(sharded)}, {label}",))


def whole_numbers(rng: random.Random, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([rng.choice((-1, 1)) * rng.randrange(1, 9) for _ in range(size)], dtype=dtype)


def squares(xs: Sequence[Tensor]) -> float:
    return sum(float((x.double() ** 2).sum()) for x in xs)


def right(sharded: Sequence[Sequence[Tensor]], replicated: Sequence[Tensor]) -> float:
    return math.sqrt(sum(map(squares, sharded)) + squares(replicated))


# ---- judging ---------------------------------------------------------------------------------------------------------


def right_norm(case: Case, run: Run) -> Finding | None:
    """Whether every rank returns the norm in which each parameter counts once."""
    sharded, replicated, _ = case.facts[0]
    answer = right(sharded, replicated)
    got = [result["norm"] for result in run.results[0]]
    for rank, norm in enumerate(got):
        if norm is None:
            return Finding("Return the norm, a number.", "no-result", case.labels[0], rank, f"{answer:g}", "None")
    wrong = [rank for rank, norm in enumerate(got) if not math.isclose(norm, answer, rel_tol=TOLERANCE)]
    if not wrong:
        return None
    rank = wrong[0]
    mistake, why = _mistake(sharded, replicated, got) or (
        "wrong-values",
        "The norm is the root of the sum of the squares of all elements of all parameters, the same on every rank.",
    )
    return Finding(why, mistake, case.labels[0], rank, f"{answer:.6g}", f"{got[rank]:.6g}")


def _mistake(
    sharded: Sequence[Sequence[Tensor]], replicated: Sequence[Tensor], got: Sequence[float]
) -> tuple[str, str] | None:
    n, same = len(sharded), squares(replicated)
    own = [squares(mine) for mine in sharded]
    known = (
        (
            "local-is-global",
            [math.sqrt(each + same) for each in own],
            "That is the norm of what this rank holds. The other ranks' slices belong to it.",
        ),
        (
            "counts-replicas",
            [math.sqrt(sum(own) + n * same)] * n,
            "What is the same on all ranks was counted once for each of them. Sum over the ranks only what is cut.",
        ),
        (
            "leaves-replicas-out",
            [math.sqrt(sum(own))] * n,
            "The gradients that every rank has whole are missing. They count as well, once.",
        ),
        (
            "norms-add",
            [sum(math.sqrt(each) for each in own) + math.sqrt(same)] * n,
            "Norms were added. It is squares that add up: the root comes last, after the all-reduce.",
        ),
        (
            "norms-add",
            [math.sqrt(sum(own)) + math.sqrt(same)] * n,
            "Two norms were added. It is squares that add up: the root comes last, after both sums.",
        ),
        (
            "norms-add",
            [sum(math.sqrt(each + same) for each in own)] * n,
            "The ranks' norms were added. It is squares that add up: the root comes last, after the all-reduce.",
        ),
        (
            "norms-add",
            [sum(math.sqrt(each + same) for each in own) / n] * n,
            "The ranks' norms were averaged. It is squares that add up: the root comes last, after the all-reduce.",
        ),
        (
            "divides-by-ranks",
            [math.sqrt(sum(own) / n + same)] * n,
            'The squares were averaged over the ranks. Each rank holds another part, so they add up: op="sum".',
        ),
        (
            "root-is-missing",
            [sum(own) + same] * n,
            "That is the sum of the squares, without the root.",
        ),
    )
    for mistake, values, why in known:
        if all(math.isclose(one, other, rel_tol=TOLERANCE) for one, other in zip(got, values, strict=True)):
            return mistake, why
    return None


def scaled(case: Case, run: Run) -> Finding | None:
    """Whether all gradients were multiplied, in place, by what brings the norm down to the limit, and by no more."""
    sharded, replicated, most = case.facts[0]
    for rank, result in enumerate(run.results[0]):
        norm = result["norm"]  # whether that is right is asked elsewhere
        factor = min(1.0, most / norm)
        before = [*sharded[rank], *replicated]
        for x, got in zip(before, [*result["sharded"], *result["replicated"]], strict=True):
            if equal(got, x.double() * factor, TOLERANCE):
                continue
            mine = math.sqrt(squares(before))
            if equal(got, x):
                mistake = "rebinds-the-name"
                why = (
                    "A gradient is as it was. x = x * factor gives a name to another tensor: multiply in place, x *= "
                    "factor or x.mul_(factor), in both lists."
                )
            elif factor == 1.0:
                mistake = "scales-up"
                why = (
                    "The norm was below the limit already. Clipping never makes a gradient larger: the factor is at "
                    "most 1."
                )
            elif equal(got, x.double() * min(1.0, most / mine), TOLERANCE):
                mistake = "local-is-global"
                why = (
                    "The factor was taken from this rank's own norm. All ranks need the same one, or the replicas "
                    "drift apart."
                )
            else:
                mistake, why = "wrong-values", f"Every gradient is multiplied by {most:g} / {norm:.6g}."
            shown = (show(x.double() * factor), show(got))
            return Finding(why, mistake, case.labels[0], rank, *shown)
    return None


def in_float32(case: Case, run: Run) -> Finding | None:
    """Whether the squares were added in float32 or better."""
    found = right_norm(case, run)
    if found is None or found.mistake != "wrong-values":
        return found
    why = (
        "Squares or their sum were kept in bfloat16, which has 8 bits: between 256 and 512 it knows even numbers only. "
        "Convert each gradient first, x.float(), and stay in float32."
    )
    return Finding(why, "adds-in-bfloat16", found.label, found.rank, found.expected, found.got)


def explain_nothing(case: Case, run: Run) -> Finding | None:
    """Why a run fails in which a rank holds no slice."""
    label = case.labels[run.call]
    if run.mistake in ("not-all-join", "different-collectives", "different-shapes"):
        why = f"{run.why}\nA rank that holds no slice takes part with 0, or the others wait for it."
        return Finding(why, "absent-are-skipped", label, run.rank)
    why = f"{run.why}\nRank 1 holds no slice here: its list is empty, and its sum of squares is 0."
    return Finding(why, "no-empty-sum", label, run.rank)


def one_number(case: Case, run: Run) -> Finding | None:
    """Whether one message with a number or two was enough."""
    for rank in range(case.ranks):
        sizes = [part.elements for part in run.collectives_of(0, rank)]
        if len(sizes) <= 1 and sum(sizes) <= 2:
            continue
        if sum(sizes) > len(sizes):
            mistake = "gathers-to-count"
            why = "The gradients travelled. A sum of squares is one number, whatever it is a sum of."
        else:
            mistake, why = "one-message-each", "Add up on the rank first, and send one number."
        got = f"{len(sizes)}, of {sizes} elements"
        return Finding(why, mistake, case.labels[0], rank, "1 message of 1 element", got)
    return None
