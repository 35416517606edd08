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
# # Assignment 04: ZeRO, the three stages
#
# Data parallelism keeps everything *n* times: weights, gradients and optimizer state. You cut them into *n* slices, one
# after the other: first the state, then the gradients, then the weights themselves. The training does not change, not
# by a digit. Lesson 04 has the pictures.
#
# What is cut is cut as `md.partition(N, n)` cuts: slices of ceil(*N*/*n*) elements, the last ones shorter or empty.
#
# | stage | rests in slices | what moves in a step, in (*n* - 1)/*n* of the model |
# |---|---|---|
# | 1 | optimizer state | 2 |
# | 2 | and gradients | 2 |
# | 3 | and weights | 3 |
#
# `check("04.1")` runs your function on real ranks, with new numbers each time. It sees every collective, how large it
# is, and when it comes; and it sees which tensors are still in memory. `hint("04.1")` helps in four steps.
#
# In all of it you may use `comm.rank`, `comm.size`, `comm.all_reduce`, `comm.all_gather`, `comm.reduce_scatter` (the
# reductions also with `op="mean"`), `md.partition`, and everything of torch that does not communicate.

# %% tags=["locked", "setup"]
import torch

import minidist as md
from grading import check, hint, quiz, submit  # noqa: F401

# %% [markdown]
# ## A worked example: a tensor that rests in slices
#
# Everyone has the whole weight, keeps a slice, and the whole can go. When it is needed an all-gather brings it back:
# the same numbers in the same order, whatever the length. The sum of what rests on the ranks is one copy, not *n*.


# %% tags=["locked", "worked-example"]
def own_slice(comm, x):
    """This rank's slice of x [N], in memory of its own: a view would keep all of x alive."""
    return x[md.partition(len(x), comm.size)[comm.rank]].clone()


def try_slices(world):
    whole = torch.arange(7.0)
    rests = own_slice(world, whole)
    del whole
    return len(rests), world.all_gather(rests).tolist()


md.launch(try_slices, ranks=3)

# %% [markdown]
# ## 04.1 Stage 1: the optimizer's state in slices (9 points)
#
# `stage1_step(comm, weight, grad, momentum, lr, mu)` is one step of SGD with momentum,
#
# $$v \leftarrow \mu v + g, \qquad w \leftarrow w - \mathrm{lr} \cdot v,$$
#
# where *g* is the average of `grad` over the ranks.
#
# - `weight` `[N]` is whole, and the same on all ranks. `grad` `[N]` is this rank's own. `momentum` is *v*, of which
#   this rank has its slice only, `md.partition(N, n)[rank]`.
# - Afterwards every rank's `weight` is the whole new one, and its `momentum` its new slice: both are changed in place,
#   and nothing is returned.
# - Each rank updates its slice. What moves is 2 (*n* - 1)/*n* *N* elements, as in data parallelism.


# %%
def stage1_step(comm, weight, grad, momentum, lr, mu):
    """A step of SGD whose momentum is this rank's slice. weight [N] and momentum are changed in place."""
    ### BEGIN SOLUTION
    mine = weight[md.partition(len(weight), comm.size)[comm.rank]]
    momentum *= mu
    momentum += comm.reduce_scatter(grad, op="mean")
    weight.copy_(comm.all_gather(mine - lr * momentum))
    ### END SOLUTION


# %%
check("04.1")

# %% [markdown]
# ## 04.2 Stage 2: gradients in slices (9 points)
#
# `shard_gradients(module, comm, shards)` is called once, before training. It registers hooks
# (`parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` as soon as `parameter.grad` is complete)
# and returns a function `finish`, which is called after every backward pass.
#
# - `shards` is a list with a flat tensor for each parameter, in the order of `module.parameters()`: this rank's slice
#   of the flattened gradient. To it your hooks add this rank's slice of the average over the ranks. Slices are set to
#   zero between two steps, not between the micro-batches of a step: these add up.
# - A gradient is reduced in its hook, and then it goes: `parameter.grad` becomes None, and nothing else holds it. So at
#   no time there are more than one or two whole gradients. It is reduced once for each micro-batch, since the whole sum
#   would need a place to rest.
# - Reductions are paired by their order. All ranks meet the layers from the last parameter to the first, but one that
#   a rank's loss did not reach gets no hook call there. It takes part with zeros, in its turn, and at the end in
#   `finish`.


# %%
def shard_gradients(module, comm, shards):
    """From now on gradients end as slices, during the backward pass. Returns finish, to be called after each one."""
    ### BEGIN SOLUTION
    parameters = list(module.parameters())
    waiting = list(range(len(parameters)))

    def reduce_last():
        i = waiting.pop()
        grad = torch.zeros_like(parameters[i]) if parameters[i].grad is None else parameters[i].grad
        parameters[i].grad = None
        shards[i] += comm.reduce_scatter(grad.flatten(), op="mean")

    def hook(parameter):
        while parameter.grad is not None:
            reduce_last()

    def finish():
        while waiting:
            reduce_last()
        waiting.extend(range(len(parameters)))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    return finish
    ### END SOLUTION


# %%
check("04.2")

# %% [markdown]
# ## 04.3 Stage 3: weights in slices (10 points)
#
# Now no rank has a whole weight, except for the layer that is being computed.
# `stage3_gradients(comm, layers, shards, x, loss_gradient)` is a forward and a backward pass, and returns a list: this
# rank's slice of each layer's gradient, averaged over the ranks, in the order of the layers.
#
# - `layers[i].forward(weight, h)` gives the layer's output, and `layers[i].backward(weight, h, grad)` the pair
#   (gradient of `h`, gradient of the weight). `weight` is the layer's whole weight, flat, `[N]`; `h` is what forward
#   got; `grad` is the gradient of its output. The first `h` is `x`, and `loss_gradient(y)` is the gradient of the last
#   output `y`.
# - `shards[i]` is this rank's slice of the weight of `layers[i]`. Layers differ in size, and *n* need not divide it.
# - Gather a weight just before its layer is computed: at most the next one may be on its way. Release it after: no name
#   and no list holds it. The backward pass gathers again. (What the layers got as `h` may be kept.)
# - A gradient is reduce-scattered before the next layer's backward, and the whole of it goes, too.


# %%
def stage3_gradients(comm, layers, shards, x, loss_gradient):
    """This rank's slices of the average gradients. No rank holds more than a layer or two at any time."""
    ### BEGIN SOLUTION
    inputs, grads = [x], []
    for layer, shard in zip(layers, shards, strict=True):
        weight = comm.all_gather(shard)
        inputs.append(layer.forward(weight, inputs[-1]))
        del weight
    grad = loss_gradient(inputs.pop())
    for layer, shard in zip(reversed(layers), reversed(shards), strict=True):
        weight = comm.all_gather(shard)
        grad, of_weight = layer.backward(weight, inputs.pop(), grad)
        grads.append(comm.reduce_scatter(of_weight, op="mean"))
        del weight, of_weight
    return grads[::-1]
    ### END SOLUTION


# %%
check("04.3")

# %% [markdown]
# ## 04.4 One norm over slices and copies (9 points)
#
# Clipping needs the norm of the whole gradient: the root of the sum of the squares of all elements of all parameters,
# each counted once. Some rest in slices; others are small, and every rank has them whole.
#
# `clip_gradients(comm, sharded, replicated, max_norm)` returns the norm, the same on every rank, and multiplies all
# gradients in place by max_norm / norm, if that is below 1.
#
# - `sharded` is a list of this rank's slices, of any shapes. A rank may hold none: its list is empty.
# - `replicated` is a list of whole gradients, equal on all ranks.
# - Squares are added in float32, also where gradients are bfloat16. One message of one number is enough.


# %%
def clip_gradients(comm, sharded, replicated, max_norm):
    """The norm of all gradients, which are scaled in place so that it is at most max_norm."""
    ### BEGIN SOLUTION
    total = torch.zeros(())
    for grad in sharded:
        total += grad.float().square().sum()
    comm.all_reduce(total)
    for grad in replicated:
        total += grad.float().square().sum()
    norm = total.sqrt()
    for grad in (*sharded, *replicated):
        grad *= torch.clamp(max_norm / norm, max=1.0)
    return norm
    ### END SOLUTION


# %%
check("04.4")

# %% [markdown]
# ## 04.5 In words (3 points)
#
# Stage 1 moves as many bytes as plain data parallelism and needs far less memory. Stage 3 needs less still. Why is it
# not simply the best, when would you stay with stage 2, and what would you change first if stage 3's all-gathers came
# too late?

# %% [markdown] tags=["in-words", "by-hand", "points=3"]
# === BEGIN MARK SCHEME ===
# 1 point: stage 3 moves half as much again, 3 (n - 1)/n of the model instead of 2, and its all-gathers stand before
# each layer of both passes. 1 point: stay with stage 2 where weights fit, above all over slow links or with small
# batches, where there is little computing to hide them behind; or with many micro-batches, each of which gathers
# everything again. 1 point: prefetch, so that the next layer's weight travels while this one computes (or larger
# batches, or gathering inside a machine only, hybrid sharding).
# === END MARK SCHEME ===

# %% [markdown]
# ## The test

# %%
quiz("04")

# %%
submit("04")
