"""Lab 05: turn a folder of results into one figure.

python labs/05_tensor/plot.py lab05-results --out tensor.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import minidist as md

Record = dict[str, Any]
Groups = dict[str, list[Record]]

# Okabe and Ito's colours, which the colour-blind can tell apart; every line also has its own marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^Dv*"


def main(arguments: list[str]) -> int:
    """Read, draw, save; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that run.py wrote its results to")
    parser.add_argument("--out", type=Path, default=Path("tensor.png"), help="the figure (default tensor.png)")
    options = parser.parse_args(arguments)
    records = read(options.folder)
    if not records:
        print(f"plot.py: no result of lab 05 in {options.folder}; make some with run.py", file=sys.stderr)
        return 2
    draw(records).savefig(options.out, dpi=150)
    print(f"{len(records)} results drawn into {options.out}")
    return 0


def read(folder: Path) -> list[Record]:
    """Every result of this lab in a folder, oldest first."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted((record for record in records if record.get("lab") == "05_tensor"), key=lambda r: r["time"])


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet; a panel without results says why it is empty."""
    figure, axes = plt.subplots(2, 3, figsize=(16, 9.5), layout="constrained")
    panels = {
        "ranks": speed_up,
        "width": waiting,
        "sequence": sequence,
        "layout": layouts,
        "traffic": traffic,
        "activations": activations,
    }
    for axis, (task, panel) in zip(axes.flat, panels.items(), strict=True):
        asked = [record for record in records if task in (record["settings"]["task"], "traffic", "activations")]
        measured = [record for record in asked if record["status"] == "measured"]
        blocked = sorted({f"blocked: {record['reason']}" for record in asked if record["status"] == "blocked"})
        if measured:
            panel(axis, measured)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        else:
            axis.set_title(f"task {task}")
            axis.text(0.5, 0.5, "\n".join(blocked) or "no result", ha="center", transform=axis.transAxes)
    figure.suptitle(title([record for record in records if record["status"] == "measured"]))
    return figure


def speed_up(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "batch", "sequence")
    lines(axis, groups, tp, lambda r, base: base["median_step_s"] / r["median_step_s"])
    ends = sorted({tp(record) for record in records})
    axis.plot(ends, ends, ":", color="grey", label="ideal")
    ticks(axis, ends)
    describe(axis, "Same batch, more ranks", "ranks that a layer is cut over", "speed-up over the fewest")


def waiting(axis: Axes, records: list[Record]) -> None:
    groups = series(records, "tp")
    lines(axis, groups, lambda r: r["dim"], lambda r, _: 100 * r["sums_s"] / r["median_step_s"])
    axis.set_ylim(bottom=0)
    ticks(axis, (record["dim"] for record in records))
    describe(axis, "Waiting for messages", "width of the model (numbers)", "share of the step (%)")


def sequence(axis: Axes, records: list[Record]) -> None:
    bars(axis, series(records, "tp", "sequence"), "Sequence parallelism off and on")


def layouts(axis: Axes, records: list[Record]) -> None:
    bars(axis, series(records, "tp", "dp"), "The same ranks and batch, shared out differently")


def bars(axis: Axes, groups: Groups, name: str) -> None:
    """Computing below, waiting above."""
    for index, group in enumerate(groups.values()):
        record = group[-1]
        compute, sums = 1e3 * record["median_compute_s"], 1e3 * record["sums_s"]
        axis.bar(index, compute, color=COLOURS[0], label="same products, nothing sent" if index == 0 else None)
        axis.bar(index, sums, bottom=compute, color=COLOURS[1], hatch="//", label="the rest" if index == 0 else None)
        axis.text(index, compute + max(sums, 0), f"+{sums:.1f} ms", ha="center", va="bottom", fontsize=8)
    names = [label.replace(", ", "\n") + ringed(group[-1]) for label, group in groups.items()]
    axis.set_xticks(range(len(groups)), names, fontsize=8)
    axis.margins(y=0.15)
    describe(axis, name, "", "step (ms)")


def traffic(axis: Axes, records: list[Record]) -> None:
    """Bytes of a layer against the formula. Embedding and head have a sum each, as much as half a layer."""
    cut = [record for record in records if tp(record) > 1 and record["dp"] == 1]
    groups = series(cut, "batch", "dim", "sequence")
    points(axis, groups, lambda r: max(r["sent_tp_bytes_per_rank"]) / (r["layers"] + 0.5) / 1e6)
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
    points(axis, series(one_replica, "batch", "dim", "sequence"), lambda r: max(r["activation_bytes_per_rank"]) / 1e6)
    ticks(axis, map(tp, one_replica))
    axis.set_ylim(bottom=0)
    describe(axis, "Activations kept by one rank", "ranks that a layer is cut over", "for the backward pass (MB)")


def points(axis: Axes, groups: Groups, y: Callable[[Record], float]) -> None:
    """Results as marks of their own size, so that equal ones stay visible behind one another."""
    for index, (label, group) in enumerate(groups.items()):
        (marks,) = axis.plot([tp(r) for r in group], [y(r) for r in group], linestyle="", markersize=7 + 2 * index)
        marks.set(color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], label=label)
        marks.set_markerfacecolor("none")


def lines(axis: Axes, groups: Groups, x: Callable[[Record], float], y: Callable[[Record, Record], float]) -> None:
    """A line for each group through the medians at each x; y also gets the group's result on the fewest ranks."""
    for index, (label, group) in enumerate(groups.items()):
        base = min(group, key=tp)
        at: dict[float, list[float]] = defaultdict(list)
        for record in group:
            at[x(record)].append(y(record, base))
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        xs = sorted(at)
        axis.plot(xs, [statistics.median(at[each]) for each in xs], color=colour, marker=marker, label=label)
        rings = [(x(record), y(record, base)) for record in group if ringed(record)]
        axis.plot([a for a, _ in rings], [b for _, b in rings], "o", ms=13, mfc="none", color=colour)
    if any(ringed(record) for group in groups.values() for record in group):
        axis.plot([], [], "o", ms=11, mfc="none", color="grey", label="ringed: more ranks than cores")


def series(records: list[Record], *fields: str) -> Groups:
    """Results that one line may join, by label: same machine and model, and the same value of each given field."""
    mixed = len({machine(record) for record in records}) > 1
    groups: Groups = defaultdict(list)
    for record in records:
        settings = record["settings"]
        words = [spelled(field, record[field] if field in record else settings.get(field)) for field in fields]
        words = [*words, f"{settings['model']} model", *([machine(record)] if mixed else [])]
        groups[", ".join(words)].append(record)
    return dict(sorted(groups.items()))


def spelled(field: str, value: object) -> str:
    """A setting as a legend says it.

    >>> spelled("sequence", True), spelled("tp", 4), spelled("dim", 256)
    ('sequence parallel', 'tp 4', 'width 256')
    """
    if field == "sequence":
        return "sequence parallel" if value else "tokens whole"
    return f"{'width' if field == 'dim' else field} {value}"


def title(records: list[Record]) -> str:
    """Which machines the figure shows, with a warning where they differ."""
    machines = sorted({machine(record) for record in records})
    if len(machines) > 1:
        return "Tensor parallelism. MIXED MACHINES, compare within a line only:\n" + "; ".join(machines)
    return f"Tensor parallelism on {machines[0]}" if machines else "Tensor parallelism: all blocked"


def machine(record: Record) -> str:
    """What a result was measured on."""
    kinds = " and ".join(sorted(set(record["devices"])))
    if record["device_type"] == "cuda":
        return kinds
    return f"{kinds} with {min(record['cores_of_host'].values())} cores"


def ringed(record: Record) -> str:
    """A remark where CPU ranks outnumbered a host's cores: such a time tells of the queue for cores, not of scaling."""
    crowded = any(record["hosts"].count(host) > cores for host, cores in record["cores_of_host"].items())
    return "\n(more ranks than cores)" if record["device_type"] == "cpu" and crowded else ""


def tp(record: Record) -> int:
    return record["tp"]


def ticks(axis: Axes, values: Iterable[float]) -> None:
    """A tick at each value measured, written as a plain number."""
    places = sorted(set(values))
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()


def describe(axis: Axes, name: str, x: str, y: str) -> None:
    axis.set(title=name, xlabel=x, ylabel=y)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
