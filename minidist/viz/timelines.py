"""A Timeline as a picture: a band for each rank, computation above, communication below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minidist.timeline import Span, Timeline, rows
from minidist.viz.style import BLUE, GREEN, GREY, INK, PAPER, SKY, VERMILLION, YELLOW, canvas, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = ("compute", "comm")


def colour_of(span: Span) -> str:
    """By the first word of what was done; communication is told by its lane.

    >>> colour_of(Span(0, "forward 3", 0, 1)) == SKY, colour_of(Span(0, "all_reduce", 0, 1, lane="comm")) == VERMILLION
    (True, True)
    """
    if span.lane == "comm":
        return VERMILLION
    first = str(span.action).split(" ")[0].lower()
    return {"forward": SKY, "backward": BLUE, "optimizer": GREEN, "update": GREEN, "wait": YELLOW, "work": SKY}.get(
        first, GREY
    )


def _draw_lane(
    ax: Axes, spans: list[Span], origin: float, scale: float, bottom: float, height: float, seconds: float
) -> None:
    """One lane of one rank. Spans that overlap share its height; a span wide enough carries its name."""
    row = rows([(span.start, span.end) for span in spans])
    thin = height / (max(row, default=0) + 1)
    for span, i in zip(spans, row, strict=True):
        left, width = (span.start - origin) * scale, span.seconds * scale
        y = bottom + height - thin * (i + 1)
        hatch = "////" if span.lane == "comm" else None
        ax.add_patch(_box(left, y, width, thin, colour_of(span), hatch))
        name = str(span.action)
        if span.seconds > 0.0105 * seconds * len(name) and thin > 0.9 * height:
            halo(
                ax.text(left + width / 2, y + thin / 2, name, ha="center", va="center", size=8, color=INK, clip_on=True)
            )


def _box(left: float, bottom: float, width: float, height: float, colour: str, hatch: str | None):
    from matplotlib.patches import Rectangle

    return Rectangle(
        (left, bottom), width, height, facecolor=colour, edgecolor=PAPER, linewidth=0.5, hatch=hatch, zorder=2
    )


def _draw(ax: Axes, timeline: Timeline, title: str, seconds: float) -> None:
    scale = 1e3  # axis in ms
    for i, rank in enumerate(timeline.ranks):
        top = -i * 1.0
        for lane, bottom, height in (("compute", top + 0.46, 0.4), ("comm", top + 0.1, 0.32)):
            _draw_lane(ax, timeline.lane(rank, lane), timeline.start, scale, bottom, height, seconds)
    count = len(timeline.ranks)
    ax.set_yticks([-i + 0.48 for i in range(count)], [f"rank {rank}" for rank in timeline.ranks])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(-count + 1, 1.0)
    ax.set_xlim(0, seconds * scale * 1.01)
    ax.grid(axis="x", alpha=0.25)
    ax.set_title(f"{title} ({timeline.kind})".strip(), size=10.5, color=INK, loc="left")


def _legend(fig: Figure, shown: list[Span]) -> None:
    from matplotlib.patches import Patch

    names = {
        SKY: "forward",
        BLUE: "backward",
        GREEN: "update",
        YELLOW: "wait",
        GREY: "other",
        VERMILLION: "communication",
    }
    if any(str(span.action).startswith("work") for span in shown):
        names[SKY] = "work"
    used = dict.fromkeys(colour_of(span) for span in shown)
    patches = [
        Patch(facecolor=colour, edgecolor=PAPER, hatch="////" if colour == VERMILLION else None, label=names[colour])
        for colour in names
        if colour in used
    ]
    fig.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def timelines(cases: Mapping[str, Timeline]) -> Figure:
    """Several timelines one above the other on one scale of time, each from its own start; the title says of what kind.

    A rank's upper band is computation, its lower, hatched band communication, issue to completion.
    """
    if not cases:
        raise ValueError("no timeline to draw: give a dict of name -> Timeline")
    seconds = max(timeline.makespan for timeline in cases.values()) or 1.0
    ranks = [max(1, len(timeline.ranks)) for timeline in cases.values()]
    height = sum(0.5 * n + 0.45 for n in ranks) + 0.75
    ratios = [0.5 * n + 0.45 for n in ranks]
    fig, axes = canvas(8.6, height, len(cases), 1, sharex=True, gridspec_kw={"height_ratios": ratios})
    for ax, (title, timeline) in zip(axes, cases.items(), strict=True):
        _draw(ax, timeline, title, seconds)
    axes[-1].set_xlabel("time [ms]")
    _legend(fig, [span for timeline in cases.values() for span in timeline.spans])
    return fig


def timeline(timeline: Timeline, title: str = "") -> Figure:
    """One timeline: a band for each rank, computation above, communication below, time in milliseconds."""
    return timelines({title: timeline})
