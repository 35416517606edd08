"""What torch.distributed takes and gives: the one place that knows its names and its limits.

A backend moves contiguous memory of a few element types. `pack` turns any view into that, without a copy where the view
already is contiguous, and `unpack` writes the result back into the view.
"""

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

REDUCE_OPS = ("sum", "mean", "min", "max", "product")

# Newer torch calls the collectives on one tensor *_single and deprecates the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def name(dtype: torch.dtype) -> str:
    """`torch.float32` as people write it: float32."""
    return str(dtype).removeprefix("torch.")


def check(op: str, x: Tensor, device: torch.device, *, written: bool = False) -> None:
    """Raise, with what to change, unless x is a tensor this package can send from this device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op} takes a tensor, not {type(x).__name__}: torch.as_tensor(...) makes one")
    if x.layout is not torch.strided:
        raise TypeError(f"{op} takes a dense tensor, not one with layout {x.layout}: use x.to_dense()")
    if x.dtype not in DTYPES:
        known = ", ".join(name(dtype) for dtype in DTYPES)
        raise TypeError(f"{op} does not carry {name(x.dtype)}: convert x to one of {known}")
    if x.device.type != device.type:
        raise ValueError(f"{op}: x is on {x.device} and this Comm works on {device}: use x.to(comm.device)")
    if written and not x.is_contiguous() and _overlaps(x):
        raise ValueError(f"{op} writes into x, whose elements share memory: pass x.contiguous()")


def check_reduction(op: str, reduction: str, x: Tensor) -> None:
    """Raise unless `reduction` is defined for x's element type."""
    if reduction not in REDUCE_OPS:
        raise ValueError(f"{op}: op={reduction!r} is none of {', '.join(REDUCE_OPS)}")
    if reduction == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{op}: the mean of {name(x.dtype)} is not a {name(x.dtype)}: use op='sum', or x.double()")
    if x.is_complex() and reduction not in ("sum", "mean"):
        raise TypeError(f"{op}: op={reduction!r} is not defined for {name(x.dtype)} here: only 'sum' and 'mean' are")


def _overlaps(x: Tensor) -> bool:
    """Whether two indices of x may reach one element, expanded dims (stride 0) aside."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if s and n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def pack(x: Tensor) -> Tensor:
    """x's values as a contiguous tensor: x's own memory where x is contiguous, else a copy. bool travels as bytes."""
    data = x.detach().resolve_conj().resolve_neg().contiguous()
    return data.view(torch.uint8) if x.dtype is torch.bool else data


def unpack(data: Tensor, x: Tensor) -> Tensor:
    """Write `data`, a tensor that `pack(x)` gave, back into the view x, and return x.

    Raises: ValueError where x is an expanded view (one element seen at many indices) and `data` wants different values
    at these indices.
    """
    if data.data_ptr() == x.data_ptr():
        return x
    data, view = data.view(x.dtype), x.detach()
    for dim, (stride, size) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if stride == 0 and size > 1:
            first = data.narrow(dim, 0, 1)
            if not torch.allclose(first.expand_as(data), data, rtol=0, atol=0, equal_nan=True):
                raise ValueError("the result differs where the expanded x has one element: pass x.contiguous()")
            data, view = first, view.narrow(dim, 0, 1)
    view.copy_(data)
    return x


def reduce_op(reduction: str, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    """torch's name for a reduction. "mean" is a sum, divided afterwards; on bool a sum is "or", a product "and"."""
    if dtype is torch.bool:
        reduction = {"sum": "max", "product": "min"}.get(reduction, reduction)
    ops = dist.ReduceOp
    return {"sum": ops.SUM, "mean": ops.SUM, "min": ops.MIN, "max": ops.MAX, "product": ops.PRODUCT}[reduction]
