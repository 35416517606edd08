"""Lab 06: measure a training step of pipeline parallelism on some ranks, and write it down.

    python labs/06_pipeline/run.py --task schedule --ranks 4               ranks started here, on this machine
    torchrun --nproc-per-node 4 labs/06_pipeline/run.py --task schedule    ranks started by torchrun
    srun --ntasks 4 python labs/06_pipeline/run.py --task schedule         ranks started by Slurm, see job.sbatch

Each run writes one JSON file; plot.py turns a folder of them into a figure; sheet.md says which runs to make.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measure import measure
from settings import DTYPES, MODELS, SCHEDULES, TASKS, Settings

from labs.shared.running import Lab, Record, common_options, start

RESULTS = Path("lab06-results")


def main(arguments: list[str]) -> int:
    """Measure what the options say, and write it down; returns the exit status."""
    options = parse(arguments)
    try:
        settings = settings_of(options)
        if options.ranks is not None:
            settings.program(options.ranks)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return start(LAB, settings, options)


def summary(record: Record) -> str:
    """A result in a sentence."""
    settings = record["settings"]
    ms = {name: 1e3 * record[name] for name in ("median_step_s", "pipeline_s", "simulated_s")}
    most = lambda name: max(record[name])
    return (
        f"{settings['task']}: {settings['schedule']}, pp {record['pp']}, dp {record['dp']}, {record['stages']} stages, "
        f"{len(set(record['hosts']))} host(s), {settings['microbatches']} micro-batches of {settings['size']}: "
        f"step {ms['median_step_s']:.1f} ms, of which forward and backward {ms['pipeline_s']:.1f} ms (simulated "
        f"{ms['simulated_s']:.1f}), bubble {record['bubble']:.2f} (simulated {record['simulated_bubble']:.2f}), "
        f"{record['tokens_per_s']:.0f} tokens/s, at most {most('in_flight_per_rank')} micro-batches in flight, "
        f"{most('activation_bytes_per_rank') / 1e6:.2f} MB for them "
        f"(predicted {most('predicted_activation_bytes_per_rank') / 1e6:.2f})"
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the options."""
    return Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})


def parse(arguments: list[str]) -> argparse.Namespace:
    default = Settings()
    parser = common_options("Lab 06: one run of pipeline parallelism, measured.", default, TASKS, MODELS, RESULTS)
    parser.add_argument("--schedule", choices=SCHEDULES, default=default.schedule)
    parser.add_argument("--microbatches", type=int, default=default.microbatches, help="of a step of one pipeline")
    parser.add_argument("--size", type=int, default=default.size, help="sequences of a micro-batch")
    parser.add_argument("--pp", type=int, help="ranks of a pipeline (default: all); the rest are replicas")
    parser.add_argument("--inner", choices=("dp", "pp"), default=default.inner, help="axis of neighbouring ranks")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of weights and activations")
    return parser.parse_args(arguments)


LAB = Lab("06_pipeline", measure, summary)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
