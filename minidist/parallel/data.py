"""Data parallelism: every rank holds the whole model, works on its part of the batch, and the gradients are averaged.

Replicas start equal and apply equal gradients, so they stay equal, as if one process had seen the whole batch. Here it
is in three versions, each the one before and one idea more:

1. `average_gradients`: after the backward pass, one all-reduce for each parameter.
2. `DataParallel(..., overlap=False)`: buckets. A message costs time however short it is, so the gradients share a few
   flat tensors, and each of these is all-reduced as one.
3. `DataParallel(..., overlap=True)`: a bucket leaves as soon as its gradients are there. A backward pass begins with
   the last layer, so the last layers' gradients travel while the first layers' are still being computed.

The rule, in all three: the sum over the ranks, divided by comm.size. With `minidist.loss.token_loss`, which multiplies
by comm.size, that is the gradient of the mean over all valid tokens of the global batch. Gradients are summed in the
parameter's own dtype. More ranks with the same local batch are a larger batch; whether that wants another learning rate
is tuning, and nothing here changes it.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (arXiv 2006.15704).
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from minidist.comm.comm import Comm
from minidist.loss import roll_call
from minidist.replicas import broadcast_tensors, check_replicas, check_same_module, persistent_buffers

FIRST_BUCKET_MB = 1
"""The bucket of the last layers is small, so that there is something to send early in the backward pass."""


# ---- 1: one all-reduce for each parameter ----------------------------------------------------------------------------


def average_gradients(module: nn.Module, comm: Comm) -> None:
    """Replace every gradient by its average over the ranks: all that data parallelism is.

    Call it on every rank after the backward pass and before the optimizer. The replicas must have
    started equal. A parameter this rank did not use takes part with zeros.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _refuse_sparse(name, parameter.grad)
            comm.all_reduce(parameter.grad, op="mean")


# ---- 2: buckets ------------------------------------------------------------------------------------------------------


class Bucket:
    """Gradients of several parameters, side by side in one flat tensor, so that one all-reduce carries them all.

    flat: [sum of the sizes]. views[i]: the part of it that is parameter i's gradient, in that parameter's shape and
    memory order. `waiting` holds the numbers of the parameters whose gradient this backward pass has not delivered yet.
    """

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.names, self.parameters = list(named), list(named.values())
        first = self.parameters[0]
        *starts, size = accumulate((p.numel() for p in self.parameters), initial=0)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.views = [
            self.flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), start)
            for p, start in zip(self.parameters, starts, strict=True)
        ]
        self.starts = starts
        self.zero = self.flat.new_zeros(())
        self.expect_all()

    def expect_all(self) -> None:
        """A new backward pass: nothing has been delivered."""
        self.waiting = set(range(len(self.parameters)))
        self.handle: Any = None

    def deliver(self, i: int, scale: float) -> None:
        """Put scale x the gradient of parameter i in its place, and let the parameter's grad be that place.

        After `zero_grad()` autograd makes a new tensor, which is copied here and scaled on the way. A grad that was
        there already, and to which autograd has added, *is* this place, and is only scaled.
        """
        parameter, view = self.parameters[i], self.views[i]
        self.waiting.remove(i)
        if (grad := parameter.grad) is None:
            view.fill_(UNUSED)  # a zero, see below
            return
        _refuse_sparse(self.names[i], grad)
        torch.add(self.zero, grad.detach(), alpha=scale, out=view)  # 0 + x, so that no x is -0.0
        parameter.grad = view

    def launch(self, comm: Comm) -> None:
        """Start to sum over the ranks."""
        self.handle = comm.all_reduce(self.flat, async_op=True)

    def wait(self) -> None:
        """The sums are there. A parameter that this rank did not use gets its grad now, if another rank used it."""
        self.handle.wait()
        for parameter, view, start in zip(self.parameters, self.views, self.starts, strict=True):
            if parameter.grad is None and not _is_unused(self.flat[start].item()):
                parameter.grad = view


UNUSED = -0.0
"""What a rank sends for a parameter that its loss did not reach.

A parameter that *no* rank used has to keep grad None, for an optimizer skips that, and would let a zero gradient decay
the weight. Telling the others who used what would take another message. But under IEEE 754 a sum is -0.0 only if every
term is -0.0, so here "nothing" and "a gradient that is zero" are two numbers, and the sum says whether anybody used it.
"""


def _is_unused(total: complex) -> bool:
    return total == 0 and math.copysign(1, total.real) < 0


def make_buckets(named: dict[str, nn.Parameter], bucket_mb: float) -> list[Bucket]:
    """Fill buckets of at most bucket_mb x 10^6 bytes (or one parameter), beginning with the last parameter.

    A backward pass meets the parameters about in this order. A bucket has one dtype and one device.
    """
    full: list[dict[str, nn.Parameter]] = []
    filling: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in reversed(named.items()):
        key = parameter.dtype, parameter.device
        bucket = filling.setdefault(key, {})
        limit = 1e6 * (bucket_mb if full else min(bucket_mb, FIRST_BUCKET_MB))
        if bucket and sum(p.nbytes for p in bucket.values()) + parameter.nbytes > limit:
            full.append(bucket)
            bucket = filling[key] = {}
        bucket[name] = parameter
    return [Bucket(bucket) for bucket in [*full, *filling.values()]]


# ---- 3: buckets that leave during the backward pass ------------------------------------------------------------------


class DataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks: wrap it, and train as if alone.

    After `loss.backward()` every parameter's grad is the average over comm, the same on every rank; gradient clipping,
    optimizers and learning-rate schedulers follow as usual. Every rank must run the same number of backward passes (or
    see `join`), and its loss must reach at least one parameter.

    comm: the ranks to average over. bucket_mb: see `make_buckets`. overlap: send each bucket during the backward pass,
    as soon as it is full; False sends them all at its end. The attribute `synced` says whether the gradients there are
    now have been averaged.

    - Parameters and buffers start as rank 0's.
    - Buffers (the running statistics of BatchNorm): each rank computes with its own, and after a synchronised backward
      pass all get rank 0's, so that evaluation, which needs no communication, and whoever saves see one set.
      broadcast_buffers=False leaves every rank its own. Buffers with persistent=False, constants mostly, stay out.
    - A parameter that this rank's loss did not reach takes part with zeros. If no rank's did, its grad stays None.
    - Frozen parameters cost nothing. Freezing one later is fine; unfreezing or adding one needs a new DataParallel.
    - The gradients are views into buckets, which the next backward pass overwrites: clone what you want to keep.
    - `state_dict`, `load_state_dict`, `named_parameters` and `named_buffers` are the module's own, with its own names.

    Raises: ValueError if there is nothing to train; RuntimeError, on all ranks, if the ranks' modules differ.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        bucket_mb: float = 25,
        overlap: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        named = {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
        if not named:
            raise ValueError("no parameter of this module requires a gradient: there is nothing to average")
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb} must be above 0; a tiny one gives each parameter its own bucket")
        self.module, self.comm, self.overlap = module, comm, overlap
        self.synced = False
        check_same_module(module, comm)
        broadcast_tensors([*module.parameters(), *module.buffers()], comm)

        self._known = {p: (p.dtype, p.device) for p in module.parameters() if p.requires_grad}
        self._statistics = persistent_buffers(module) if broadcast_buffers else []
        self._buckets = make_buckets(named, bucket_mb)
        self._launched = 0  # buckets that are on their way
        self._averaging = False  # whether a backward pass is under way that averages
        self._accumulating = False  # inside no_sync
        self._join_steps: int | None = None  # backward passes so far inside join
        self._register_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Nothing is sent."""
        if self._averaging and not _inside_backward():
            self._drop_failed_backward()
        if torch.is_grad_enabled():
            self._check_parameters()
        return self.module(*args, **kwargs)

    def _check_parameters(self) -> None:
        """Refuse to train a parameter that no bucket has, or that its bucket no longer fits."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if unknown := [n for n, p in trained.items() if self._known.get(p) != (p.dtype, p.device)]:
            raise RuntimeError(
                f"{', '.join(unknown)}: frozen, not there, or of another dtype or device when DataParallel was built, "
                "so its gradient would not be averaged: wrap the module again"
            )

    # ---- during the backward pass ------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        """Have autograd call us whenever a parameter's gradient is complete, for as long as this object lives."""
        this: weakref.ref[DataParallel] = weakref.ref(self)
        hooks = []
        for bucket in self._buckets:
            for i, parameter in enumerate(bucket.parameters):
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(_on_gradient, this, bucket, i)))
        weakref.finalize(self, _remove, hooks)

    def _gradient_ready(self, bucket: Bucket, i: int) -> None:
        """Parameter i of this bucket has its gradient: deliver it, and send what can be sent."""
        if self._accumulating:
            self.synced = False
            return
        if not self._averaging:
            self._begin()
        if i not in bucket.waiting:
            raise RuntimeError(
                f"{bucket.names[i]}: a second gradient in one backward pass, and the first may be on "
                "its way already. If that comes from activation checkpointing, pass use_reentrant=False"
            )
        bucket.deliver(i, 1 / self.comm.size)
        if self.overlap:
            self._launch_full_buckets()

    def _begin(self) -> None:
        """The first gradient of a backward pass: have autograd call `_finish` after the last."""
        if self._join_steps is not None:
            self._announce_step()
        self._averaging = True
        Variable._execution_engine.queue_callback(self._finish)

    def _launch_full_buckets(self) -> None:
        """Send in the order of the list, and in that order only.

        A later bucket may fill first, on one rank and not on another (a branch not taken). Sent as they
        fill, the ranks' all-reduces would pair bucket 2 with bucket 3.
        """
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            self._buckets[self._launched].launch(self.comm)
            self._launched += 1

    def _finish(self) -> None:
        """The backward pass is over, what has not come will not come: send the rest, wait for all."""
        for bucket in self._buckets[self._launched :]:
            for i in sorted(bucket.waiting):
                bucket.deliver(i, 1 / self.comm.size)
        self._launch_full_buckets()
        for bucket in self._buckets:
            bucket.wait()
            bucket.expect_all()
        if self._join_steps is None:
            broadcast_tensors((getattr(owner, name) for owner, name in self._statistics), self.comm)
        self._launched, self._averaging, self.synced = 0, False, True

    def _drop_failed_backward(self) -> None:
        """A backward pass raised midway, with some buckets sent. Send the rest, so that the ranks stay in step."""
        self.zero_grad()
        self._finish()
        self.zero_grad()
        self.synced = False

    # ---- steps that differ -------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only add to the local gradients. The next one outside averages what has gathered.

            with replica.no_sync():
                for x, y in micro_batches[:-1]:
                    token_loss(replica(x), y, comm, tokens).backward()
            x, y = micro_batches[-1]
            token_loss(replica(x), y, comm, tokens).backward()

        What counts is where the backward pass runs. `synced` is False until gradients have been averaged: an optimizer
        step taken then would drive the replicas apart.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextmanager
    def join(self, step: Callable[[], Any] | None = None) -> Iterator[None]:
        """Around a training loop whose number of batches differs from rank to rank; every rank enters.

            with replica.join(step=optimizer.step):
                for tokens, targets in my_batches:
                    ...

        A rank that leaves its loop early stays in `join` until the last one is done, and contributes zeros to their
        remaining steps (to the first of them also what `no_sync` left). The divisor remains comm.size, so that with
        `token_loss`, whose count it also joins, those steps are right: means over the tokens there are. Other
        collectives have to wait until after the `with`.

        step: called on such a rank after each of these steps, to apply the same gradients. Without it the rank's
        optimizer state falls behind; either way it leaves with the parameters and buffers of those that ran longest.
        Inside, BatchNorm's statistics stay local.
        """
        self._join_steps = 0
        try:
            yield
            while (call := roll_call(self.comm, ranks=0).tolist())[1]:
                if call[2]:
                    self._contribute_nothing()
                    if step is not None:
                        step()
            broadcast_tensors([*self.parameters(), *self.buffers()], self.comm, src=self._longest())
        finally:
            self._join_steps = None

    def _announce_step(self) -> None:
        """Inside join: say that a step is coming, to the ranks that are out of data."""
        _, ranks, steps = roll_call(self.comm, steps=1).tolist()
        if steps != ranks:
            raise RuntimeError(f"{steps} of {ranks} ranks average gradients now; the others count tokens instead")
        assert self._join_steps is not None
        self._join_steps += 1

    def _contribute_nothing(self) -> None:
        """Inside join, out of data: take part in the others' step."""
        if self.synced:
            self.zero_grad()
        self._finish()

    def _longest(self) -> int:
        """The rank with the most steps inside join, the first one of several."""
        assert self._join_steps is not None
        order = self.comm.size - 1 - self.comm.rank
        best = self.comm.all_reduce(
            torch.tensor(self._join_steps * self.comm.size + order, device=self.comm.device), op="max"
        )
        return self.comm.size - 1 - int(best) % self.comm.size

    # ---- as if it were the module ------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Raise RuntimeError, on all ranks, if the parameters are no longer equal. Every rank calls."""
        check_replicas(self.module, self.comm)

    def __getstate__(self) -> Any:
        raise TypeError("a DataParallel belongs to its ranks and cannot be copied or saved: copy or save its .module")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own. Every rank loads the same file; `check_replicas` says whether that is so."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Part of a larger module that loads: its names for ours have no "module." either."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


def _on_gradient(replica: "weakref.ref[DataParallel]", bucket: Bucket, i: int, _: Tensor) -> None:
    if (alive := replica()) is not None:
        alive._gradient_ready(bucket, i)


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _refuse_sparse(name: str, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise TypeError(
            f"{name} has a sparse gradient, which buckets cannot hold: build its embedding with sparse=False"
        )
