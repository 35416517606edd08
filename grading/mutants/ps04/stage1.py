"""04.1, stage 1. `_step` is the right way, with a switch for each mistake."""

import torch

import minidist as md
from grading.mutants import mutant


def _own(comm, weight):
    return weight[md.partition(len(weight), comm.size)[comm.rank]]


def _scatter(comm, grad):
    return comm.reduce_scatter(grad, op="mean")


def _step(comm, weight, grad, momentum, lr, mu, own=_own, scatter=_scatter):
    momentum *= mu
    momentum += scatter(comm, grad)
    weight.copy_(comm.all_gather(own(comm, weight) - lr * momentum))


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("04.1", "basic", "sum-not-mean")
def only_adds(comm, weight, grad, momentum, lr, mu):
    _step(comm, weight, grad, momentum, lr, mu, scatter=lambda comm, grad: comm.reduce_scatter(grad))


@mutant("04.1", "basic", "local-is-global")
def uses_its_own_gradient(comm, weight, grad, momentum, lr, mu):
    _step(comm, weight, grad, momentum, lr, mu, scatter=_own)


@mutant("04.1", "basic", "weights-not-gathered")
def keeps_its_slice_to_itself(comm, weight, grad, momentum, lr, mu):
    momentum *= mu
    momentum += _scatter(comm, grad)
    _own(comm, weight).sub_(lr * momentum)


@mutant("04.1", "basic", "rebinds-the-name")
def names_another_weight(comm, weight, grad, momentum, lr, mu):
    momentum *= mu
    momentum += _scatter(comm, grad)
    weight = comm.all_gather(_own(comm, weight) - lr * momentum)


@mutant("04.1", "basic", "wrong-sign")
def climbs(comm, weight, grad, momentum, lr, mu):
    _step(comm, weight, grad, momentum, -lr, mu)


# ---- any N -----------------------------------------------------------------------------------------------------------


@mutant("04.1", "any N", "own-length-as-step")
def counts_in_its_own_length(comm, weight, grad, momentum, lr, mu):
    def own(comm, weight):
        return weight[comm.rank * len(momentum) : (comm.rank + 1) * len(momentum)]

    _step(comm, weight, grad, momentum, lr, mu, own=own)


@mutant("04.1", "any N", "all-parts-equal")
def cuts_evenly(comm, weight, grad, momentum, lr, mu):
    _step(comm, weight, grad, momentum, lr, mu, own=lambda comm, x: torch.tensor_split(x, comm.size)[comm.rank])


@mutant("04.1", "any N", "all-parts-equal")
def rounds_down(comm, weight, grad, momentum, lr, mu):
    def own(comm, weight):
        size = len(weight) // comm.size
        return weight[comm.rank * size : (comm.rank + 1) * size]

    _step(comm, weight, grad, momentum, lr, mu, own=own)


@mutant("04.1", "any N", "absent-are-skipped")
def goes_home_with_nothing(comm, weight, grad, momentum, lr, mu):
    if len(momentum) > 0:
        _step(comm, weight, grad, momentum, lr, mu)


# ---- momentum --------------------------------------------------------------------------------------------------------


@mutant("04.1", "momentum", "rebinds-the-name")
def names_another_momentum(comm, weight, grad, momentum, lr, mu):
    momentum = mu * momentum + _scatter(comm, grad)
    weight.copy_(comm.all_gather(_own(comm, weight) - lr * momentum))


@mutant("04.1", "momentum", "state-is-lost")
def writes_over_the_momentum(comm, weight, grad, momentum, lr, mu):
    momentum.copy_(_scatter(comm, grad))
    weight.copy_(comm.all_gather(_own(comm, weight) - lr * momentum))


@mutant("04.1", "momentum", "rate-in-the-state")
def multiplies_the_rate_in(comm, weight, grad, momentum, lr, mu):
    momentum *= mu
    momentum += lr * _scatter(comm, grad)
    weight.copy_(comm.all_gather(_own(comm, weight) - momentum))


# ---- traffic ---------------------------------------------------------------------------------------------------------


@mutant("04.1", "traffic", "moves-more-than-needed")
def averages_all_and_cuts(comm, weight, grad, momentum, lr, mu):
    _step(comm, weight, grad, momentum, lr, mu, scatter=lambda comm, x: _own(comm, comm.all_reduce(x, op="mean")))


@mutant("04.1", "traffic", "moves-more-than-needed")
def gathers_by_adding(comm, weight, grad, momentum, lr, mu):
    momentum *= mu
    momentum += _scatter(comm, grad)
    mine = _own(comm, weight) - lr * momentum
    weight.zero_()
    _own(comm, weight).copy_(mine)
    comm.all_reduce(weight)


@mutant("04.1", "traffic", "gathers-the-state")
def updates_everything_everywhere(comm, weight, grad, momentum, lr, mu):
    momentum *= mu
    momentum += _scatter(comm, grad)
    weight.copy_(comm.all_gather(_own(comm, weight)) - lr * comm.all_gather(momentum))
