"""Lesson 00's readiness check: is this machine fit for the course, and is the learner?"""

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

import minidist as md


def _gigabytes() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return "not known here"


def _launch() -> str:
    """A world of two that adds 1 and 2; a failure becomes the row's text, so that the other rows are still seen."""
    try:
        md.launch(_three, ranks=2)  # the first one also starts the process that all later ranks are forked from
        start = time.perf_counter()
        sums = md.launch(_three, ranks=2)
        seconds = time.perf_counter() - start
    except (RuntimeError, OSError) as error:
        return f"FAILED: {error}"
    return f"works: two ranks agree that 1 + 2 = {sums[0]}, {seconds:.2f} s"


def _three(world: md.Comm) -> int:
    return int(world.all_reduce(torch.tensor([world.rank + 1])))


def machine() -> None:
    """Print what the course runs on, and whether ranks can be started here."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = {
        "Python": f"{platform.python_version()}  (3.11 or newer)",
        "PyTorch": torch.__version__,
        "cores": f"{os.cpu_count()}  (two are enough)",
        "memory": f"{_gigabytes()}  (4 GB are enough)",
        "GPUs": f"{cuda}  (none are needed)",
        "system": platform.system(),
        "ranks": _launch(),
    }
    for name, value in rows.items():
        print(f"{name:8s} {value}")


def check(question: str, yours: Any, right: Callable[[], Any], pointer: str) -> None:
    """Print whether an answer is right, open, or not yet; then where to read up. right: computes the answer."""
    if yours is None:
        print(f"{question}: open. Write your answer instead of None and run the cell again.")
    elif yours == right():
        print(f"{question}: right.")
    else:
        print(f"{question}: not yet. You wrote {yours!r}, running it gives {right()!r}.\n  Read: {pointer}")
