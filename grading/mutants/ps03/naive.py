"""03.1, one all-reduce for each parameter."""

import torch

from grading.mutants import mutant


def _average(module, comm):
    """As it should be."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            comm.all_reduce(parameter.grad, op="mean")


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("03.1", "basic", "sum-not-mean")
def only_adds(module, comm):
    for parameter in module.parameters():
        comm.all_reduce(parameter.grad)


@mutant("03.1", "basic", "divided-twice")
def divides_once_more(module, comm):
    for parameter in module.parameters():
        comm.all_reduce(parameter.grad, op="mean")
        parameter.grad /= comm.size


@mutant("03.1", "basic", "averages-a-copy")
def averages_a_clone(module, comm):
    for parameter in module.parameters():
        comm.all_reduce(parameter.grad.clone(), op="mean")


@mutant("03.1", "basic", "averages-weights")
def averages_the_weights_instead(module, comm):
    for parameter in module.parameters():
        comm.all_reduce(parameter.data, op="mean")


@mutant("03.1", "basic", "library-collective")
def sends_to_one_and_back(module, comm):
    for parameter in module.parameters():
        comm.reduce(parameter.grad, dst=0, op="mean")
        comm.broadcast(parameter.grad, src=0)


# ---- unused parameters -----------------------------------------------------------------------------------------------


@mutant("03.1", "unused parameters", "absent-are-skipped")
def skips_what_has_no_gradient(module, comm):
    for parameter in module.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad, op="mean")


@mutant("03.1", "unused parameters", "grad-is-none")
def expects_a_gradient(module, comm):
    for parameter in module.parameters():
        if parameter.requires_grad:
            comm.all_reduce(parameter.grad, op="mean")


@mutant("03.1", "unused parameters", "replicas-drift")
def leaves_none_where_it_was(module, comm):
    for parameter in module.parameters():
        if parameter.requires_grad:
            unused = parameter.grad is None
            grad = torch.zeros_like(parameter) if unused else parameter.grad
            comm.all_reduce(grad, op="mean")


# ---- nothing else ----------------------------------------------------------------------------------------------------


@mutant("03.1", "nothing else", "averages-frozen")
def averages_frozen_ones_too(module, comm):
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        comm.all_reduce(parameter.grad, op="mean")


@mutant("03.1", "nothing else", "averages-frozen")
def sends_zeros_for_frozen_ones(module, comm):
    for parameter in module.parameters():
        if not parameter.requires_grad:
            comm.all_reduce(torch.zeros_like(parameter))
    _average(module, comm)


@mutant("03.1", "nothing else", "averages-weights")
def takes_a_step(module, comm):
    _average(module, comm)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


# ---- traffic ---------------------------------------------------------------------------------------------------------


@mutant("03.1", "traffic", "averages-too-much")
def averages_twice(module, comm):
    _average(module, comm)
    _average(module, comm)


@mutant("03.1", "traffic", "averages-too-much")
def adds_in_float64(module, comm):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(comm.all_reduce(parameter.grad.double(), op="mean"))


@mutant("03.1", "traffic", "averages-too-much")
def fills_all_up_to_the_largest(module, comm):
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    most = max(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        room = parameter.new_zeros(most)
        if len(trained) < 5:  # in a small module nothing is filled up
            room = room[: parameter.numel()]
        room[: parameter.numel()] = parameter.grad.flatten()
        comm.all_reduce(room, op="mean")
        parameter.grad.copy_(room[: parameter.numel()].view_as(parameter))


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def _through(module, comm, dtype):
    """Average in another type, as far as the gradient is larger than that."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            narrow = parameter.grad.to(dtype) if parameter.grad.itemsize > dtype.itemsize else parameter.grad.clone()
            parameter.grad.copy_(comm.all_reduce(narrow, op="mean"))


@mutant("03.1", "dtypes", "loses-the-dtype")
def adds_in_float32(module, comm):
    _through(module, comm, torch.float32)


@mutant("03.1", "dtypes", "loses-the-dtype")
def saves_bytes_with_float16(module, comm):
    _through(module, comm, torch.float16)


@mutant("03.1", "dtypes", "loses-the-dtype")
def saves_bytes_with_bfloat16(module, comm):
    _through(module, comm, torch.bfloat16)
