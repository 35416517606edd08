"""ZeRO: what data parallelism keeps once a rank, optimizer state, gradients and parameters, is kept once in all.

Ask where each of them rests between steps, and the rest follows: what is cut has to be gathered before it is used.

stage   params      grads     optimizer   traffic, in N (n-1)/n   resident, N parameters and two moments
0       Replicate   Partial   Replicate   2                       4 N
1       Replicate   Partial   Shard       2                       (2 + 2/n) N
2       Replicate   Shard     Shard       2                       (1 + 3/n) N
3       Shard       Shard     Shard       3                       4 N / n

Stages 0 to 2 reduce a layer's gradients while the backward pass goes on below it. Stage 3 also gathers a layer's
parameters just before they are used, one layer ahead, in both directions, and frees them right after.

The rule is `DataParallel`'s: the sum over the ranks, divided by their number.

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv 1910.02054);
Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (arXiv 2304.11277), for the prefetching.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from minidist import placement
from minidist.comm.comm import Comm
from minidist.memory import PeakMemory, tensors_in
from minidist.replicas import broadcast_tensors, check_same_module, persistent_buffers
from minidist.sharded.whole import on_first_part
from minidist.units import whole
from minidist.units.flat import Flat, Piece, Setting, groups_of, held, in_master_dtype, rest
from minidist.units.unit import Unit, check_arguments, divide, named_blocks

Groups = Callable[[str, nn.Parameter], Mapping[str, Any]]


class Zero(nn.Module):
    """A module trained on all ranks of comm, with parameters, gradients and optimizer state kept as `stage` says.

        z = md.Zero(model, world, stage=3, optimizer=lambda groups: md.AdamW(groups, lr=1e-3))
        for tokens, targets in batches:
            z.zero_grad()
            md.token_loss(z(tokens), targets, world).backward()
            z.clip_grad_norm_(1.0)
            z.step()

    comm: the ranks, or (shard, replicate) for hybrid sharding: what is cut is cut over the first, and the ranks of the
    second hold the same slices. Gradients are averages over all. stage: a row of the table. optimizer: makes a torch
    optimizer, ours or torch's, out of parameter groups; it is `z.optimizer`, for schedulers. Without it nothing can
    `step`. groups: the options of a parameter, by its name and itself; parameters of equal options form a group:

        groups=lambda name, p: {"weight_decay": 0.1 if p.dim() > 1 else 0.0}

    blocks: the parts to gather and reduce one by one; None: the items of the module's lists (`blocks_of`). keep_last:
    stage 3 does not free the last block and what is in no block between the forward and the backward pass, which needs
    them first: less traffic, more memory. grad_dtype: in which gradients are summed, over ranks and micro-batches, and
    rest. None: the parameters' own, or float32 for 16-bit ones, in which small terms would be lost. offload: optimizer
    state and gradient slices live in the CPU's memory; for parameters on a GPU (not tested on one). axis: the name of
    (the first) comm in your Mesh, where a norm over a whole mesh is wanted.

    - 16-bit parameters are copies: the optimizer updates 32-bit master weights.
    - Every rank runs the same blocks in the same order, and every backward pass; parameters in them may stay unused.
      A parameter that no rank used keeps grad None.
    - Gradients and what the optimizer updates are in `z.parameters()`, flat slices by the module's names. The module's
      own parameters have no grad, and in stage 3 are NaN without memory while they are not in use.
    - Parameters and buffers start as rank 0's. After a backward pass buffers are rank 0's, as with `DataParallel`.
    - `full_state_dict`, `full_grads`, `load_state_dict`, evaluation in stage 3: all ranks call them, or none.

    Raises: ValueError where there is nothing to train or no such stage; RuntimeError, on all ranks, if their modules
    differ.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | tuple[Comm, Comm],
        stage: int = 3,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        groups: Groups | None = None,
        *,
        blocks: Sequence[nn.Module] | None = None,
        keep_last: bool = False,
        grad_dtype: torch.dtype | None = None,
        offload: bool = False,
        axis: str = "dp",
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        check_arguments(comm, optimizer, groups)
        if not any(p.requires_grad and p.numel() for p in module.parameters()):
            raise ValueError("no parameter of this module requires a gradient: there is nothing to train")
        shard, replicas = comm if isinstance(comm, tuple) else (comm, None)
        self.module, self.stage, self.comm, self.replicas = module, stage, shard, replicas
        self.keep_last, self.axis, self.synced = keep_last, axis, True
        self._setting = Setting(shard, replicas, axis, rest(stage), grad_dtype, offload)
        for ranks in self._comms():
            check_same_module(module, ranks)
            broadcast_tensors(module.buffers(), ranks)
        self._statistics = persistent_buffers(module) if broadcast_buffers else []
        options = {name: dict(groups(name, p)) if groups else {} for name, p in module.named_parameters()}
        self._make_units(named_blocks(module, blocks))
        self.optimizer = None if optimizer is None else optimizer(groups_of(self._pieces(), options))
        self.peak = PeakMemory()
        self._backward = False  # a backward pass is under way
        self._accumulating = False  # inside no_sync
        self._keep = False  # since no_sync(reshard=False), until a backward pass outside begins
        self._ahead: list[tuple[Unit, Unit]] = []  # in the backward pass of the first, the second is to be gathered
        self._pending: list[Unit] = []  # units whose gradients are being reduced
        self._register_hooks()

    def _comms(self) -> list[Comm]:
        return [self.comm] if self.replicas is None else [self.comm, self.replicas]

    def _make_units(self, blocks: Mapping[str, nn.Module]) -> None:
        parts = {"": self.module, **blocks}
        made = {
            path: Unit(path, parts[path], named, self._setting) for path, named in divide(self.module, blocks).items()
        }
        self._root = made.pop("")
        self._order = list(made.values())  # blocks in the order of the last forward pass; at first, of the module
        self._order_now: list[Unit] = []
        self._units = [self._root, *self._order]
        self._flats = [flat for unit in self._units for flat in unit.flats]

    def _pieces(self) -> list[Piece]:
        return [piece for flat in self._flats for piece in flat.pieces]

    def _register_hooks(self) -> None:
        for unit in self._units:
            if unit is not self._root and self.stage == 3:
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
                unit.module.register_forward_hook(partial(self._after_forward, unit))
            for flat in unit.flats:
                for i, parameter in enumerate(flat.parameters if flat.trained else []):
                    parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, unit, flat, i))

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. In stage 3 every rank calls it, also to evaluate."""
        if self._backward and not _inside_backward():
            self._drop_failed_backward()
        self._check_parameters()
        if self.stage < 3:
            return self.module(*args, **kwargs)
        self._root.start_unshard()
        self._order_now = []
        for first in self._order[:1]:
            first.start_unshard()
        self._root.unshard()
        out = self.module(*args, **kwargs)
        self._order = self._order_now or self._order
        self._after_forward(self._root, None, None, out)
        for unit in self._order if not torch.is_grad_enabled() else []:
            unit.reshard()
        return out

    def _before_forward(self, unit: Unit, *_: Any) -> None:
        """A block is about to run: have its parameters, and send for the next block's."""
        unit.unshard()
        if self._backward or unit in self._order_now:
            return  # computed again in the backward pass, or a second time
        self._order_now.append(unit)
        following = self._order[self._order.index(unit) + 1 :] if unit in self._order else []
        for following_unit in following[:1]:
            following_unit.start_unshard()

    def _after_forward(self, unit: Unit, _module: Any, _args: Any, out: Any) -> None:
        """A unit has run: free its parameters, and have autograd call before it needs them again."""
        if self._backward:
            return
        tensors = list(tensors_in(out))
        if torch.is_grad_enabled():
            if not tensors:
                raise TypeError(
                    f"{unit.path or 'the module'} returned {type(out).__name__}: return a tensor, or "
                    "a tuple, list or dict of some, so that its backward pass can be announced"
                )
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
        last = unit is self._root or unit is self._order[-1]
        if not (self._keep or (self.keep_last and last and torch.is_grad_enabled())):
            unit.reshard()

    def _check_parameters(self) -> None:
        """Refuse to train a parameter that was frozen, or not there, or another when this was built."""
        for flat in self._flats:
            for name, p in zip(flat.names, flat.parameters, strict=True):
                if p.dtype != flat.full.dtype or (p.requires_grad and not flat.trained):
                    raise RuntimeError(f"{name}: frozen or of another dtype when Zero was built: wrap the module again")

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit, _grad: Tensor) -> None:
        """Stage 3: the backward pass enters a unit. Those after it are done: reduce and free them.

        All ranks come here in the same order, whatever parameters they used, so it is here that
        messages leave, and not where the last gradient of a unit happens to arrive.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs what stage 3 has freed by then: use stage 2")
        self._begin()
        at = self._order.index(unit) if unit in self._order else len(self._order)
        unit.start_unshard()  # if too few gradients came for that, before anything else is sent
        for later in reversed(self._order[at + 1 :]):
            if later.in_backward:
                self._launch(later)
        unit.unshard()
        unit.in_backward = True
        self._ahead = [(unit, previous) for previous in self._order[max(at - 1, 0) : at]]
        if unit is self._root or not unit.waiting():
            self._send_for_next(unit)

    def _on_gradient(self, unit: Unit, flat: Flat, i: int, _parameter: Tensor) -> None:
        """Autograd has a parameter's gradient."""
        self._begin()
        if self.stage == 3 and unit is not self._root:
            unit.check_entered()
        flat.deliver(i)
        if self._ahead and 2 * unit.waiting() <= sum(len(flat.parameters) for flat in unit.flats if flat.trained):
            self._send_for_next(unit)
        if self.stage < 3 and not self._accumulating and not unit.waiting():
            self._launch_complete()

    def _send_for_next(self, unit: Unit) -> None:
        """Gather the block that the backward pass comes to after this one.

        Not at once: a layer's backward pass needs most memory at its beginning, and half of it is time enough.
        """
        for _, previous in [pair for pair in self._ahead if pair[0] is unit]:
            previous.start_unshard()
            self._ahead = []

    def _begin(self) -> None:
        """The first sign of a backward pass: have autograd call `_finish` at its end."""
        if not self._backward:
            self._backward = True
            self._keep = self._keep and self._accumulating
            Variable._execution_engine.queue_callback(self._finish)
            self._root.unshard()

    def _launch_complete(self) -> None:
        """Stages 0 to 2: reduce units in one order on all ranks, as far as their gradients are complete."""
        for unit in self._backward_order():
            if unit.waiting():
                return
            self._launch(unit)

    def _backward_order(self) -> list[Unit]:
        others = [unit for unit in self._units if unit is not self._root and unit not in self._order]
        return [*others, *reversed(self._order), self._root]

    def _launch(self, unit: Unit) -> None:
        """A unit's gradients are complete: reduce them, free its parameters, finish the unit before."""
        if unit.launched:
            return
        unit.launched = True
        if self.stage >= 2:  # two units' gradients at most: one on its way, one being computed
            self._wait(self._pending)
            self._pending = []
        if not self._keep:
            unit.reshard()
        for flat in unit.flats:
            flat.start_reduce()
        self._pending.append(unit)

    def _wait(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for flat in unit.flats:
                flat.finish_reduce()

    def _finish(self) -> None:
        """The backward pass is over: what has not come will not come. Reduce the rest, and wait for all of it."""
        if not (self._accumulating and self.stage < 2):
            for unit in self._backward_order():
                self._launch(unit)
            self._wait(self._pending)
            for comm in self._comms():
                broadcast_tensors((getattr(owner, name) for owner, name in self._statistics), comm)
        self._reset()
        self.synced = not self._accumulating or self.stage >= 2

    def _reset(self) -> None:
        self._pending, self._ahead, self._backward = [], [], False
        for unit in self._units:
            unit.launched = unit.in_backward = False
            for flat in unit.flats:
                flat.expect_all()
            if not self._keep:
                unit.reshard()

    def _drop_failed_backward(self) -> None:
        """A backward pass raised midway. Complete it, so that ranks that all raised are in step, and forget it."""
        self._finish()
        self.zero_grad()

    @contextmanager
    def no_sync(self, reshard: bool = True) -> Iterator[None]:
        """Around micro-batches but the last: gradients add up.

        Stages 0 and 1 send nothing meanwhile. Stages 2 and 3 have no place for a whole model's gradients and reduce
        them once a micro-batch all the same; the sum is in the slices. reshard=False: stage 3 gathers each unit once,
        and keeps it until the first backward pass outside.
        """
        before, self._accumulating, self._keep = self._accumulating, True, not reshard
        try:
            yield
        finally:
            self._accumulating = before

    # ---- step --------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, mesh: placement.Axes | Mapping[str, Comm] | None = None, norm: float = 2.0
    ) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most max_norm; returns what it was.

        mesh: where the module is cut over other axes too, such as tensor parallelism's. Collective.
        """
        self._check_synced()
        if mesh is None:
            mesh = dict(zip((self.axis, f"{self.axis} replicas"), self._comms(), strict=False))
        return placement.clip_grad_norm_(self, max_norm, mesh, norm)

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step on what this rank owns; then all have what they keep. Collective."""
        if self.optimizer is None:
            raise RuntimeError("there is no optimizer: build Zero(optimizer=lambda groups: ...)")
        self._check_synced()
        with in_master_dtype(self._pieces()):
            self.optimizer.step()
        self._keep = False
        for unit in self._units:
            unit.reshard()
        for flat in self._flats:
            flat.start_update()
        for flat in self._flats:
            flat.finish_update()

    def _check_synced(self) -> None:
        if not self.synced:
            raise RuntimeError("gradients are this rank's alone: run the last backward outside no_sync")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; they are always set to None."""
        for flat in self._flats:
            flat.drop_grads()
        self.synced = True

    # ---- the whole model ---------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict, with every parameter in full, in the CPU's memory of rank 0; {} on the others."""
        return on_first_part(self.module, whole.state_dict(self.module, self._flats, self._comms()))

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:  # pyright: ignore
        """Take parameters and buffers from rank 0's state_dict, such as `full_state_dict` gave; the others' may be {}.

        Optimizer state stays. Raises RuntimeError, on all ranks, where names or shapes do not fit.
        """
        whole.load(self.module, self._flats, self._comms(), state_dict)

    def full_grads(self) -> dict[str, Tensor | None]:
        """The averaged gradients in full, by name, on rank 0; {} on the others. None for what no rank used."""
        self._check_synced()
        return on_first_part(self.module, whole.grads(self._flats, self._comms()))

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds now under "params", "grads" and "optimizer" (master weights too), and the "peak".

        The peak is that of all tensors while `z.peak` was entered: `with z.peak: step()`.
        """
        return held(self._flats, self.optimizer) | {"peak": self.peak.nbytes}

    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Zero has slices of parameters: call full_state_dict() on all ranks, rank 0 gets the whole")

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizer updates: flat slices, by the names that the parameters have in the module."""
        yield from ((piece.name, piece.tensor) for piece in self._pieces())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise TypeError("the parameters lie in flat tensors: convert or move the module before it is wrapped")

    def __getstate__(self) -> Any:
        raise TypeError("a Zero belongs to its ranks and cannot be copied or saved: save its full_state_dict()")


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
