"""05.2, by rows."""

import torch
import torch.nn.functional as F

from grading.mutants import mutant


def _sum(comm, x):
    return comm.all_reduce(x.clone())


class _Sum(torch.autograd.Function):
    """As it should be. `sums`: how forward adds. `back`: what becomes of the gradient."""

    @staticmethod
    def forward(ctx, x, comm, sums=_sum, back=lambda comm, grad: grad):
        ctx.comm, ctx.back = comm, back
        return sums(comm, x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(ctx.comm, grad), None, None, None


def _row(comm, x, weight, bias, **how):
    y = _Sum.apply(F.linear(x, weight), comm, *how.values())
    return y if bias is None else y + bias


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("05.2", "basic", "local-is-global")
def keeps_its_part(comm, x, weight, bias=None):
    return F.linear(x, weight, bias)


@mutant("05.2", "basic", "mean-for-sum")
def averages_the_parts(comm, x, weight, bias=None):
    return _row(comm, x, weight, bias, sums=lambda comm, x: comm.all_reduce(x.clone(), op="mean"))


@mutant("05.2", "basic", "sums-the-inputs")
def adds_before_it_multiplies(comm, x, weight, bias=None):
    return F.linear(_Sum.apply(x, comm), weight, bias)


# ---- bias once -------------------------------------------------------------------------------------------------------


@mutant("05.2", "bias once", "bias-on-each-rank")
def adds_the_bias_to_each_part(comm, x, weight, bias=None):
    return _Sum.apply(F.linear(x, weight, bias), comm)


@mutant("05.2", "bias once", "bias-divided")
def divides_the_bias(comm, x, weight, bias=None):
    return _Sum.apply(F.linear(x, weight, bias if bias is None else bias / comm.size), comm)


@mutant("05.2", "bias once", "replicas-drift")
def adds_the_bias_on_rank_0(comm, x, weight, bias=None):
    return _Sum.apply(F.linear(x, weight, bias if comm.rank == 0 else None), comm)


# ---- gradients -------------------------------------------------------------------------------------------------------


@mutant("05.2", "gradients", "reduces-in-both-directions")
def sums_backward_as_well(comm, x, weight, bias=None):
    return _row(comm, x, weight, bias, sums=_sum, back=_sum)


@mutant("05.2", "gradients", "backward-follows")
def calls_comm_from_the_graph(comm, x, weight, bias=None):
    y = comm.all_reduce(F.linear(x, weight))
    return y if bias is None else y + bias


@mutant("05.2", "gradients", "mean-for-sum")
def divides_the_gradient(comm, x, weight, bias=None):
    return _row(comm, x, weight, bias, sums=_sum, back=lambda comm, grad: grad / comm.size)


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("05.2", "messages", "moves-more-than-needed")
def gathers_the_parts_and_adds(comm, x, weight, bias=None):
    def sums(comm, x):
        return comm.all_gather(x.flatten()).view(comm.size, *x.shape).sum(0)

    return _row(comm, x, weight, bias, sums=sums)


@mutant("05.2", "messages", "moves-more-than-needed")
def sums_and_broadcasts(comm, x, weight, bias=None):
    return _row(comm, x, weight, bias, sums=lambda comm, x: comm.broadcast(comm.all_reduce(x.clone()), src=0))


@mutant("05.2", "messages", "reduces-in-both-directions")
def averages_what_is_the_same(comm, x, weight, bias=None):
    return _row(comm, x, weight, bias, sums=_sum, back=lambda comm, grad: comm.all_reduce(grad.clone(), op="mean"))
