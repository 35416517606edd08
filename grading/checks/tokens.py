"""Accumulation over micro-batches: what one process on the whole batch gets, and what known mistakes get instead."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Run

VOCAB, DIM, IGNORE = 5, 3, -100
Batch = tuple[Tensor, Tensor]
TOLERANCE = 1e-6  # a count divided in float32 is right enough


def model_of(weights: Mapping[str, Tensor]) -> nn.Module:
    """A small model of tokens in float64."""
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)).double()
    model.load_state_dict(dict(weights))
    return model


def body(function: Callable[..., Any], comm: Any, ask: Any, weights: Any, micro_batches: Any) -> dict[str, Any]:
    """Inside a rank: the call, and the gradients it leaves."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    model.load_state_dict(weights)
    function(model, comm, [tuple(each) for each in micro_batches])
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# ---- cases: facts hold the weights and everyone's micro-batches ------------------------------------------------------


def draw(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    full = [[6, 6], [6, 6], [6, 6]]
    return {
        "basic": [_case(rng, full, "2 micro-batches, all tokens valid"), _case(rng, full[:2], "all tokens valid")],
        "unequal": [_case(rng, [[6, 1], [2, 5], [1, 1]], "valid tokens 7, 7 and 2")],
        "empty": [_case(rng, [[5, 0], [0, 0]], "no valid token on rank 1")],
    }


def _case(rng: random.Random, valid: Sequence[Sequence[int]], label: str) -> Case:
    """valid: for each rank and micro-batch the number of targets that count, of 6."""
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)).double()
    weights = {name: torch.randn(p.shape, generator=seed, dtype=torch.float64) for name, p in model.named_parameters()}
    batches = [[_batch(seed, count) for count in counts] for counts in valid]
    calls = tuple({"weights": weights, "micro_batches": mine} for mine in batches)
    return Case((calls,), ((weights, batches),), (f"n = {len(valid)}, {label}",))


def _batch(seed: torch.Generator, valid: int) -> Batch:
    inputs = torch.randint(VOCAB, (2, 3), generator=seed)
    targets = torch.randint(VOCAB, (2, 3), generator=seed)
    hidden = torch.randperm(6, generator=seed)[valid:]
    targets.view(-1)[hidden] = IGNORE
    return inputs, targets


# ---- gradients of losses ---------------------------------------------------------------------------------------------


def gradient(weights: Mapping[str, Tensor], loss: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """The gradient of a loss of the model, zeros where it does not reach."""
    model = model_of(weights)
    value = loss(model)
    if isinstance(value, Tensor) and value.requires_grad:
        value.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def total(model: nn.Module, batches: Sequence[Batch]) -> Any:
    """The sum of the losses of all valid tokens."""
    return sum(
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        for inputs, targets in batches
    )


def count(batches: Sequence[Batch]) -> int:
    """The number of valid tokens."""
    return sum(int((targets != IGNORE).sum()) for _, targets in batches)


def expected(weights: Mapping[str, Tensor], batches: Sequence[Sequence[Batch]]) -> dict[str, Tensor]:
    """What one process gets that sees everyone's micro-batches."""
    everything = [batch for mine in batches for batch in mine]
    return gradient(weights, lambda model: total(model, everything) / count(everything))


def known(weights: Any, batches: Sequence[Sequence[Batch]], rank: int) -> list[tuple[str, dict[str, Tensor], str]]:
    """Mistake, gradient and sentence."""
    n, everything = len(batches), [batch for mine in batches for batch in mine]
    tokens = count(everything)

    def of(loss: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
        return gradient(weights, loss)

    def mean(model: nn.Module, mine: Sequence[Batch]) -> Any:
        return total(model, mine) / max(count(mine), 1)

    return [
        (
            "mean-of-means",
            of(lambda model: sum(mean(model, mine) for mine in batches) / n),
            "Every rank divided by its own tokens, so that a token of a rank with few of them counts more. Divide by "
            "the number of valid tokens on all ranks.",
        ),
        (
            "micro-batch-as-step",
            of(lambda model: sum(sum(mean(model, [each]) for each in mine) / len(mine) for mine in batches) / n),
            "Every micro-batch was divided by its own tokens. All of a step's micro-batches have one divisor: the "
            "valid tokens of the whole step, on all ranks.",
        ),
        (
            "padding-counts",
            of(lambda model: total(model, everything) / sum(targets.numel() for _, targets in everything)),
            f"Divided by all targets. Those that are {IGNORE} are padding: they have no loss, and do not count.",
        ),
        (
            "divided-twice",
            of(lambda model: total(model, everything) / tokens / n),
            "n times too small: averaging divides by the number of ranks, so a rank's loss has to be comm.size times "
            "its sum, over the tokens of all.",
        ),
        (
            "sum-not-mean",
            of(lambda model: total(model, everything) / n),
            "The division by the number of valid tokens is missing.",
        ),
        (
            "last-micro-batch-only",
            of(lambda model: sum(total(model, mine[-1:]) for mine in batches) / tokens),
            "Only the last micro-batch is in it: the gradients of the earlier ones were cleared, or overwritten.",
        ),
        (
            "local-is-global",
            of(lambda model: total(model, batches[rank]) * n / tokens),
            "This rank's own gradient: it has not been averaged with the others'.",
        ),
    ]


# ---- judging ---------------------------------------------------------------------------------------------------------


def ran(case: Case, run: Run) -> Finding | None:
    """Whether there are gradients at all."""
    for rank, got in enumerate(run.results[0]):
        if any(value is None for value in got.values()):
            why = "There is no gradient: every micro-batch needs its loss and a backward()."
            return Finding(why, "no-result", case.labels[0], rank)
    return None


def right(case: Case, run: Run) -> Finding | None:
    """Whether every rank has the gradient of one process on everything."""
    weights, batches = case.facts[0]
    answer = expected(weights, batches)
    wrong = [rank for rank, got in enumerate(run.results[0]) if not _same(got, answer)]
    if not wrong:
        return None
    rank = wrong[0]
    mistakes = known(weights, batches, rank)
    mistake, why = next(
        ((mistake, why) for mistake, other, why in mistakes if _same(run.results[0][rank], other)), ("wrong-values", "")
    )
    name = next(name for name, value in answer.items() if not equal(run.results[0][rank][name], value, TOLERANCE))
    why = why or "The gradient is not that of one process which sees the micro-batches of all ranks."
    first_row, got = answer[name].flatten()[:4], run.results[0][rank][name]
    shown = (show(first_row), show(got.flatten()[:4] if isinstance(got, Tensor) else got))
    return Finding(f"{name}, first elements: {why}", mistake, case.labels[0], rank, *shown)


def right_or_known(case: Case, run: Run) -> Finding | None:
    """As `right`; a mistake in the token rule has cost its points already, and does not count here."""
    found = right(case, run)
    if found is None:
        return None
    for rank, got in enumerate(run.results[0]):
        values = [value for value in got.values() if isinstance(value, Tensor)]
        if any(not bool(torch.isfinite(value).all()) for value in values):
            why = (
                "NaN, which is 0 / 0: a mean over no tokens. Sum the losses, and divide by the tokens of all ranks, of "
                'which there are some (reduction="sum").'
            )
            return Finding(why, "divides-by-no-tokens", case.labels[0], rank, found.expected, "nan")
    return None if found.mistake in ("mean-of-means", "micro-batch-as-step", "padding-counts") else found


def once(case: Case, run: Run) -> Finding | None:
    """Whether the gradients were averaged once, and otherwise only counts travelled."""
    weights, batches = case.facts[0]
    size = sum(value.numel() for value in weights.values())
    for rank in range(case.ranks):
        sent = sum(part.elements for part in run.collectives_of(0, rank))
        most = size + 8 * len(batches[rank])
        if sent > most:
            why = (
                "The gradients travelled more than once. Backward passes add up locally, and the sum is averaged once, "
                "after the last one: the average of sums is the sum of averages."
            )
            expected = f"{size} elements and a count or two to average"
            return Finding(why, "averages-every-time", case.labels[0], rank, expected, f"{sent}")
    return None


def explain_empty(case: Case, run: Run) -> Finding | None:
    """Why a run fails in which a rank has nothing to contribute."""
    if run.mistake in ("not-all-join", "different-collectives", "different-shapes"):
        why = f"{run.why}\nRank 1 has no valid token, and still has to take part in every all-reduce, with zeros."
        return Finding(why, "absent-are-skipped", case.labels[0], run.rank)
    if "ZeroDivisionError" in run.why:
        why = f"{run.why}\nRank 1 has no valid token: divide by the tokens of all ranks, of which there are some."
        return Finding(why, "divides-by-no-tokens", case.labels[0], run.rank)
    return None


def _same(got: Mapping[str, Any], other: Mapping[str, Tensor]) -> bool:
    return all(equal(got.get(name), value, TOLERANCE) for name, value in other.items())
