"""05.1, by columns."""

import torch
import torch.nn.functional as F

from grading.mutants import mutant


class _Copy(torch.autograd.Function):
    """As it should be. `sums`: how the gradient is added up over the ranks."""

    @staticmethod
    def forward(ctx, x, comm, sums=lambda comm, grad: comm.all_reduce(grad.clone())):
        ctx.comm, ctx.sums = comm, sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.sums(ctx.comm, grad), None, None


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("05.1", "basic", "gathers-the-output")
def gathers_all_columns(comm, x, weight, bias=None):
    y = F.linear(_Copy.apply(x, comm), weight, bias)
    return comm.all_gather(y.detach().t()).t()


@mutant("05.1", "basic", "sums-the-columns")
def adds_the_outputs(comm, x, weight, bias=None):
    return comm.all_reduce(F.linear(_Copy.apply(x, comm), weight, bias).detach())


@mutant("05.1", "basic", "bias-forgotten")
def forgets_the_bias(comm, x, weight, bias=None):
    return F.linear(_Copy.apply(x, comm), weight)


# ---- input gradient --------------------------------------------------------------------------------------------------


@mutant("05.1", "input gradient", "local-is-global")
def leaves_it_to_autograd(comm, x, weight, bias=None):
    return F.linear(x, weight, bias)


@mutant("05.1", "input gradient", "mean-for-sum")
def averages_the_parts(comm, x, weight, bias=None):
    return F.linear(_Copy.apply(x, comm, lambda comm, grad: comm.all_reduce(grad.clone(), op="mean")), weight, bias)


@mutant("05.1", "input gradient", "backward-follows")
def returns_nothing_in_backward(comm, x, weight, bias=None):
    return F.linear(_Copy.apply(x, comm, lambda comm, grad: None), weight, bias)


# ---- weight gradient -------------------------------------------------------------------------------------------------


@mutant("05.1", "weight gradient", "own-slice-is-a-part")
def copies_the_weight_too(comm, x, weight, bias=None):
    return F.linear(_Copy.apply(x, comm), _Copy.apply(weight, comm), bias)


@mutant("05.1", "weight gradient", "own-slice-is-a-part")
def copies_the_bias_too(comm, x, weight, bias=None):
    return F.linear(_Copy.apply(x, comm), weight, bias if bias is None else _Copy.apply(bias, comm))


@mutant("05.1", "weight gradient", "own-slice-is-a-part")
def averages_the_weight_as_data_parallelism_does(comm, x, weight, bias=None):
    def mean(comm, grad):
        return comm.all_reduce(grad.clone(), op="mean")

    return F.linear(_Copy.apply(x, comm), _Copy.apply(weight, comm, mean), bias)


@mutant("05.1", "weight gradient", "backward-follows")
def multiplies_with_the_data_of_the_weight(comm, x, weight, bias=None):
    return F.linear(_Copy.apply(x, comm), weight.data, bias)


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("05.1", "messages", "sends-in-forward")
def makes_sure_that_x_is_the_same(comm, x, weight, bias=None):
    comm.broadcast(x.detach().clone(), src=0)
    return F.linear(_Copy.apply(x, comm), weight, bias)


@mutant("05.1", "messages", "moves-more-than-needed")
def gathers_the_parts_and_adds(comm, x, weight, bias=None):
    def sums(comm, grad):
        return comm.all_gather(grad.flatten()).view(comm.size, *grad.shape).sum(0)

    return F.linear(_Copy.apply(x, comm, sums), weight, bias)


@mutant("05.1", "messages", "moves-more-than-needed")
def sums_once_more_to_be_sure(comm, x, weight, bias=None):
    def sums(comm, grad):
        return comm.all_reduce(comm.all_reduce(grad.clone()), op="mean")

    return F.linear(_Copy.apply(x, comm, sums), weight, bias)


# ---- any shape -------------------------------------------------------------------------------------------------------


@mutant("05.1", "any shape", "bias-is-optional")
def always_adds_the_bias(comm, x, weight, bias=None):
    return _Copy.apply(x, comm) @ weight.T + bias


@mutant("05.1", "any shape", "two-dims-only")
def multiplies_matrices_only(comm, x, weight, bias=None):
    y = torch.mm(_Copy.apply(x, comm), weight.t())
    return y if bias is None else y + bias


@mutant("05.1", "any shape", "two-dims-only")
def names_two_dims(comm, x, weight, bias=None):
    y = torch.einsum("ti,oi->to", _Copy.apply(x, comm), weight)
    return y if bias is None else y + bias
