"""The one way times are taken here: contenders take turns, step by step, in the same ranks."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import minidist as md

Step = Callable[[], object]
Times = dict[str, list[float]]

WORLDS = 4


def in_worlds(measure: Callable[..., dict[str, list[float]]], ranks: int, *args: Any, rounds: int) -> Times:
    """What `measure(world, *args, rounds)` gives, its rounds spread over several worlds, one after the other.

    Where a process has its memory differs from launch to launch, and stays: the same step takes up to 3 % longer in one
    world than in the next, and no number of rounds within one world shows it.
    """
    worlds = max(1, min(WORLDS, rounds // 5))
    total: Times = {}
    for part in md.partition(rounds, worlds):
        share = part.stop - part.start
        for name, seconds in md.launch(measure, ranks=ranks, args=(*args, share), check=False, timeout=1200)[0].items():
            total.setdefault(name, []).extend(seconds)
    return total


def alternate(steps: Mapping[str, Step], world: md.Comm, rounds: int, warmup: int = 3) -> Times:
    """Seconds of every step in every round: {name: [rounds]}, the same lists on every rank.

    A step's time is the world's: from the first rank's start to the last rank's end, after a barrier. Each round
    runs every contender once, in an order drawn anew, so none always runs in the cache that a certain other left
    behind. The garbage collector rests meanwhile, as in timeit. The ranks share one host, hence one monotonic clock.
    """
    names = list(steps)
    starts = torch.zeros(len(names), warmup + rounds, dtype=torch.float64)
    ends = torch.zeros_like(starts)
    draw = random.Random(0)  # the same order on every rank
    gc.collect()
    gc.disable()
    try:
        for turn in range(warmup + rounds):
            for index in draw.sample(range(len(names)), len(names)):
                world.barrier()
                starts[index, turn] = time.monotonic()
                steps[names[index]]()
                ends[index, turn] = time.monotonic()
    finally:
        gc.enable()
    world.all_reduce(starts, op="min")
    world.all_reduce(ends, op="max")
    seconds = (ends - starts)[:, warmup:]
    return {name: seconds[index].tolist() for index, name in enumerate(names)}
