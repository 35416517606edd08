"""Lab 04: measure ZeRO on some ranks, and write it down.

    python labs/04_zero/run.py --task memory --ranks 4               ranks started here, on this machine
    torchrun --nproc-per-node 4 labs/04_zero/run.py --task memory    ranks started by torchrun
    srun --ntasks 4 python labs/04_zero/run.py --task memory         ranks started by Slurm, see job.sbatch

Each run writes one JSON file; plot.py turns a folder of them into a figure; sheet.md says which runs to make.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measure import measure
from settings import LIBRARIES, MODELS, PRECISIONS, TASKS, Settings

from labs.shared.running import Lab, Record, common_options, start

RESULTS = Path("lab04-results")


def main(arguments: list[str]) -> int:
    """Measure what the options say, and write it down; returns the exit status."""
    options = parse(arguments)
    try:
        settings = settings_of(options)
        if options.ranks is not None:
            settings.shards(options.ranks)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return start(LAB, settings, options)


def summary(record: Record) -> str:
    """A result in a sentence."""
    settings, sent = record["settings"], record["sent_bytes_per_rank"]
    return (
        f"{settings['task']}: {settings['library']} stage {settings['stage']}, {record['ranks']} ranks on "
        f"{len(set(record['hosts']))} host(s): state {record['state_bytes'] / 1e6:.2f} MB per rank "
        f"(predicted {record['predicted_state_bytes'] / 1e6:.2f}), peak {record['peak_bytes'] / 1e6:.2f} MB, "
        f"step {1e3 * record['median_step_s']:.1f} ms, of which exposed {1e3 * record['exposed_s']:.1f} ms, "
        + (f"{max(sent) / 1e6:.2f} MB sent per rank" if sent else "bytes not recorded for torch's own")
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the options."""
    return Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})


def parse(arguments: list[str]) -> argparse.Namespace:
    default = Settings()
    parser = common_options("Lab 04: one run of ZeRO, measured.", default, TASKS, MODELS, RESULTS)
    parser.add_argument("--library", choices=LIBRARIES, default=default.library, help="whose ZeRO")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=default.stage)
    parser.add_argument("--batch-per-rank", type=int, default=default.batch_per_rank, help="sequences of a step a rank")
    parser.add_argument("--micro-batches", type=int, default=default.micro_batches, help="parts the batch is cut into")
    parser.add_argument("--precision", choices=PRECISIONS, default=default.precision)
    parser.add_argument("--shard", type=int, help="ranks that share one copy of the state (default: all): hybrid")
    return parser.parse_args(arguments)


LAB = Lab("04_zero", measure, summary)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
