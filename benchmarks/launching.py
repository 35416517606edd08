"""Starting ranks, and importing the package."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import minidist as md
from benchmarks.row import Row, compare

LIMIT_S = 0.15
RANKS = 4


def rows(quick: bool) -> Iterator[Row]:
    """Four ranks that meet in one all-reduce and leave, once warm; and `import minidist` beside `import torch`."""
    rounds = 2 if quick else 20
    launch_ours()  # the first launch starts the supervisor
    warm = [timed(launch_ours) for _ in range(rounds)]
    yield compare(
        "launch/4 ranks warm/limit",
        warm,
        [LIMIT_S] * rounds,
        1.0,
        f"md.launch with one all-reduce, against {LIMIT_S} s",
    )
    if not quick:
        ours, theirs = zip(*((timed(launch_ours), timed(launch_torch)) for _ in range(4)), strict=True)
        what = "the same through torch.multiprocessing.spawn, which imports torch in every rank"
        yield compare("launch/4 ranks warm/mp.spawn", ours, theirs, 1.0, what)
    times = ((timed(importer("minidist")), timed(importer("torch"))) for _ in range(1 if quick else 10))
    ours, theirs = zip(*times, strict=True)
    what = "python -c 'import minidist' (which imports torch), against python -c 'import torch'"
    yield compare("import", ours, theirs, 1.10, what)


def meet(world: md.Comm) -> float:
    return float(world.all_reduce(torch.ones(1)))


def launch_ours() -> None:
    results = md.launch(meet, ranks=RANKS, check=False)
    if results != [RANKS] * RANKS:
        raise AssertionError(f"the ranks did not all meet: {results}")


def launch_torch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(meet_torch, args=(str(Path(folder) / "store"),), nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]


def meet_torch(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def importer(module: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start
