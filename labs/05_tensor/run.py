"""Lab 05: measure a training step of tensor parallelism on some ranks, and write it down.

    python labs/05_tensor/run.py --task ranks --ranks 4               ranks started here, on this machine
    torchrun --nproc-per-node 4 labs/05_tensor/run.py --task ranks    ranks started by torchrun
    srun --ntasks 4 python labs/05_tensor/run.py --task ranks         ranks started by Slurm, see job.sbatch

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
from settings import DTYPES, MODELS, TASKS, Settings

import minidist as md

RESULTS = Path("lab05-results")


def main(arguments: list[str]) -> int:
    """Start the ranks, or join those that torchrun or srun started; returns the exit status."""
    options = parse(arguments)
    try:
        settings = settings_of(options)
        if options.ranks is not None:
            settings.axes(options.ranks)
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
        "lab": "05_tensor",
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        **labels,
        "settings": vars(settings),
        "versions": {"python": platform.python_version(), **versions},
        "system": f"{platform.system()} {platform.release()}",
    }


def derived(measured: dict[str, Any]) -> dict[str, float]:
    """The numbers the plots show.

    >>> derived({"step_s": [0.3, 0.2, 0.4], "compute_s": [0.2, 0.2, 0.25], "tokens_per_step": 60})["tokens_per_s"]
    200.0
    """
    step, compute = statistics.median(measured["step_s"]), statistics.median(measured["compute_s"])
    return {
        "median_step_s": step,
        "median_compute_s": compute,
        "sums_s": step - compute,
        "tokens_per_s": measured["tokens_per_step"] / step,
    }


def summary(record: dict[str, Any]) -> str:
    step_ms, sums_ms = 1e3 * record["median_step_s"], 1e3 * record["sums_s"]
    cut = f"tp {record['tp']}, dp {record['dp']}" + (", sequence parallel" if record["settings"]["sequence"] else "")
    return (
        f"{record['settings']['task']}: {record['ranks']} ranks on {len(set(record['hosts']))} host(s), {cut}, "
        f"width {record['dim']}: step {step_ms:.1f} ms, of which waiting for messages {sums_ms:.1f} ms, "
        f"{record['tokens_per_s']:.0f} tokens/s, {record['collectives']} collectives of tp, "
        f"{max(record['sent_tp_bytes_per_rank']) / 1e6:.2f} MB sent per rank for them, "
        f"{max(record['activation_bytes_per_rank']) / 1e6:.2f} MB of activations kept"
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
    parser = argparse.ArgumentParser(prog="run.py", description="Lab 05: one run of tensor parallelism, measured.")
    parser.add_argument("--task", choices=TASKS, default=default.task, help="the task of the sheet this run is for")
    parser.add_argument("--ranks", type=int, help="ranks to start here (default 4); leave out under torchrun and srun")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there is a GPU a rank")
    parser.add_argument("--model", choices=MODELS, default=default.model)
    parser.add_argument("--dim", type=int, help="width, instead of the model's own")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of weights and activations")
    parser.add_argument("--tp", type=int, help="ranks that a layer is cut over (default: all)")
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism")
    parser.add_argument("--batch", type=int, default=default.batch, help="sequences of a step over all replicas")
    parser.add_argument("--steps", type=int, default=default.steps, help="measured steps")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps before the first measured one")
    parser.add_argument("--threads", type=int, default=default.threads, help="CPU threads a rank")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until a run started here is given up")
    parser.add_argument("--job", help="the job's id, written into the result (Slurm: $SLURM_JOB_ID)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the results (default {RESULTS})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
