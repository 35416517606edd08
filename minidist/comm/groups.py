"""Dividing a group of ranks: the rules, and torch's process groups."""

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def check_division(members: Sequence[Sequence[int]], size: int) -> None:
    """Raise ValueError unless these are ascending lists of ranks below `size`, no rank in two of them.

    >>> check_division([[0, 1], [1, 2]], 3)
    Traceback (most recent call last):
    ValueError: rank 1 is in two groups: subgroups divide a Comm, call it once for each division
    """
    seen: set[int] = set()
    for group in members:
        if not group or any(not isinstance(rank, Integral) or not 0 <= rank < size for rank in group):
            raise ValueError(f"group {list(group)} must hold ranks of this Comm, which are 0 to {size - 1}")
        if any(a >= b for a, b in pairwise(group)):
            raise ValueError(f"group {list(group)} must be in ascending order: torch numbers its ranks that way")
        if both := seen & set(group):
            raise ValueError(
                f"rank {min(both)} is in two groups: subgroups divide a Comm, call it once for each division"
            )
        seen.update(group)


def torch_groups(division: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Any]:
    """A process group for each tuple of world ranks; None where this rank is not in it, or is all of it.

    division: the same on all ranks that call. rank: mine in the world. size: how many ranks call. If that is the whole
    world every rank makes every group, as torch asks for; if fewer, the members alone make theirs.
    """
    everyone = size == dist.get_world_size()
    made = []
    for ranks in division:
        group = None
        if len(ranks) > 1 and (everyone or rank in ranks):
            group = dist.new_group(list(ranks), use_local_synchronization=not everyone)
        made.append(group if rank in ranks else None)
    return made


def groups_made() -> int:
    """How many groups this rank is in: where only the members make a group, torch names it by this number."""
    return len(distributed_c10d._world.pg_names)
