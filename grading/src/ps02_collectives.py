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
# # Assignment 02: the ring, from messages
#
# Four functions, each the one before and one idea more, until an all-reduce stands on nothing but `isend` and `irecv`.
# Lesson 02 has the pictures.
#
# What a function may use is said above it. `comm` is a Comm as in the lessons: `comm.rank` is *r*, `comm.size` is *n*,
# and the right neighbour of rank *r* in the ring is *(r + 1) % n*.
#
# `check("02.1")` runs your function on real ranks, with inputs that are drawn anew each time. Its messages pass through
# the checker, which hands one on when both sides have asked for it: a send is over when its receive has been posted.
# A program that only works because somebody buffers stands still there, and you are told who waits for whom.
# `hint("02.1")`, from the same package, helps in four steps.

# %% tags=["locked", "setup"]
import torch

import minidist as md
from grading import check, hint, quiz, submit  # noqa: F401

# %% [markdown]
# ## A worked example: broadcast along a ring
#
# Rank 0 has `x`, everyone wants it. Rank 0 sends it to rank 1, which passes it on to rank 2, and so on; the last one
# keeps it. Rank *n - 1* must not send: rank 0 has it already, and would never receive it.


# %% tags=["locked", "worked-example"]
def ring_broadcast(comm, x):
    """Rank 0's x [N] on every rank, as a new tensor. Everyone's x has the same length and type."""
    result = x.clone()
    if comm.rank > 0:
        comm.irecv(result, comm.rank - 1).wait()
    if comm.rank < comm.size - 1:
        comm.isend(result, comm.rank + 1).wait()
    return result


def try_broadcast(world):
    return ring_broadcast(world, torch.arange(3) + 10 * world.rank).tolist()


md.launch(try_broadcast, ranks=4)

# %% [markdown]
# ## 02.1 One step of a ring (4 points)
#
# The same tools, one thing more: here everyone sends *and* receives. If all ranks waited for their send first, nobody
# would ever receive. So both are begun, and only then is one of them waited for. Fill in the other half.
#
# `shift(comm, x)`: send `x` `[N]` to the right neighbour and return what the left neighbour sent, in a new tensor of
# the same type. `x` stays as it is. There are at least two ranks.
#
# You may use: `comm.rank`, `comm.size`, `comm.isend`, `comm.irecv`, tensor operations.


# %%
def shift(comm, x):
    """What the left neighbour has as x."""
    right = (comm.rank + 1) % comm.size
    sending = comm.isend(x, right)
    ### BEGIN SOLUTION
    left = (comm.rank - 1) % comm.size
    received = torch.empty_like(x)
    receiving = comm.irecv(received, left)
    receiving.wait()
    sending.wait()
    return received
    ### END SOLUTION


# %%
check("02.1")

# %% [markdown]
# ## 02.2 All-gather (8 points)
#
# `all_gather(comm, x)`: `x` is `[K]`, with the same *K* on every rank. Return everyone's `x`, in the order of the
# ranks: `[n K]`, in a new tensor of the same type.
#
# Each rank makes *n - 1* steps, and in each of them passes one piece of *K* elements on. A piece that came in one step
# leaves in the next.
#
# You may use: `comm.rank`, `comm.size`, `comm.isend`, `comm.irecv`, tensor operations.


# %%
def all_gather(comm, x):
    """Everyone's x [K], one after the other: [n K]."""
    ### BEGIN SOLUTION
    rank, n = comm.rank, comm.size
    pieces = [torch.empty_like(x) for _ in range(n)]
    pieces[rank].copy_(x)
    for step in range(1, n):
        receiving = comm.irecv(pieces[(rank - step) % n], (rank - 1) % n)
        sending = comm.isend(pieces[(rank - step + 1) % n], (rank + 1) % n)
        receiving.wait()
        sending.wait()
    return torch.cat(pieces)
    ### END SOLUTION


# %%
check("02.2")

# %% [markdown]
# ## 02.3 Reduce-scatter (10 points)
#
# `reduce_scatter(comm, x)`: `x` is `[N]` on every rank, with any *N*. Return this rank's slice of the sum over the
# ranks, in a new tensor of the same type: `[ceil(N/n)]`, where the last ones may be shorter or empty (*N* = 5, *n* = 4:
# 2, 2, 1, 0). `x` stays as it is.
#
# Each rank makes *n - 1* steps, and in each of them passes one partial sum of one slice on. The slice of rank *r* sets
# out at rank *r + 1*, and everyone whom it passes adds to it.
#
# You may use: `comm.rank`, `comm.size`, `comm.isend`, `comm.irecv`, tensor operations, and `md.partition(N, n)`, which
# cuts.


# %%
def reduce_scatter(comm, x):
    """This rank's slice of the sum of x [N] over the ranks."""
    ### BEGIN SOLUTION
    rank, n = comm.rank, comm.size
    partial = x.clone()
    pieces = [partial[part] for part in md.partition(len(x), n)]
    for step in range(1, n):
        own = pieces[(rank - step - 1) % n]
        received = torch.empty_like(own)
        receiving = comm.irecv(received, (rank - 1) % n)
        sending = comm.isend(pieces[(rank - step) % n], (rank + 1) % n)
        receiving.wait()
        sending.wait()
        own += received
    return pieces[rank].clone()
    ### END SOLUTION


# %%
check("02.3")

# %% [markdown]
# ## 02.4 All-reduce (8 points)
#
# `all_reduce(comm, x)`: `x` is `[N]` on every rank, with any *N*. Return the sum over the ranks, `[N]`, in a new tensor
# of the same type. `x` stays as it is.
#
# It is your two functions, one after the other. Mind that `all_gather` wants equally long pieces: what can be done to
# `x` first, so that `reduce_scatter` gives such, and what then to the result? (The check puts right functions in the
# place of your `reduce_scatter` and `all_gather`, so that a mistake in them does not count twice.)
#
# You may use: `reduce_scatter`, `all_gather`, tensor operations.


# %%
def all_reduce(comm, x):
    """The sum of x [N] over the ranks."""
    ### BEGIN SOLUTION
    missing = -len(x) % comm.size
    full = torch.cat([x, x.new_zeros(missing)])
    return all_gather(comm, reduce_scatter(comm, full))[: len(x)]
    ### END SOLUTION


# %%
check("02.4")

# %% [markdown]
# ## 02.5 In words (3 points)
#
# Someone's `reduce_scatter` waits for its `isend` before it calls `irecv`, and on their laptop it works for small
# tensors. What happens with large ones, why, and why does the check see it with small ones too?

# %% [markdown] tags=["in-words", "by-hand", "points=3"]
# === BEGIN MARK SCHEME ===
# 1 point: with large tensors all ranks wait for ever. 1 point: a small message is copied aside by the library, so the
# send returns before anyone receives; a large one is not. 1 point: the check completes a send only when its receive has
# been posted, so that nothing is ever copied aside.
# === END MARK SCHEME ===

# %% [markdown]
# ## The test

# %%
quiz("02")

# %%
submit("02")
