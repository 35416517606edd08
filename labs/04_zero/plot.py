"""Lab 04: turn a folder of results into one figure.

python labs/04_zero/plot.py lab04-results --out zero.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import BYTES_EACH, TASKS

import minidist as md
from labs.shared.drawing import Record, bars, describe, lines, panels, points, ranks, save, series, style, ticks


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet."""
    drawn = {
        "task memory": (("memory", "precision"), memory),
        "task time": (("time",), step_time),
        "task batch": (("batch",), batch_size),
        "task accumulation": (("accumulation",), accumulation),
        "traffic": (TASKS, traffic),
        "task hybrid": (("hybrid",), hybrid),
    }
    return panels("ZeRO", records, drawn)


def memory(axis: Axes, records: list[Record]) -> None:
    """State against the ranks that share it, beside the formula as a dotted line of the same colour."""
    groups = series(records, "stage", "precision")
    points(axis, groups, shard, lambda r: r["state_bytes"] / r["parameters"])
    for index, group in enumerate(groups.values()):
        stage, each = group[0]["settings"]["stage"], BYTES_EACH[group[0]["settings"]["precision"]]
        counts = range(1, max(map(shard, records)) + 1)
        axis.plot(counts, [md.zero_memory(1, n, stage, *each).total for n in counts], ":", color=style(index)["color"])
    axis.plot([], [], ":", color="grey", label="formula")
    axis.set_ylim(bottom=0)
    ticks(axis, map(shard, records))
    shared = "ranks that share one copy of the state"
    describe(axis, "Memory: parameters, gradients, optimizer's state", shared, "kept by one rank (bytes a parameter)")


def step_time(axis: Axes, records: list[Record]) -> None:
    bars(axis, series(records, "library", "stage", "ranks", "precision"), "step alone, nothing sent", "exposed")
    describe(axis, "Time: communication that computing did not hide", "", "step (ms)")


def batch_size(axis: Axes, records: list[Record]) -> None:
    lines(axis, series(records, "stage", "ranks", "precision"), field("batch_per_rank"), lambda r, _: share_exposed(r))
    axis.set_xscale("log")
    ticks(axis, map(field("batch_per_rank"), records))
    describe(axis, "Batch: what is exposed, as a share of the step", "sequences a rank", "exposed / step")


def accumulation(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "stage", "ranks", "precision")
    lines(axis, groups, field("micro_batches"), lambda r, _: sent_per_parameter(r))
    axis.set_ylim(bottom=0)
    ticks(axis, map(field("micro_batches"), records))
    describe(axis, "Accumulation: traffic of a step", "micro-batches a step", "sent by one rank (bytes a parameter)")


def traffic(axis: Axes, records: list[Record]) -> None:
    """Bytes against ranks for one micro-batch in float32, beside 2, 2, 2 and 3 times (n-1)/n of the parameters."""
    plain = [r for r in records if r["sent_bytes_per_rank"] and plain_step(r)]
    points(axis, series(plain, "stage"), ranks, sent_per_parameter)
    counts = range(1, max(map(ranks, plain), default=1) + 1)
    for stage, dashes in ((2, ":"), (3, "--")):
        name = "3 (n-1)/n" if stage == 3 else "2 (n-1)/n"
        axis.plot(counts, [4 * md.zero_traffic(1, n, stage) for n in counts], dashes, color="grey", label=name)
    axis.set_ylim(bottom=0)
    ticks(axis, map(ranks, plain))
    describe(axis, "Traffic", "ranks", "sent by one rank (bytes a parameter)")


def hybrid(axis: Axes, records: list[Record]) -> None:
    """Step and memory against the number of ranks that share a copy."""
    groups = series(records, "ranks", "precision")
    lines(axis, groups, shard, lambda r, _: 1e3 * r["median_step_s"])
    for record in records:
        note = f"{record['state_bytes'] / record['parameters']:.1f} B a parameter"
        place = (shard(record), 1e3 * record["median_step_s"])
        axis.annotate(note, place, (0, 8), textcoords="offset points", ha="center", fontsize=8)
    axis.set_ylim(bottom=0)
    ticks(axis, map(shard, records))
    describe(
        axis, "Hybrid sharding: step, and what a rank keeps", "ranks that share one copy of the state", "step (ms)"
    )


# ---- of a record -----------------------------------------------------------------------------------------------------


def field(name: str) -> Callable[[Record], float]:
    return lambda record: record["settings"][name]


def shard(record: Record) -> int:
    return record["settings"]["shard"] or record["ranks"]


def plain_step(record: Record) -> bool:
    """Whether a step has one micro-batch, in float32, cut over all ranks."""
    settings = record["settings"]
    return settings["micro_batches"] == 1 and settings["precision"] == "float32" and shard(record) == record["ranks"]


def sent_per_parameter(record: Record) -> float:
    return max(record["sent_bytes_per_rank"]) / record["parameters"]


def share_exposed(record: Record) -> float:
    return record["exposed_s"] / record["median_step_s"]


if __name__ == "__main__":
    sys.exit(save("04_zero", draw, "zero.png", __doc__, sys.argv[1:]))
