"""The loss of a batch that is spread over ranks: one scaling rule for the whole package.

    loss = (sum of token losses over the global batch) / (number of valid tokens of the global batch)

A token is valid unless its target is IGNORE. Averaging the ranks' own means instead weighs a token by how few others
its rank happened to get: with one valid token of loss 4 on rank 0, and three of loss 2 on rank 1, the mean of the means
is (4 + 2) / 2 = 3, and the loss is (4 + 6) / 4 = 2.5.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from minidist.comm.comm import Comm

IGNORE = -100
"""A target that asks nothing of the model: padding, or a token whose successor lies outside the batch."""


def token_loss(
    logits: Tensor,
    targets: Tensor,
    comm: Comm,
    tokens: int | Tensor | None = None,
    tp: Comm | None = None,
) -> Tensor:
    """comm.size x (sum of this rank's token losses) / (valid tokens over comm).

    So the *average* over the ranks, of this number and of its gradients alike, is the rule:
    `DataParallel` and `average_gradients` divide by comm.size. Where no target is valid the loss is
    0, not NaN, and its gradient is zero.

    logits: [..., V]; float16 and bfloat16 are summed as float32. targets: [...], int64. tokens:
    what to divide by. None counts the valid targets of this call over comm, in one small all-reduce
    that every rank must join. With accumulation a step has several calls and divides them all by
    the same number: that of `global_tokens`. tp: the ranks that have the same batch and a slice of
    the vocabulary each, logits [..., V/tp]; comm then is the axis of those with other batches, and
    the loss is the same on all ranks of tp.

    Raises: TypeError or ValueError for targets that do not fit the logits.
    """
    _check(logits, targets)
    if tp is not None:
        total = vocab_parallel_cross_entropy(logits, targets, tp).sum()
    else:
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        flat = logits.flatten(0, -2)
        total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    if tokens is None:
        tokens = global_tokens(targets, comm)
    return total * comm.size / torch.as_tensor(tokens).clamp(min=1)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, comm: Comm) -> Tensor:
    """Each token's loss, -log softmax(logits)[target], from logits cut along the vocabulary.

    logits: [..., V/tp], on each rank as many; of a word that does not exist, -inf. targets: [...],
    int64, the same on all ranks; where one is IGNORE the loss is 0. Result: [...], in float32 or
    better, the same on all ranks; each rank's logits get the gradient of theirs. Three numbers a
    token travel, not V: the largest logit, then the sum of exp(logit - largest) and the target's
    logit.

    Raises: TypeError or ValueError for targets that do not fit, or ranks with different numbers of
    logits.
    Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), 3.
    """
    _check(logits, targets)
    words = logits.shape[-1] * comm.size
    wrong = (targets != IGNORE) & ((targets < 0) | (targets >= words))
    if not targets.is_cuda and bool(wrong.any()):
        raise ValueError(f"targets are {IGNORE} or from 0 to {words - 1}, not {targets[wrong][0]}")
    return _VocabParallel.apply(logits, targets, comm)


class _VocabParallel(torch.autograd.Function):
    """T tokens, W = V/tp logits of each on this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: Comm) -> Tensor:
        scores = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))  # [T, W]
        width = scores.shape[-1]
        largest = _largest(scores, comm)
        scores = scores - largest[:, None]
        local = targets.flatten() - comm.rank * width
        here = ((local >= 0) & (local < width)).nonzero().flatten()  # the tokens whose target is one of mine
        wanted = torch.zeros_like(largest)
        wanted[here] = scores[here, local[here]]
        share = scores.exp_()
        total, wanted = comm.all_reduce(torch.stack([share.sum(-1), wanted]))  # [T] each
        ctx.save_for_backward(share.div_(total[:, None]), here, local[here], targets)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return (total.log() - wanted).view_as(targets).masked_fill(targets == IGNORE, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """d loss / d logit = softmax - 1 at the target, and softmax elsewhere."""
        share, here, local, targets = ctx.saved_tensors
        grad = grad.masked_fill(targets == IGNORE, 0).flatten()
        out = share * grad[:, None]
        out[here, local] -= grad[here]
        return out.view(ctx.shape).to(ctx.dtype), None, None


def _largest(scores: Tensor, comm: Comm) -> Tensor:
    """The largest logit of each token over all ranks, [T]; and in the same message, whether all have as many."""
    width = scores.shape[-1]
    row = torch.cat([scores.amax(-1), scores.new_tensor([width, -width])])
    *_, most, least = comm.all_reduce(row, op="max")
    if most != -least:
        raise ValueError(f"ranks hold from {int(-least)} to {int(most)} logits of each token: fill up with -inf")
    return row[:-2]


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
