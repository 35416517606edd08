"""Lab 04: measure ZeRO on some ranks, and write it down.

    python labs/04_zero/run.py --task memory --ranks 4               ranks started here, on this machine
    torchrun --nproc-per-node 4 labs/04_zero/run.py --task memory    ranks started by torchrun
    srun --ntasks 4 python labs/04_zero/run.py --task memory         ranks started by Slurm, see job.sbatch

Each run writes one JSON file; plot.py turns a folder of them into a figure; sheet.md says which runs to make.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from measure import measure
from settings import LIBRARIES, MODELS, PRECISIONS, TASKS, Settings

import minidist as md

RESULTS = Path("lab04-results")


def main(arguments: list[str]) -> int:
    """Start the ranks, or join those that torchrun or srun started; returns the exit status."""
    options = parse(arguments)
    try:
        settings = settings_of(options)
        if options.ranks is not None:
            settings.shards(options.ranks)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    labels = {"command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]), "job": options.job}
    missing = missing_gpus(options.backend, options.ranks)
    if missing:
        path = write_blocked(options.out, settings, options.ranks, missing, labels)
        print(f"blocked: {missing}. Written to {path}: hand it in, a blocked task is not a failed one.")
        return 0
    md.launch(
        measure_and_write,
        ranks=options.ranks,
        args=(settings, options.out.resolve(), labels),
        timeout=options.timeout,
        backend=options.backend,
        check=False,
    )
    return 0


def measure_and_write(world: md.Comm, settings: Settings, out: Path, labels: dict[str, Any]) -> None:
    """Measure on all ranks; rank 0 writes the result and says what it is."""
    measured = measure(world, settings)
    if world.rank == 0:
        record = {**heading(settings, labels), "status": "measured", **measured, **derived(measured)}
        print(f"{summary(record)}\n  written to {write(out, record)}")


def heading(settings: Settings, labels: dict[str, Any]) -> dict[str, Any]:
    """What a result says about itself before any number: without this a time means nothing."""
    versions = {"minidist": version("minidist"), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "lab": "04_zero",
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        **labels,
        "settings": vars(settings),
        "versions": {"python": platform.python_version(), **versions},
        "system": f"{platform.system()} {platform.release()}",
    }


def derived(measured: dict[str, Any]) -> dict[str, float]:
    """The numbers the plots show; of memory those of the rank that holds most.

    >>> times = {"step_s": [0.3, 0.2, 0.4], "compute_s": [0.2, 0.2, 0.25], "tokens_per_step": 60}
    >>> bytes_ = {"held_bytes_per_rank": {"params": [8, 6], "grads": [4, 3]}, "predicted_bytes": {"params": 7.5}}
    >>> found = derived({**times, **bytes_, "peak_bytes_per_rank": [20, 21]})
    >>> found["tokens_per_s"], found["state_bytes"], found["predicted_state_bytes"], found["peak_bytes"]
    (200.0, 12, 7.5, 21)
    """
    step, compute = statistics.median(measured["step_s"]), statistics.median(measured["compute_s"])
    return {
        "median_step_s": step,
        "median_compute_s": compute,
        "exposed_s": step - compute,
        "tokens_per_s": measured["tokens_per_step"] / step,
        "state_bytes": max(map(sum, zip(*measured["held_bytes_per_rank"].values(), strict=True))),
        "predicted_state_bytes": sum(measured["predicted_bytes"].values()),
        "peak_bytes": max(measured["peak_bytes_per_rank"]),
    }


def summary(record: dict[str, Any]) -> str:
    settings, sent = record["settings"], record["sent_bytes_per_rank"]
    return (
        f"{settings['task']}: {settings['library']} stage {settings['stage']}, {record['ranks']} ranks on "
        f"{len(set(record['hosts']))} host(s): state {record['state_bytes'] / 1e6:.2f} MB per rank "
        f"(predicted {record['predicted_state_bytes'] / 1e6:.2f}), peak {record['peak_bytes'] / 1e6:.2f} MB, "
        f"step {1e3 * record['median_step_s']:.1f} ms, of which exposed {1e3 * record['exposed_s']:.1f} ms, "
        + (f"{max(sent) / 1e6:.2f} MB sent per rank" if sent else "bytes not recorded for torch's own")
    )


def missing_gpus(backend: str | None, ranks: int | None) -> str:
    """What the asked-for NCCL run lacks on this machine, or nothing."""
    if backend != "nccl":
        return ""
    found, needed = torch.cuda.device_count(), ranks or 1
    return f"{needed} GPU(s) needed here, {found} found" if found < needed else ""


def write_blocked(out: Path, settings: Settings, ranks: int | None, reason: str, labels: dict[str, Any]) -> Path:
    """A result that says why there is none."""
    return write(out, {**heading(settings, labels), "status": "blocked", "ranks": ranks, "reason": reason})


def write(out: Path, record: dict[str, Any]) -> Path:
    """One file a run, named so that a folder of them sorts by task, ranks and time."""
    out.mkdir(parents=True, exist_ok=True)
    stamp = record["time"].replace(":", "").replace("+0000", "")
    path = out / f"{record['settings']['task']}-{record['ranks'] or 'env'}-{stamp}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the options."""
    return Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})


def parse(arguments: list[str]) -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(prog="run.py", description="Lab 04: one run of ZeRO, measured.")
    parser.add_argument("--task", choices=TASKS, default=default.task, help="the task of the sheet this run is for")
    parser.add_argument("--ranks", type=int, help="ranks to start here (default 4); leave out under torchrun and srun")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there is a GPU a rank")
    parser.add_argument("--model", choices=MODELS, default=default.model)
    parser.add_argument("--library", choices=LIBRARIES, default=default.library, help="whose ZeRO")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=default.stage)
    parser.add_argument("--batch-per-rank", type=int, default=default.batch_per_rank, help="sequences of a step a rank")
    parser.add_argument("--micro-batches", type=int, default=default.micro_batches, help="parts the batch is cut into")
    parser.add_argument("--precision", choices=PRECISIONS, default=default.precision)
    parser.add_argument("--shard", type=int, help="ranks that share one copy of the state (default: all): hybrid")
    parser.add_argument("--steps", type=int, default=default.steps, help="measured steps")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps before the first measured one")
    parser.add_argument("--threads", type=int, default=default.threads, help="CPU threads a rank")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until a run started here is given up")
    parser.add_argument("--job", help="the job's id, written into the result (Slurm: $SLURM_JOB_ID)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the results (default {RESULTS})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
