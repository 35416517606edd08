"""Attention cut by heads: cases of 05.3, and what known mistakes give."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist as md
from grading.checks.blocks import Facts, Known, case_of, dense, gradients_right, passes, said
from grading.exercise import Case, Finding
from grading.ranks.run import Run

SIZE, TOKENS, BATCH = 2, 3, 2


def attention(
    x: Tensor, qkv: Tensor, out: Tensor, heads: int, causal: bool = True, there: bool = True, back: bool = True
) -> Tensor:
    """One process's, or of some heads. x [B, S, D], qkv [3 heads K, D], out [D, heads K]. causal: False is a mistake,
    and so are there and back: whether heads and tokens change places before and after."""

    def by_head(part: Tensor) -> Tensor:
        if not there:
            return part.reshape(part.shape[0], heads, part.shape[1], -1)
        return part.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = map(by_head, F.linear(x, qkv).chunk(3, dim=-1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = y.transpose(1, 2).flatten(2) if back else y.reshape(*x.shape[:2], -1)
    return F.linear(y, out)


def draw(rng: random.Random, heads: int, ranks: int, causal: bool = True) -> Case:
    """Everyone has the same x and the whole weights, and uses what belongs to its heads."""
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    dim = heads * SIZE
    inputs = {
        "x": torch.randn(BATCH, TOKENS, dim, generator=seed, dtype=torch.float64),
        "qkv": torch.randn(3 * dim, dim, generator=seed, dtype=torch.float64),
        "out": torch.randn(dim, dim, generator=seed, dtype=torch.float64),
        "heads": heads,
    }
    grad = torch.randn(BATCH, TOKENS, dim, generator=seed, dtype=torch.float64)
    if heads % ranks:
        return case_of(f"{heads} heads", [inputs] * ranks, Facts([{}] * ranks), refuses=True)

    def model(**given: Any) -> Tensor:
        return attention(**given, causal=causal)

    whole = dense(model, inputs, grad)
    masks = [_of_heads(whole, heads, ranks, rank) for rank in range(ranks)]
    right = [
        {"y": whole["y"], "x": whole["x"], "qkv": whole["qkv"] * rows, "out": whole["out"] * columns}
        for rows, columns in masks
    ]
    known = _known(inputs, masks, grad, right, model)
    return case_of(f"{heads} heads", [inputs] * ranks, Facts(right, known), [grad] * ranks)


def _of_heads(like: Mapping[str, Tensor], heads: int, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """1 where a weight belongs to the rank's heads, and 0 elsewhere: rows of qkv, and columns of out."""
    rows, columns = torch.zeros_like(like["qkv"]), torch.zeros_like(like["out"])
    part = md.partition(heads, ranks)[rank]
    own = slice(part.start * SIZE, part.stop * SIZE)
    for block in rows.chunk(3):
        block[own] = 1
    columns[:, own] = 1
    return rows, columns


def _known(
    inputs: Mapping[str, Any],
    masks: Sequence[tuple[Tensor, Tensor]],
    grad: Tensor,
    right: Sequence[Mapping[str, Tensor]],
    model: Callable[..., Tensor],
) -> list[Known]:
    ranks = len(masks)
    own = [inputs["qkv"][rows[:, 0] == 1] for rows, _ in masks]
    parts = [dense(model, {**inputs, "out": inputs["out"] * columns}, grad) for _, columns in masks]
    others = {
        "causal": attention(**inputs, causal=False),
        "across": _added(inputs, [inputs["qkv"].chunk(ranks)[rank] for rank in range(ranks)]),
        "mixed": _added(inputs, own, there=False, back=False),
        "back": _added(inputs, own, back=False),
    }
    found = [
        Known(
            "local-is-global",
            "y",
            lambda r: parts[r]["y"],
            "That is what this rank's heads add to the output. The output projection mixes all heads, so the parts of "
            "the ranks have to be added up: row does that.",
        ),
        Known(
            "cuts-across-heads",
            "y",
            lambda r: others["across"],
            "The rows of qkv were cut in n equal blocks. They are first the queries of all heads, then the keys, then "
            "the values: cut each third by heads, so that a rank has q, k and v of the same ones.",
        ),
        Known(
            "not-causal",
            "y",
            lambda r: others["causal"],
            "Tokens see those after them: the attention is causal, is_causal=True.",
        ),
        *(
            Known(
                "reshapes-for-transpose",
                "y",
                lambda r, how=how: others[how],
                "Tokens and heads were mixed up. [B, S, heads K] becomes [B, S, heads, K] first, and then heads and "
                "tokens change places: unflatten(-1, (heads, K)).transpose(1, 2). And the way back likewise.",
            )
            for how in ("mixed", "back")
        ),
        Known(
            "local-is-global",
            "x",
            lambda r: parts[r]["x"],
            "That is what this rank's heads add to it. All heads read the same x, so the parts have to be added up: "
            "column does that in backward.",
        ),
    ]
    found.append(
        Known(
            "sums-twice",
            "x",
            lambda r: right[r]["x"] * ranks,
            "n times too large: it was added up, and what came was added up again. column does that already.",
        )
    )
    return found


def _added(inputs: Mapping[str, Any], weights: Sequence[Tensor], **how: bool) -> Tensor:
    """The sum over the ranks of what they give with these rows of qkv and their columns of out."""
    ranks = len(weights)
    columns = inputs["out"].chunk(ranks, dim=1)
    parts = [
        attention(inputs["x"], qkv, out, inputs["heads"] // ranks, **how)
        for qkv, out in zip(weights, columns, strict=True)
    ]
    return torch.stack(parts).sum(0)


# ---- judging ---------------------------------------------------------------------------------------------------------


def shared(case: Case, run: Run) -> Finding | None:
    """Whether the ranks did it together at all."""
    for rank in range(case.ranks):
        forward, _ = passes(run, rank)
        if not forward:
            why = (
                "The output is right, and this rank asked nobody: it computed all heads by itself. Then n ranks are no "
                "faster than one. Each computes its own heads, and the parts of the output are added up."
            )
            return Finding(why, "rank-does-it-all", case.labels[0], rank)
    return None


def one_each_way(case: Case, run: Run) -> Finding | None:
    """Whether each direction has one all-reduce."""
    size = case.facts[0].right[0]["y"].numel()
    for rank in range(case.ranks):
        for what, parts in zip(("forward", "backward"), passes(run, rank), strict=True):
            if what == "backward" and not gradients_right(case, run):
                continue
            if [(part.name, part.elements) for part in parts] != [("all_reduce", size)]:
                why = (
                    f"In {what} one all-reduce is enough. q, k and v of all of a rank's heads are one column-parallel "
                    "layer, and their outputs together one row-parallel layer."
                )
                expected = f"all_reduce of {size} in {what}"
                return Finding(why, "one-message-each", case.labels[0], rank, expected, said(parts))
    return None


def refuses(case: Case, run: Run) -> Finding | None:
    """Whether heads that cannot be divided were refused at once, with both numbers."""
    heads, ranks = case.calls[0][0]["args"][3], case.ranks
    expected = f"ValueError that names {heads} heads and {ranks} ranks"
    for rank, result in enumerate(run.results[0]):
        text = result["refused"]
        if not text:
            why = (
                f"{heads} heads cannot be divided evenly among {ranks} ranks. Rounded down, some would be computed "
                "nowhere; rounded up, some ranks would have nothing to do. Refuse, before anything is sent."
            )
            return Finding(why, "uneven-heads", case.labels[0], rank, expected, "a result")
        if str(heads) not in text or str(ranks) not in text:
            why = "Say what does not fit, with both numbers, so that whoever reads it knows what to change."
            return Finding(why, "error-without-numbers", case.labels[0], rank, expected, text[:80])
        if run.collectives_of(0, rank):
            why = "It was refused after a message had been sent. Look at sizes first: they are the same on all ranks."
            return Finding(why, "refuses-too-late", case.labels[0], rank, expected, "a message before it")
    return None


def explain_refusal(case: Case, run: Run) -> Finding | None:
    """Why a run with heads that cannot be divided does not end."""
    if run.mistake in ("not-all-join", "different-collectives", "different-shapes"):
        why = f"{run.why}\nNot all ranks refused. What is refused depends on sizes, which are the same on all of them."
        return Finding(why, "not-all-join", case.labels[run.call], run.rank)
    why = (
        f"{run.why}\nThat is an error from deep inside, about a shape. Look at it first, heads % comm.size, and raise "
        "ValueError(...) with both numbers."
    )
    return Finding(why, "fails-deep-inside", case.labels[run.call], run.rank)
