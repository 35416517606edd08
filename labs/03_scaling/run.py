"""Lab 03: measure a training step of data parallelism on some ranks, and write it down.

    python labs/03_scaling/run.py --task strong --ranks 4               ranks started here, on this machine
    torchrun --nproc-per-node 4 labs/03_scaling/run.py --task strong    ranks started by torchrun
    srun --ntasks 4 python labs/03_scaling/run.py --task strong         ranks started by Slurm, see job.sbatch

Each run writes one JSON file; plot.py turns a folder of them into a figure; sheet.md says which runs to make.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measure import measure
from settings import MECHANISMS, MODELS, TASKS, Settings

from labs.shared.running import Lab, Record, common_options, start

RESULTS = Path("lab03-results")


def main(arguments: list[str]) -> int:
    """Measure what the options say, and write it down; returns the exit status."""
    options = parse(arguments)
    try:
        settings = settings_of(options)
        settings.global_batch(options.ranks or 1)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return start(LAB, settings, options)


def summary(record: Record) -> str:
    """A result in a sentence."""
    sent = record["sent_bytes_per_rank"]
    step_ms, exposed_ms = 1e3 * record["median_step_s"], 1e3 * record["exposed_s"]
    return (
        f"{record['settings']['task']}: {record['ranks']} ranks on {len(set(record['hosts']))} host(s), "
        f"global batch {record['global_batch']}, {record['settings']['mechanism']}: "
        f"step {step_ms:.1f} ms, of which exposed communication {exposed_ms:.1f} ms, "
        f"{record['tokens_per_s']:.0f} tokens/s, "
        + (f"{max(sent) / 1e6:.2f} MB sent per rank" if sent else "bytes not recorded for ddp")
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the options; without any batch option the global batch is 16."""
    given = {name: getattr(options, name) for name in Settings.__dataclass_fields__}
    if given["batch"] is None and given["batch_per_rank"] is None:
        given["batch"] = 16
    return Settings(**given)


def parse(arguments: list[str]) -> argparse.Namespace:
    default = Settings(batch=16)
    about = "Lab 03: one run of data parallelism, measured."
    parser = common_options(about, default, TASKS, MODELS, RESULTS)
    parser.add_argument("--mechanism", choices=MECHANISMS, default=default.mechanism)
    parser.add_argument("--batch", type=int, help="sequences of a step over all ranks (default 16)")
    parser.add_argument("--batch-per-rank", type=int, help="sequences of a step on each rank, instead of --batch")
    parser.add_argument("--bucket-mb", type=float, default=default.bucket_mb, help="size of a gradient bucket")
    return parser.parse_args(arguments)


LAB = Lab("03_scaling", measure, summary)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
