"""Lab 04: turn a folder of results into one figure.

python labs/04_zero/plot.py lab04-results --out zero.png
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
from settings import BYTES_EACH, TASKS

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
    parser.add_argument("--out", type=Path, default=Path("zero.png"), help="the figure (default zero.png)")
    options = parser.parse_args(arguments)
    records = read(options.folder)
    if not records:
        print(f"plot.py: no result of lab 04 in {options.folder}; make some with run.py", file=sys.stderr)
        return 2
    draw(records).savefig(options.out, dpi=150)
    print(f"{len(records)} results drawn into {options.out}")
    return 0


def read(folder: Path) -> list[Record]:
    """Every result of this lab in a folder, oldest first."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted((record for record in records if record.get("lab") == "04_zero"), key=lambda r: r["time"])


def draw(records: list[Record]) -> Figure:
    """Six panels, one for each question of the sheet; a panel without results says why it is empty."""
    figure, axes = plt.subplots(2, 3, figsize=(16, 9.5), layout="constrained")
    panels = {
        ("memory", "precision"): memory,
        ("time",): step_time,
        ("batch",): batch_size,
        ("accumulation",): accumulation,
        TASKS: traffic,
        ("hybrid",): hybrid,
    }
    for axis, (tasks, panel) in zip(axes.flat, panels.items(), strict=True):
        asked = [record for record in records if record["settings"]["task"] in tasks]
        measured = [record for record in asked if record["status"] == "measured"]
        blocked = sorted({f"blocked: {record['reason']}" for record in asked if record["status"] == "blocked"})
        if measured:
            panel(axis, measured)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        else:
            axis.set_title(f"task {tasks[0]}" if tasks is not TASKS else "traffic")
            axis.text(0.5, 0.5, "\n".join(blocked) or "no result", ha="center", transform=axis.transAxes)
    figure.suptitle(title([record for record in records if record["status"] == "measured"]))
    return figure


def memory(axis: Axes, records: list[Record]) -> None:
    """State against ranks, beside the formula as a dotted line of the same colour."""
    groups = series(records, "stage")
    for index, (label, group) in enumerate(groups.items()):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        held = [record["state_bytes"] / record["parameters"] for record in group]
        axis.plot(list(map(ranks, group)), held, marker, mfc="none", ms=7, color=colour, label=label)
        stage, each = group[0]["settings"]["stage"], BYTES_EACH[group[0]["settings"]["precision"]]
        counts = range(1, max(map(ranks, records)) + 1)
        axis.plot(counts, [md.zero_memory(1, n, stage, *each).total for n in counts], ":", color=colour)
    axis.plot([], [], ":", color="grey", label="formula")
    axis.set_ylim(bottom=0)
    ticks(axis, map(ranks, records))
    describe(axis, "Memory: parameters, gradients, optimizer's state", "ranks", "kept by one rank (bytes a parameter)")


def step_time(axis: Axes, records: list[Record]) -> None:
    """Bars, computing below and exposed communication above."""
    groups = series(records, "library", "stage", "ranks")
    for index, group in enumerate(groups.values()):
        compute, exposed = (
            1e3 * statistics.median(r[name] for r in group) for name in ("median_compute_s", "exposed_s")
        )
        axis.bar(index, compute, color=COLOURS[0], label="step alone, nothing sent" if index == 0 else None)
        axis.bar(index, exposed, bottom=compute, color=COLOURS[1], hatch="//", label="exposed" if index == 0 else None)
        axis.text(index, compute + max(exposed, 0), f"+{exposed:.1f} ms", ha="center", va="bottom", fontsize=8)
    names = [label.replace(", ", "\n") + ringed(group[-1]) for label, group in groups.items()]
    axis.set_xticks(range(len(groups)), names, fontsize=7)
    axis.margins(y=0.15)
    describe(axis, "Time: communication that computing did not hide", "", "step (ms)")


def batch_size(axis: Axes, records: list[Record]) -> None:
    lines(axis, series(records, "stage", "ranks"), field("batch_per_rank"), share_exposed)
    axis.set_xscale("log")
    ticks(axis, map(field("batch_per_rank"), records))
    describe(axis, "Batch: what is exposed, as a share of the step", "sequences a rank", "exposed / step")


def accumulation(axis: Axes, records: list[Record]) -> None:
    lines(axis, series(records, "stage", "ranks"), field("micro_batches"), sent_per_parameter)
    axis.set_ylim(bottom=0)
    ticks(axis, map(field("micro_batches"), records))
    describe(axis, "Accumulation: traffic of a step", "micro-batches a step", "sent by one rank (bytes a parameter)")


def traffic(axis: Axes, records: list[Record]) -> None:
    """Bytes against ranks for one micro-batch in float32, beside 2, 2, 2 and 3 times (n-1)/n of the parameters."""
    plain = [r for r in records if r["sent_bytes_per_rank"] and plain_step(r)]
    for index, (label, group) in enumerate(series(plain, "stage").items()):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        points = list(map(sent_per_parameter, group))
        axis.plot(list(map(ranks, group)), points, marker, mfc="none", ms=7 + 2 * index, color=colour, label=label)
    counts = range(1, max(map(ranks, plain), default=1) + 1)
    for stage, style in ((2, ":"), (3, "--")):
        name = "3 (n-1)/n" if stage == 3 else "2 (n-1)/n"
        axis.plot(counts, [4 * md.zero_traffic(1, n, stage) for n in counts], style, color="grey", label=name)
    axis.set_ylim(bottom=0)
    ticks(axis, map(ranks, plain))
    describe(axis, "Traffic", "ranks", "sent by one rank (bytes a parameter)")


def hybrid(axis: Axes, records: list[Record]) -> None:
    """Step and memory against the number of ranks that share a copy."""
    groups = series(records, "ranks")
    lines(axis, groups, shard, lambda r: 1e3 * r["median_step_s"])
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


def ranks(record: Record) -> int:
    return record["ranks"]


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


# ---- lines -----------------------------------------------------------------------------------------------------------


def lines(axis: Axes, groups: Groups, x: Callable[[Record], float], y: Callable[[Record], float]) -> None:
    """A line for each group through the medians at each x."""
    for index, (label, group) in enumerate(groups.items()):
        at: dict[float, list[float]] = defaultdict(list)
        for record in group:
            at[x(record)].append(y(record))
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        xs = sorted(at)
        axis.plot(xs, [statistics.median(at[each]) for each in xs], color=colour, marker=marker, label=label)
        rings = [(x(record), y(record)) for record in group if ringed(record)]
        axis.plot([a for a, _ in rings], [b for _, b in rings], "o", ms=13, mfc="none", color=colour)
    if any(ringed(record) for group in groups.values() for record in group):
        axis.plot([], [], "o", ms=11, mfc="none", color="grey", label="ringed: more ranks than cores")


def series(records: list[Record], *fields: str) -> Groups:
    """Results that one line may join, by label: same machine, model and precision, and the same of each given field."""
    mixed = len({machine(record) for record in records}) > 1
    groups: Groups = defaultdict(list)
    for record in records:
        settings = record["settings"]
        words = [spelled(name, settings.get(name, record.get(name))) for name in fields]
        words = [*words, f"{settings['model']} model", settings["precision"], *([machine(record)] if mixed else [])]
        groups[", ".join(words)].append(record)
    return dict(sorted(groups.items()))


def spelled(name: str, value: object) -> str:
    """A setting as a legend says it.

    >>> spelled("library", "torch"), spelled("ranks", 4), spelled("stage", 3)
    ('torch', '4 ranks', 'stage 3')
    """
    if name == "library":
        return str(value)
    return f"{value} ranks" if name == "ranks" else f"{name.replace('_', ' ')} {value}"


def title(records: list[Record]) -> str:
    """Which machines the figure shows, with a warning where they differ."""
    machines = sorted({machine(record) for record in records})
    if len(machines) > 1:
        return "ZeRO. MIXED MACHINES, compare within a line only:\n" + "; ".join(machines)
    return f"ZeRO on {machines[0]}" if machines else "ZeRO: all blocked"


def machine(record: Record) -> str:
    """What a result was measured on."""
    kinds = " and ".join(sorted(set(record["devices"])))
    if record["device_type"] == "cuda":
        return kinds
    return f"{kinds} with {min(record['cores_of_host'].values())} cores"


def ringed(record: Record) -> str:
    """A remark where CPU ranks outnumbered a host's cores: such a time tells of the queue for cores, not of ZeRO."""
    crowded = any(record["hosts"].count(host) > cores for host, cores in record["cores_of_host"].items())
    return "\n(more ranks than cores)" if record["device_type"] == "cpu" and crowded else ""


def ticks(axis: Axes, values: Iterable[float]) -> None:
    """A tick at each value measured, written as a plain number."""
    places = sorted(set(values))
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()


def describe(axis: Axes, name: str, x: str, y: str) -> None:
    axis.set(title=name, xlabel=x, ylabel=y)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
