"""What each collective gives, computed in one place from everybody's tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grading.ranks.codec import Damaged, whole_number

NAMES = frozenset(
    {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "lengths", "barrier"}
)
_REDUCTIONS = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def answers(name: str, args: Any, tensors: Sequence[Tensor]) -> list[Any]:
    """What every rank gets: a tensor, numbers, or None where it gets nothing. Raises Damaged for impossible arguments.

    >>> answers("all_gather", {}, [torch.tensor([1]), torch.tensor([2, 3])])[0]
    ([1, 2], tensor([1, 2, 3]))
    """
    ranks = range(len(tensors))
    args = args if isinstance(args, dict) else {}
    if name == "lengths":
        return [[len(x) for x in tensors]] * len(tensors)
    if name == "barrier":
        return [None] * len(tensors)
    if name == "all_gather":
        return [([len(x) for x in tensors], torch.cat(list(tensors)))] * len(tensors)
    if name == "broadcast":
        return [tensors[whole_number(args.get("src"), len(tensors) - 1)]] * len(tensors)
    if name == "all_to_all":
        return _exchanged(tensors)
    total = _reduced(args.get("op"), tensors)
    if name == "all_reduce":
        return [total] * len(tensors)
    if name == "reduce":
        dst = whole_number(args.get("dst"), len(tensors) - 1)
        return [total if rank == dst else None for rank in ranks]
    step = -(-len(total) // len(tensors))
    return [total[rank * step : (rank + 1) * step] for rank in ranks]


def _reduced(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    if op not in _REDUCTIONS:
        raise Damaged(f"a reduction {op!r:.20}")
    total = tensors[0].clone()
    for x in tensors[1:]:
        total = _REDUCTIONS[op](total, x)
    return total


def _exchanged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All-to-all of tensors that are cut evenly: ceil(N / n) rows for each rank, the last ones fewer."""
    n = len(tensors)
    step = -(-len(tensors[0]) // n)
    return [torch.cat([x[rank * step : (rank + 1) * step] for x in tensors]) for rank in range(n)]


def difference(one: tuple[str, Any, Any], other: tuple[str, Any, Any], ranks: tuple[int, int]) -> str:
    """The mistake where two ranks' parts (name, arguments, tensor) do not belong together; empty where they do."""
    (name, args, x), (other_name, other_args, y) = one, other
    if name != other_name or args != other_args:
        return "different-collectives"
    if x.dtype != y.dtype:
        return "different-shapes"
    ragged = name in ("all_gather", "lengths")
    return "" if x.shape[ragged:] == y.shape[ragged:] and x.dim() == y.dim() else "different-shapes"
