"""What the checks of several exercises look at: messages, inputs left alone, and numbers that came by no message."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grading.exercise import Case, Criterion, Finding, Judge, equal, show
from grading.ranks.run import Run


def numbers(rng: random.Random, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different small whole numbers: sums of up to 8 of them are exact in any type, in any order. [length]"""
    return torch.tensor(rng.sample(range(1, 30), length) if length < 29 else [], dtype=dtype)


def fine_numbers(rng: random.Random, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers that need all of this type's precision, and whose sums are still exact in any order. [length]"""
    if dtype is torch.float64:
        return torch.tensor([rng.randrange(1, 2**40) / 2**36 for _ in range(length)], dtype=dtype)
    if dtype is torch.int64:
        return torch.tensor([2**54 + rng.randrange(2**20) for _ in range(length)], dtype=dtype)
    return numbers(rng, length, dtype)


def body(function: Callable[..., Any], comm: Any, ask: Any, x: Tensor) -> dict[str, Any]:
    """Inside a rank: the call, and what became of its input."""
    result = function(comm, x)
    return {"result": result, "x": x}


def parts_of(run: Run, call: int, key: str = "result") -> list[Any]:
    """What all ranks returned under this key."""
    return [each.get(key) if isinstance(each, dict) else None for each in run.results[call]]


def unchanged(case: Case, run: Run) -> Finding | None:
    """Whether every rank's x is as it was."""
    for call, label in enumerate(case.labels):
        for rank, after in enumerate(parts_of(run, call, "x")):
            before = case.calls[call][rank]["x"]
            if not equal(after, before) or after.dtype != before.dtype:
                why = (
                    "x belongs to the caller, who may still need it. Add into a tensor of your own (x.clone()), and "
                    "receive into one (torch.empty_like); a slice of x is x's own memory."
                )
                return Finding(why, "changes-its-input", label, rank, f"x as it was, {show(before)}", show(after))
    return None


def heard_of(run: Run, call: int, ranks: int) -> list[set[int]]:
    """For each rank, whose numbers can have reached it: by messages, one after the other, and by given functions."""
    heard = [{rank} for rank in range(ranks)]
    carried: dict[int, set[int]] = {}
    events: list[tuple[int, str, Any]] = []
    for message in run.messages_of(call):
        events.append((message.sent or 0, "sent", message))
        if message.taken is not None:
            events.append((message.taken, "taken", message))
    joint = [c for c in run.collectives if c.call == call and c.waited is not None]
    events += [(collective.waited or 0, "joint", collective) for collective in joint]
    for _, kind, note in sorted(events, key=lambda event: event[0]):
        if kind == "sent":
            carried[id(note)] = set(heard[note.src]) if note.elements else set()
        elif kind == "taken":
            heard[note.dst] |= carried[id(note)]
        else:
            heard[note.rank] = set(range(ranks))
    return heard


def by_messages(case: Case, run: Run, needs: Callable[[int, int], set[int]] | None = None) -> Finding | None:
    """Whether everything that a rank knows can have come in messages. needs: whose numbers rank r of n must have."""
    for call, label in enumerate(case.labels):
        for rank, known in enumerate(heard_of(run, call, case.ranks)):
            needed = set(range(case.ranks)) if needs is None else needs(rank, case.ranks)
            if missing := needed - known:
                why = (
                    f"The numbers are right, but no message can have brought rank {min(missing)}'s to rank {rank}. "
                    "They came another way, which a cluster does not have."
                )
                return Finding(why, "not-by-messages", label, rank)
    return None


def touched(case: Case, run: Run) -> Finding | None:
    """Whether a tensor was written to while it was being sent."""
    for message in run.messages:
        if message.changed:
            why = (
                f"Rank {message.src} wrote into a tensor before its isend to rank {message.dst} was over. What leaves "
                "is then a matter of luck: wait for the isend first, or send a copy."
            )
            return Finding(why, "writes-while-sending", case.labels[message.call], message.src)
    return None


def never_waited(case: Case, run: Run) -> Finding | None:
    """Whether a message was received and its irecv never waited for."""
    for message in run.messages:
        if message.sent is not None and message.posted is not None and message.taken is None:
            why = (
                f"Rank {message.dst} never waited for its irecv from rank {message.src}. The buffer is filled when "
                "wait() returns, not before: until then it holds whatever was there."
            )
            return Finding(why, "reads-before-wait", case.labels[message.call], message.dst)
    return None


def exact_types(case: Case, run: Run) -> Finding | None:
    """Whether every result has its input's type and all of its precision. facts: what each rank has to return."""
    for call, label in enumerate(case.labels):
        for rank, got in enumerate(parts_of(run, call)):
            expected = case.facts[call][rank]
            if equal(got, expected) and got.dtype == expected.dtype:
                continue
            found = str(got.dtype).removeprefix("torch.") if isinstance(got, Tensor) else type(got).__name__
            why = (
                f"The type is {found}. Buffers and sums must have x's own type: torch.empty_like(x), x.new_empty(...), "
                "dtype=x.dtype. torch.empty(n) makes float32, and float32 keeps 24 bits of a number."
            )
            return Finding(why, "loses-the-dtype", label, rank, f"{show(expected)}", show(got))
    return None


def explain_types(case: Case, run: Run) -> Finding | None:
    """A run with other types that did not end, and ended with float32: its buffer has the wrong type."""
    label = case.labels[run.call]
    return Finding(
        f"{run.why}\nA buffer must have the type of what it is for: torch.empty_like(x) or dtype=x.dtype; "
        "torch.empty(n) makes float32.",
        "loses-the-dtype",
        label,
        run.rank,
    )


def message_counts(most: Callable[[Case, int], int], why: str) -> Judge:
    """A judge: exactly n - 1 messages leave every rank, of `most(case, call)` elements each.

    One of them may be shorter, as the last slice is where n does not divide N.
    """

    def judge(case: Case, run: Run) -> Finding | None:
        n = case.ranks
        for call, label in enumerate(case.labels):
            for rank in range(n):
                sizes = [message.elements for message in run.messages_of(call) if message.src == rank]
                limit = most(case, call)
                fitting = len(sizes) == n - 1
                if fitting and max(sizes, default=0) <= limit and sizes.count(limit) >= n - 2:
                    continue
                mistake = "ring-sends-whole" if fitting else "too-many-messages"
                expected = f"{n - 1} message{'s' * (n > 2)} of at most {limit} elements"
                return Finding(why, mistake, label, rank, expected, f"{len(sizes)}, of {sizes} elements")
        return None

    return judge


def goes_to(step: int) -> Criterion:
    """A criterion: every message goes to the rank `step` places on."""

    def judge(case: Case, run: Run) -> Finding | None:
        for message in run.messages:
            right = (message.src + step) % case.ranks
            if message.sent is not None and message.dst != right:
                why = "In this ring everyone sends to one neighbour only, and receives from the other."
                label = case.labels[message.call]
                return Finding(why, "ring-backwards", label, message.src, f"to rank {right}", f"to rank {message.dst}")
        return None

    return Criterion("direction", 1, "basic", judge)


def one_rank(case: Case, run: Run) -> Finding | None:
    """Why a world of one fails where larger ones do not."""
    if "a message needs two ranks" in run.why:
        why = f"{run.why}\nA rank alone has no neighbour: with n = 1 there is no step to make, range(1, n) is empty."
        return Finding(why, "alone-is-special", case.labels[run.call], run.rank)
    return None


def world(
    xs_of: Sequence[Sequence[Tensor]], expected: Callable[[Sequence[Tensor]], Sequence[Tensor]], more: str = ""
) -> Case:
    """A world that makes one call for each list of everyone's x."""
    calls = tuple(tuple({"x": x} for x in xs) for xs in xs_of)
    labels = tuple(f"n = {len(xs)}, N = {len(xs[0])}{more}{_type(xs[0])}" for xs in xs_of)
    return Case(calls, tuple(expected(xs) for xs in xs_of), labels)


def _type(x: Tensor) -> str:
    return "" if x.dtype is torch.float32 else f", {str(x.dtype).removeprefix('torch.')}"


def first(*judges: Judge) -> Judge:
    """A judge that finds what the first of these finds."""

    def judge(case: Case, run: Run) -> Finding | None:
        return next((found for each in judges if (found := each(case, run)) is not None), None)

    return judge
