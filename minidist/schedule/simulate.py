"""What a program does, computed from what its actions read and write: when, with which messages, or why not at all."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minidist.schedule.program import KINDS, Action, Name, Program, reads, writes
from minidist.timeline import Span, Timeline

Cost = float | Sequence[float]
"""Seconds: one number for all stages, or one for each."""


class Message(NamedTuple):
    """A tensor that one rank makes and another needs."""

    tensor: Name
    src: int
    dst: int


class Report(NamedTuple):
    """A valid program. messages: all that are sent. blocking_hangs: whether it would hang if a send waited for its
    receiver, each rank receiving just before it needs something and sending right after it made it.
    """

    messages: tuple[Message, ...]
    blocking_hangs: bool


def messages(program: Program) -> list[Message]:
    """What has to be sent, in the order in which the ranks make it."""
    readers = {name: r for r, row in enumerate(program) for a in row for name in reads(a, program.stages)}
    return [
        Message(name, rank, readers[name])
        for rank, row in enumerate(program)
        for action in row
        for name in writes(action, program.stages)
        if readers.get(name, rank) != rank
    ]


def simulate(
    program: Program,
    F: Cost = 1.0,
    I: Cost = 1.0,  # noqa: E741
    W: Cost = 1.0,
    comm: float = 0.0,
) -> Timeline:
    """When every action runs, if each begins as soon as its rank is free and what it reads is here.

    F, I, W: seconds of a forward pass, an input gradient, a weight gradient; a full backward takes
    I + W. comm: seconds from the end of an action until what it made is on another rank; sending
    keeps nobody busy.

    Raises: ValueError for a program that `validate` refuses, and for costs that are negative or not
    one for each stage.

    >>> from minidist.schedule.library import build
    >>> simulate(build("gpipe", ranks=4, microbatches=8)).makespan
    33.0
    """
    check_complete(program)
    given = {"F": F, "I": I, "W": W}
    costs = {kind: _per_stage(kind, cost, program.stages) for kind, cost in given.items()}
    costs["B"] = [i + w for i, w in zip(costs["I"], costs["W"], strict=True)]
    if not comm >= 0:
        raise ValueError(f"comm={comm!r}: a message takes 0 seconds or more")
    clock = [0.0] * program.ranks
    made: dict[Name, tuple[float, int]] = {}  # when, and on which rank, until it is read
    spans = []
    for rank, action, needed, written in runnable(program):
        start = clock[rank]
        for name in needed:
            if name in made:  # data is there from the start
                at, home = made.pop(name)
                there = at if home == rank else at + comm
                if there > start:
                    start = there
        stage, kind, _ = action
        clock[rank] = end = start + costs[kind][stage]
        for name in written:
            made[name] = end, rank
        spans.append(Span(rank, action, start, end))
    return Timeline(spans, ranks=program.ranks, predicted=True)


def _per_stage(kind: str, cost: Cost, stages: int) -> list[float]:
    values = [float(cost)] * stages if isinstance(cost, int | float) else [float(value) for value in cost]
    if len(values) != stages or not all(value >= 0 for value in values):
        raise ValueError(f"{kind}={cost!r} must be seconds, 0 or more: one number, or one for each of {stages} stages")
    return values


def runnable(program: Program) -> Iterator[tuple[int, Action, list[Name], list[Name]]]:
    """(rank, action, what it reads, what it writes) in an order in which everything can run, sends never blocking.

    Raises: ValueError that says what each rank waits for, if some action never can.
    """
    stages = program.stages
    made = {Name("x", 0, m) for m in range(program.microbatches)}
    at = [0] * program.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program):
            i = at[rank]
            while i < len(row) and made.issuperset(needed := reads(row[i], stages)):
                action = row[i]
                made.difference_update(needed)  # nobody else reads it
                made.update(written := writes(action, stages))
                yield rank, action, needed, written
                i += 1
            moved |= i > at[rank]
            at[rank] = i
    stuck = [(r, row[i]) for r, (row, i) in enumerate(zip(program, at, strict=True)) if i < len(row)]
    if stuck:
        waits = [f"rank {r} at {a} for {_missing(a, program, made)}" for r, a in stuck]
        raise ValueError(f"this program cannot go on: {'; '.join(waits)}")


def _missing(action: Action, program: Program, made: set[Name]) -> str:
    names = [name for name in reads(action, program.stages) if name not in made]
    makers = {n: (r, a) for r, row in enumerate(program) for a in row for n in writes(a, program.stages)}
    return " and ".join(f"{name} (made by {makers[name][1]} on rank {makers[name][0]})" for name in names)


def check_complete(program: Program) -> None:
    """Raise ValueError unless every micro-batch goes through every stage once: forward, or forward and backward."""
    stages, microbatches = program.stages, program.microbatches
    if empty := [rank for rank, row in enumerate(program) if not row]:
        raise ValueError(f"rank {empty[0]} has nothing to do: give every rank a stage, or take fewer ranks")
    homes = program.homes
    done: dict[tuple[int, int], dict[str, int]] = {}  # (stage, micro-batch) -> {kind: rank}
    for rank, row in enumerate(program):
        for action in row:
            stage, kind, m = action
            if kind not in KINDS or stage < 0 or m < 0:
                raise ValueError(f"rank {rank}: {action} is no action: kinds are {', '.join(KINDS)}")
            found = done.setdefault((stage, m), {})
            if kind in found:
                raise ValueError(f"{action} is done twice, on rank {found[kind]} and on rank {rank}")
            if homes[stage] != rank:
                raise ValueError(
                    f"{action} is on rank {rank}, and stage {stage} on rank {homes[stage]}: a stage has its weights "
                    "on one rank"
                )
            found[kind] = rank
    training = any(kind != "F" for kinds in done.values() for kind in kinds)
    legal = ({"F", "B"}, {"F", "I", "W"}) if training else ({"F"},)
    for stage in range(stages):
        for m in range(microbatches):
            kinds = done.get((stage, m), {}).keys()
            if kinds not in legal:
                has = ", ".join(f"{stage}{kind}{m}" for kind in KINDS if kind in kinds) or "nothing"
                raise ValueError(
                    f"micro-batch {m} at stage {stage} has {has}: it needs F and then B, or F, I and W, "
                    "and every stage has the same micro-batches"
                )


def validate(program: Program) -> Report:
    """Check that a program can run: complete, and never waiting for what comes later.

    Raises: ValueError that names the action which is missing, done twice or waited for in vain.

    >>> from minidist.schedule.library import build
    >>> [validate(build(name, ranks=4, microbatches=8)).blocking_hangs for name in ("gpipe", "1f1b")]
    [False, True]
    """
    check_complete(program)
    deque(runnable(program), maxlen=0)
    return Report(tuple(messages(program)), not _runs_with_blocking_sends(program))


class Transfer(NamedTuple):
    """A send or a receive among a rank's actions."""

    kind: str
    message: Message


def lower(program: Program) -> list[list[Action | Transfer]]:
    """Every rank's actions with the receives before them and the sends after them."""
    sent = {message.tensor: message for message in messages(program)}
    return [
        [
            step
            for action in row
            for step in (
                *(Transfer("recv", sent[name]) for name in reads(action, program.stages) if name in sent),
                action,
                *(Transfer("send", sent[name]) for name in writes(action, program.stages) if name in sent),
            )
        ]
        for row in program
    ]


def _runs_with_blocking_sends(program: Program) -> bool:
    """Whether all ranks come to their end, if a send is over only when its receiver stands at the receive."""
    rows = lower(program)
    at = [0] * len(rows)
    head = lambda rank: rows[rank][at[rank]] if at[rank] < len(rows[rank]) else None
    moved = True
    while moved:
        moved = False
        for rank in range(len(rows)):
            step = head(rank)
            if isinstance(step, Action):
                at[rank] += 1
                moved = True
            elif step is not None and step.kind == "send" and head(step.message.dst) == step._replace(kind="recv"):
                at[rank] += 1
                at[step.message.dst] += 1
                moved = True
    return all(head(rank) is None for rank in range(len(rows)))
