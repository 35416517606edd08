"""Lab 05: measure a training step of tensor parallelism on some ranks, and write it down.

    python labs/05_tensor/run.py --task ranks --ranks 4               ranks started here, on this machine
    torchrun --nproc-per-node 4 labs/05_tensor/run.py --task ranks    ranks started by torchrun
    srun --ntasks 4 python labs/05_tensor/run.py --task ranks         ranks started by Slurm, see job.sbatch

Each run writes one JSON file; plot.py turns a folder of them into a figure; sheet.md says which runs to make.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measure import measure
from settings import DTYPES, MODELS, TASKS, Settings

from labs.shared.running import Lab, Record, common_options, start

RESULTS = Path("lab05-results")


def main(arguments: list[str]) -> int:
    """Measure what the options say, and write it down; returns the exit status."""
    options = parse(arguments)
    try:
        settings = settings_of(options)
        if options.ranks is not None:
            settings.axes(options.ranks)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return start(LAB, settings, options)


def summary(record: Record) -> str:
    """A result in a sentence."""
    step_ms, exposed_ms = 1e3 * record["median_step_s"], 1e3 * record["exposed_s"]
    cut = f"tp {record['tp']}, dp {record['dp']}" + (", sequence parallel" if record["settings"]["sequence"] else "")
    return (
        f"{record['settings']['task']}: {record['ranks']} ranks on {len(set(record['hosts']))} host(s), {cut}, "
        f"width {record['dim']}: step {step_ms:.1f} ms, of which waiting for messages {exposed_ms:.1f} ms, "
        f"{record['tokens_per_s']:.0f} tokens/s, {record['collectives']} collectives of tp, "
        f"{max(record['sent_tp_bytes_per_rank']) / 1e6:.2f} MB sent per rank for them, "
        f"{max(record['activation_bytes_per_rank']) / 1e6:.2f} MB of activations kept"
    )


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the options."""
    return Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})


def parse(arguments: list[str]) -> argparse.Namespace:
    default = Settings()
    parser = common_options("Lab 05: one run of tensor parallelism, measured.", default, TASKS, MODELS, RESULTS)
    parser.add_argument("--dim", type=int, help="width, instead of the model's own")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of weights and activations")
    parser.add_argument("--tp", type=int, help="ranks that a layer is cut over (default: all)")
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism")
    parser.add_argument("--batch", type=int, default=default.batch, help="sequences of a step over all replicas")
    return parser.parse_args(arguments)


LAB = Lab("05_tensor", measure, summary)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
