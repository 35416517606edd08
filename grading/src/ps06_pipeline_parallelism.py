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
# # Assignment 06: pipeline parallelism
#
# Each rank has a stage, some consecutive layers, and the batch passes through in *M* micro-batches. Who does what when
# is a program: a list of actions for each of *P* ranks. You write programs, then the clock that says how long one
# takes, then what carries one out on real tensors. Lesson 06 has the pictures.
#
# An action is `Action(stage, kind, microbatch)`, or as text `2F0`. The kinds are F, forward; B, backward; and the two
# halves of B: I, the gradient of the stage's input, which the stage before waits for, and W, that of its weights, for
# which nobody waits. Here rank *r* has stage *r*, and micro-batches are numbered from 0.
#
# `check("06.1")` runs your function in processes of its own, with new numbers each time. `hint("06.1")` helps in four
# steps. A row of actions may be a list or a generator, of actions or of texts.

# %% tags=["locked", "setup"]
import torch

import minidist as md  # noqa: F401
from grading import check, hint, quiz, submit  # noqa: F401
from minidist.schedule import Action, Program, parse, reads, simulate, writes

# %% [markdown]
# ## A worked example: a program, and what follows from it
#
# Here is a program without any parallelism: a micro-batch goes all the way forward and all the way back before the next
# one begins. A program is order and nothing else. What depends on what follows from what actions read and write:
# `x[1, 0]` is what goes into stage 1 for micro-batch 0, `g[1, 0]` its gradient, and `act[1, 0]` what stage 1 keeps from
# forward for backward.


# %% tags=["locked", "worked-example"]
def one_at_a_time(rank, microbatches):
    row = []
    for m in range(microbatches):
        row += [Action(rank, "F", m), Action(rank, "B", m)]
    return row


def picture(rows):
    """Letters stand where an action begins, and F takes one column, B two, I and W one. Rank 0 is the first line."""
    program = Program.of(parse(",".join(map(str, row)))[0] for row in rows)
    timeline = simulate(program)
    for rank in range(program.ranks):
        line = ["."] * round(timeline.makespan)
        for span in timeline.lane(rank):
            line[round(span.start) : round(span.end)] = f"{span.action.kind:-<{round(span.seconds)}}"
        print("".join(line))
    print(f"{timeline.makespan:.0f} seconds, of which a rank stands still {timeline.idle_share:.0%}")


print("1B0 reads", *reads(Action(1, "B", 0), 3), "and writes", *writes(Action(1, "B", 0), 3))
picture([one_at_a_time(rank, 2) for rank in range(3)])

# %% [markdown]
# ## 06.1 All forward, then all backward (6 points)
#
# GPipe: a rank runs every micro-batch forward, and then every one backward. `gpipe(rank, ranks, microbatches)` is the
# row of one rank. `one_at_a_time` has the same actions; what is different is the order.
#
# Any order of the micro-batches is right, if it is the same one on all ranks.


# %%
def gpipe(rank, ranks, microbatches):
    """The actions of this rank: F of every micro-batch, then B of every micro-batch."""
    ### BEGIN SOLUTION
    return [Action(rank, kind, m) for kind in "FB" for m in range(microbatches)]
    ### END SOLUTION


# %%
check("06.1")

# %% [markdown]
# `picture([gpipe(rank, 4, 8) for rank in range(4)])` draws it.
#
# ## 06.2 One forward, one backward (8 points)
#
# GPipe has all *M* micro-batches in memory when the first gradient comes back. 1F1B runs only as many ahead as it takes
# until then. `one_f_one_b(rank, ranks, microbatches)` is the row of one rank:
#
# - warm-up: F, as often as there are ranks behind this one;
# - then F and B in turn, as long as there is an F left;
# - cool-down: B of all that is still in flight.
#
# Rank *r* never has more than *P* - *r* micro-batches between F and B, and the program takes no longer than GPipe's.
# There may be fewer micro-batches than ranks, or one.


# %%
def one_f_one_b(rank, ranks, microbatches):
    """The actions of this rank in 1F1B."""
    ### BEGIN SOLUTION
    forward, backward = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FB")
    ahead = min(ranks - 1 - rank, microbatches)
    row = forward[:ahead]
    for f, b in zip(forward[ahead:], backward):  # noqa: B905
        row += [f, b]
    return row + backward[microbatches - ahead :]
    ### END SOLUTION


# %%
check("06.2")

# %% [markdown]
# ## 06.3 When does an action start? (8 points)
#
# How long a program takes follows from one rule: an action starts as soon as its rank is free and everything that it
# reads is there. `start_times(program, reads, writes, seconds, comm)` returns a dict, the start of every action.
#
# - `program[rank]` is a list of actions, done in this order, one at a time. `seconds(action)` is how long one lasts.
# - `reads(action)` and `writes(action)` are lists of names. What an action writes is there when it has ended; on
#   another rank `comm` seconds later. Sending keeps nobody busy. What no action writes is data, and there from the
#   start.
# - Time starts at 0. Where no rank can go on although actions are left, raise a ValueError.
#
# Kinds, stages and schedules do not appear in the rule, and a rank may have several stages.


# %%
def start_times(program, reads, writes, seconds, comm):
    """{action: when it starts, in seconds}."""
    ### BEGIN SOLUTION
    starts, made, free = {}, {}, [0.0] * len(program)
    written = {name for row in program for action in row for name in writes(action)}
    waiting = [list(row) for row in program]
    while any(waiting):
        ready = [r for r, row in enumerate(waiting) if row and all(n in made for n in reads(row[0]) if n in written)]
        if not ready:
            raise ValueError(f"no rank can go on: {[str(row[0]) for row in waiting if row]}")
        for rank in ready:
            action = waiting[rank].pop(0)
            there = [made[name] for name in reads(action) if name in written]
            starts[action] = max([free[rank], *(at + (comm if home != rank else 0.0) for at, home in there)])
            free[rank] = starts[action] + seconds(action)
            made.update((name, (free[rank], rank)) for name in writes(action))
    return starts
    ### END SOLUTION


# %%
check("06.3")

# %% [markdown]
# ## 06.4 Carry it out (12 points)
#
# `run_actions(comm, actions, stage, xs, targets, loss_fn)` carries out one rank's actions, of the kinds F and B. It
# knows no schedule: it goes through the actions, and each says what to do.
#
# - `stage(x)` is this rank's module. `xs[m]` `[T, D]` is micro-batch *m* on rank 0; on the other ranks it is a tensor
#   of the right shape and type to receive into. What a stage returns has its input's shape.
# - F calls the stage, and sends what it returns to the next rank. B receives the gradient of that from the next rank,
#   goes back through the stage, and sends the gradient of `x` to the rank before. Autograd follows nothing through a
#   message: what arrives asks for its gradient by `requires_grad_()`.
# - On the last rank `loss_fn(output, targets[m])` is the mean over this micro-batch's targets that are not -100. The
#   loss is the mean over those of the whole batch, and there may be more of them in one micro-batch than in another.
#   The last rank returns it; the others may return anything. `targets` is None on the other ranks.
# - The weights' gradients add up in `grad`. After B nothing of a micro-batch may be left in memory.
# - Use `comm.isend(x, dst)` and `comm.irecv(x, src)`. Here, as on a cluster, a send is over when its receiver asked for
#   it. A handle holds the tensor that it sends: wait for it, and let go of it, once the gradient of that tensor is
#   here.


# %%
def run_actions(comm, actions, stage, xs, targets, loss_fn):
    """Forward and backward of this rank's stage as the actions say. Returns the loss, on the last rank."""
    ### BEGIN SOLUTION
    rank, last = comm.rank, comm.size - 1
    tokens = [(target != -100).sum() for target in targets or ()]
    kept, returning, total = {}, [], 0.0
    for _, kind, m in actions:
        if kind == "F":
            x = xs[m] if rank == 0 else comm.irecv(xs[m], rank - 1).wait().requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[m]) * tokens[m] / sum(tokens)
                total += y.detach()
            kept[m] = x, y, None if rank == last else comm.isend(y.detach(), rank + 1)
        else:
            x, y, sent = kept.pop(m)
            grad = None
            if rank < last:
                grad = comm.irecv(torch.empty_like(y), rank + 1).wait()
                sent.wait()
            torch.autograd.backward(y, grad)
            if rank > 0:
                returning.append(comm.isend(x.grad, rank - 1))
    for handle in returning:
        handle.wait()
    return total
    ### END SOLUTION


# %%
check("06.4")

# %% [markdown]
# ## 06.5 Weight gradients later (9 points)
#
# In the cool-down of 1F1B a rank waits for gradients and has nothing to do. If B is cut in two, W can be put off until
# then. `zero_bubble(row, rank, ranks)` gets the rank's row of 1F1B and returns it with I in the place of each B, and W
# of every micro-batch somewhere after its I.
#
# - With F = I = W the program takes no longer than 3 *M* + *P* - 1, so that the bubble is
#   $(P-1)/(3M+P-1)$ and no longer $(P-1)/(M+P-1)$.
# - A micro-batch is in memory from F until its W. No rank may have more of them than 1F1B has on rank 0: at most *P*.
#
# Rank 0 can put off nothing, since it has *P* in flight anyway. How many can rank *r* put off?


# %%
def zero_bubble(row, rank, ranks):
    """This rank's row of 1F1B, with I and W for each B."""
    ### BEGIN SOLUTION
    split, put_off = [], []
    for action in row:
        if action.kind == "F":
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        put_off.append(action._replace(kind="W"))
        if len(put_off) > rank:
            split.append(put_off.pop(0))
    return split + put_off
    ### END SOLUTION


# %%
check("06.5")

# %% [markdown]
# `picture([zero_bubble(one_f_one_b(rank, 4, 8), rank, 4) for rank in range(4)])` draws it; compare it with 1F1B's.
#
# ## 06.6 In words (3 points)
#
# A colleague trains with *P* = 8 stages and *M* = 8 micro-batches under GPipe, and wants to change to 1F1B because of
# the bubble. How large is the bubble, and what does 1F1B do to it? What does 1F1B give that makes a smaller bubble
# possible all the same? Name one more way to make it smaller, and what that costs.

# %% [markdown] tags=["in-words", "by-hand", "points=3"]
# === BEGIN MARK SCHEME ===
# 1 point: 7/15, 47 % of the time, (P - 1) / (M + P - 1), and 1F1B leaves it as it is. 1 point: it holds at most P - r
# micro-batches in memory and not M, so M can be raised at the same memory (M = 32: 7/39, 18 %), as long as a
# micro-batch stays large enough for the chip to be efficient. 1 point, one of: interleaving V stages a rank divides the
# idle time by V and sends (PV-1)/(P-1) times as many messages; splitting backward and putting off W, which holds more
# in memory on later ranks and wants F, I and W of similar length; fewer stages, each of which has to fit.
# === END MARK SCHEME ===

# %% [markdown]
# ## The test

# %%
quiz("06")

# %%
submit("06")
