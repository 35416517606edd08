"""Lab 03: turn a folder of results into one figure.

python labs/03_scaling/plot.py lab03-results --out scaling.png
"""

from __future__ import annotations

import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import TASKS

from labs.shared.drawing import Record, bars, describe, lines, panels, points, ranks, save, series, ticks


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet."""
    drawn = {
        "task strong": (("strong",), strong_scaling),
        "task weak": (("weak",), weak_scaling),
        "task batch": (("batch",), batch_size),
        "task bucket": (("bucket",), bucket_size),
        "task overlap": (("overlap",), overlap),
        "traffic": (TASKS, traffic),
    }
    return panels("Scaling of data parallelism", records, drawn)


def strong_scaling(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "mechanism", "batch")
    lines(axis, groups, ranks, lambda r, base: base["ranks"] * base["median_step_s"] / r["median_step_s"])
    ends = sorted({ranks(record) for record in records})
    axis.plot(ends, ends, ":", color="grey", label="ideal")
    ticks(axis, ends)
    describe(axis, "Strong scaling: same global batch", "ranks", "speed-up over one rank")


def weak_scaling(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "mechanism", "batch_per_rank")
    lines(axis, groups, ranks, lambda r, base: base["median_step_s"] / r["median_step_s"])
    axis.axhline(1.0, linestyle=":", color="grey", label="ideal")
    axis.set_ylim(bottom=0)
    ticks(axis, map(ranks, records))
    describe(axis, "Weak scaling: same batch per rank", "ranks", "efficiency: step of fewest ranks / step")


def batch_size(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "mechanism", "ranks")
    lines(axis, groups, lambda r: r["global_batch"], lambda r, _: r["tokens_per_s"])
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    ticks(axis, (record["global_batch"] for record in records))
    describe(axis, "Batch size", "global batch (sequences)", "throughput (tokens/s)")


def bucket_size(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "mechanism", "ranks")
    lines(axis, groups, lambda r: r["settings"]["bucket_mb"], lambda r, _: 1e3 * r["median_step_s"])
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    ticks(axis, (record["settings"]["bucket_mb"] for record in records))
    describe(axis, "Bucket size", "bucket (MB)", "step (ms)")


def overlap(axis: Axes, records: list[Record]) -> None:
    """A mechanism that hides communication has a shorter top."""
    bars(axis, series(records, "mechanism", "ranks"), "step without averaging", "exposed")
    describe(axis, "Overlap: communication that computing did not hide", "", "step (ms)")


def traffic(axis: Axes, records: list[Record]) -> None:
    """Bytes against ranks, beside the bandwidth-optimal all-reduce: 2 (n-1)/n of the fp32 gradient."""
    recorded = [record for record in records if record["sent_bytes_per_rank"]]
    points(axis, series(recorded, "mechanism"), ranks, lambda r: max(r["sent_bytes_per_rank"]) / 1e6)
    for parameters in sorted({record["parameters"] for record in recorded}):
        counts = range(1, max(map(ranks, recorded)) + 1)
        optimal = [2 * (n - 1) / n * 4 * parameters / 1e6 for n in counts]
        axis.plot(counts, optimal, ":", color="grey", label=f"2 (n-1)/n x {4 * parameters / 1e6:.1f} MB of gradients")
    axis.set_ylim(bottom=0)
    ticks(axis, map(ranks, recorded))
    describe(axis, "Traffic", "ranks", "sent per rank and step (MB)")


if __name__ == "__main__":
    sys.exit(save("03_scaling", draw, "scaling.png", __doc__, sys.argv[1:]))
