"""The pre-lab of every lab: checks in order on this machine, a tiny run and its figure, and a mark that all passed.

What a session relies on is found out here, so that no GPU minute is spent on it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import minidist as md

Check = Callable[[], str]
"""Returns what is wrong, or nothing."""


def prelab(folder: Path, checks: Mapping[str, Check], about: str | None, arguments: list[str]) -> int:
    """Run the checks, stop at the first that fails; returns the exit status. folder: the lab's."""
    parser = argparse.ArgumentParser(prog="prelab.py", description=about)
    results = Path(f"lab{folder.name[:2]}-results")
    parser.add_argument("--out", type=Path, default=results, help=f"folder of the results (default {results})")
    out = parser.parse_args(arguments).out
    trial = out / "prelab"  # a folder of its own, so that its tiny run is in no figure
    tiny = ("--model", "tiny", "--ranks", 2, "--steps", 3, "--out", trial)
    in_order: dict[str, Check] = {
        **checks,
        "a run writes a result": lambda: run(folder / "run.py", *tiny),
        "results become a figure": lambda: run(folder / "plot.py", trial, "--out", trial / "prelab.png"),
    }
    for name, check in in_order.items():
        problem = check()
        print(f"{'failed' if problem else 'passed'}: {name}" + (f"\n{problem}" if problem else ""))
        if problem:
            print("The pre-lab has to pass before GPU time is asked for.")
            return 1
    (out / "prelab-passed").write_text(f"torch {torch.__version__}\n")
    print(f"Pre-lab passed. The session can start; job.sbatch looks for {out / 'prelab-passed'}.")
    return 0


def ranks_meet() -> str:
    def meet(world: md.Comm) -> float:
        return world.all_reduce(torch.tensor([float(world.rank)])).item()

    got = md.launch(meet, ranks=4)
    return "" if got == [6.0] * 4 else f"four ranks summed 0 + 1 + 2 + 3 to {got}"


def run(script: Path, *arguments: object) -> str:
    """Run a script of the lab; the end of what it said, if it failed."""
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]
