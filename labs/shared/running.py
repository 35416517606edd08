"""From a command line to a JSON file: start the ranks, or say what is missing, and write what was measured."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import minidist as md

Record = dict[str, Any]


@dataclass(frozen=True)
class Lab:
    """A lab: its folder's name, what each rank runs, and how its result is said in a sentence."""

    name: str
    measure: Callable[[md.Comm, Any], Record]
    summary: Callable[[Record], str]


def start(lab: Lab, settings: Any, options: argparse.Namespace) -> int:
    """Start the ranks, or join those that torchrun or srun started; returns the exit status."""
    labels = {"command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]), "job": options.job}
    missing = missing_gpus(options.backend, options.ranks)
    if missing:
        reason = {"status": "blocked", "ranks": options.ranks, "reason": missing}
        path = write(options.out, {**heading(lab, settings, labels), **reason})
        print(f"blocked: {missing}. Written to {path}: hand it in, a blocked task is not a failed one.")
        return 0
    md.launch(
        measure_and_write,
        ranks=options.ranks,
        args=(lab, settings, options.out.resolve(), labels),
        timeout=options.timeout,
        backend=options.backend,
        check=False,
    )
    return 0


def measure_and_write(world: md.Comm, lab: Lab, settings: Any, out: Path, labels: Record) -> None:
    """Measure on all ranks; rank 0 writes the result and says what it is."""
    measured = lab.measure(world, settings)
    if world.rank == 0:
        record = {**heading(lab, settings, labels), "status": "measured", **measured, **times(measured)}
        print(f"{lab.summary(record)}\n  written to {write(out, record)}")


def heading(lab: Lab, settings: Any, labels: Record) -> Record:
    """What a result says about itself before any number: without this a time means nothing."""
    versions = {"minidist": version("minidist"), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "lab": lab.name,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        **labels,
        "settings": vars(settings),
        "versions": {"python": platform.python_version(), **versions},
        "system": f"{platform.system()} {platform.release()}",
    }


def times(measured: Record) -> Record:
    """The times that every plot shows.

    >>> times({"step_s": [0.3, 0.2, 0.4], "compute_s": [0.2, 0.2, 0.25], "tokens_per_step": 60})["tokens_per_s"]
    200.0
    """
    step, compute = statistics.median(measured["step_s"]), statistics.median(measured["compute_s"])
    return {
        "median_step_s": step,
        "median_compute_s": compute,
        "exposed_s": step - compute,
        "tokens_per_s": measured["tokens_per_step"] / step,
    }


def missing_gpus(backend: str | None, ranks: int | None) -> str:
    """What the asked-for NCCL run lacks on this machine, or nothing."""
    if backend != "nccl":
        return ""
    found, needed = torch.cuda.device_count(), ranks or 1
    return f"{needed} GPU(s) needed here, {found} found" if found < needed else ""


def write(out: Path, record: Record) -> Path:
    """One file a run, named so that a folder of them sorts by task, ranks and time."""
    out.mkdir(parents=True, exist_ok=True)
    stamp = record["time"].replace(":", "").replace("+0000", "")
    path = out / f"{record['settings']['task']}-{record['ranks'] or 'env'}-{stamp}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def common_options(
    description: str, default: Any, tasks: Iterable[str], models: Iterable[str], results: Path
) -> argparse.ArgumentParser:
    """A parser with the options of every lab; each adds its own. default: the Settings of a run without options."""
    parser = argparse.ArgumentParser(prog="run.py", description=description)
    parser.add_argument("--task", choices=tasks, default=default.task, help="the task of the sheet this run is for")
    parser.add_argument("--ranks", type=int, help="ranks to start here (default 4); leave out under torchrun and srun")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there is a GPU a rank")
    parser.add_argument("--model", choices=models, default=default.model)
    parser.add_argument("--steps", type=int, default=default.steps, help="measured steps")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps before the first measured one")
    parser.add_argument("--threads", type=int, default=default.threads, help="CPU threads a rank")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until a run started here is given up")
    parser.add_argument("--job", help="the job's id, written into the result (Slurm: $SLURM_JOB_ID)")
    parser.add_argument("--out", type=Path, default=results, help=f"folder of the results (default {results})")
    return parser
