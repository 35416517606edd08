"""All-reduce, reduce-scatter and all-gather over sizes: Comm's and those built from messages, against gloo's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

import minidist as md
from benchmarks.alternate import Step, alternate
from benchmarks.row import Row, compare

SIZES = {"1 KB": 2**10, "32 KB": 2**15, "1 MB": 2**20, "8 MB": 2**23, "64 MB": 2**26}
QUICK_SIZES = {"1 KB": 2**10}
OPS = ("all_reduce", "reduce_scatter", "all_gather")

# Comm adds its bookkeeping to a call, which shows on small payloads; a claim is made only where bytes decide.
BAR = 1.05
CLAIMED_FROM_BYTES = 2**20

WHAT = {
    "Comm": "the collective of md.Comm, unchecked; both sides return a new tensor where the result is one",
    "Comm, lengths exchanged": "md.Comm's without `sizes`: the ranks first tell each other how much they bring",
    "ring": "md.algorithms, built from send and recv in Python",
    "halving": "md.algorithms, recursive halving and doubling, the same way",
}


def rows(quick: bool) -> Iterator[Row]:
    """A row for each op, number of ranks, size and way of ours; the size is the whole vector's, as in NCCL's tests."""
    sizes = QUICK_SIZES if quick else SIZES
    for ranks in (2,) if quick else (2, 4):
        measured = md.launch(measure, ranks=ranks, args=(sizes, 3 if quick else 20), check=False, timeout=1200)[0]
        for (op, size), seconds in measured.items():
            for way in [way for way in seconds if way != "gloo"]:
                judged = way == "Comm" and sizes[size] >= CLAIMED_FROM_BYTES
                name = f"collectives/{op}/{ranks} ranks/{size}/{way}"
                yield compare(name, seconds[way], seconds["gloo"], BAR, WHAT[way], judged)


def measure(world: md.Comm, sizes: dict[str, int], rounds: int) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Seconds of one call: {(op, size): {way: [rounds]}}. Small calls are timed many at once."""
    measured = {}
    for op in OPS:
        for size, nbytes in sizes.items():
            calls = max(1, min(20, 2**20 // nbytes))
            steps = {way: repeated(call, calls) for way, call in ways(op, nbytes // 4, world).items()}
            seconds = alternate(steps, world, rounds)
            measured[op, size] = {way: [each / calls for each in taken] for way, taken in seconds.items()}
    return measured


def ways(op: str, count: int, world: md.Comm) -> dict[str, Step]:
    """The contenders for an op on `count` float32 elements (all-gather: the total, spread over the ranks)."""
    whole = torch.zeros(count)  # zeros stay zeros however often they are summed
    part = torch.zeros(count // world.size)
    algorithms = md.algorithms
    if op == "all_reduce":
        return {
            "gloo": lambda: dist.all_reduce(whole),
            "Comm": lambda: world.all_reduce(whole),
            "ring": lambda: algorithms.ring_all_reduce(whole, world),
            "halving": lambda: algorithms.halving_doubling_all_reduce(whole, world),
        }
    if op == "reduce_scatter":
        return {
            "gloo": lambda: dist.reduce_scatter_single(torch.empty_like(part), whole),
            "Comm": lambda: world.reduce_scatter(whole),
            "ring": lambda: algorithms.ring_reduce_scatter(whole, world),
        }
    return {
        "gloo": lambda: dist.all_gather_single(torch.empty_like(whole), part),
        "Comm": lambda: world.all_gather(part, sizes=[len(part)] * world.size),
        "Comm, lengths exchanged": lambda: world.all_gather(part),
        "ring": lambda: algorithms.ring_all_gather(part, world),
    }


def repeated(call: Step, times: int) -> Step:
    def step() -> None:
        for _ in range(times):
            call()

    return step
