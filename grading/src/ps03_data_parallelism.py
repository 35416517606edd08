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
# # Assignment 03: data parallelism in four steps
#
# Every rank has a copy of the model and a part of the batch. What has to be equal after each step are the gradients.
# You average them, first in the simplest way, then in buckets, then during the backward pass, and last over several
# micro-batches. Lesson 03 has the pictures.
#
# `check("03.1")` runs your function on real ranks, with new numbers each time. It sees every all-reduce: how large it
# is, in which order they come, and how far the backward pass was. `hint("03.1")` helps in four steps.
#
# In all of it you may use `comm.rank`, `comm.size`, `comm.all_reduce` (also with `op="mean"` and `async_op=True`), and
# everything of torch that does not communicate.

# %% tags=["locked", "setup"]
import torch
import torch.nn.functional as F
from torch import nn

import minidist as md
from grading import check, hint, quiz, submit  # noqa: F401

# %% [markdown]
# ## A worked example: are the replicas equal?
#
# An all-reduce with `op="max"` and one with `op="min"` agree exactly where all ranks have the same number. Parameters
# are visited in the order of `module.parameters()`, which is the same on all ranks, so the all-reduces meet.


# %% tags=["locked", "worked-example"]
def replicas_equal(module, comm):
    """Whether every parameter has the same values on all ranks. Every rank calls."""
    equal = True
    for parameter in module.parameters():
        largest = comm.all_reduce(parameter.detach().clone(), op="max")
        smallest = comm.all_reduce(parameter.detach().clone(), op="min")
        equal = equal and torch.equal(largest, smallest)
    return equal


def try_replicas(world):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    same = replicas_equal(module, world)
    with torch.no_grad():
        module.bias += world.rank
    return same, replicas_equal(module, world)


md.launch(try_replicas, ranks=2)

# %% [markdown]
# ## 03.1 One all-reduce for each parameter (7 points)
#
# `average_gradients(module, comm)` is called on every rank after the backward pass. It replaces `parameter.grad` by the
# average over the ranks, for every parameter that is trained. Nothing is returned.
#
# - A parameter that this rank's loss did not reach has `grad` None. It takes part with zeros, and has the average
#   afterwards, as on the other ranks. (You need not care for one that no rank has used.)
# - Frozen parameters (`requires_grad` is False) are left out, and weights stay as they are.
# - Each gradient is averaged once, and in its own type.


# %%
def average_gradients(module, comm):
    """Replace every gradient by its average over the ranks."""
    ### BEGIN SOLUTION
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        comm.all_reduce(parameter.grad, op="mean")
    ### END SOLUTION


# %%
check("03.1")

# %% [markdown]
# ## 03.2 Buckets (8 points)
#
# `average_in_buckets(module, comm, elements)` does the same with fewer messages: gradients share flat tensors, and one
# all-reduce carries a whole bucket.
#
# - Fill the buckets from the last parameter of `module.parameters()` to the first: a backward pass meets them in this
#   order. A bucket has at most `elements` elements; a parameter that no longer fits begins a new one, and one that is
#   larger than that has a bucket to itself.
# - A bucket has one type. Fill those of each type on their own.
# - Gradients may have any shape, also none at all, and need not be contiguous. Parameters with `grad` None take part as
#   in 03.1; here all are trained.


# %%
def average_in_buckets(module, comm, elements):
    """Replace every gradient by its average over the ranks, one all-reduce for each bucket."""
    ### BEGIN SOLUTION
    buckets, filling = [], {}
    for parameter in reversed(list(module.parameters())):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket = filling.get(parameter.dtype)
        if bucket is None or sum(p.numel() for p in bucket) + parameter.numel() > elements:
            bucket = filling[parameter.dtype] = []
            buckets.append(bucket)
        bucket.append(parameter)
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        comm.all_reduce(flat, op="mean")
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
    ### END SOLUTION


# %%
check("03.2")

# %% [markdown]
# ## 03.3 Buckets that leave during the backward pass (9 points)
#
# `overlap(module, comm, elements)` is called once, before training. It registers hooks
# (`parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` as soon as `parameter.grad` is complete)
# and returns a function `finish`. After every backward pass `finish()` is called, and then every `grad` is the average
# over the ranks. Between two steps the gradients are set to None.
#
# - Buckets as in 03.2; all parameters are float32 and trained.
# - A bucket leaves in the hook of the gradient that fills it: `comm.all_reduce(flat, op="mean", async_op=True)` begins
#   it and returns a handle. `finish` waits. A hook that waits would stop the backward pass.
# - Ranks may meet the layers in different orders. Buckets leave in one fixed order all the same, each one after those
#   before it.
# - A parameter that this rank's loss did not reach gets no hook call. Its bucket leaves in `finish`, with zeros in its
#   place, and afterwards its `grad` is the average.


# %%
def overlap(module, comm, elements):
    """From now on average gradients during the backward pass. Returns finish, to be called after each one."""
    ### BEGIN SOLUTION
    buckets = []
    for parameter in reversed(list(module.parameters())):
        if not buckets or sum(p.numel() for p in buckets[-1]) + parameter.numel() > elements:
            buckets.append([])
        buckets[-1].append(parameter)
    arrived, under_way = set(), []

    def send_next():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[len(under_way)]]
        flat = torch.cat([grad.flatten() for grad in grads])
        under_way.append(comm.all_reduce(flat, op="mean", async_op=True))

    def hook(parameter):
        arrived.add(parameter)
        while len(under_way) < len(buckets) and arrived.issuperset(buckets[len(under_way)]):
            send_next()

    def finish():
        while len(under_way) < len(buckets):
            send_next()
        for bucket, handle in zip(buckets, under_way, strict=True):
            flat = handle.wait()
            for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = piece.view_as(parameter).clone()
        arrived.clear()
        under_way.clear()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return finish
    ### END SOLUTION


# %%
check("03.3")

# %% [markdown]
# ## 03.4 Accumulation, and one rule for tokens (8 points)
#
# A batch too large for one pass comes in micro-batches, whose gradients add up locally.
# `accumulate(module, comm, micro_batches)` runs a whole step: afterwards every `grad` is that of
#
# $$\frac{\text{sum of the losses of all valid tokens of all micro-batches on all ranks}}{\text{their number}}$$
#
# - `micro_batches` is this rank's list of pairs `(inputs, targets)`, both `[B, S]`; `module(inputs)` gives logits
#   `[B, S, V]`. A target of -100 is padding: no valid token. The loss of a token is
#   `F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")`, summed.
# - Ranks and micro-batches may have different numbers of valid tokens, and a rank may have none at all.
# - The gradients are averaged once in the whole step, with `average_gradients` from 03.1. Small all-reduces, of counts,
#   are free. All `grad` are None at the start. (The check puts a right function in the place of your
#   `average_gradients`.)


# %%
def accumulate(module, comm, micro_batches):
    """The gradient of the mean loss over all valid tokens of all ranks and micro-batches, averaged once."""
    ### BEGIN SOLUTION
    valid = sum((targets != -100).sum() for _, targets in micro_batches)
    tokens = comm.all_reduce(torch.as_tensor(valid).clone())
    for inputs, targets in micro_batches:
        logits = module(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
        (comm.size * loss / tokens).backward()
    average_gradients(module, comm)
    ### END SOLUTION


# %%
check("03.4")

# %% [markdown]
# ## 03.5 In words (3 points)
#
# With four ranks your training gives the same losses as on one rank with a batch four times as large. A colleague
# replaces the average of gradients by an average of the *weights* after each optimizer step, with AdamW, and the
# replicas are equal as well. Is it the same training? And which bytes does each of the two send per step?

# %% [markdown] tags=["in-words", "by-hand", "points=3"]
# === BEGIN MARK SCHEME ===
# 1 point: not the same. 1 point: AdamW's step is no linear function of the gradient (it divides by the root of the
# second moment), so the average of steps is not the step of the average, and the moments of the replicas differ; with
# plain SGD from equal weights it would be. 1 point: the same bytes, a number for each parameter, in the same type.
# === END MARK SCHEME ===

# %% [markdown]
# ## The test

# %%
quiz("03")

# %%
submit("03")
