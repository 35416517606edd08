"""A pipeline schedule as a program: for every rank the actions it carries out, one after the other.

An `Action` runs one micro-batch through one stage, forward or backward. A `Program` is order and nothing else: no
times, no idle slots, no messages. What depends on what is said once, by `reads` and `writes`, which name the tensors an
action takes and makes. Start times, messages, deadlocks and memory follow from them, and so does the run on real
tensors.

The text form is that of torch.distributed.pipelining's CSV: a line for each rank, actions such as 2F0 between commas.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

KINDS = MappingProxyType({"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"})


class Action(NamedTuple):
    """Micro-batch `microbatch` through stage `stage`. kind: F forward, B backward, or its halves I, then W.

    I computes the gradient of the stage's input, which the stage before waits for, W that of its weights, for which
    nobody waits.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Name(NamedTuple):
    """What a tensor is called. role: one of

    x     what goes into the stage        act   what its forward pass keeps for the backward pass
    g     the gradient of x               wctx  what I keeps for W
    """

    role: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.role}[{self.stage}, {self.microbatch}]"


def reads(action: Action, stages: int) -> list[Name]:
    """The tensors an action needs. The last stage has the loss, and needs no gradient of others.

    >>> [str(name) for name in reads(Action(1, "B", 0), stages=4)]
    ['act[1, 0]', 'g[2, 0]']
    """
    stage, kind, m = action
    if kind == "F":
        return [Name("x", stage, m)]
    if kind == "W":
        return [Name("wctx", stage, m)]
    return [Name("act", stage, m)] + ([Name("g", stage + 1, m)] if stage + 1 < stages else [])


def writes(action: Action, stages: int) -> list[Name]:
    """The tensors an action makes. The first stage's input is data, and has no gradient.

    >>> [str(name) for name in writes(Action(1, "I", 0), stages=4)]
    ['g[1, 0]', 'wctx[1, 0]']
    """
    stage, kind, m = action
    if kind == "F":
        return ([Name("x", stage + 1, m)] if stage + 1 < stages else []) + [Name("act", stage, m)]
    gradient = [Name("g", stage, m)] if stage > 0 and kind in "BI" else []
    return gradient + ([Name("wctx", stage, m)] if kind == "I" else [])


def check_counts(**counts: int) -> None:
    """Raise ValueError unless each is a whole number from 1 on."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number from 1 on")


StageMap = Callable[[int, int], int]
"""(stage, ranks) -> the rank that has the stage."""


def loop(stage: int, ranks: int) -> int:
    """Round and round: 0, 1, 2, 3, 0, 1, 2, 3.

    >>> [loop(stage, 4) for stage in range(8)]
    [0, 1, 2, 3, 0, 1, 2, 3]
    """
    return stage % ranks


def vee(stage: int, ranks: int) -> int:
    """Down and up again, so that the first and the last stage are on one rank: 0, 1, 2, 3, 3, 2, 1, 0.

    >>> [vee(stage, 4) for stage in range(8)]
    [0, 1, 2, 3, 3, 2, 1, 0]
    """
    turn, place = divmod(stage, ranks)
    return place if turn % 2 == 0 else ranks - 1 - place


@dataclass(frozen=True)
class Program:
    """Every rank's actions in their order: program[rank]. Which rank has which stages, they say themselves."""

    actions: tuple[tuple[Action, ...], ...]

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action]]) -> "Program":
        """The program of these rows, one a rank."""
        return cls(tuple(tuple(row) for row in rows))

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.actions)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.actions[rank]

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.actions)

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for row in self.actions for action in row), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for row in self.actions for action in row), default=-1)

    @cached_property
    def homes(self) -> dict[int, int]:
        """{stage: the rank that has it}, the first one if several do, which `validate` refuses."""
        homes: dict[int, int] = {}
        for rank, row in enumerate(self.actions):
            for action in row:
                homes.setdefault(action.stage, rank)
        return homes

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return sorted(stage for stage, home in self.homes.items() if home == rank)

    def forward(self) -> "Program":
        """The forward passes alone, for evaluation."""
        return Program.of([action for action in row if action.kind == "F"] for row in self.actions)

    def first(self, microbatches: int) -> "Program":
        """The program without the micro-batches from this number on."""
        return Program.of([action for action in row if action.microbatch < microbatches] for row in self.actions)


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def parse(text: str) -> Program:
    """The program that a text writes down: a line a rank, actions between commas, empty cells and lines skipped.

    Raises: ValueError that names the line and the cell it could not read, or says that nothing is there.

    >>> print(parse("0F0, 0F1,,0B0,0B1"))
    0F0,0F1,0B0,0B1
    """
    rows = []
    for line in text.splitlines():
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        rows.append([_action(cell, len(rows), i) for i, cell in enumerate(cells) if cell])
    if not rows:
        raise ValueError("there is no program in this text: write a line for each rank, such as 0F0,0B0")
    return Program.of(rows)


def _action(cell: str, rank: int, column: int) -> Action:
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(
            f"rank {rank}, cell {column + 1}: {cell!r} is no action: write stage, kind and micro-batch, such as 2F0, "
            "where the kind is F (forward), B (backward), I (input gradient) or W (weight gradient)"
        )
    return Action(int(found[1]), found[2], int(found[3]))
