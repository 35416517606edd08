"""05.5, by tokens. `_mlp` is the right way, with a switch for each mistake."""

import torch
import torch.nn.functional as F

import minidist as md
from grading.mutants import mutant


def copy_ranks(comm, x):
    raise NotImplementedError  # the check puts a right one in its place


def _own(comm, x):
    return x[md.partition(len(x), comm.size)[comm.rank]].clone()


def _gather(comm, x):
    return comm.all_gather(x)


def _scatter(comm, x):
    return comm.reduce_scatter(x)


class _Pair(torch.autograd.Function):
    """Any forward with any backward, both functions of comm and a tensor."""

    @staticmethod
    def forward(ctx, x, comm, there, back):
        ctx.comm, ctx.back = comm, back
        return there(comm, x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(ctx.comm, grad), None, None, None


def _mlp(
    comm,
    x,
    gain,
    shift,
    up,
    down,
    gather=_gather,
    gather_back=_scatter,
    scatter=_scatter,
    scatter_back=_gather,
    of_gain=None,
    of_shift=None,
):
    weights = (of_gain or copy_ranks)(comm, gain), (of_shift or copy_ranks)(comm, shift)
    h = F.layer_norm(x, gain.shape, *weights)
    h = F.gelu(F.linear(_Pair.apply(h, comm, gather, gather_back), up))
    return _Pair.apply(F.linear(h, down), comm, scatter, scatter_back)


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("05.5", "basic", "local-is-global")
def cuts_its_own_part(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, scatter=_own)


@mutant("05.5", "basic", "mean-for-sum")
def averages_the_parts(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, scatter=lambda comm, x: comm.reduce_scatter(x, op="mean"))


@mutant("05.5", "basic", "whole-sum")
def hands_the_sum_to_all(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, scatter=lambda comm, x: comm.all_reduce(x.clone()))


# ---- gradients -------------------------------------------------------------------------------------------------------


@mutant("05.5", "gradients", "slices-the-gradient")
def cuts_the_gradient(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, gather_back=_own)


@mutant("05.5", "gradients", "mean-for-sum")
def averages_the_gradient(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, gather_back=lambda comm, grad: comm.reduce_scatter(grad, op="mean"))


@mutant("05.5", "gradients", "own-tokens-only")
def fills_up_with_zeros(comm, x, gain, shift, up, down):
    def back(comm, grad):
        sizes = comm.lengths(len(grad))
        whole = grad.new_zeros(sum(sizes), *grad.shape[1:])
        whole[md.partition(len(whole), comm.size)[comm.rank]] = grad
        return whole

    return _mlp(comm, x, gain, shift, up, down, scatter_back=back)


# ---- norm gradients --------------------------------------------------------------------------------------------------


def _as_it_is(comm, x):
    return x


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, op):
        ctx.comm, ctx.op = comm, op
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = ctx.comm.all_reduce(grad.clone(), op="mean" if ctx.op == "mean" else "sum")
        return ctx.comm.all_reduce(total) if ctx.op == "twice" else total, None, None


@mutant("05.5", "norm gradients", "norm-gradients-local")
def leaves_the_norm_alone(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, of_gain=_as_it_is, of_shift=_as_it_is)


@mutant("05.5", "norm gradients", "norm-gradients-local")
def forgets_the_shift(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, of_shift=_as_it_is)


@mutant("05.5", "norm gradients", "mean-for-sum")
def averages_as_data_parallelism_does(comm, x, gain, shift, up, down):
    def mean(comm, x):
        return _Mean.apply(x, comm, "mean")

    return _mlp(comm, x, gain, shift, up, down, of_gain=mean, of_shift=mean)


@mutant("05.5", "norm gradients", "sums-twice")
def sums_twice(comm, x, gain, shift, up, down):
    def twice(comm, x):
        return _Mean.apply(x, comm, "twice")

    return _mlp(comm, x, gain, shift, up, down, of_gain=twice, of_shift=twice)


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("05.5", "messages", "moves-more-than-needed")
def sums_all_and_cuts(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, scatter=lambda comm, x: _own(comm, comm.all_reduce(x.clone())))


@mutant("05.5", "messages", "moves-more-than-needed")
def gathers_by_adding(comm, x, gain, shift, up, down):
    def gather(comm, x):
        whole = x.new_zeros(sum(comm.lengths(len(x))), *x.shape[1:])
        whole[md.partition(len(whole), comm.size)[comm.rank]] = x
        return comm.all_reduce(whole)

    return _mlp(comm, x, gain, shift, up, down, gather=gather)


@mutant("05.5", "messages", "moves-more-than-needed")
def sums_the_gradient_and_cuts(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, gather_back=lambda comm, x: _own(comm, comm.all_reduce(x.clone())))


# ---- any S -----------------------------------------------------------------------------------------------------------


@mutant("05.5", "any S", "all-parts-equal")
def takes_its_own_length_for_all(comm, x, gain, shift, up, down):
    return _mlp(comm, x, gain, shift, up, down, gather=lambda comm, x: comm.all_gather(x, [len(x)] * comm.size))


@mutant("05.5", "any S", "all-parts-equal")
def makes_room_for_equal_parts(comm, x, gain, shift, up, down):
    def gather(comm, x):
        return comm.all_gather(x).view(comm.size, len(x), -1).flatten(0, 1)

    return _mlp(comm, x, gain, shift, up, down, gather=gather)


@mutant("05.5", "any S", "leaves-padding-in")
def fills_up_to_equal_parts(comm, x, gain, shift, up, down):
    most = max(comm.lengths(len(x)))
    return _mlp(comm, F.pad(x, (0, 0, 0, most - len(x))), gain, shift, up, down)
