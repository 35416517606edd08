"""What checked mode costs a call: the same collective in a checked and in an unchecked world."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import minidist as md
from benchmarks.alternate import alternate
from benchmarks.collectives import repeated
from benchmarks.row import Row, compare

SIZES = {"1 KB": 2**10, "1 MB": 2**20}
CALLS = 20


def rows(quick: bool) -> Iterator[Row]:
    """Informative: a lesson pays this for its error messages. The two worlds take turns, launch by launch."""
    launches, rounds = (1, 2) if quick else (4, 10)
    for size, nbytes in SIZES.items():
        checked: list[float] = []
        unchecked: list[float] = []
        for _ in range(launches):
            for seconds, check in ((checked, True), (unchecked, False)):
                seconds += md.launch(measure, ranks=2, args=(nbytes, rounds), check=check)[0]
        what = "all_reduce on 2 ranks in a checked world, against an unchecked one"
        yield compare(f"checked/all_reduce/2 ranks/{size}", checked, unchecked, 2.0, what, judged=False)


def measure(world: md.Comm, nbytes: int, rounds: int) -> list[float]:
    """Seconds of one call."""
    x = torch.zeros(nbytes // 4)
    step = repeated(lambda: world.all_reduce(x), CALLS)
    return [seconds / CALLS for seconds in alternate({"call": step}, world, rounds)["call"]]
