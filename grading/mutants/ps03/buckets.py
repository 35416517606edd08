"""03.2, buckets."""

import torch

from grading.mutants import mutant


def _fill(module, elements, parameters=None):
    """Buckets as they should be."""
    buckets, filling = [], {}
    for parameter in reversed(list(module.parameters())) if parameters is None else parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket = filling.get(parameter.dtype)
        if bucket is None or sum(p.numel() for p in bucket) + parameter.numel() > elements:
            bucket = filling[parameter.dtype] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets


def _average(buckets, comm, dtype=None):
    """As it should be, but for the type."""
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        flat = flat if dtype is None or dtype.itemsize > flat.itemsize else flat.to(dtype)
        comm.all_reduce(flat, op="mean")
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("03.2", "basic", "sum-not-mean")
def only_adds(module, comm, elements):
    for bucket in _fill(module, elements):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        comm.all_reduce(flat)
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))


@mutant("03.2", "basic", "averages-a-copy")
def does_not_write_back(module, comm, elements):
    for bucket in _fill(module, elements):
        comm.all_reduce(torch.cat([parameter.grad.flatten() for parameter in bucket]), op="mean")


@mutant("03.2", "basic", "mixed-up-order")
def writes_back_in_another_order(module, comm, elements):
    for bucket in _fill(module, elements):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        comm.all_reduce(flat, op="mean")
        start = 0
        for parameter in reversed(bucket):
            parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


# ---- buckets ---------------------------------------------------------------------------------------------------------


@mutant("03.2", "buckets", "one-bucket-is-best")
def one_for_all(module, comm, elements):
    _average(_fill(module, 10**9), comm)


@mutant("03.2", "buckets", "bucket-of-one")
def one_for_each(module, comm, elements):
    _average(_fill(module, 1), comm)


@mutant("03.2", "buckets", "first-layer-first")
def from_the_first_parameter(module, comm, elements):
    _average(_fill(module, elements, list(module.parameters())), comm)


@mutant("03.2", "buckets", "bucket-too-full")
def closes_a_bucket_when_it_is_over_full(module, comm, elements):
    _average(_fill(module, elements + 3), comm)


# ---- unused parameters -----------------------------------------------------------------------------------------------


@mutant("03.2", "unused parameters", "absent-are-skipped")
def skips_what_has_no_gradient(module, comm, elements):
    there = [parameter for parameter in reversed(list(module.parameters())) if parameter.grad is not None]
    _average(_fill(module, elements, there), comm)


@mutant("03.2", "unused parameters", "grad-is-none")
def expects_a_gradient(module, comm, elements):
    for parameter in module.parameters():
        parameter.grad.shape  # noqa: B018
    _average(_fill(module, elements), comm)


@mutant("03.2", "unused parameters", "replicas-drift")
def takes_the_zeros_back(module, comm, elements):
    unused = [parameter for parameter in module.parameters() if parameter.grad is None]
    _average(_fill(module, elements), comm)
    for parameter in unused:
        parameter.grad = None


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@mutant("03.2", "dtypes", "loses-the-dtype")
def copies_into_float32(module, comm, elements):
    _average(_fill(module, elements), comm, torch.float32)


@mutant("03.2", "dtypes", "loses-the-dtype")
def saves_bytes_with_bfloat16(module, comm, elements):
    _average(_fill(module, elements), comm, torch.bfloat16)


@mutant("03.2", "dtypes", "loses-the-dtype")
def takes_the_type_of_the_first(module, comm, elements):
    parameters = list(module.parameters())
    _average(_fill(module, elements), comm, parameters[0].dtype)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@mutant("03.2", "shapes", "view-needs-contiguous")
def flattens_with_view(module, comm, elements):
    for bucket in _fill(module, elements):
        flat = torch.cat([parameter.grad.view(-1) for parameter in bucket])
        comm.all_reduce(flat, op="mean")
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))


@mutant("03.2", "shapes", "flatten-is-a-copy")
def writes_into_flatten(module, comm, elements):
    for bucket in _fill(module, elements):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        comm.all_reduce(flat, op="mean")
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad.flatten().copy_(piece) if parameter.dim() else parameter.grad.copy_(piece[0])


@mutant("03.2", "shapes", "forgets-scalars")
def counts_dims(module, comm, elements):
    there = [parameter for parameter in reversed(list(module.parameters())) if parameter.dim() > 0]
    _average(_fill(module, elements, there), comm)
