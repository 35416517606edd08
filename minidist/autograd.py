"""Collectives that autograd can differentiate: each is a pair, what it does going forward and what it does going back.

    copy              identity          all-reduce        into a region where the ranks compute different things
    reduce            all-reduce        identity          out of it
    gather            all-gather        own slice         the ranks go on with the same computation
    gather, differ    all-gather        reduce-scatter    they go on with different ones
    scatter           own slice         all-gather
    reduce_scatter    reduce-scatter    all-gather
    all_to_all        all-to-all        all-to-all back

Going back is the transpose of going forward, so the rows come in conjugate pairs: each row's way back is another row's
way forward.

The convention: there is one loss L, and every rank computes it, the same number. A tensor that all ranks hold alike has
one gradient, alike on all ranks; a slice has the slice of the gradient; and of a sum whose terms the ranks hold every
term has the sum's. So with y = reduce(x) and L = y on two ranks, dL/dx is 1 on both. torch.distributed.nn's all_reduce
instead differentiates the sum of the ranks' losses, and says 2.

Slices are those of `md.partition`, so that any length will do. Differentiable once: a second derivative raises.
Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), 3, f and g; Korthikanti et al. (arXiv 2205.05198), 4.2.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minidist.comm.comm import Comm
from minidist.comm.partition import lengths, partition

Move = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """`there` going forward, `back` going backward. Neither may write into the tensor it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad), None, None


class _ReduceInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.mark_dirty(x)
        return comm.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def copy(x: Tensor, comm: Comm) -> Tensor:
    """x itself, alike on all ranks, which then differ; its gradient is the sum of the ranks'."""
    return _Pair.apply(x, _same, lambda grad: _all_reduce(grad, comm))


def reduce(x: Tensor, comm: Comm) -> Tensor:
    """The sum of x over the ranks; every rank's x has the sum's gradient. x: this rank's term."""
    return _Pair.apply(x, lambda x: _all_reduce(x, comm), _same)


def reduce_(x: Tensor, comm: Comm) -> Tensor:
    """`reduce` into x: for an x that nobody needs any more, such as a matrix product's result."""
    return _ReduceInto.apply(x, comm)


def gather(x: Tensor, comm: Comm, dim: int = 0, differ: bool = False, length: int | None = None) -> Tensor:
    """Everyone's x, concatenated along dim. x: this rank's `md.partition` slice of the result.

    differ: whether the ranks go on with different computations, each of which then has a part of the gradient. length:
    of the result along dim, if known; if not, the lengths travel first. Raises ValueError where x is no such slice.
    """
    back = (lambda grad: _reduce_scatter(grad, comm, dim)) if differ else lambda grad: _slice(grad, comm, dim)
    return _Pair.apply(x, lambda x: _all_gather(x, comm, dim, length), back)


def scatter(x: Tensor, comm: Comm, dim: int = 0) -> Tensor:
    """This rank's `md.partition` slice of x along dim. x: alike on all ranks, and so is its gradient."""
    length = x.shape[dim]
    return _Pair.apply(x, lambda x: _slice(x, comm, dim), lambda grad: _all_gather(grad, comm, dim, length))


def reduce_scatter(x: Tensor, comm: Comm, dim: int = 0) -> Tensor:
    """This rank's `md.partition` slice along dim of the sum of x over the ranks. x: this rank's term."""
    length = x.shape[dim]
    return _Pair.apply(x, lambda x: _reduce_scatter(x, comm, dim), lambda grad: _all_gather(grad, comm, dim, length))


def all_to_all(
    x: Tensor, comm: Comm, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
) -> Tensor:
    """A piece of x to every rank, along dim 0; the pieces received. Gradients go back the way the pieces came.

    Sizes: lengths of the pieces, both or neither. Without them x has the same shape on all ranks and is cut by
    `md.partition`.
    """
    if (send_sizes is None) != (recv_sizes is None):
        raise ValueError("all_to_all: give both send_sizes and recv_sizes, or neither")
    send = lengths(len(x), comm.size) if send_sizes is None else list(send_sizes)
    recv = [send[comm.rank]] * comm.size if recv_sizes is None else list(recv_sizes)
    return _Pair.apply(x, lambda x: comm.all_to_all(x, send, recv), lambda grad: comm.all_to_all(grad, recv, send))


def swap_shards(x: Tensor, comm: Comm, split: int, join: int, length: int | None = None) -> Tensor:
    """From a slice along `join` of some tensor to a slice of it along `split`: one all-to-all, another one going back.

    x: this rank's `md.partition` slice along join, whole along split -> whole along join, sliced along split. length:
    of the tensor along join, if known. Raises ValueError where x is no such slice.
    """
    joined = _slices(x.shape[join], comm, length)
    cut = lengths(x.shape[split], comm.size)
    there = lambda x: _swap(x, comm, (split, cut), (join, joined))
    back = lambda grad: _swap(grad, comm, (join, joined), (split, cut))
    return _Pair.apply(x, there, back)


# ---- what is done, either way ----------------------------------------------------------------------------------------


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, comm: Comm) -> Tensor:
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _slice(x: Tensor, comm: Comm, dim: int) -> Tensor:
    part = partition(x.shape[dim], comm.size)[comm.rank]
    return x.narrow(dim, part.start, part.stop - part.start).clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, comm: Comm, dim: int, length: int | None) -> Tensor:
    sizes = _slices(x.shape[dim], comm, length)
    return comm.all_gather(x.movedim(dim, 0), sizes=sizes).movedim(0, dim)


def _reduce_scatter(x: Tensor, comm: Comm, dim: int) -> Tensor:
    return comm.reduce_scatter(x.movedim(dim, 0)).movedim(0, dim)


def _swap(x: Tensor, comm: Comm, split: tuple[int, list[int]], join: tuple[int, list[int]]) -> Tensor:
    """Piece r along split goes to rank r; the pieces received are put side by side along join."""
    (split_dim, cut), (join_dim, joined) = split, join
    outgoing = [piece.reshape(-1) for piece in x.split(cut, split_dim)]
    shapes = [list(x.shape) for _ in joined]
    for shape, n in zip(shapes, joined, strict=True):
        shape[split_dim], shape[join_dim] = cut[comm.rank], n
    arriving = [torch.Size(shape).numel() for shape in shapes]
    received = comm.all_to_all(torch.cat(outgoing), [len(piece) for piece in outgoing], arriving).split(arriving)
    return torch.cat([piece.view(shape) for piece, shape in zip(received, shapes, strict=True)], join_dim)


def _slices(mine: int, comm: Comm, length: int | None) -> list[int]:
    """The lengths of all ranks' slices, of which mine is one. length: their sum; None: the ranks tell each other."""
    held = comm.lengths(mine) if length is None else lengths(length, comm.size)
    right = lengths(sum(held), comm.size)
    if held != right or mine != right[comm.rank]:
        raise ValueError(
            f"rank {comm.rank} of {comm.size} holds {mine} along the dim that is gathered: md.partition cuts "
            f"{sum(held)} into {right}"
        )
    return right
