"""Where a tensor's elements are: on every rank, cut over the ranks, or a sum that has not been taken.

A placement belongs to one axis of the mesh. `redistribute` goes from one to another, and is the only place that picks
a collective for it. A parameter carries its placements by the axis' name (`place`); whoever has to know which elements
exist once and which on every rank (norm, clipping, checkpoint) reads them there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minidist.comm.comm import Comm
from minidist.comm.partition import lengths, partition


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole tensor, and all have the same."""


@dataclass(frozen=True)
class Shard:
    """Every rank has a slice along `dim`; in the order of the ranks they make up the tensor.

    copies: so many ranks, side by side, have the same slice.
    """

    dim: int = 0
    copies: int = 1

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}" + (f", copies={self.copies})" if self.copies > 1 else ")")


@dataclass(frozen=True)
class Partial:
    """Every rank has a tensor of the full shape, and the sum over the ranks is what is meant."""


Placement = Replicate | Shard | Partial


class Axes(Protocol):
    """A `Mesh`: its axes in order, and the Comm of each."""

    axes: dict[str, int]

    def __getitem__(self, names: str, /) -> Comm: ...


# ---- what a parameter carries ----------------------------------------------------------------------------------------


def place(parameter: nn.Parameter, axis: str, placement: Placement, part: int | None = None) -> None:
    """Note on the parameter where its elements are along this axis of the mesh, and which part this rank has.

    Shard also says that the ranks along the axis hold different parameters, as the stages of a pipeline do: what
    matters is that no element is there twice. The note survives `to`, `double` and pickle; `copy.deepcopy` of a
    parameter makes a new one without it.

    >>> weight = nn.Parameter(torch.zeros(2, 4))
    >>> place(weight, "tp", Shard(1))
    >>> placement_of(weight, "tp"), placement_of(weight, "dp")
    (Shard(dim=1), Replicate())
    """
    if not isinstance(placement, Replicate | Shard | Partial):
        raise TypeError(f"a placement is Replicate(), Shard(dim) or Partial(), not {placement!r}")
    vars(parameter)["placements"] = placements(parameter) | {axis: placement}
    if part is not None:
        vars(parameter)["parts"] = parts(parameter) | {axis: part}


def placements(parameter: Tensor) -> dict[str, Placement]:
    """What `place` noted: axis -> placement."""
    return vars(parameter).get("placements", {})


def parts(parameter: Tensor) -> dict[str, int]:
    """Which part this rank has along an axis, where `place` noted it: axis -> number."""
    return vars(parameter).get("parts", {})


def placement_of(parameter: Tensor, axis: str) -> Placement:
    """Where its elements are along this axis: Replicate() unless `place` said otherwise."""
    return placements(parameter).get(axis, Replicate())


# ---- from one placement to another -----------------------------------------------------------------------------------


def redistribute(x: Tensor, src: Placement, dst: Placement, comm: Comm) -> Tensor:
    """x as it has to lie along comm's axis, from how it lies now. All ranks of comm call with the same src and dst.

    src -> dst               what is called       result, where x is [n, ...] in full
    Shard(i) -> Replicate    all_gather           [n, ...]
    Partial  -> Replicate    all_reduce           [n, ...]
    Partial  -> Shard(j)     reduce_scatter       this rank's `md.partition` slice of dim j
    Replicate -> Shard(j)    nothing              the same slice
    Shard(i) -> Shard(j)     all_to_all           the same slice; dim i whole

    The shards that come in may be of any length, empty ones too. x stays as it is; the result is x itself where src is
    dst, else memory of its own. Raises ValueError for a dim that x does not have and for -> Partial: no collective
    undoes a sum.
    """
    src, dst = _known_dim(x, src), _known_dim(x, dst)
    if src == dst:
        return x
    if isinstance(dst, Partial):
        raise ValueError(f"{src} -> Partial(): nothing undoes a sum; leave it Partial, or divide it by hand")
    if isinstance(dst, Replicate):
        if isinstance(src, Shard):
            return _once(comm.all_gather(x.movedim(src.dim, 0)), src.copies, comm).movedim(0, src.dim)
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))
    if not isinstance(src, Replicate) and max(getattr(p, "copies", 1) for p in (src, dst)) > 1:
        raise ValueError(f"{src} -> {dst}: shards of which there are copies go to and from Replicate() alone")
    if isinstance(src, Partial):
        return comm.reduce_scatter(x.movedim(dst.dim, 0)).movedim(0, dst.dim)
    if isinstance(src, Replicate):
        _check_copies(dst, comm)
        return _slice(x, dst, comm).clone(memory_format=torch.contiguous_format)
    return _exchange(x, src.dim, dst.dim, comm)


def _once(whole: Tensor, copies: int, comm: Comm) -> Tensor:
    """Of copies that lie side by side, the first."""
    return whole if copies == 1 else torch.cat(whole.chunk(comm.size)[::copies])


def _check_copies(shard: Shard, comm: Comm) -> None:
    if shard.copies < 1 or comm.size % shard.copies:
        raise ValueError(f"{shard}: the {comm.size} ranks of the axis cannot hold {shard.copies} copies of each slice")


def _known_dim(x: Tensor, placement: Placement) -> Placement:
    """The placement with its dim counted from the front."""
    if not isinstance(placement, Shard):
        if not isinstance(placement, Replicate | Partial):
            raise TypeError(f"a placement is Replicate(), Shard(dim) or Partial(), not {placement!r}")
        return placement
    if not -x.dim() <= placement.dim < x.dim():
        raise ValueError(f"{placement}: a tensor of shape {list(x.shape)} has no dim {placement.dim} to be cut along")
    return Shard(placement.dim % x.dim(), placement.copies)


def _slice(x: Tensor, shard: Shard, comm: Comm) -> Tensor:
    mine = partition(x.shape[shard.dim], comm.size // shard.copies)[comm.rank // shard.copies]
    return x.narrow(shard.dim, mine.start, mine.stop - mine.start)


def _exchange(x: Tensor, i: int, j: int, comm: Comm) -> Tensor:
    """Shard(i) -> Shard(j): everyone's dim i, my slice of dim j."""
    rows = comm.lengths(x.shape[i])
    columns = lengths(x.shape[j], comm.size)
    first = x.movedim((i, j), (0, 1))  # [my rows, all columns, ...]
    rest = first.shape[2:]
    cell = rest.numel()
    flat = torch.cat([piece.reshape(-1) for piece in first.split(columns, dim=1)])
    send = [x.shape[i] * width * cell for width in columns]
    recv = [height * columns[comm.rank] * cell for height in rows]
    whole = comm.all_to_all(flat, send, recv).view(sum(rows), columns[comm.rank], *rest)
    return whole.movedim((0, 1), (i, j))


# ---- one norm for all of a model's gradients -------------------------------------------------------------------------


def grad_norm(module: nn.Module, mesh: Axes | Mapping[str, Comm], norm: float = 2.0) -> Tensor:
    """The norm of all gradients of the whole model, as one process would see it: a scalar, equal on every rank.

    Every logical parameter counts once, however it lies on the mesh: its owned elements are summed over the axes that
    shard it, and of replicas the first along each axis counts. Gradients must be reduced already.

    module: its `parameters()`. mesh: a Mesh, or {axis: Comm} for some axes of one. norm: 2.0, or inf for the largest
    absolute value. Collective over the mesh, one small all-reduce for each axis.
    Raises ValueError for a Partial parameter, or one placed on an axis that is not in the mesh.
    """
    names: Any = getattr(mesh, "axes", mesh)
    comms = {axis: mesh[axis] for axis in names}
    if norm not in (2.0, float("inf")):
        raise ValueError(f"norm={norm} must be 2.0 or float('inf')")
    device = next(iter(comms.values())).device if comms else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in _owned(module, comms):
        part = torch.linalg.vector_norm(grad, norm, dtype=_wide(grad.dtype)).to(total) if grad.numel() else 0 * total
        total = torch.maximum(total, part) if norm == float("inf") else total + part.square()
    for comm in comms.values():
        if comm.size > 1:
            comm.all_reduce(total, op="max" if norm == float("inf") else "sum")
    return total if norm == float("inf") else total.sqrt()


def _owned(module: nn.Module, comms: Mapping[str, Comm]) -> Iterator[Tensor]:
    """The gradients that this rank counts: those of which no rank before it on an axis has a replica."""
    for name, parameter in module.named_parameters():
        placed = placements(parameter)
        if unknown := placed.keys() - comms.keys():
            raise ValueError(
                f"{name} is placed on {sorted(unknown)}, and the norm is asked for over the axes {list(comms)}: "
                "pass the mesh that the model was placed on"
            )
        if partial := [axis for axis, placement in placed.items() if isinstance(placement, Partial)]:
            raise ValueError(f"{name} is Partial on {partial}: reduce it first, a norm of summands is no norm of a sum")
        first = all(_is_first(placed.get(axis), comm.rank) for axis, comm in comms.items())
        if first and parameter.grad is not None:
            yield parameter.grad.detach()


def _is_first(placement: Placement | None, rank: int) -> bool:
    """Whether no rank before this one on the axis has the same elements."""
    return rank % placement.copies == 0 if isinstance(placement, Shard) else rank == 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def clip_grad_norm_(module: nn.Module, max_norm: float, mesh: Axes | Mapping[str, Comm], norm: float = 2.0) -> Tensor:
    """Scale all gradients so that their `grad_norm` is at most max_norm; returns what it was.

    The factor, max_norm / (norm + 1e-6) as torch has it, is the same on every rank. Call it on all, after the gradients
    were reduced and before the optimizer.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be greater than 0")
    total = grad_norm(module, mesh, norm)
    scale_grads_(module, total, max_norm)
    return total


def scale_grads_(module: nn.Module, total: Tensor, max_norm: float) -> None:
    """The second half of clipping: multiply by max_norm / total where that is below 1."""
    factor: Any = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.detach().mul_(factor.to(parameter.grad))
