"""Checks of assignment 05: tensor parallelism, by columns, rows, heads, vocabulary and sequence."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grading.checks import blocks, heads, linear, sequence, vocab
from grading.checks.blocks import ALLOWED, right
from grading.checks.common import first
from grading.exercise import Case, Criterion, Exercise

# ---- 05.1 by columns -------------------------------------------------------------------------------------------------


def draw_columns(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [linear.columns(rng, n, f"{linear.OUT} columns") for n in (3, 2)],
        "shapes": [linear.columns(rng, 2, "x [B, S, I], no bias", lead=(2, 3), bias=False)],
    }


COLUMN = Exercise(
    id="05.1",
    function="column",
    task="column(comm, x, weight, bias=None): a linear layer whose output is cut over the ranks.",
    criteria=(
        Criterion("basic", 2, "basic", right("y", otherwise="Rank r computes its columns: x W_r^T + b_r."), basic=True),
        Criterion("input gradient", 3, "basic", right("x")),
        Criterion("weight gradient", 1, "basic", right("weight", "bias")),
        Criterion("messages", 2, "basic", linear.one_sum_back),
        Criterion("any shape", 1, "shapes", right("y"), explain=linear.explain_shapes),
    ),
    draw=draw_columns,
    body=blocks.called,
    allowed=ALLOWED,
)


# ---- 05.2 by rows ----------------------------------------------------------------------------------------------------


def draw_rows(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [linear.rows(rng, n, "no bias") for n in (3, 2)],
        "bias": [linear.rows(rng, 3, "with a bias", bias=True)],
    }


ROW = Exercise(
    id="05.2",
    function="row",
    task="row(comm, x, weight, bias=None): a linear layer whose input is cut over the ranks.",
    criteria=(
        Criterion("basic", 3, "basic", right("y", otherwise="The parts x_r W_r^T, added up."), basic=True),
        Criterion("bias once", 2, "bias", right("y", "bias")),
        Criterion("gradients", 2, "basic", right("x", "weight")),
        Criterion("messages", 2, "basic", linear.one_sum_forward),
    ),
    draw=draw_rows,
    body=blocks.called,
    allowed=ALLOWED,
)


# ---- 05.3 by heads ---------------------------------------------------------------------------------------------------


def draw_heads(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [heads.draw(rng, 6, 3), heads.draw(rng, 4, 2)],
        "refused": [heads.draw(rng, 6, 4)],
    }


ATTENTION = Exercise(
    id="05.3",
    function="attention",
    task="attention(comm, x, qkv, out, heads): causal attention of which each rank computes its own heads.",
    criteria=(
        Criterion("basic", 3, "basic", first(right("y"), heads.shared), basic=True),
        Criterion("gradients", 2, "basic", right("x", "qkv", "out")),
        Criterion("messages", 2, "basic", heads.one_each_way),
        Criterion("refuses", 1, "refused", heads.refuses, explain=heads.explain_refusal),
    ),
    draw=draw_heads,
    body=blocks.called,
    allowed=ALLOWED,
    given={"column": blocks.given_column, "row": blocks.given_row},
    uses=("05.1", "05.2"),
)


# ---- 05.4 by vocabulary ----------------------------------------------------------------------------------------------


def draw_vocab(rng: random.Random, reduction: str = "mean") -> Mapping[str, Sequence[Case]]:
    def of(size: int, ranks: int, label: str, **more: Any) -> Case:
        return vocab.draw(rng, size, ranks, label, reduction=reduction, **more)

    return {
        "basic": [of(12, n, "all targets valid", backward=True) for n in (3, 2)],
        "large": [of(6, 2, "logits around 0 and 2000", spread=2000.0)],
        "ignored": [
            of(6, 2, "2 of 8 targets ignored", ignored=2),
            of(6, 2, "all targets ignored", ignored=vocab.TOKENS),
        ],
        "sizes": [of(7, 3, "3, 3 and 1 columns"), of(5, 2, "3 and 2 columns")],
    }


VOCAB = Exercise(
    id="05.4",
    function="vocab_loss",
    task="vocab_loss(comm, logits, targets, vocab): cross-entropy over logits of which each rank has its columns.",
    criteria=(
        Criterion("basic", 3, "basic", right("y"), basic=True),
        Criterion("gradient", 2, "basic", right("logits")),
        Criterion("messages", 2, "basic", vocab.few_numbers),
        Criterion("large logits", 1, "large", vocab.survives),
        Criterion("ignored targets", 2, "ignored", vocab.none_valid),
        Criterion("any V", 1, "sizes", right("y")),
    ),
    draw=draw_vocab,
    body=blocks.called,
    allowed=ALLOWED,
    given={"sum_ranks": blocks.given_sum_ranks},
    uses=("05.2",),
)


# ---- 05.5 by tokens --------------------------------------------------------------------------------------------------


def draw_sequence(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [sequence.draw(rng, 6, n) for n in (3, 2)],
        "sizes": [sequence.draw(rng, 7, 3), sequence.draw(rng, 5, 2)],
    }


SEQUENCE = Exercise(
    id="05.5",
    function="sequence_mlp",
    task="sequence_mlp(comm, x, gain, shift, up, down): a norm and a feed-forward layer, between which tokens are cut.",
    criteria=(
        Criterion("basic", 3, "basic", right("y"), basic=True),
        Criterion("gradients", 2, "basic", right("up", "down", "x")),
        Criterion("norm gradients", 2, "basic", sequence.norms_right),
        Criterion("messages", 2, "basic", sequence.two_each_way),
        Criterion("any S", 1, "sizes", sequence.right_tokens, explain=sequence.explain_tokens),
    ),
    draw=draw_sequence,
    body=blocks.called,
    allowed=ALLOWED,
    given={"copy_ranks": blocks.given_copy_ranks},
    uses=("05.1",),
)
EXERCISES = (COLUMN, ROW, ATTENTION, VOCAB, SEQUENCE)


# ---- variants, for instructors to draw: other tasks under the same number --------------------------------------------


def draw_all_seen(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [heads.draw(rng, 6, 3, causal=False), heads.draw(rng, 4, 2, causal=False)],
        "refused": [heads.draw(rng, 6, 4)],
    }


def draw_sums(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return draw_vocab(rng, "sum")


VARIANTS = {
    each.id: each
    for each in (
        replace(
            ATTENTION,
            id="05.3-all",
            task="attention(comm, x, qkv, out, heads): attention in which every token sees all, also those after it; "
            "each rank computes its own heads.",
            draw=draw_all_seen,
        ),
        replace(
            VOCAB,
            id="05.4-sum",
            task=f"{VOCAB.task} The sum of the losses of the targets that count, not their mean.",
            draw=draw_sums,
        ),
    )
}
"""To use one, assign it to a name in a private folder's checks: `VOCAB = ps05.VARIANTS["05.4-sum"]`."""
