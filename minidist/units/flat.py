"""Many parameters in one flat tensor, of which each rank of a group owns a slice: what is gathered and reduced at once.

A message costs time however short it is, so the parameters of a layer travel together. They lie side by side in one
flat tensor and are views of it, so that nothing is copied on the way in or out, and `md.partition` cuts it: a rank's
slice may begin in the middle of a parameter. Which of the three, parameters, gradients and optimizer state, a rank
keeps in full and of which its slice alone, is `Rest`; ZeRO's stages are four values of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import copysign
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.comm import Comm
from minidist.comm.partition import partition
from minidist.memory import optimizer_tensors, storage_bytes
from minidist.placement import Partial, Placement, Replicate, Shard, place, placements
from minidist.plan.memory import SHARDED, check_stage

UNUSED = -0.0
"""What a rank sends for a parameter that its loss did not reach: a sum is -0.0 only if every term is (decision 006)."""


@dataclass(frozen=True)
class Rest:
    """Where parameters, gradients and optimizer state rest between steps."""

    params: Placement
    grads: Placement
    optimizer: Placement


def rest(stage: int) -> Rest:
    """Where a stage keeps things between steps: a row of ZeRO's table.

    >>> rest(2)
    Rest(params=Replicate(), grads=Shard(dim=0), optimizer=Shard(dim=0))
    """
    check_stage(stage)
    cut = SHARDED[stage]
    return Rest(
        params=Shard() if "params" in cut else Replicate(),
        grads=Shard() if "grads" in cut else Partial(),
        optimizer=Shard() if "optimizer" in cut else Replicate(),
    )


@dataclass(frozen=True)
class Setting:
    """What all flat tensors of a model have in common.

    comm: the ranks that share them out. replicas: the ranks that hold the same slice, where there are several. axis:
    name of comm's axis in the mesh. grad_dtype: in which gradients are summed and rest; None: the parameters' own, or
    float32 for those of 16 bit. offload: what the optimizer updates, and its gradients, are on the CPU.
    """

    comm: Comm
    replicas: Comm | None
    axis: str
    rest: Rest
    grad_dtype: torch.dtype | None = None
    offload: bool = False

    @property
    def ranks(self) -> int:
        """Over how many gradients are averaged."""
        return self.comm.size * (1 if self.replicas is None else self.replicas.size)


@dataclass(frozen=True)
class Piece:
    """The part of parameter number `index` that this rank's slice holds: its elements from `start` on.

    tensor: [elements], a view into the slice; the optimizer updates it.
    """

    index: int
    name: str
    start: int
    tensor: nn.Parameter


class Flat:
    """Parameters side by side, all of one dtype, on one device, and all trained or all frozen.

    full: [N], the parameters are views of it; while they are not here its memory is freed. shard: this rank's slice of
    it. master: what the optimizer updates, the shard itself or a copy in another dtype or on another device. grads:
    [N], the sum of this rank's gradients, divided by the number of ranks, until they are reduced. grad_shard: the slice
    of the sum over the ranks.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], setting: Setting) -> None:
        self.names, self.parameters, self.setting = list(named), list(named.values()), setting
        first = self.parameters[0]
        self.trained = first.requires_grad
        *self.starts, self.size = accumulate((p.numel() for p in self.parameters), initial=0)
        self.shapes = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in self.parameters]
        everything = slice(0, self.size)
        parts = partition(self.size, setting.comm.size)
        self.part = parts[setting.comm.rank] if setting.rest.optimizer == Shard() else everything
        self.sharded = setting.rest.params == Shard()
        self.sizes = [part.stop - part.start for part in parts]

        self.full = first.data.new_empty(self.size)
        self.views = self.views_of(self.full)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.spread_first_values()
        self.shard = self.full[self.part].clone() if self.sharded else self.full[self.part]
        away = torch.nan if first.is_floating_point() or first.is_complex() else 0
        self.nothing = [first.data.new_full((), away).expand(p.shape) for p in self.parameters]
        self.gathering: Any = None
        self.here = True

        wide = torch.promote_types(first.dtype, torch.float32)
        self.own_master = self.trained and (setting.offload or wide != first.dtype)
        self.master = self.shard
        if self.own_master:
            self.master = self.shard.to("cpu" if setting.offload else first.device, wide, copy=True)
        self.grad_dtype = setting.grad_dtype or wide
        self.pieces = self.make_pieces() if self.trained else []
        self.zero = torch.zeros((), dtype=self.grad_dtype, device=first.device)
        self.grads: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.grad_shard: Tensor | None = None
        self.reducing: Any = None
        self.came: list[int] = []  # gradients that are there and not taken over
        self.used: set[int] = set()  # parameters that got one since the last reduction
        self.filled: set[int] = set()  # parameters of which `grads` holds something
        self.reduced = False  # `grads`, where it stays, holds in its own part the sum over the ranks
        self.expect_all()
        if self.sharded:
            self.reshard()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor [N] in the parameters' shapes and memory order."""
        return [
            flat.as_strided(shape, stride, start)
            for (shape, stride), start in zip(self.shapes, self.starts, strict=True)
        ]

    def spread_first_values(self) -> None:
        """Everybody starts with the values of the first rank."""
        for comm in (self.setting.comm, self.setting.replicas):
            if comm is not None and comm.size > 1:
                comm.broadcast(self.full, 0)

    def load(self, values: Sequence[Tensor] | None) -> None:
        """Take the first rank's values; None on the others. Parameters that are not here stay away."""
        stay = self.here
        self.reshard()
        self.full.untyped_storage().resize_(self.size * self.full.itemsize)
        for view, value in zip(self.views, values or [], strict=False):
            view.copy_(value)
        self.spread_first_values()
        if self.sharded:
            self.shard.copy_(self.full[self.part])
            self.here = True
        if self.own_master:
            self.master.copy_(self.shard)
        if not stay:
            self.reshard()
        elif self.sharded:
            self.point_at(self.views)

    def point_at(self, tensors: Sequence[Tensor]) -> None:
        """Let the parameters be these."""
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def make_pieces(self) -> list[Piece]:
        pieces = []
        ends = [*self.starts[1:], self.size]
        for index, (begin, end) in enumerate(zip(self.starts, ends, strict=True)):
            start, stop = max(begin, self.part.start), min(end, self.part.stop)
            if start < stop:
                view = self.master[start - self.part.start : stop - self.part.start]
                tensor = nn.Parameter(view)
                tensor.grad_dtype = self.grad_dtype
                for axis, placement in placements(self.parameters[index]).items():
                    place(tensor, axis, placement)
                if self.setting.rest.optimizer == Shard():
                    place(tensor, self.setting.axis, Shard())
                pieces.append(Piece(index, self.names[index], start - begin, tensor))
        return pieces

    # ---- parameters: unshard and reshard -----------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather the parameters, if they are not here or on their way."""
        if self.here or self.gathering is not None:
            return
        self.full.untyped_storage().resize_(self.size * self.full.itemsize)
        # Through `data`: the forward pass has saved views of this memory, and autograd would take what arrives in it
        # for a change of them.
        self.gathering = self.setting.comm.all_gather(self.shard, self.sizes, out=self.full.data, async_op=True)

    def unshard(self) -> None:
        """The parameters are here."""
        if self.here:
            return
        self.start_unshard()
        self.gathering.wait()
        self.gathering = None
        self.here = True
        self.point_at(self.views)

    def reshard(self) -> None:
        """Free the parameters. Whoever reads one now sees NaN: the memory is gone, although views of it were saved."""
        if self.gathering is not None:
            self.unshard()
        if not (self.sharded and self.here):
            return
        self.point_at(self.nothing)
        self.full.untyped_storage().resize_(0)
        self.here = False

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def expect_all(self) -> None:
        """A new backward pass: no gradient has come, and what the last one left is taken over."""
        self.take_over_all()
        self.waiting = set(range(len(self.parameters))) if self.trained else set()

    def deliver(self, index: int) -> None:
        """Autograd has this parameter's gradient: take it over while it is in the processor's cache.

        The first one of a layer waits for the second: at that point its backward pass needs most memory, and one
        gradient alone is less than the flat tensor for all.
        """
        if index not in self.waiting:
            raise RuntimeError(
                f"{self.names[index]}: a second gradient in one backward pass, and the first may be on its way. "
                "If that comes from activation checkpointing, pass use_reentrant=False; if from two forward passes, "
                "give each a backward pass before the next, or use stage 2"
            )
        self.waiting.remove(index)
        self.came.append(index)
        if len(self.waiting) < len(self.parameters) - 1 or not self.waiting:
            self.take_over_all()

    def take_over_all(self) -> None:
        """Take over every gradient that has come."""
        while self.came:
            self.take_over(self.came.pop())

    def take_over(self, index: int) -> None:
        """Add the parameter's gradient, divided by the number of ranks, to the flat tensor, and take it away there."""
        parameter, scale = self.parameters[index], 1 / self.setting.ranks
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise TypeError(
                f"{self.names[index]} has a sparse gradient, which has no slices: build its embedding with sparse=False"
            )
        self.open_grads()
        view = self.grad_views[index]
        if index in self.filled:
            view.add_(grad, alpha=scale)
        elif grad.dtype == view.dtype:
            torch.add(self.zero, grad, alpha=scale, out=view)  # 0 + x, so that no x is -0.0
        else:
            view.copy_(grad).mul_(scale).add_(0.0)
        self.used.add(index)
        self.filled.add(index)

    def open_grads(self) -> Tensor:
        """Memory for gradients, holding what is to be added to."""
        if self.grads is None:
            self.grads = torch.empty(self.size, dtype=self.grad_dtype, device=self.full.device)
            self.grad_views = self.views_of(self.grads)
        if self.reduced:  # a second averaged backward pass: what is there must be counted by one rank alone
            mine = self.part if self.setting.rest.optimizer == Shard() or self.setting.comm.rank == 0 else slice(0, 0)
            if self.setting.replicas is not None and self.setting.replicas.rank != 0:
                mine = slice(0, 0)
            self.grads[: mine.start].fill_(UNUSED)
            self.grads[mine.stop :].fill_(UNUSED)
            self.filled = set(range(len(self.parameters)))
            self.reduced = False
        return self.grads

    def start_reduce(self) -> None:
        """Everything has come that will come: begin to sum over the ranks."""
        if not self.trained:
            return
        grads = self.open_grads()
        self.take_over_all()
        for index in set(range(len(self.parameters))) - self.filled:
            self.grad_views[index].fill_(UNUSED)
        self.waiting = set()
        comm = self.setting.comm
        whole = self.setting.rest.optimizer == Replicate()
        call = comm.all_reduce if whole else comm.reduce_scatter
        self.reducing = call(grads, async_op=True)

    def finish_reduce(self) -> None:
        """The slice of the sum is here, and every piece has its gradient."""
        if not self.trained:
            return
        total: Tensor = self.reducing.wait()
        self.reducing = None
        if self.setting.replicas is not None:
            self.setting.replicas.all_reduce(total)
        if self.grads is not None and self.setting.rest.grads == Partial():
            if total is not self.grads:
                self.grads[self.part].copy_(total)
            self.grad_shard, self.reduced = self.grads[self.part].to(self.master.device), True
        else:
            self.grads, self.grad_views = None, []
            total = total.to(self.master.device)
            self.grad_shard = total if self.grad_shard is None else self.grad_shard.add_(total)
        self.hand_out()
        self.used, self.filled = set(), set()

    def hand_out(self) -> None:
        """Every piece's grad is its part of the slice; None where no rank had any."""
        assert self.grad_shard is not None
        end = 0
        for piece in self.pieces:
            start, end = end, end + piece.tensor.numel()
            unused = piece.index not in self.used and is_unused(self.grad_shard[start].item())
            piece.tensor.grad = None if unused else self.grad_shard[start:end]

    def drop_grads(self) -> None:
        """Forget the gradients."""
        for piece in self.pieces:
            piece.tensor.grad = None
        self.grad_shard, self.used, self.filled, self.reduced = None, set(), set(), False

    # ---- after the optimizer -----------------------------------------------------------------------------------------

    def start_update(self) -> None:
        """The optimizer has changed the pieces: begin to give every rank what it keeps of them."""
        if self.own_master and self.trained:
            self.shard.copy_(self.master)
        if self.trained and not self.sharded and self.setting.rest.optimizer == Shard():
            data = self.full.data
            self.gathering = self.setting.comm.all_gather(data[self.part], self.sizes, out=data, async_op=True)

    def finish_update(self) -> None:
        """The parameters are up to date."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


def is_unused(total: complex) -> bool:
    """Whether a sum is -0.0: no rank had anything to add."""
    return total == 0 and copysign(1, total.real) < 0


def held(flats: Sequence[Flat], optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes in these tensors under "params" and "grads", and under "optimizer" with its state and master weights."""
    masters = [flat.master for flat in flats if flat.own_master]
    state = [] if optimizer is None else optimizer_tensors(optimizer)
    return {
        "params": storage_bytes(tensor for flat in flats for tensor in (flat.full, flat.shard)),
        "grads": storage_bytes(tensor for flat in flats for tensor in (flat.grads, flat.grad_shard)),
        "optimizer": storage_bytes([*masters, *state]),
    }


def groups_of(pieces: Sequence[Piece], options: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups: pieces whose options are equal, in the order of the module. The same groups on every rank."""
    kinds: list[dict[str, Any]] = []
    for option in options.values():
        if option not in kinds:
            kinds.append(option)
    return [{"params": [p.tensor for p in pieces if options[p.name] == kind], **kind} for kind in kinds]


@contextmanager
def in_master_dtype(pieces: Sequence[Piece]) -> Iterator[None]:
    """Inside, gradients have their piece's dtype, which optimizers want."""
    tensors = [piece.tensor for piece in pieces if piece.tensor.dtype != piece.tensor.grad_dtype]
    narrow = {tensor: tensor.grad for tensor in tensors}
    kept = {tensor: tensor.grad_dtype for tensor in tensors}
    for tensor, grad in narrow.items():
        _set_grad(tensor, None if grad is None else grad.to(tensor.dtype), tensor.dtype)
    try:
        yield
    finally:
        for tensor, grad in narrow.items():
            _set_grad(tensor, grad, kept[tensor])


def _set_grad(tensor: nn.Parameter, grad: Tensor | None, dtype: torch.dtype | None) -> None:
    tensor.grad = None
    tensor.grad_dtype = dtype
    tensor.grad = grad
