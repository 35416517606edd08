"""The entry into a tensor-parallel region and the products behind it, with communication overlapped.

`autograd.copy` followed by matrix products computes the same. There each product's backward pass computes the gradients
of its weight and of its input, and when the latter are added up, copy all-reduces the sum while nothing else happens.
But nobody waits for the weights' gradients. So here a product's backward pass only leaves the gradient of its output
with the entry, and the entry's own, which comes last,

    1. computes the gradient of the input, summed over the products,
    2. starts the collective that sums it over the ranks,
    3. computes the gradients of the weights meanwhile, and
    4. waits.

With sequence parallelism the entry is `autograd.gather`. It keeps this rank's tokens, not all of them, and gathers them
again in the backward pass, while step 1 is under way (Korthikanti et al., arXiv 2205.05198, 4.2.2).

Shapes: T tokens, t of them on this rank, D model, F outputs of a product on this rank.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from minidist.comm.comm import Comm
from minidist.comm.handle import Handle
from minidist.comm.partition import lengths, partition


class Entry:
    """One pass through the entry: what its backward pass and those of the products have to share.

    shape: of all tokens, such as (B, S), where x is this rank's `md.partition` slice of them and has to be gathered;
    None where x is whole. shared: for each weight the Comm of the ranks that hold the same rows, over which its
    gradient is summed, or None.
    """

    def __init__(self, comm: Comm, shape: Sequence[int] | None, shared: Sequence[Comm | None]) -> None:
        self.comm, self.shape, self.shared = comm, shape, shared
        self.sizes = None if shape is None else lengths(prod(shape), comm.size)
        self._left: dict[int, list[tuple[int, Tensor]]] = {}  # backward pass -> (product, gradient of its output)
        self._regathered: Handle | None = None

    def enter(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """x [..., D] itself; with a shape, x [t, D] -> [*shape, D]. weights: [F, D] each, of the products to come."""
        return _Enter.apply(self, x, *weights)

    def product(self, i: int, whole: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """whole W' for weight number i: [..., D] -> [..., F]. x: what entered; whole: what came out."""
        return _Product.apply(whole, self, i, x.detach(), weight.detach(), weight.requires_grad)

    # ---- inside the backward pass ------------------------------------------------------------------------------------

    def leave(self, i: int, grad: Tensor, x: Tensor, trains: bool) -> None:
        """The gradient of product i's output is there. With it begins the second gathering of x, if W_i is trained."""
        here = torch._C._current_graph_task_id()
        if here not in self._left:
            self._left, self._regathered = {here: []}, None  # what a failed pass left is void
        self._left[here].append((i, grad.flatten(0, -2)))
        if trains and self.sizes is not None and self._regathered is None:
            with self.comm.recorder.label("regather"):
                self._regathered = self.comm.all_gather(x, sizes=self.sizes, async_op=True)

    def take(self) -> dict[int, list[Tensor]]:
        """What the products of this backward pass have left: for each product the gradients of its outputs, [T, F]."""
        left: dict[int, list[Tensor]] = {}
        for i, grad in self._left.pop(torch._C._current_graph_task_id(), []):
            left.setdefault(i, []).append(grad)
        return left

    def start_sum(self, grad: Tensor) -> Handle:
        """Sum [T, D] over the ranks, the transpose of entering: an all-reduce into grad, or a reduce-scatter."""
        if self.sizes is None:
            return self.comm.all_reduce(grad, async_op=True)
        return self.comm.reduce_scatter(grad, async_op=True)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's part of [..., D], as it entered."""
        if self.sizes is None:
            return whole
        return whole.flatten(0, -2)[partition(sum(self.sizes), self.comm.size)[self.comm.rank]]

    def tokens(self, x: Tensor) -> Tensor:
        """What entered on all ranks: [T, D]."""
        if self._regathered is None:
            return x.flatten(0, -2)
        whole, self._regathered = self._regathered.wait(), None
        return whole


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entry: Entry, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        if entry.shape is None:
            return x.view_as(x)
        return entry.comm.all_gather(x, sizes=entry.sizes).view(*entry.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, beside: Tensor | None) -> tuple[Tensor | None, ...]:
        """beside: the gradient from what used the whole tensor beside the products; it is complete on every rank."""
        entry: Entry = ctx.entry
        _, needs_x, *trained = ctx.needs_input_grad
        x, *weights = ctx.saved_tensors
        left = entry.take()
        summing = entry.start_sum(_input_grad(left, weights)) if needs_x and left else None
        grads = _weight_grads(entry, {i: left[i] for i in left if trained[i]}, x)
        grad = None if summing is None else summing.wait().view_as(x)
        if needs_x and beside is not None:
            grad = entry.mine(beside) if grad is None else grad + entry.mine(beside)
        return None, grad, *(grads.get(i) for i in range(len(weights)))


def _input_grad(left: dict[int, list[Tensor]], weights: Sequence[Tensor]) -> Tensor:
    """The products' gradients of their common input, added up: [T, D] {+tp}."""
    (first, i), *others = [(grad, i) for i, grads in left.items() for grad in grads]
    total = first @ weights[i]
    for grad, i in others:
        total.addmm_(grad, weights[i])
    return total


def _weight_grads(entry: Entry, left: dict[int, list[Tensor]], x: Tensor) -> dict[int, Tensor]:
    """The gradient [F, D] of each weight that is trained. Those whose rows others hold too come first: they travel."""
    found, sharing = {}, []
    whole = entry.tokens(x) if left else x
    for i in sorted(left, key=lambda i: entry.shared[i] is None):
        found[i] = left[i][0].t() @ whole
        for grad in left[i][1:]:
            found[i].addmm_(grad.t(), whole)
        if (holders := entry.shared[i]) is not None:
            with holders.recorder.label("shared heads"):
                sharing.append(holders.all_reduce(found[i], async_op=True))
    for handle in sharing:
        handle.wait()
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, entry: Entry, i: int, x: Tensor, weight: Tensor, trains: bool) -> Tensor:
        ctx.entry, ctx.i, ctx.trains = entry, i, trains
        ctx.save_for_backward(x)
        return F.linear(whole, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.entry.leave(ctx.i, grad, *ctx.saved_tensors, ctx.trains)
        return None, None, None, None, None, None
