"""The loss of a batch that is spread over ranks: one scaling rule for the whole package.

    loss = (sum of token losses over the global batch) / (number of valid tokens of the global batch)

A token is valid unless its target is IGNORE. Averaging the ranks' own means instead weighs a token by how few others
its rank happened to get: with one valid token of loss 4 on rank 0, and three of loss 2 on rank 1, the mean of the means
is (4 + 2) / 2 = 3, and the loss is (4 + 6) / 4 = 2.5.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from minidist.comm.comm import Comm

IGNORE = -100
"""A target that asks nothing of the model: padding, or a token whose successor lies outside the batch."""


def token_loss(
    logits: Tensor,
    targets: Tensor,
    comm: Comm,
    tokens: int | Tensor | None = None,
) -> Tensor:
    """comm.size x (sum of this rank's token losses) / (valid tokens over comm).

    So the *average* over the ranks, of this number and of its gradients alike, is the rule:
    `DataParallel` and `average_gradients` divide by comm.size. Where no target is valid the loss is
    0, not NaN, and its gradient is zero.

    logits: [..., V]; float16 and bfloat16 are summed as float32. targets: [...], int64. tokens:
    what to divide by. None counts the valid targets of this call over comm, in one small all-reduce
    that every rank must join. With accumulation a step has several calls and divides them all by
    the same number: that of `global_tokens`.

    Raises: TypeError or ValueError for targets that do not fit the logits.
    """
    _check(logits, targets)
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    flat = logits.flatten(0, -2)
    total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    if tokens is None:
        tokens = global_tokens(targets, comm)
    return total * comm.size / torch.as_tensor(tokens).clamp(min=1)


def global_tokens(targets: Tensor | Iterable[Tensor], comm: Comm) -> Tensor:
    """The number of valid targets over all ranks of comm: an int64 scalar, the same on every rank.

    targets: a tensor, or those of all micro-batches of a step. One small all-reduce, that every rank must join.
    """
    parts = [targets] if isinstance(targets, Tensor) else list(targets)
    valid = torch.zeros((), dtype=torch.int64, device=comm.device)
    for part in parts:
        valid += (part != IGNORE).sum()
    return roll_call(comm, tokens=valid)[0]


def roll_call(comm: Comm, tokens: int | Tensor = 0, ranks: int = 1, steps: int = 0) -> Tensor:
    """Sums over the ranks: [valid tokens, ranks that have data, ranks about to average gradients], int64.

    Counting tokens needs the first number only. The other two cost nothing in the same message, and with them a rank
    that is out of data knows what the others are doing: `DataParallel.join` answers for it, with zeros.
    """
    row = torch.zeros(3, dtype=torch.int64, device=comm.device)
    row[0], row[1], row[2] = tokens, ranks, steps
    return comm.all_reduce(row)


def _check(logits: Tensor, targets: Tensor) -> None:
    if targets.dtype != torch.int64:
        raise TypeError(f"targets are class numbers, int64, not {targets.dtype}: use targets.long()")
    if logits.dim() < 2 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {list(logits.shape)} must have the shape of targets {list(targets.shape)} and one dim more, "
            "the vocabulary"
        )
