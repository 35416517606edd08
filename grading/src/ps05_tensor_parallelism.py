# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Assignment 05: tensor parallelism
#
# One layer is cut over the ranks: by columns, by rows, by heads, by vocabulary, and at the end the activations between
# the layers as well. Each time there are two questions: what does forward send, and what does backward? Lesson 05 has
# the pictures.
#
# What is cut is cut as `md.partition(N, n)` cuts. A cut dim is written with a stroke: `[O/n, I]` is rank *r*'s rows of
# a weight `[O, I]`. All ranks compute one and the same loss, so a gradient is that of one loss, not of *n* of them.
#
# `check("05.1")` runs your function on real ranks, forward and backward, with new numbers each time, and sees every
# collective of either pass. `hint("05.1")` helps in four steps.
#
# In all of it you may use `comm.rank`, `comm.size`, `comm.all_reduce`, `comm.all_gather`, `comm.reduce_scatter`,
# `md.partition`, and everything of torch that does not communicate.

# %% tags=["locked", "setup"]
import torch
import torch.nn.functional as F

import minidist as md
from grading import check, hint, quiz, submit  # noqa: F401

# %% [markdown]
# ## A worked example: a collective that autograd can go back through
#
# To autograd, what comes out of a `comm` call is a tensor that fell from the sky. Who wants gradients says what becomes
# of them, in a `torch.autograd.Function`: `forward` gets the inputs, `backward` the gradient of the output, and returns
# a gradient for each input, None for what is no tensor.
#
# Here forward takes this rank's rows of an `x` that is the same everywhere. Every rank's rows go into the one loss, and
# so the gradient of all of `x` is made of everyone's: backward is an all-gather. Such a forward and backward are called
# a conjugate pair.


# %% tags=["locked", "worked-example"]
class OwnRows(torch.autograd.Function):
    """x [N, ...], the same on all ranks -> this rank's rows [N/n, ...]."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x[md.partition(len(x), comm.size)[comm.rank]].clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_gather(grad), None


def try_rows(world):
    x = torch.arange(4.0, requires_grad=True)
    rows = OwnRows.apply(x, world)
    (rows * (world.rank + 1)).sum().backward()
    return x.grad.tolist()


md.launch(try_rows, ranks=2)

# %% [markdown]
# ## 05.1 By columns (9 points)
#
# `column(comm, x, weight, bias)` is rank *r*'s part of a linear layer whose output is cut: `x` `[..., I]` is the same
# on all ranks, `weight` is `[O/n, I]`, `bias` `[O/n]` or None, and the result is `[..., O/n]`, this rank's columns.
# Forward needs no message.
#
# But every rank's columns use all of `x`. What does backward need, so that `x` has its whole gradient, and weight and
# bias have theirs? `Copy` is that pair, half of it written; `copy_ranks` is its name for the later exercises.
#
# `x` may have any dims before its last.


# %%
class Copy(torch.autograd.Function):
    """x, the same on all ranks, for a use that is another one on each."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return ctx.comm.all_reduce(grad.clone()), None
        ### END SOLUTION


def copy_ranks(comm, x):
    return Copy.apply(x, comm)


def column(comm, x, weight, bias=None):
    """x [..., I] -> this rank's columns [..., O/n] of the output."""
    ### BEGIN SOLUTION
    return F.linear(copy_ranks(comm, x), weight, bias)
    ### END SOLUTION


# %%
check("05.1")

# %% [markdown]
# ## 05.2 By rows (9 points)
#
# `row(comm, x, weight, bias)` is the layer that follows: its input is cut, as the layer before left it. `x` is
# `[..., I/n]`, `weight` `[O, I/n]`, `bias` `[O]` the same on all ranks, or None. The result `[..., O]` is whole, and
# the same on all ranks.
#
# - Each rank's product is a part of every output: forward sums the parts, once. Mind that the bias is in the result
#   once, and that every rank has its whole gradient.
# - Backward sends nothing. Why not? `Sum` is the pair, and `sum_ranks` its name for the later exercises.


# %%
class Sum(torch.autograd.Function):
    """The sum of everyone's x, on all ranks."""

    @staticmethod
    def forward(ctx, x, comm):
        ### BEGIN SOLUTION
        return comm.all_reduce(x.clone())
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


def sum_ranks(comm, x):
    return Sum.apply(x, comm)


def row(comm, x, weight, bias=None):
    """This rank's features x [..., I/n] -> the whole output [..., O], on all ranks."""
    ### BEGIN SOLUTION
    y = sum_ranks(comm, F.linear(x, weight))
    return y if bias is None else y + bias
    ### END SOLUTION


# %%
check("05.2")

# %% [markdown]
# ## 05.3 By heads (8 points)
#
# Heads of an attention know nothing of one another, so each rank computes some of them, and nobody else's:
# `attention(comm, x, qkv, out, heads)` is causal self-attention without biases. `x` `[B, S, D]` is the same on all
# ranks, and so is the result.
#
# - `qkv` `[3D, D]` and `out` `[D, D]` are whole, as they came from a file. The rows of `qkv` are first the queries of
#   all heads, then the keys, then the values; a head has *K* = *D* / heads rows of each third, and its *K* columns of
#   `out`. Rank *r* uses what belongs to its heads, `md.partition(heads, n)[r]`, and nothing else.
# - One all-reduce in forward and one in backward are enough. You may use `column` and `row` from above, and
#   `F.scaled_dot_product_attention(q, k, v, is_causal=True)`, where q, k and v are `[B, heads/n, S, K]`. (The check
#   puts right functions in the place of your `column` and `row`.)
# - Where *n* does not divide the heads, raise a ValueError that names both numbers, before anything is sent.


# %%
def attention(comm, x, qkv, out, heads):
    """x [B, S, D] -> causal attention [B, S, D], of which this rank computes heads/n heads."""
    ### BEGIN SOLUTION
    if heads % comm.size:
        raise ValueError(f"{heads} heads cannot be divided among {comm.size} ranks")
    size, own = x.shape[-1] // heads, md.partition(heads, comm.size)[comm.rank]
    mine = slice(own.start * size, own.stop * size)
    weight = torch.cat([third[mine] for third in qkv.chunk(3)])
    q, k, v = (
        part.unflatten(-1, (-1, size)).transpose(1, 2) for part in column(comm, x, weight, None).chunk(3, dim=-1)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return row(comm, y.transpose(1, 2).flatten(2), out[:, mine], None)
    ### END SOLUTION


# %%
check("05.3")

# %% [markdown]
# ## 05.4 By vocabulary (11 points)
#
# The last layer of a language model is its widest, and its logits are the largest tensor there is. Cut by columns, they
# need never be brought together.
#
# `vocab_loss(comm, logits, targets, vocab)` is the mean cross-entropy, the same on every rank. `logits` `[T, V/n]` are
# this rank's columns, `md.partition(vocab, n)[rank]`, and `targets` `[T]` the same on all ranks, numbers in the whole
# vocabulary. The loss of a token is
#
# $$\log \sum_j e^{z_j} - z_\text{target}.$$
#
# - What travels is a number or three for each token.
# - Logits may be large: before the exponential the largest of the token's logits is subtracted, the largest of all
#   ranks (`op="max"`; no gradient needs to come back through it).
# - A target of -100 is padding: it has no loss, and the mean is over the others. If there are none the loss is 0.
# - For sums that gradients come back through you have `sum_ranks(comm, x)` from 05.2. (The check puts a right one in
#   the place of yours.)


# %%
def vocab_loss(comm, logits, targets, vocab):
    """The mean cross-entropy of targets [T] under logits [T, V/n], of which no rank has all."""
    ### BEGIN SOLUTION
    own = md.partition(vocab, comm.size)[comm.rank]
    most = comm.all_reduce(logits.detach().amax(-1), op="max")
    shifted = logits - most[:, None]
    total = sum_ranks(comm, shifted.exp().sum(-1))
    here = (targets >= own.start) & (targets < own.stop)
    index = torch.where(here, targets - own.start, 0)
    target = sum_ranks(comm, torch.where(here, shifted.gather(-1, index[:, None])[:, 0], 0.0))
    valid = targets != -100
    return torch.where(valid, total.log() - target, 0.0).sum() / valid.sum().clamp(min=1)
    ### END SOLUTION


# %%
check("05.4")

# %% [markdown]
# ## 05.5 By tokens (10 points)
#
# Between the cut layers everything is still there *n* times: norms are computed by every rank for all tokens. Sequence
# parallelism cuts the tokens there. An all-reduce is a reduce-scatter and an all-gather; now the norm stands between
# the two, and not a byte more is sent.
#
# `sequence_mlp(comm, x, gain, shift, up, down)` is a layer norm, `up`, gelu and `down`, without biases. `x` `[S/n, D]`
# are this rank's tokens, cut as `md.partition(S, n)` cuts, and so is the result. `gain` and `shift` `[D]`, of the norm,
# are the same on all ranks. `up` `[F/n, D]` is cut by columns, `down` `[D, F/n]` by rows.
#
# - The norm sees this rank's tokens, `F.layer_norm(h, gain.shape, gain, shift)`. `up` sees all of them: `Gather` brings
#   them together. After `down` the ranks' parts are added and cut: `Scatter`.
# - Write both pairs. What is gathered is used by other features on each rank: what does its backward have to do? And
#   what does `Scatter`'s need, whose forward hands every rank a piece?
# - `gain` and `shift` are the same on all ranks, and used for other tokens on each. You have met that: `copy_ranks`, of
#   which the check puts a right one in the place of yours.


# %%
class Gather(torch.autograd.Function):
    """This rank's tokens [S/n, ...] -> all tokens [S, ...]."""

    @staticmethod
    def forward(ctx, x, comm):
        ### BEGIN SOLUTION
        ctx.comm = comm
        return comm.all_gather(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return ctx.comm.reduce_scatter(grad), None
        ### END SOLUTION


class Scatter(torch.autograd.Function):
    """Parts of a sum over the ranks, [S, ...] -> this rank's tokens of the sum [S/n, ...]."""

    @staticmethod
    def forward(ctx, x, comm):
        ### BEGIN SOLUTION
        ctx.comm = comm
        return comm.reduce_scatter(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return ctx.comm.all_gather(grad), None
        ### END SOLUTION


def sequence_mlp(comm, x, gain, shift, up, down):
    """down(gelu(up(norm(x)))) for this rank's tokens x [S/n, D]."""
    ### BEGIN SOLUTION
    h = F.layer_norm(x, gain.shape, copy_ranks(comm, gain), copy_ranks(comm, shift))
    h = F.gelu(F.linear(Gather.apply(h, comm), up))
    return Scatter.apply(F.linear(h, down), comm)
    ### END SOLUTION


# %%
check("05.5")

# %% [markdown]
# ## 05.6 In words (3 points)
#
# A colleague wants to cut each layer of a model over 16 machines of 8 chips, 128 ranks, because then it needs the least
# memory. How often does a layer of attention and feed-forward have to wait for all ranks, in a step? Why can that not
# be hidden as data parallelism hides its all-reduce? And what would you propose?

# %% [markdown] tags=["in-words", "by-hand", "points=3"]
# === BEGIN MARK SCHEME ===
# 1 point: four times, two all-reduces in forward (after attention, after the feed-forward layer) and two in backward,
# or the all-gathers and reduce-scatters in their place. 1 point: what follows needs the sum at once, so the chips stand
# still meanwhile, and between machines links are ten times slower or worse; gradients of data parallelism are needed
# only at the end of the step. 1 point: tensor parallelism inside a machine, over 8 chips at most, and data parallelism,
# ZeRO or stages of layers between machines.
# === END MARK SCHEME ===

# %% [markdown]
# ## The test

# %%
quiz("05")

# %%
submit("05")
