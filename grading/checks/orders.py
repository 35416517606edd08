"""What the programs of assignment 06 have to be: in which order, with how much in memory, how long.

A property gets the rows of a program that is complete and can run, and says what it lacks. See `programs.Property`.
"""

from collections.abc import Sequence

import minidist as md
from grading.checks.programs import Rows, in_flight, makespan, shown
from minidist.schedule import Action

Wrong = tuple[str, str, str, str, int | None]


def _of(row: Sequence[Action], kind: str) -> list[int]:
    return [action.microbatch for action in row if action.kind == kind]


# ---- 06.1 ------------------------------------------------------------------------------------------------------------


def forward_first(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """No forward pass comes after a backward pass."""
    for rank, row in enumerate(rows):
        kinds = "".join(action.kind for action in row)
        if "BF" not in kinds:
            continue
        before = kinds.index("B")
        mistake, why = "backward-at-once", "A backward pass comes before all forward passes are done."
        if kinds == "FB" * microbatches:
            why += " So one micro-batch is in the pipeline at a time, and the other ranks wait."
        elif kinds.startswith("F" * before + "B" * before + "F"):
            mistake = "flushes-early"
            why += " Between two groups of micro-batches the pipeline runs empty: a bubble for each group."
        return mistake, why, f"F {microbatches} times, then B", shown(row), rank
    return None


def one_order(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """All ranks take the micro-batches in one order, forward, and in one order, backward."""
    for kind in "FB":
        orders = [_of(row, kind) for row in rows]
        rank = next((rank for rank in range(1, ranks) if orders[rank] != orders[0]), None)
        if rank is not None:
            why = (
                f"Rank {rank} takes the micro-batches in another order than rank 0 ({kind}). Each then waits for one "
                "that its neighbour does later."
            )
            return "orders-differ", why, f"{orders[0]}", f"{orders[rank]}", rank
    return None


def backwards(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """Backward passes begin with the last micro-batch."""
    for rank, row in enumerate(rows):
        if _of(row, "B") != _of(row, "F")[::-1]:
            why = "The micro-batch that went forward last goes back first."
            return "first-goes-first", why, f"B of {_of(row, 'F')[::-1]}", f"{_of(row, 'B')}", rank
    return None


# ---- 06.2 ------------------------------------------------------------------------------------------------------------


def _ahead(row: Sequence[Action]) -> int:
    """Forward passes before the first backward pass."""
    return next((i for i, action in enumerate(row) if action.kind != "F"), len(row))


def _most(rows: Rows, limits: Sequence[int], rule: str) -> Wrong | None:
    """Whether no rank holds more micro-batches than its limit."""
    for rank, row in enumerate(rows):
        most, held = limits[rank], in_flight(row, "B")
        if held <= most:
            continue
        ahead = [_ahead(each) for each in rows]
        mistake, why = "warm-up-too-long", "It runs too many forward passes ahead before its first backward pass."
        if "BF" not in "".join(action.kind for action in row):
            why = "All its forward passes come first, as in GPipe, so that all micro-batches are in memory at once."
        elif len(set(ahead)) == 1:
            mistake = "same-warm-up"
            why = "All ranks run as many forward passes ahead as rank 0. Those further on get a gradient earlier."
        return mistake, f"{why} {rule}", f"{most} in flight at most", f"{held}", rank
    return None


def one_f_one_b_memory(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    limits = [min(ranks - rank, microbatches) for rank in range(ranks)]
    return _most(rows, limits, "Rank r of P has at most P - r micro-batches between F and B.")


def eager_memory(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """With a message each way to hide: two forward passes ahead for each rank that follows."""
    limits = [min(2 * (ranks - rank) - 1, microbatches) for rank in range(ranks)]
    return _most(rows, limits, "Rank r of P has at most 2 (P - r) - 1 micro-batches between F and B.")


def no_waiting(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """As fast as a program without split backward passes can be: (M + P - 1) (F + B)."""
    best, took = 3 * (microbatches + ranks - 1), makespan(rows)
    if took <= best:
        return None
    mistake, why = "warm-up-too-short", "Some rank waits for a gradient with forward passes left that it could do."
    orders = [_of(row, "B") for row in rows]
    if any(order != sorted(order) for order in orders):
        mistake, why = (
            "newest-goes-first",
            "Backward passes do not take the oldest micro-batch first, whose gradient is there.",
        )
    return mistake, f"{why} With F = 1 and B = 2 the program can take (M + P - 1) 3.", f"{best}", f"{took:g}", None


def eager_time(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """With messages that take as long as F: as fast as with two forward passes ahead for each rank that follows."""
    best, took = makespan(eager(ranks, microbatches), comm=1.0), makespan(rows, comm=1.0)
    if took <= best:
        return None
    why = "With F = 1, B = 2 and messages of 1 a rank waits for gradients that are on their way. Run further ahead."
    return "messages-take-no-time", why, f"{best:g}", f"{took:g}", None


def eager(ranks: int, microbatches: int) -> Rows:
    """1F1B with two forward passes ahead for each rank that follows."""
    rows = []
    for rank in range(ranks):
        forward, backward = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FB")
        ahead = min(2 * (ranks - 1 - rank), microbatches)
        pairs = zip(forward[ahead:], backward, strict=False)
        rows.append([*forward[:ahead], *(a for pair in pairs for a in pair), *backward[microbatches - ahead :]])
    return rows


# ---- 06.5 ------------------------------------------------------------------------------------------------------------


def split_memory(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """From F to W no rank has more micro-batches in flight than 1F1B has on rank 0."""
    most = min(ranks, microbatches)
    for rank, row in enumerate(rows):
        if (held := in_flight(row, "W")) > most:
            kinds = "".join(action.kind for action in row)
            mistake, why = "put-off-too-long", "W is put off by too many micro-batches."
            if in_flight(row, "I") > min(ranks - rank, microbatches):
                mistake, why = "warm-up-too-long", "More forward passes run ahead than in the row of 1F1B."
            elif "W" * microbatches in kinds:
                mistake, why = "all-weights-at-the-end", "All W come at the end, so nothing is freed before."
            more = "A micro-batch is in memory from F until its W. 1F1B has at most P, on rank 0."
            return mistake, f"{why} {more}", f"{most} in flight at most", f"{held}", rank
    return None


def split_time(rows: Rows, ranks: int, microbatches: int) -> Wrong | None:
    """As fast as ZB-H1: with F = I = W, and more micro-batches than ranks, that is 3 M + P - 1."""
    best = md.schedule.simulate(md.schedule.build("zb_h1", ranks, microbatches)).makespan
    took = makespan(rows)
    if took <= best:
        return None
    mistake, why = "put-off-too-little", "Some rank has no W left to do while it waits for a gradient."
    if late := [rank for rank, row in enumerate(rows) if _at_the_end(row) > rank + 1]:
        mistake, why = "put-off-too-long", f"Rank {late[0]} leaves W to the end that would have filled a wait before."
    if not any(_lag(row) for row in rows):
        mistake, why = (
            "weights-at-once",
            "Every W comes right after its I, so that the rank before waits for both, as for B.",
        )
    more = "With F = I = W = 1 it can take 3 M + P - 1, which is a bubble of (P - 1) / (3 M + P - 1)."
    more = more if microbatches >= ranks else "With F = I = W = 1 less is possible."
    return mistake, f"{why} {more}", f"{best:g}", f"{took:g}", None


def _at_the_end(row: Sequence[Action]) -> int:
    """How many W come after everything else."""
    return next((i for i, action in enumerate(reversed(row)) if action.kind != "W"), len(row))


def _lag(row: Sequence[Action]) -> int:
    """The most I that came without their W."""
    put_off = most = 0
    for action, after in zip(row, [*row[1:], None], strict=True):
        put_off += {"I": 1, "W": -1}.get(action.kind, 0)
        most = max(most, put_off - (after is not None and after.kind == "W"))
    return most
