"""Lab 03: turn a folder of results into one figure.

python labs/03_scaling/plot.py lab03-results --out scaling.png
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

Record = dict[str, Any]
Groups = dict[str, list[Record]]

# Okabe and Ito's colours, which the colour-blind can tell apart; every line also has its own marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^Dv*"


def main(arguments: list[str]) -> int:
    """Read, draw, save; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that run.py wrote its results to")
    parser.add_argument("--out", type=Path, default=Path("scaling.png"), help="the figure (default scaling.png)")
    options = parser.parse_args(arguments)
    records = read(options.folder)
    if not records:
        print(f"plot.py: no result of lab 03 in {options.folder}; make some with run.py", file=sys.stderr)
        return 2
    draw(records).savefig(options.out, dpi=150)
    print(f"{len(records)} results drawn into {options.out}")
    return 0


def read(folder: Path) -> list[Record]:
    """Every result of this lab in a folder, oldest first."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted((record for record in records if record.get("lab") == "03_scaling"), key=lambda r: r["time"])


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet; a panel without results says why it is empty."""
    figure, axes = plt.subplots(2, 3, figsize=(16, 9.5), layout="constrained")
    panels = {
        "strong": strong_scaling,
        "weak": weak_scaling,
        "batch": batch_size,
        "bucket": bucket_size,
        "overlap": overlap,
        "any": traffic,
    }
    for axis, (task, panel) in zip(axes.flat, panels.items(), strict=True):
        asked = [record for record in records if task in ("any", record["settings"]["task"])]
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
    """Bars, computing below and exposed communication above: a mechanism that hides communication has a shorter top."""
    groups = series(records, "mechanism", "ranks")
    for index, group in enumerate(groups.values()):
        record = group[-1]
        compute, exposed = 1e3 * record["median_compute_s"], 1e3 * record["exposed_s"]
        axis.bar(index, compute, color=COLOURS[0], label="step without averaging" if index == 0 else None)
        axis.bar(index, exposed, bottom=compute, color=COLOURS[1], hatch="//", label="exposed" if index == 0 else None)
        axis.text(index, compute + max(exposed, 0), f"+{exposed:.1f} ms", ha="center", va="bottom", fontsize=8)
    names = [label.replace(", ", "\n") + ringed(group[-1]) for label, group in groups.items()]
    axis.set_xticks(range(len(groups)), names, fontsize=8)
    axis.margins(y=0.15)
    describe(axis, "Overlap: communication that computing did not hide", "", "step (ms)")


def traffic(axis: Axes, records: list[Record]) -> None:
    """Bytes against ranks, beside the bandwidth-optimal all-reduce: 2 (n-1)/n of the fp32 gradient."""
    recorded = [record for record in records if record["sent_bytes_per_rank"]]
    for index, (label, group) in enumerate(series(recorded, "mechanism").items()):
        sent = [max(record["sent_bytes_per_rank"]) / 1e6 for record in group]
        (points,) = axis.plot(list(map(ranks, group)), sent, linestyle="", markersize=7 + 2 * index, label=label)
        points.set(color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], markerfacecolor="none")
    for parameters in sorted({record["parameters"] for record in recorded}):
        counts = range(1, max(map(ranks, recorded)) + 1)
        optimal = [2 * (n - 1) / n * 4 * parameters / 1e6 for n in counts]
        axis.plot(counts, optimal, ":", color="grey", label=f"2 (n-1)/n x {4 * parameters / 1e6:.1f} MB of gradients")
    axis.set_ylim(bottom=0)
    ticks(axis, map(ranks, recorded))
    describe(axis, "Traffic", "ranks", "sent per rank and step (MB)")


def lines(axis: Axes, groups: Groups, x: Callable[[Record], float], y: Callable[[Record, Record], float]) -> None:
    """A line for each group through the medians at each x; y also gets the group's result on the fewest ranks."""
    for index, (label, group) in enumerate(groups.items()):
        base = min(group, key=ranks)
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
        words = [spelled(field, settings.get(field, record.get(field))) for field in fields]
        words = [*words, f"{settings['model']} model", *([machine(record)] if mixed else [])]
        groups[", ".join(words)].append(record)
    return dict(sorted(groups.items()))


def spelled(field: str, value: object) -> str:
    """A setting as a legend says it.

    >>> spelled("mechanism", "naive"), spelled("ranks", 4), spelled("batch_per_rank", 2)
    ('naive', '4 ranks', 'batch per rank 2')
    """
    if field == "mechanism":
        return str(value)
    return f"{value} ranks" if field == "ranks" else f"{field.replace('_', ' ')} {value}"


def title(records: list[Record]) -> str:
    """Which machines the figure shows, with a warning where they differ."""
    machines = sorted({machine(record) for record in records})
    if len(machines) > 1:
        return "Scaling of data parallelism. MIXED MACHINES, compare within a line only:\n" + "; ".join(machines)
    return f"Scaling of data parallelism on {machines[0]}" if machines else "Scaling of data parallelism: all blocked"


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


def ranks(record: Record) -> int:
    return record["ranks"]


def ticks(axis: Axes, values: Iterable[float]) -> None:
    """A tick at each value measured, written as a plain number."""
    places = sorted(set(values))
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()


def describe(axis: Axes, name: str, x: str, y: str) -> None:
    axis.set(title=name, xlabel=x, ylabel=y)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
