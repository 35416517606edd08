"""Lab 06: turn a folder of results into one figure.

python labs/06_pipeline/plot.py lab06-results --out pipeline.png
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import TASKS

from labs.shared.drawing import (
    COLOURS,
    Groups,
    Record,
    bars,
    describe,
    lines,
    panels,
    ringed,
    save,
    series,
    style,
    ticks,
)


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet."""
    drawn = {
        "task schedule": (("schedule",), schedules),
        "task microbatches": (("microbatches", "schedule"), bubble),
        "activations": (TASKS, activations),
        "task size": (("size",), size),
        "task stages": (("stages",), speed_up),
        "tasks layout and machines": (("layout", "machines"), layouts),
    }
    return panels("Pipeline parallelism", records, drawn)


def schedules(axis: Axes, records: list[Record]) -> None:
    """Forward and backward of a step for every schedule: simulated from measured actions, and measured."""
    groups = series(records, "schedule", "ranks", "microbatches")
    for index, group in enumerate(groups.values()):
        for place, name, label, colour in (
            (-0.2, "simulated_s", "simulated from measured actions", COLOURS[5]),
            (0.2, "pipeline_s", "measured", COLOURS[0]),
        ):
            height = 1e3 * median(group, name)
            axis.bar(index + place, height, 0.4, color=colour, label=label if index == 0 else None)
            share = median(group, "simulated_bubble" if name == "simulated_s" else "bubble")
            axis.text(index + place, height, f"{share:.2f}", ha="center", va="bottom", fontsize=8)
    axis.plot([], [], " ", label="numbers: bubble")
    name_bars(axis, groups)
    describe(axis, "Schedules: forward and backward of a step", "", "time (ms)")


def bubble(axis: Axes, records: list[Record]) -> None:
    """The bubble against M, beside what is simulated as a dotted line and the formula for equal stages."""
    plain = [record for record in records if record["settings"]["schedule"] in ("gpipe", "1f1b")]
    groups = series(plain, "schedule", "pp", "size")
    lines(axis, groups, microbatches, lambda r, _: r["bubble"])
    for index, group in enumerate(groups.values()):
        axis.plot(*through(group, microbatches, "simulated_bubble"), ":", color=style(index)["color"])
    axis.plot([], [], ":", color="grey", label="dotted: simulated")
    for pp in sorted({record["pp"] for record in plain}):
        counts = range(1, max(map(microbatches, plain)) + 1)
        axis.plot(
            counts, [(pp - 1) / (m + pp - 1) for m in counts], "-", color="grey", lw=0.8, label=f"formula, pp {pp}"
        )
    axis.set_xscale("log")
    axis.set_ylim(0, 1)
    ticks(axis, map(microbatches, plain))
    describe(axis, "Bubble: more micro-batches of one size", "micro-batches M", "idle share of the ranks' time")


def activations(axis: Axes, records: list[Record]) -> None:
    """Every rank's activations at the peak, beside what the simulated number in flight comes to."""
    pipelines = [record for record in records if record["pp"] > 1]
    for index, (label, group) in enumerate(series(pipelines, "schedule").items()):
        both = [
            (predicted / 1e6, measured / 1e6)
            for record in group
            for predicted, measured in zip(
                record["predicted_activation_bytes_per_rank"], record["activation_bytes_per_rank"], strict=True
            )
        ]
        axis.plot(
            *zip(*both, strict=True), label=label, linestyle="", markersize=7, markerfacecolor="none", **style(index)
        )
    most = max((max(r["predicted_activation_bytes_per_rank"]) for r in pipelines), default=0) / 1e6
    axis.plot([0, most], [0, most], ":", color="grey", label="as predicted")
    describe(
        axis,
        "Activations at the peak, a mark for each rank",
        "in flight x what one micro-batch keeps (MB)",
        "peak of a step, less the state (MB)",
    )


def size(axis: Axes, records: list[Record]) -> None:
    """The step at a fixed batch against M, measured and simulated, the fewest seconds marked."""
    fixed = [dict(record, batch=microbatches(record) * record["settings"]["size"]) for record in records]
    groups = series(fixed, "schedule", "pp", "batch")
    lines(axis, groups, microbatches, lambda r, _: 1e3 * r["pipeline_s"])
    for index, group in enumerate(groups.values()):
        xs, ys = through(group, microbatches, "simulated_s", 1e3)
        axis.plot(xs, ys, ":", color=style(index)["color"])
        counts, seconds = through(group, microbatches, "pipeline_s", 1e3)
        least, at = min(zip(seconds, counts, strict=True))
        axis.annotate(f"least: M = {at:g}", (at, least), (0, -16), textcoords="offset points", ha="center", fontsize=8)
    axis.plot([], [], ":", color="grey", label="dotted: simulated")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    ticks(axis, map(microbatches, records))
    describe(axis, "One batch, cut into more and smaller micro-batches", "micro-batches M", "forward and backward (ms)")


def speed_up(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "schedule", "microbatches", "size")
    lines(axis, groups, pp, lambda r, base: pp(base) * base["median_step_s"] / r["median_step_s"], pp)
    ends = sorted({pp(record) for record in records})
    axis.plot(ends, ends, ":", color="grey", label="ideal")
    bounds = [pp_ * m / (m + pp_ - 1) for pp_ in ends for m in [microbatches(records[0])]]
    axis.plot(ends, bounds, "--", color="grey", label="bubble alone")
    ticks(axis, ends)
    describe(axis, "More stages, the same batch", "ranks of the pipeline", "speed-up over one rank")


def layouts(axis: Axes, records: list[Record]) -> None:
    named = [dict(record, order=order(record)) for record in records]
    bars(axis, series(named, "order", "schedule"), "a rank's actions, nothing waited for", "waiting and messages")
    describe(axis, "The same ranks and batch, shared out differently", "", "step (ms)")


# ---- of a record -----------------------------------------------------------------------------------------------------


def pp(record: Record) -> int:
    return record["pp"]


def microbatches(record: Record) -> int:
    return record["settings"]["microbatches"]


def order(record: Record) -> str:
    """The mesh, as neighbouring ranks see it: the last axis is the inner one."""
    axes = ("dp", "pp") if record["settings"]["inner"] == "pp" else ("pp", "dp")
    return " x ".join(f"{name} {record[name]}" for name in axes)


def median(group: list[Record], name: str) -> float:
    return statistics.median(record[name] for record in group)


def through(
    group: list[Record], x: Callable[[Record], float], name: str, factor: float = 1.0
) -> tuple[list[float], list[float]]:
    """Medians of a field at each x, ascending."""
    xs = sorted({x(record) for record in group})
    return xs, [factor * median([record for record in group if x(record) == each], name) for each in xs]


def name_bars(axis: Axes, groups: Groups) -> None:
    names = [label.replace(", ", "\n") + ringed(group[-1]) for label, group in groups.items()]
    axis.set_xticks(range(len(groups)), names, fontsize=8)
    axis.margins(y=0.15)


if __name__ == "__main__":
    sys.exit(save("06_pipeline", draw, "pipeline.png", __doc__, sys.argv[1:]))
