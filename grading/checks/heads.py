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


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int, causal: bool = True, mixed: bool = False) -> Tensor:
    """One process's. x [B, S, D], qkv [3 D, D], out [D, D]. causal, mixed: False and True are mistakes."""
    parts = F.linear(x, qkv).chunk(3, dim=-1)

    def by_head(part: Tensor) -> Tensor:
        if mixed:
            return part.reshape(part.shape[0], heads, part.shape[1], -1)
        return part.unflatten(-1, (heads, -1)).transpose(1, 2)

    y = F.scaled_dot_product_attention(*map(by_head, parts), is_causal=causal)
    return F.linear(y.reshape(x.shape) if mixed else y.transpose(1, 2).flatten(2), out)


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
        return case_of(f"{heads} heads", [inputs] * ranks, Facts([{}] * ranks))

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
    parts = [dense(model, {**inputs, "out": inputs["out"] * columns}, grad) for _, columns in masks]
    others = {
        "causal": attention(**inputs, causal=False),
        "mixed": attention(**inputs, mixed=True),
        "across": sum(_across(inputs, ranks, rank) for rank in range(ranks)),
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
        Known(
            "reshapes-for-transpose",
            "y",
            lambda r: others["mixed"],
            "Tokens and heads were mixed up. [B, S, heads K] becomes [B, S, heads, K] first, and then heads and tokens "
            "change places: unflatten(-1, (heads, K)).transpose(1, 2). And the way back likewise.",
        ),
        Known(
            "local-is-global",
            "x",
            lambda r: parts[r]["x"],
            "That is what this rank's heads add to it. All heads read the same x, so the parts have to be added up: "
            "column does that in backward.",
        ),
    ]
    for name, which in (("qkv", 0), ("out", 1)):
        total = sum(mine[name] for mine in right)
        found.append(
            Known(
                "rank-does-it-all",
                name,
                lambda r, total=total: total,
                "It is not zero for heads of other ranks. Each rank computes with the rows of qkv and the columns of "
                "out that belong to its heads, and those alone.",
            )
        )
        other = [mask[which] for mask in masks]
        found.append(
            Known(
                "averages-parts",
                name,
                lambda r, name=name, other=other: right[r][name] / ranks * other[r],
                "n times too small. Every head is computed once, on one rank, and its gradient is complete there.",
            )
        )
    return found


def _across(inputs: Mapping[str, Any], ranks: int, rank: int) -> Tensor:
    """A rank's part of the output, if the rows of qkv are cut into n blocks."""
    qkv, out, heads = inputs["qkv"].chunk(ranks)[rank], inputs["out"].chunk(ranks, dim=1)[rank], inputs["heads"]
    q, k, v = (
        each.unflatten(-1, (heads // ranks, -1)).transpose(1, 2) for each in F.linear(inputs["x"], qkv).chunk(3, dim=-1)
    )
    return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), out)


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
            why = f"{heads} heads cannot be divided among {ranks} ranks: {heads % ranks} of them would be computed nowhere."
            return Finding(why, "drops-the-rest", case.labels[0], rank, expected, "a result")
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
