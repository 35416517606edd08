"""What may travel: element types, and any view as the contiguous memory that a backend moves.

`pack` turns a view into contiguous memory, without a copy where it already is, and `unpack` writes the result back.
"""

from numbers import Integral
from typing import NoReturn

import torch
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

LARGEST_TAG = 2**31 - 2  # the next one is the package's own
REDUCTIONS = ("sum", "mean", "min", "max", "product")


def name(dtype: torch.dtype) -> str:
    """The element type as people write it.

    >>> name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def check(op: str, x: Tensor, device: torch.device, *, written: bool = False) -> None:
    """Raise, with what to change, unless x can travel from this device. written: whether `op` writes into it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op} takes a tensor, not {type(x).__name__}: torch.as_tensor(...) makes one")
    if x.layout is not torch.strided:
        raise TypeError(f"{op} takes a dense tensor, not {x.layout}: use x.to_dense()")
    if x.dtype not in DTYPES:
        known = ", ".join(name(dtype) for dtype in DTYPES)
        raise TypeError(f"{op} does not carry {name(x.dtype)}: convert x to one of {known}")
    if x.device.type != device.type or (device.index is not None and x.device.index != device.index):
        raise ValueError(f"{op}: x is on {x.device} and this Comm works on {device}: use x.to(comm.device)")
    if not written:
        return
    if not x.is_contiguous() and _overlaps(x):
        raise ValueError(f"{op} writes into x, and several indices of x reach one element: pass x.contiguous()")
    if x.grad_fn is not None and torch.is_grad_enabled():
        _guard(op, x)


def check_out(op: str, out: Tensor, x: Tensor, length: int) -> None:
    """Raise unless `out` is contiguous memory for `length` rows of x's kind."""
    shape = [length, *x.shape[1:]]
    if list(out.shape) != shape or out.dtype != x.dtype or not out.is_contiguous():
        is_now = f"{name(out.dtype)} {list(out.shape)}" + ("" if out.is_contiguous() else ", not contiguous")
        raise ValueError(f"{op}: out must be contiguous {name(x.dtype)} {shape}, and is {is_now}")


def check_reduction(op: str, reduction: str, x: Tensor) -> None:
    """Raise unless `reduction` is defined for x's element type."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: op={reduction!r} is none of {', '.join(REDUCTIONS)}")
    if reduction == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{op}: a mean of {name(x.dtype)} is in general no {name(x.dtype)}: use op='sum' or x.double()")
    if x.is_complex() and reduction not in ("sum", "mean"):
        raise TypeError(f"{op}: op={reduction!r} is not defined for {name(x.dtype)}, only 'sum' and 'mean' are")


def check_rank(op: str, what: str, rank: int, size: int) -> None:
    """Raise unless `rank`, the argument called `what`, is a rank of a group of this size."""
    if not isinstance(rank, Integral) or not 0 <= rank < size:
        raise ValueError(f"{op}: {what}={rank!r} is no rank of this Comm: they are 0 to {size - 1}")


def check_peer(op: str, what: str, rank: int, tag: int, me: int, size: int) -> None:
    """Raise unless this rank can exchange a message with `rank` under this tag."""
    check_rank(op, what, rank, size)
    if rank == me:
        raise ValueError(f"{op}: {what}={rank} is this rank itself: a message needs two ranks")
    if not isinstance(tag, int) or not 0 <= tag <= LARGEST_TAG:
        raise ValueError(f"{op}: tag={tag!r} must be a whole number from 0 to {LARGEST_TAG}")


def check_sizes(send: list[int], recv: list[int] | None, length: int, me: int, size: int) -> None:
    """Raise unless these can be the lengths an all-to-all sends and receives, of a tensor with so many rows."""
    for what, sizes in (("send_sizes", send), ("recv_sizes", recv)):
        if sizes is not None and (len(sizes) != size or any(n < 0 for n in sizes)):
            raise ValueError(f"all_to_all: {what} {sizes} must be {size} lengths, one for each rank")
    if sum(send) != length:
        raise ValueError(f"all_to_all: send_sizes {send} add up to {sum(send)}, x has {length} rows")
    if recv is not None and send[me] != recv[me]:
        raise ValueError(f"all_to_all: rank {me} sends itself {send[me]} rows and expects {recv[me]} of itself")


def packed_reduction(reduction: str, dtype: torch.dtype) -> str:
    """The reduction to run on what `pack` gives: sum, min, max or product.

    A mean is a sum that is divided afterwards. As in torch's own arithmetic True + True is True, so that on bool, which
    travels as bytes of 0 and 1, a sum is a maximum and a product a minimum. (Gloo adds the bytes: 2 is no bool.)

    >>> packed_reduction("mean", torch.float32), packed_reduction("sum", torch.bool)
    ('sum', 'max')
    """
    if dtype is torch.bool:
        return {"sum": "max", "product": "min"}.get(reduction, reduction)
    return "sum" if reduction == "mean" else reduction


def rows(x: Tensor) -> Tensor:
    """x where it has a dim 0, else its one element as a row."""
    return x.reshape(1) if x.dim() == 0 else x


def pack(x: Tensor) -> Tensor:
    """x's values as a contiguous tensor: x's own memory where x is contiguous, else a copy. bool travels as bytes."""
    data = x.detach().resolve_conj().resolve_neg().contiguous()
    return data.view(torch.uint8) if x.dtype is torch.bool else data


def unpack(data: Tensor, x: Tensor) -> Tensor:
    """Write `data`, which `pack(x)` gave, back into the view x, and return x.

    Raises: ValueError where x is an expanded view (one element seen at many indices) and `data` holds different values
    for these indices.
    """
    if data.data_ptr() == x.data_ptr():
        return x
    data, view = data.view(x.dtype), x.detach()
    for dim, (stride, size) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if stride == 0 and size > 1:
            first = data.narrow(dim, 0, 1)
            same = (first == data) | ((first != first) & (data != data))
            if not same.all():
                raise ValueError("x is expanded and the result is not the same along that dim: pass x.contiguous()")
            data, view = first, view.narrow(dim, 0, 1)
    view.copy_(data)
    return x


def _overlaps(x: Tensor) -> bool:
    """Whether two indices of x may reach one element, expanded dims (stride 0) aside."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if s and n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _guard(op: str, x: Tensor) -> None:
    """Let x be used as data, but not be differentiated through: what wrote into it has no gradient."""

    def refuse(grad: Tensor) -> NoReturn:
        raise RuntimeError(f"backward reached a tensor that {op} wrote into, which has no gradient: pass x.detach()")

    x.register_hook(refuse)
