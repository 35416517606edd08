"""04.3, stage 3. `_step` is the right way, with a switch for each mistake."""

import torch

import minidist as md
from grading.mutants import mutant


def _gather(comm, shard):
    return comm.all_gather(shard)


def _scatter(comm, grad):
    return comm.reduce_scatter(grad, op="mean")


def _step(comm, layers, shards, x, loss_gradient, gather=_gather, scatter=_scatter, keep=None, hold=None):
    """gather, scatter: how a weight comes, and how a gradient goes. keep, hold: lists that weights and gradients stay
    in."""
    inputs = [x]
    for layer, shard in zip(layers, shards, strict=True):
        weight = gather(comm, shard)
        inputs.append(layer.forward(weight, inputs[-1]))
        if keep is not None:
            keep.append(weight)
    grad, found = loss_gradient(inputs.pop()), []
    for layer, shard in reversed(list(zip(layers, shards, strict=True))):
        weight = gather(comm, shard)
        grad, of_weight = layer.backward(weight, inputs.pop(), grad)
        found.append(scatter(comm, of_weight))
        if hold is not None:
            hold.append(of_weight)
        del weight, of_weight
    return found[::-1]


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("04.3", "basic", "sum-not-mean")
def only_adds(comm, layers, shards, x, loss_gradient):
    return _step(comm, layers, shards, x, loss_gradient, scatter=lambda comm, grad: comm.reduce_scatter(grad))


@mutant("04.3", "basic", "local-is-global")
def cuts_its_own_gradient(comm, layers, shards, x, loss_gradient):
    return _step(
        comm,
        layers,
        shards,
        x,
        loss_gradient,
        scatter=lambda comm, grad: grad[md.partition(len(grad), comm.size)[comm.rank]].clone(),
    )


@mutant("04.3", "basic", "shard-for-whole")
def computes_with_the_shard(comm, layers, shards, x, loss_gradient):
    return _step(comm, layers, shards, x, loss_gradient, gather=lambda comm, shard: shard)


@mutant("04.3", "basic", "whole-sum")
def keeps_the_whole_average(comm, layers, shards, x, loss_gradient):
    return _step(
        comm, layers, shards, x, loss_gradient, scatter=lambda comm, grad: comm.all_reduce(grad.clone(), op="mean")
    )


@mutant("04.3", "basic", "mixed-up-order")
def forgets_to_turn_the_list(comm, layers, shards, x, loss_gradient):
    return _step(comm, layers, shards, x, loss_gradient)[::-1]


# ---- gathers late ----------------------------------------------------------------------------------------------------


def _all_first(comm, layers, shards, x, loss_gradient, forward=True, backward=True):
    """Gathers the whole model before the forward pass, before the backward pass, or before both."""
    inputs, first = [x], [_gather(comm, shard) for shard in shards] if forward else []
    for layer, shard in zip(layers, shards, strict=True):
        weight = first.pop(0) if forward else _gather(comm, shard)
        inputs.append(layer.forward(weight, inputs[-1]))
        del weight
    grad, found = loss_gradient(inputs.pop()), []
    first = [_gather(comm, shard) for shard in reversed(shards)] if backward else []
    for layer, shard in reversed(list(zip(layers, shards, strict=True))):
        weight = first.pop(0) if backward else _gather(comm, shard)
        grad, of_weight = layer.backward(weight, inputs.pop(), grad)
        found.append(_scatter(comm, of_weight))
        del weight, of_weight
    return found[::-1]


@mutant("04.3", "gathers late", "whole-model-gathered")
def gathers_all_before_each_pass(comm, layers, shards, x, loss_gradient):
    return _all_first(comm, layers, shards, x, loss_gradient)


@mutant("04.3", "gathers late", "whole-model-gathered")
def gathers_all_before_the_forward_pass(comm, layers, shards, x, loss_gradient):
    return _all_first(comm, layers, shards, x, loss_gradient, backward=False)


@mutant("04.3", "gathers late", "whole-model-gathered")
def gathers_all_before_the_backward_pass(comm, layers, shards, x, loss_gradient):
    return _all_first(comm, layers, shards, x, loss_gradient, forward=False)


# ---- releases --------------------------------------------------------------------------------------------------------


@mutant("04.3", "releases", "released-once")
def keeps_a_list_of_weights(comm, layers, shards, x, loss_gradient):
    return _step(comm, layers, shards, x, loss_gradient, keep=[])


@mutant("04.3", "releases", "released-once")
def uses_the_weights_of_the_forward_pass(comm, layers, shards, x, loss_gradient):
    inputs, weights = [x], []
    for layer, shard in zip(layers, shards, strict=True):
        weights.append(_gather(comm, shard))
        inputs.append(layer.forward(weights[-1], inputs[-1]))
    grad, found = loss_gradient(inputs.pop()), []
    for layer in reversed(layers):
        grad, of_weight = layer.backward(weights.pop(), inputs.pop(), grad)
        found.append(_scatter(comm, of_weight))
        del of_weight
    return found[::-1]


@mutant("04.3", "releases", "released-once")
def keeps_copies_of_the_weights(comm, layers, shards, x, loss_gradient):
    known = {}

    def remember(comm, shard):
        if id(shard) not in known:
            known[id(shard)] = _gather(comm, shard)
        return known[id(shard)].clone()

    return _step(comm, layers, shards, x, loss_gradient, gather=remember)


# ---- gradients leave -------------------------------------------------------------------------------------------------


def _later(comm, layers, shards, x, loss_gradient, wait):
    """Lets so many gradients wait before the first of them leaves."""
    waiting, found = [], []

    def scatter(comm, grad):
        waiting.append(grad)
        if len(waiting) > wait:
            found.append(_scatter(comm, waiting.pop(0)))

    _step(comm, layers, shards, x, loss_gradient, scatter=scatter)
    while waiting:
        found.append(_scatter(comm, waiting.pop(0)))
    return found[::-1]


@mutant("04.3", "gradients leave", "gradients-at-the-end")
def sends_all_gradients_at_the_end(comm, layers, shards, x, loss_gradient):
    return _later(comm, layers, shards, x, loss_gradient, wait=99)


@mutant("04.3", "gradients leave", "gradients-at-the-end")
def sends_gradients_two_layers_late(comm, layers, shards, x, loss_gradient):
    return _later(comm, layers, shards, x, loss_gradient, wait=2)


@mutant("04.3", "gradients leave", "keeps-full-gradients")
def keeps_a_list_of_gradients(comm, layers, shards, x, loss_gradient):
    return _step(comm, layers, shards, x, loss_gradient, hold=[])


# ---- traffic ---------------------------------------------------------------------------------------------------------


@mutant("04.3", "traffic", "moves-more-than-needed")
def averages_all_and_cuts(comm, layers, shards, x, loss_gradient):
    def scatter(comm, grad):
        mean = comm.all_reduce(grad.clone(), op="mean")
        return mean[md.partition(len(mean), comm.size)[comm.rank]].clone()

    return _step(comm, layers, shards, x, loss_gradient, scatter=scatter)


@mutant("04.3", "traffic", "moves-more-than-needed")
def reduces_twice(comm, layers, shards, x, loss_gradient):
    def scatter(comm, grad):
        return (_scatter(comm, grad) + _scatter(comm, grad)) / 2

    return _step(comm, layers, shards, x, loss_gradient, scatter=scatter)


@mutant("04.3", "traffic", "moves-more-than-needed")
def gathers_by_adding(comm, layers, shards, x, loss_gradient):
    def gather(comm, shard):
        size = int(comm.all_reduce(torch.tensor(len(shard))))
        room = shard.new_zeros(size)
        room[md.partition(size, comm.size)[comm.rank]] = shard
        return comm.all_reduce(room)

    return _step(comm, layers, shards, x, loss_gradient, gather=gather)


# ---- any size --------------------------------------------------------------------------------------------------------


@mutant("04.3", "any size", "absent-are-skipped")
def leaves_empty_shards_out(comm, layers, shards, x, loss_gradient):
    return _step(
        comm,
        layers,
        shards,
        x,
        loss_gradient,
        gather=lambda comm, shard: comm.all_gather(shard) if len(shard) else shard,
    )


@mutant("04.3", "any size", "all-parts-equal")
def takes_its_own_length_for_all(comm, layers, shards, x, loss_gradient):
    return _step(
        comm,
        layers,
        shards,
        x,
        loss_gradient,
        gather=lambda comm, shard: comm.all_gather(shard, [len(shard)] * comm.size),
    )


@mutant("04.3", "any size", "all-parts-equal")
def cuts_off_what_it_takes_for_padding(comm, layers, shards, x, loss_gradient):
    return _step(
        comm,
        layers,
        shards,
        x,
        loss_gradient,
        gather=lambda comm, shard: comm.all_gather(shard)[: len(shard) * comm.size],
    )
