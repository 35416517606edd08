"""A schedule made by one rule: whoever can begin first begins, with what its rank likes best, and holds no more than
so many micro-batches at once. Stage map, preference and limit are the whole schedule: with the right ones it is GPipe
or 1F1B to the letter.
"""

from collections.abc import Callable
from typing import Any

from minidist.schedule.program import Action, Name, Program, StageMap, check_counts, loop, reads, writes

Preference = Callable[[Action], Any]


def forward_first(action: Action) -> Any:
    """GPipe's: forward passes before backward passes, in the order of the micro-batches."""
    return ("FBIW".index(action.kind), action.microbatch, action.stage)


def backward_first(action: Action) -> Any:
    """1F1B's: what frees memory first. Weight gradients last, which nobody waits for."""
    return ("BIFW".index(action.kind), action.microbatch, -action.stage)


def greedy(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    stage_map: StageMap = loop,
    prefer: Preference = backward_first,
    limit: Callable[[int], int] = lambda rank: 10**9,
    split: bool = False,
    F: float = 1.0,
    I: float = 1.0,  # noqa: E741
    W: float = 1.0,
) -> Program:
    """The program that this rule makes.

    prefer: of what a rank can begin at one time, it takes the action for which this is least. limit: the most (stage,
    micro-batch) that a rank holds between a forward pass and the end of its backward pass. split: backward passes in
    two halves. F, I, W: seconds that the rule reckons with.

    Raises: ValueError where the limit lets nothing go on, for times below 0, and for a stage map that leaves a rank
    without a stage or a stage without a rank.

    >>> print(greedy(ranks=2, microbatches=3, limit=lambda rank: 2 - rank))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    check_counts(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    if not all(seconds >= 0 for seconds in (F, I, W)):
        raise ValueError(f"F={F}, I={I}, W={W} must be seconds, 0 or more")
    stages = ranks * stages_per_rank
    homes = [stage_map(stage, ranks) for stage in range(stages)]
    if set(homes) != set(range(ranks)):
        raise ValueError(
            f"the stage map puts stages 0 to {stages - 1} on ranks {homes}: each of {ranks} ranks needs one"
        )
    seconds = {"F": F, "B": I + W, "I": I, "W": W}
    kinds = "FIW" if split else "FB"
    left = [
        {Action(s, kind, m) for s in range(stages) if homes[s] == rank for kind in kinds for m in range(microbatches)}
        for rank in range(ranks)
    ]
    made = {Name("x", 0, m): 0.0 for m in range(microbatches)}
    clock, held = [0.0] * ranks, [0] * ranks
    rows: list[list[Action]] = [[] for _ in range(ranks)]

    def options(rank: int) -> list[tuple[float, Action]]:
        """When this rank could begin what."""
        return [
            (max([clock[rank], *(made[name] for name in reads(action, stages))]), action)
            for action in left[rank]
            if all(name in made for name in reads(action, stages))
            and not (action.kind == "F" and held[rank] >= limit(rank))
        ]

    while any(left):
        begins = [
            (start, rank, min((a for at, a in found if at <= start), key=prefer))
            for rank in range(ranks)
            if (found := options(rank))
            for start in [min(at for at, _ in found)]
        ]
        if not begins:
            raise ValueError("no rank can go on: raise the limit, which keeps out a forward pass that others wait for")
        start, rank, action = min(begins, key=lambda begin: begin[:2])
        clock[rank] = start + seconds[action.kind]
        held[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
        made.update(dict.fromkeys(writes(action, stages), clock[rank]))
        rows[rank].append(action)
        left[rank].discard(action)
    return Program.of(rows)
