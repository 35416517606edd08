"""Layers that hold a slice of their parameters, and the borders of the regions in which they compute.

Each is the torch layer it was made from, of which it keeps name, hooks and place: only `forward` is another. What is
sent is decided in two places, `Region` (where a tensor enters) and `Border.leave` (where it leaves).

Shapes: T = B S tokens, t of them on this rank, D model, F hidden, V vocab.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.autograd import reduce_, reduce_scatter
from minidist.comm.comm import Comm
from minidist.comm.partition import partition
from minidist.sharded.entry import Entry


class Border:
    """What lies between regions: on every rank all tokens, [B, S, D], or with `sequence` its own ones, [t, D].

    axis: the name of comm's axis. shape: of all tokens, (B, S), as they were last cut in this forward pass; None:
    nobody cut them yet.
    """

    def __init__(self, comm: Comm, sequence: bool, axis: str) -> None:
        self.comm, self.sequence, self.axis = comm, sequence, axis
        self.shape: tuple[int, ...] | None = None

    def leave(self, x: Tensor) -> Tensor:
        """Out of a region, with the sum over the ranks: [B, S, D] {+tp} -> [B, S, D], or [t, D]. x is used up."""
        if not self.sequence:
            return reduce_(x, self.comm)
        self.shape = tuple(x.shape[:-1])
        return reduce_scatter(x.flatten(0, -2), self.comm)

    def entering(self, x: Tensor) -> tuple[int, ...] | None:
        """The shape of the tokens that are to be gathered where x enters a region; None: x has them all."""
        if not self.sequence:
            return None
        if x.dim() != 2:
            raise ValueError(
                f"with sequence parallelism a rank's tokens between regions are [t, D], not {list(x.shape)}"
            )
        return (sum(self.comm.lengths(len(x))),) if self.shape is None else self.shape

    def tokens(self, count: int) -> slice:
        """This rank's tokens of so many."""
        return partition(count, self.comm.size)[self.comm.rank]

    def sum_grad(self, parameter: nn.Parameter, label: str, comm: Comm | None = None) -> None:
        """The parameter is the same on all ranks and meets other numbers on each: sum its gradient over them.

        comm: the ranks that have it, if not all. A tensor hook comes before the gradient is added to `grad`. So the sum
        is right for accumulated gradients too, and whoever averages over another axis averages sums.
        """

        comm = self.comm if comm is None else comm

        def total(grad: Tensor) -> Tensor:
            with comm.recorder.label(label):
                return comm.all_reduce(grad.clone(memory_format=torch.contiguous_format))

        if parameter.requires_grad:
            parameter.register_hook(total)


class Region:
    """Where a tensor enters: once for all `layers`, in `module`'s forward; or, without one, for each layer alone."""

    def __init__(self, border: Border, module: nn.Module | None = None) -> None:
        self.border = border
        self.layers: list[Any] = []
        self.shared: list[Comm | None] = []
        self._open: tuple[Entry, Tensor, Tensor] | None = None  # the entry, what came out of it, what went in
        if module is not None:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._exit, always_call=True)

    def add(self, layer: nn.Module, shared: Comm | None) -> int:
        """Let this layer's product belong to the region; its number there. shared: see `Entry`."""
        self.layers.append(layer)
        self.shared.append(shared)
        return len(self.layers) - 1

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor):
            raise TypeError(f"{type(module).__name__} is where a region begins: pass it a tensor as its first argument")
        x = args[0]
        entry = Entry(self.border.comm, self.border.entering(x), self.shared)
        whole = entry.enter(x, [layer.weight for layer in self.layers])
        self._open = entry, whole, x
        return whole, *args[1:]

    def _exit(self, *_: Any) -> None:
        self._open = None

    def product(self, number: int, x: Tensor) -> Tensor:
        """x W' for this layer's rows: [..., D] -> [..., F/tp]. A tensor that did not enter yet does so here."""
        weight = self.layers[number].weight
        if self._open is not None and _is(x, self._open[1]):
            entry, _, entered = self._open
            return entry.product(number, x, entered, weight)
        shape = self.border.entering(x) if self._open is None else None
        entry = Entry(self.border.comm, shape, [self.shared[number]])
        return entry.product(0, entry.enter(x, [weight]), x, weight)


def _is(x: Tensor, whole: Tensor) -> bool:
    """Whether x is `whole`, or became another object for it because someone put a full backward hook on a module."""
    if x is whole:
        return True
    node, output = x.grad_fn, x.output_nr
    while node is not None and node.name() == "BackwardHookFunctionBackward":
        node, output = node.next_functions[output]
    return node is not None and node is whole.grad_fn


def become(layer: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Let this layer be of another kind: the same object, so that its hooks and whoever refers to it stay right."""
    layer.__class__ = kind
    vars(layer).update(attributes)


class ColumnLinear(nn.Linear):
    """y = x W' + b with its outputs cut: weight [F/tp, D], bias [F/tp]; x [B, S, D] or [t, D] -> [B, S, F/tp].

    missing: outputs that the first rank has and this one has not. They are -inf: no word of the vocabulary.
    """

    region: Region
    number: int
    missing: int

    def forward(self, input: Tensor) -> Tensor:
        out = self.region.product(self.number, input)
        out = out if self.bias is None else out + self.bias
        return F.pad(out, (0, self.missing), value=-torch.inf) if self.missing else out


class RowLinear(nn.Linear):
    """y = x W' + b with its inputs cut: weight [D, F/tp], bias [D]; x [B, S, F/tp] -> [B, S, D] or [t, D].

    The bias is added after the sum, once.
    """

    border: Border

    def forward(self, input: Tensor) -> Tensor:
        out = self.border.leave(F.linear(input, self.weight))
        return out if self.bias is None else out + self.bias


class VocabEmbedding(nn.Embedding):
    """Rows of a matrix of which this rank has some, weight [V/tp, D]: those of other ranks are zero before the sum."""

    border: Border
    rows: slice
    words: int

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_cuda and ((input < 0) | (input >= self.words)).any():
            raise IndexError(f"a token is a number from 0 to {self.words - 1}: found {input.min()} to {input.max()}")
        away = (input < self.rows.start) | (input >= self.rows.stop)
        if len(self.weight) == 0:
            return self.border.leave(self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum())
        found = F.embedding((input - self.rows.start).masked_fill(away, 0), self.weight)
        return self.border.leave(found.masked_fill(away[..., None], 0))


class TokenDropout(nn.Dropout):
    """Dropout between regions, on this rank's tokens [t, D]: its rows of the mask that one process would draw."""

    border: Border

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        shape = self.border.entering(input)
        assert shape is not None, "only with sequence parallelism"
        mask = _mask((*shape, input.shape[-1]), self.p, input).flatten(0, -2)
        return input * mask[self.border.tokens(len(mask))]


class SliceDropout(nn.Dropout):
    """Dropout inside a region, on a slice along `dim`: this rank's slice of the mask that one process would draw."""

    border: Border
    dim: int

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        whole = list(input.shape)
        whole[self.dim] *= self.border.comm.size
        mask = _mask(whole, self.p, input)
        mine = self.border.tokens(whole[self.dim])
        return input * mask.narrow(self.dim, mine.start, mine.stop - mine.start)


def _mask(shape: Any, p: float, like: Tensor) -> Tensor:
    """What nn.Dropout multiplies a tensor of this shape with; takes as many random numbers."""
    return F.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p)
