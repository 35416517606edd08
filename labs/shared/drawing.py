"""Results as a figure of six panels: lines, marks and bars that never join what was measured on different machines."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = dict[str, Any]
Groups = dict[str, list[Record]]
Panel = Callable[[Axes, list[Record]], None]

# Okabe and Ito's colours, which the colour-blind can tell apart; every line also has its own marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^Dv*"


# ---- from a folder to a file -----------------------------------------------------------------------------------------


def save(lab: str, draw: Callable[[list[Record]], Figure], file: str, about: str | None, arguments: list[str]) -> int:
    """Read a lab's results, draw, save; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plot.py", description=about)
    parser.add_argument("folder", type=Path, help="folder that run.py wrote its results to")
    parser.add_argument("--out", type=Path, default=Path(file), help=f"the figure (default {file})")
    options = parser.parse_args(arguments)
    records = read(options.folder, lab)
    if not records:
        print(f"plot.py: no result of lab {lab[:2]} in {options.folder}; make some with run.py", file=sys.stderr)
        return 2
    draw(records).savefig(options.out, dpi=150)
    print(f"{len(records)} results drawn into {options.out}")
    return 0


def read(folder: Path, lab: str) -> list[Record]:
    """Every result of this lab in a folder, oldest first."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted((record for record in records if record.get("lab") == lab), key=lambda record: record["time"])


def panels(name: str, records: list[Record], drawn: Mapping[str, tuple[Iterable[str], Panel]]) -> Figure:
    """Six panels, one for each question of the sheet; a panel without results says why it is empty.

    drawn: what a panel without results is called -> the tasks whose results it shows, and how.
    """
    figure, axes = plt.subplots(2, 3, figsize=(16, 9.5), layout="constrained")
    for axis, (called, (tasks, panel)) in zip(axes.flat, drawn.items(), strict=True):
        asked = [record for record in records if record["settings"]["task"] in tasks]
        measured = [record for record in asked if record["status"] == "measured"]
        blocked = sorted({f"blocked: {record['reason']}" for record in asked if record["status"] == "blocked"})
        if measured:
            panel(axis, measured)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        else:
            axis.set_title(called)
            axis.text(0.5, 0.5, "\n".join(blocked) or "no result", ha="center", transform=axis.transAxes)
    figure.suptitle(title(name, [record for record in records if record["status"] == "measured"]))
    return figure


def title(name: str, records: list[Record]) -> str:
    """Which machines the figure shows, with a warning where they differ."""
    machines = sorted({machine(record) for record in records})
    if len(machines) > 1:
        return f"{name}. MIXED MACHINES, compare within a line only:\n" + "; ".join(machines)
    return f"{name} on {machines[0]}" if machines else f"{name}: all blocked"


# ---- of records ------------------------------------------------------------------------------------------------------


def ranks(record: Record) -> int:
    return record["ranks"]


def machine(record: Record) -> str:
    """What a result was measured on."""
    kinds = " and ".join(sorted(set(record["devices"])))
    if record["device_type"] == "cuda":
        return kinds
    return f"{kinds} with {min(record['cores_of_host'].values())} cores"


def ringed(record: Record) -> str:
    """A remark where CPU ranks outnumbered a host's cores: such a time tells of the queue for cores."""
    crowded = any(record["hosts"].count(host) > cores for host, cores in record["cores_of_host"].items())
    return "\n(more ranks than cores)" if record["device_type"] == "cpu" and crowded else ""


def series(records: list[Record], *fields: str) -> Groups:
    """Results that one line may join, by label: same machine and model, and the same value of each given field.

    A field of the record, or else of its settings.
    """
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

    >>> spelled("mechanism", "naive"), spelled("ranks", 4), spelled("batch_per_rank", 2), spelled("dim", 256)
    ('naive', '4 ranks', 'batch per rank 2', 'width 256')
    >>> spelled("sequence", True), spelled("sequence", False)
    ('sequence parallel', 'tokens whole')
    """
    if field == "sequence":
        return "sequence parallel" if value else "tokens whole"
    if field in ("mechanism", "library", "precision", "schedule", "order"):
        return str(value)
    names = {"dim": "width"}
    return f"{value} ranks" if field == "ranks" else f"{names.get(field, field).replace('_', ' ')} {value}"


# ---- into a panel ----------------------------------------------------------------------------------------------------


def style(index: int) -> dict[str, Any]:
    """Colour and marker of a panel's line with this number."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def lines(
    axis: Axes,
    groups: Groups,
    x: Callable[[Record], float],
    y: Callable[[Record, Record], float],
    base: Callable[[Record], float] = ranks,
) -> None:
    """A line for each group through the medians at each x; y also gets the group's result with the smallest base."""
    for index, (label, group) in enumerate(groups.items()):
        first = min(group, key=base)
        at: dict[float, list[float]] = defaultdict(list)
        for record in group:
            at[x(record)].append(y(record, first))
        xs = sorted(at)
        axis.plot(xs, [statistics.median(at[each]) for each in xs], label=label, **style(index))
        rings = [(x(record), y(record, first)) for record in group if ringed(record)]
        axis.plot([a for a, _ in rings], [b for _, b in rings], "o", ms=13, mfc="none", color=style(index)["color"])
    if any(ringed(record) for group in groups.values() for record in group):
        axis.plot([], [], "o", ms=11, mfc="none", color="grey", label="ringed: more ranks than cores")


def points(axis: Axes, groups: Groups, x: Callable[[Record], float], y: Callable[[Record], float]) -> None:
    """Results as marks of their own size, so that equal ones stay visible behind one another."""
    for index, (label, group) in enumerate(groups.items()):
        size: dict[str, Any] = {"linestyle": "", "markersize": 7 + 2 * index, "markerfacecolor": "none"}
        axis.plot(list(map(x, group)), list(map(y, group)), label=label, **size, **style(index))


def bars(axis: Axes, groups: Groups, computing: str, rest: str) -> None:
    """A bar for each group, medians: the step that sends nothing below, and above it what the real one takes more."""
    for index, group in enumerate(groups.values()):
        compute, more = (1e3 * statistics.median(r[name] for r in group) for name in ("median_compute_s", "exposed_s"))
        axis.bar(index, compute, color=COLOURS[0], label=computing if index == 0 else None)
        axis.bar(index, more, bottom=compute, color=COLOURS[1], hatch="//", label=rest if index == 0 else None)
        axis.text(index, compute + max(more, 0), f"+{more:.1f} ms", ha="center", va="bottom", fontsize=8)
    names = [label.replace(", ", "\n") + ringed(group[-1]) for label, group in groups.items()]
    axis.set_xticks(range(len(groups)), names, fontsize=8)
    axis.margins(y=0.15)


def ticks(axis: Axes, values: Iterable[float]) -> None:
    """A tick at each value measured, written as a plain number."""
    places = sorted(set(values))
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.minorticks_off()


def describe(axis: Axes, name: str, x: str, y: str) -> None:
    axis.set(title=name, xlabel=x, ylabel=y)
