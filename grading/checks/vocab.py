"""A loss over logits that are cut by vocabulary: cases of 05.4, and what known mistakes give."""

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist as md
from grading.checks.blocks import Facts, Known, case_of, cut, gradients_right, passes, said
from grading.checks.blocks import wrong as wrong_value
from grading.exercise import Case, Finding
from grading.ranks.run import Run

IGNORE, TOKENS = -100, 8


def draw(
    rng: random.Random,
    vocab: int,
    ranks: int,
    label: str,
    ignored: int = 0,
    spread: float = 0.0,
    backward: bool = False,
    reduction: str = "mean",
) -> Case:
    """ignored: so many targets are padding. spread: how far the logits of different ranks lie apart."""
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    logits = torch.randn(TOKENS, vocab, generator=seed, dtype=torch.float64)
    parts = md.partition(vocab, ranks)
    for rank, part in enumerate(parts):
        logits[:, part] += spread * rank
    targets = torch.randperm(max(vocab, TOKENS), generator=seed)[:TOKENS] % vocab  # each column, where there are few
    targets[:ignored] = IGNORE
    grad = torch.tensor(rng.choice((2.0, 3.0)), dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    y = loss(whole, targets, reduction)
    (y * grad).sum().backward()
    assert whole.grad is not None
    right = [{"y": y.detach(), "logits": cut(whole.grad, ranks, rank, -1)} for rank in range(ranks)]
    args = [{"logits": cut(logits, ranks, rank, -1), "targets": targets, "vocab": vocab} for rank in range(ranks)]
    shifted = logits - logits.amax(-1, keepdim=True)
    known = [known for each in (shifted, logits) for known in _known_values(each, targets, parts)]
    known += _known_gradients(logits, targets, parts, grad, right)
    return case_of(f"V = {vocab}, {label}", args, Facts(right, known), [grad] * ranks if backward else None)


def loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """One process's: the sum over valid targets, over their number; 0 where there is none."""
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return total / (targets != IGNORE).sum().clamp(min=1) if reduction == "mean" else total


def _at(logits: Tensor, targets: Tensor, starts: Sequence[int], parts: Sequence[slice]) -> Tensor:
    """The target's logit as ranks find it that believe their columns to begin at `starts`."""
    found = torch.zeros(len(targets), dtype=logits.dtype)
    for start, part in zip(starts, parts, strict=True):
        mine = logits[:, part]
        here = (targets >= start) & (targets < start + mine.shape[1])
        found += torch.where(here, mine.gather(1, (targets - start).clamp(0, mine.shape[1] - 1)[:, None])[:, 0], 0.0)
    return found


def _known_values(logits: Tensor, targets: Tensor, parts: Sequence[slice]) -> list[Known]:
    """logits: as they are, or as they are after the largest was subtracted: for some mistakes that differs."""
    ranks, vocab, valid = len(parts), logits.shape[1], targets != IGNORE
    count = valid.sum().clamp(min=1)
    total = logits.logsumexp(-1)
    target = _at(logits, targets, [part.start for part in parts], parts)

    def mean(each: Tensor) -> Tensor:
        return torch.where(valid, each, 0.0).sum() / count

    everyones = sum(
        logits[:, part].gather(1, (targets - part.start).clamp(0, part.stop - part.start - 1)[:, None])[:, 0]
        for part in parts
    )
    each_own = [(logits[:, part] - logits[:, part].amax(-1, keepdim=True)).exp().sum(-1) for part in parts]
    here = [(targets >= part.start) & (targets < part.stop) for part in parts]
    most = sum(torch.where(mine, logits[:, part].amax(-1), 0.0) for mine, part in zip(here, parts, strict=True))
    ends = [part.stop - part.start for part in parts]

    def starting(starts: Sequence[int]) -> Callable[[int], Tensor]:
        return lambda r: mean(total - _at(logits, targets, starts, parts))

    why_start = (
        "Targets were looked for in the wrong columns. Rank r's begin at r ceil(V / n), which is "
        "md.partition(vocab, n)[r].start."
    )
    split = [sum(len(c) for c in torch.tensor_split(logits[0], ranks)[:r]) for r in range(ranks)]
    return [
        Known(
            "local-is-global",
            "y",
            lambda r: mean(logits[:, parts[r]].logsumexp(-1) - target),
            "The sum of the exponentials has this rank's columns only. It goes over the whole vocabulary.",
        ),
        Known(
            "adds-foreign-targets",
            "y",
            lambda r: mean(total - everyones),
            "Every rank added a logit for every target, also where the target lies in another rank's columns. One rank "
            "has it; the others add 0.",
        ),
        Known(
            "own-max-each",
            "y",
            lambda r: mean(torch.stack(each_own).sum(0).log() - (target - most)),
            "Each rank subtracted its own maximum. What is subtracted has to be the same number for all of a token's "
            'logits: an all-reduce with op="max".',
        ),
        Known(
            "sum-not-mean",
            "y",
            lambda r: mean(total - target) * count,
            "That is the sum over the targets. Divide it by the number of those that count.",
        ),
        Known(
            "padding-counts",
            "y",
            lambda r: torch.where(valid, total - target, 0.0).sum() / len(targets),
            f"Divided by all targets. Those that are {IGNORE} are padding: they have no loss, and do not count.",
        ),
        Known(
            "padding-has-loss",
            "y",
            lambda r: (total - target).sum() / count,
            f"Targets of {IGNORE} are padding and have no loss. Their logit was taken as 0, and the logarithm of the "
            "sum was counted all the same.",
        ),
        Known("own-length-as-step", "y", starting([r * end for r, end in enumerate(ends)]), why_start),
        Known("drops-the-rest", "y", starting([r * (vocab // ranks) for r in range(ranks)]), why_start),
        Known("tensor-split", "y", starting(split), why_start),
    ]


def _known_gradients(
    logits: Tensor, targets: Tensor, parts: Sequence[slice], grad: Tensor, right: Sequence[dict[str, Tensor]]
) -> list[Known]:
    valid = targets != IGNORE
    scale = grad / valid.sum().clamp(min=1) * valid[:, None]
    softmax, hot = logits.softmax(-1) * scale, F.one_hot(targets.clamp(min=0), logits.shape[1]) * scale
    lost = "Comm's calls are data to autograd: sum_ranks is the sum that gradients come back through."
    return [
        Known(
            "backward-follows",
            "logits",
            lambda r: -hot[:, parts[r]],
            f"The softmax is missing in it: no gradient came back through the sum of the exponentials. {lost}",
        ),
        Known(
            "backward-follows",
            "logits",
            lambda r: softmax[:, parts[r]],
            f"The target's -1 is missing in it: no gradient came back through the target's logit. {lost}",
        ),
        Known(
            "reduces-in-both-directions",
            "logits",
            lambda r: right[r]["logits"] * len(parts),
            "n times too large: the gradient was added up over the ranks. They all compute one and the same loss.",
        ),
    ]


# ---- judging ---------------------------------------------------------------------------------------------------------


def survives(case: Case, run: Run) -> Finding | None:
    """Whether large logits give a loss all the same."""
    found = wrong_value(case, run, "y")
    if found is not None and found.mistake == "wrong-values":
        why = (
            "exp of a large number is infinite: subtract the token's largest logit first, of the whole vocabulary. "
            "The softmax stays the same, and no exponent is above 0."
        )
        return Finding(why, "exp-overflows", found.label, found.rank, found.expected, found.got)
    return found


def none_valid(case: Case, run: Run) -> Finding | None:
    """Whether padding has no loss, and no valid target gives 0."""
    found = wrong_value(case, run, "y")
    if found is not None and "nan" in found.got:
        why = "NaN, which is 0 / 0: no target counts here, and the loss is 0. Divide by at least 1."
        return Finding(why, "divides-by-no-tokens", found.label, found.rank, found.expected, found.got)
    return found


def few_numbers(case: Case, run: Run) -> Finding | None:
    """Whether only a number or three for each token travelled."""
    limit = 4 * TOKENS
    vocab = case.calls[0][0]["args"][2]
    for rank in range(case.ranks):
        forward, backward = passes(run, rank)
        parts = [*forward, *(backward if gradients_right(case, run) else [])]
        if sum(part.elements for part in parts) <= limit:
            continue
        own = case.calls[0][rank]["args"][0].numel()
        gathers = any(part.name == "all_gather" or part.elements >= TOKENS * vocab for part in parts)
        if gathers or own * 2 < max(part.elements for part in parts):
            mistake = "gathers-the-logits"
            why = (
                "The logits travelled. They are by far the largest tensor here. Each rank can do its part "
                "with its own columns: what others need of it is one number for each token."
            )
        else:
            mistake, why = (
                "adds-after-sending",
                ("Every column was sent. Add up on the rank first: what travels is one number for each token."),
            )
        expected = f"at most {limit} elements, 4 for each token"
        return Finding(why, mistake, case.labels[0], rank, expected, said(parts))
    return None
