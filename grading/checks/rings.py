"""The results that known mistakes give in a ring: the ring run on paper, with the mistake in it.

Every list has a tensor of each rank. Where a result depends on memory that nobody wrote, it is taken to be zero.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import minidist as md
from grading.exercise import Known

Xs = Sequence[Tensor]
Slot = Callable[[int, int], int]  # which piece, for a rank and a step counted from 1


def slices(x: Tensor, ranks: int) -> list[Tensor]:
    """x cut as md.partition cuts it."""
    return [x[part] for part in md.partition(len(x), ranks)]


def total(xs: Xs) -> Tensor:
    """The sum over the ranks."""
    whole = xs[0].clone()
    for x in xs[1:]:
        whole += x
    return whole


def gather(xs: Xs, sends: Slot, puts: Slot, steps: int | None = None) -> list[list[Tensor]]:
    """Every rank's pieces after a ring all-gather that sends and stores them as told."""
    n = len(xs)
    held = [[xs[r].clone() if slot == r else torch.zeros_like(xs[r]) for slot in range(n)] for r in range(n)]
    for step in range(1, n if steps is None else steps + 1):
        leaving = [held[r][sends(r, step) % n].clone() for r in range(n)]
        for r in range(n):
            held[r][puts(r, step) % n] = leaving[r - 1]
    return held


def reduce(xs: Xs, sends: Slot, adds: Slot, steps: int | None = None) -> list[list[Tensor]]:
    """Every rank's partial sums after a ring reduce-scatter that sends and adds as told."""
    n = len(xs)
    held = [[piece.clone() for piece in slices(x, n)] for x in xs]
    for step in range(1, n if steps is None else steps + 1):
        leaving = [held[r][sends(r, step) % n].clone() for r in range(n)]
        for r in range(n):
            held[r][adds(r, step) % n] += leaving[r - 1]
    return held


# ---- what is returned instead ----------------------------------------------------------------------------------------

SHIFT = (
    Known(
        "ring-backwards",
        lambda xs, r: xs[(r + 1) % len(xs)],
        "That is the right neighbour's tensor. Send to rank (r + 1) % n, and so receive from rank (r - 1) % n.",
    ),
    Known(
        "own-tensor-back",
        lambda xs, r: xs[r],
        "That is what this rank had itself. Receive into a buffer of its own, and return that buffer.",
    ),
    Known(
        "reads-before-wait",
        lambda xs, r: torch.zeros_like(xs[r]),
        "The buffer is still empty: it is filled when the irecv's wait() returns, not before.",
    ),
)

GATHER = (
    Known("own-tensor-back", lambda xs, r: xs[r], "That is this rank's own x. The result holds everyone's."),
    Known(
        "passes-own-on",
        lambda xs, r: torch.cat(gather(xs, lambda rank, step: rank, lambda rank, step: rank - step)[r]),
        "Every piece is the left neighbour's: in each step x itself was sent. After the first step a rank has to pass "
        "on what it received last, or nothing gets further than one place.",
    ),
    Known(
        "order-of-arrival",
        lambda xs, r: torch.cat([xs[(r - step) % len(xs)] for step in range(len(xs))]),
        "The pieces are there, in the order in which they came. What comes in step s set out at rank (r - s) % n, and "
        "that is the place where it belongs.",
    ),
    Known(
        "one-step-short",
        lambda xs, r: torch.cat(
            gather(xs, lambda rank, step: rank - step + 1, lambda rank, step: rank - step, len(xs) - 2)[r]
        ),
        "The right neighbour's piece is missing: it has the longest way, n - 1 steps. range(1, n) makes that many, "
        "range(1, n - 1) one fewer.",
    ),
    Known(
        "wrong-slot",
        lambda xs, r: torch.cat(gather(xs, lambda rank, step: rank - step + 1, lambda rank, step: rank - step + 1)[r]),
        "The piece that came was put where the one that left had been. In step s piece (r - s + 1) % n leaves, and "
        "piece (r - s) % n comes.",
    ),
    Known("stacked", lambda xs, r: torch.stack(list(xs)), "The pieces belong one after the other, [n K], not as rows."),
)

REDUCE = (
    Known(
        "wrong-slot",
        lambda xs, r: slices(xs[r], len(xs))[r],
        "Only this rank's own numbers: what came was added to the piece that had just left. In step s piece "
        "(r - s) % n leaves, and what comes belongs to piece (r - s - 1) % n, which leaves in the next step.",
    ),
    Known(
        "forwards-the-finished",
        lambda xs, r: reduce(xs, lambda rank, step: rank - step - 1, lambda rank, step: rank - step - 1)[r][r],
        "Sums of different slices are mixed: the piece that left is the one that this step adds to. In step s piece "
        "(r - s) % n leaves, the one that was added to in the step before.",
    ),
    Known(
        "passes-own-on",
        lambda xs, r: slices(xs[r], len(xs))[r] + slices(xs[r - 1], len(xs))[r],
        "Only two ranks' numbers are in this sum. After the first step the partial sum has to be sent on, not x's own "
        "slice.",
    ),
    Known(
        "own-slice-only", lambda xs, r: slices(xs[r], len(xs))[r], "That is a slice of this rank's x, not yet a sum."
    ),
    Known(
        "ring-backwards",
        lambda xs, r: slices(total(xs), len(xs))[(r + 1) % len(xs)],
        "A finished sum, but of slice (r + 1) % n. Rank r has to end with slice r: start with piece (r - 1) % n.",
    ),
    Known("whole-sum", lambda xs, r: total(xs), "That is the sum of all of x. This rank's result is only its slice."),
)

CUTS = (
    Known(
        "tensor-split",
        lambda xs, r: torch.tensor_split(total(xs), len(xs))[r],
        "That is how torch.tensor_split cuts: sizes differ by one at most. Cut at multiples of ceil(N / n), as "
        "md.partition(N, n) does.",
    ),
    Known(
        "drops-the-rest",
        lambda xs, r: total(xs)[r * (len(xs[0]) // len(xs)) : (r + 1) * (len(xs[0]) // len(xs))],
        "N // n elements for each rank leave out the last N % n. A slice has ceil(N / n): -(-N // n).",
    ),
    Known(
        "leaves-padding-in",
        lambda xs, r: _padded(total(xs), len(xs))[r],
        "The zeros that filled x up to a multiple of n are still in the result: cut them off at the end.",
    ),
    Known(
        "rest-to-the-last",
        lambda xs, r: _rest_to_last(total(xs), len(xs), r),
        "The last rank got the rest. Every slice has ceil(N / n) elements, and the last ones have what is left.",
    ),
)

BOTH = (
    Known(
        "half-a-ring",
        lambda xs, r: slices(total(xs), len(xs))[r],
        "That is the first half only: this rank's slice of the sum. The all-gather hands the finished slices round.",
    ),
    Known("no-reduction", lambda xs, r: torch.cat(list(xs)), "Everyone's x side by side; nothing has been added."),
    Known(
        "halves-swapped",
        lambda xs, r: xs[r] * len(xs),
        "That is n times this rank's own x: gathered first, and then reduced. The reduce-scatter comes first.",
    ),
    Known(
        "own-slice-only",
        lambda xs, r: torch.cat([slices(x, len(xs))[rank] for rank, x in enumerate(xs)]),
        "One slice of each rank's x: they have been gathered before they were added.",
    ),
)

BOTH_CUTS = (
    Known(
        "leaves-padding-in",
        lambda xs, r: torch.cat(_padded(total(xs), len(xs))),
        "The zeros that filled x up to a multiple of n are still in the result: cut them off at the end.",
    ),
    Known(
        "drops-the-rest",
        lambda xs, r: total(xs)[: len(xs[0]) // len(xs) * len(xs)],
        "The last N % n elements are missing: fill x up to the next multiple of n, do not cut it down to the last one.",
    ),
)


def _padded(x: Tensor, ranks: int) -> list[Tensor]:
    step = -(-len(x) // ranks)
    return list(torch.cat([x, x.new_zeros(step * ranks - len(x))]).view(ranks, step))


def _rest_to_last(x: Tensor, ranks: int, rank: int) -> Tensor:
    step = len(x) // ranks
    return x[rank * step : (rank + 1) * step if rank < ranks - 1 else None]
