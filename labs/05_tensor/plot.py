"""Lab 05: turn a folder of results into one figure.

python labs/05_tensor/plot.py lab05-results --out tensor.png
"""

from __future__ import annotations

import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import TASKS

import minidist as md
from labs.shared.drawing import Record, bars, describe, lines, panels, points, save, series, ticks


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet."""
    drawn = {
        "task ranks": (("ranks",), speed_up),
        "task width": (("width",), waiting),
        "task sequence": (("sequence",), sequence),
        "task layout": (("layout",), layouts),
        "traffic": (TASKS, traffic),
        "activations": (TASKS, activations),
    }
    return panels("Tensor parallelism", records, drawn)


def tp(record: Record) -> int:
    return record["tp"]


def speed_up(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "batch", "sequence")
    lines(axis, groups, tp, lambda r, base: base["median_step_s"] / r["median_step_s"], tp)
    ends = sorted({tp(record) for record in records})
    axis.plot(ends, ends, ":", color="grey", label="ideal")
    ticks(axis, ends)
    describe(axis, "Same batch, more ranks", "ranks that a layer is cut over", "speed-up over the fewest")


def waiting(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "tp")
    lines(axis, groups, lambda r: r["dim"], lambda r, _: 100 * r["exposed_s"] / r["median_step_s"])
    axis.set_ylim(bottom=0)
    ticks(axis, (record["dim"] for record in records))
    describe(axis, "Waiting for messages", "width of the model (numbers)", "share of the step (%)")


def sequence(axis: Axes, records: list[Record]) -> None:
    bars(axis, series(records, "tp", "sequence"), "same products, nothing sent", "the rest")
    describe(axis, "Sequence parallelism off and on", "", "step (ms)")


def layouts(axis: Axes, records: list[Record]) -> None:
    bars(axis, series(records, "tp", "dp"), "same products, nothing sent", "the rest")
    describe(axis, "The same ranks and batch, shared out differently", "", "step (ms)")


def traffic(axis: Axes, records: list[Record]) -> None:
    """Bytes of a layer against the formula. Embedding and head have a sum each, as much as half a layer."""
    cut = [record for record in records if tp(record) > 1 and record["dp"] == 1]
    groups = series(cut, "batch", "dim", "sequence")
    points(axis, groups, tp, lambda r: max(r["sent_tp_bytes_per_rank"]) / (r["layers"] + 0.5) / 1e6)
    for group in groups.values():
        axis.plot(*zip(*sorted((tp(r), formula(r) / 1e6) for r in group), strict=True), ":.", color="grey")
    axis.plot([], [], ":.", color="grey", label="formula")
    ticks(axis, map(tp, cut))
    axis.set_ylim(bottom=0)
    describe(axis, "Sent by one rank", "ranks that a layer is cut over", "in a step, for each layer (MB)")


def formula(record: Record) -> int:
    """Bytes that one rank sends for one layer, forward and backward."""
    element = 2 if record["settings"]["dtype"] == "bfloat16" else 4
    tokens = record["payload_bytes"] // record["dim"] // element
    ways = md.cost.tensor_parallel_layer(tokens, record["dim"], tp(record), element, record["settings"]["sequence"])
    return sum(sum(way.values()) for way in ways.values())


def activations(axis: Axes, records: list[Record]) -> None:
    one_replica = [record for record in records if record["dp"] == 1]
    groups = series(one_replica, "batch", "dim", "sequence")
    points(axis, groups, tp, lambda r: max(r["activation_bytes_per_rank"]) / 1e6)
    ticks(axis, map(tp, one_replica))
    axis.set_ylim(bottom=0)
    describe(axis, "Activations kept by one rank", "ranks that a layer is cut over", "for the backward pass (MB)")


if __name__ == "__main__":
    sys.exit(save("05_tensor", draw, "tensor.png", __doc__, sys.argv[1:]))
