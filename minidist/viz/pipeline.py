"""A pipeline's timeline as a grid: a row for each rank, a box for each action, and grey where the rank is idle.

A box carries the number of its micro-batch. On a rank with several stages the later ones are paler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from minidist.schedule import SCHEDULES, build, messages, simulate
from minidist.schedule.program import KINDS, Action, Program
from minidist.timeline import Timeline
from minidist.viz.explore import Explorer
from minidist.viz.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    SKY,
    canvas,
    halo,
    rank_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = MappingProxyType({"F": SKY, "B": BLUE, "I": ORANGE, "W": GREEN})
MOST_NUMBERS = 700  # in one picture; more could not be read


def pipeline(cases: Mapping[str, Timeline] | Timeline, unit: str = "") -> Figure:
    """Timelines of pipelines one above the other, on one scale of time, each from its own start.

    unit: "ms" for times in seconds that are shown in milliseconds; "": times without a unit.
    """
    cases = {"": cases} if isinstance(cases, Timeline) else cases
    if not cases:
        raise ValueError("no timeline to draw: give a dict of name -> Timeline")
    scale = 1e3 if unit == "ms" else 1.0
    longest = max(timeline.makespan for timeline in cases.values()) * scale or 1.0
    heights = [0.27 * len(timeline.ranks) + 0.5 for timeline in cases.values()]
    fig, axes = canvas(8.6, sum(heights) + 0.75, len(cases), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    for ax, (title, timeline) in zip(axes, cases.items(), strict=True):
        _grid(ax, timeline, scale, longest, title)
    axes[-1].set_xlabel(f"time [{unit}]" if unit else "time")
    _legend(fig, cases.values())
    return fig


def _grid(ax: Axes, timeline: Timeline, scale: float, longest: float, title: str) -> None:
    numbered = len(timeline.spans) <= MOST_NUMBERS
    for row, rank in enumerate(timeline.ranks):
        ax.broken_barh([(0, timeline.makespan * scale)], (-row - 0.42, 0.84), facecolors=FAINT, zorder=1)
        spans = timeline.lane(rank)
        boxes = [((span.start - timeline.start) * scale, span.seconds * scale) for span in spans]
        pale = _paleness([span.action for span in spans])
        colours = [_mixed(COLOURS[span.action.kind], pale[span.action.stage]) for span in spans]
        ax.broken_barh(boxes, (-row - 0.42, 0.84), facecolors=colours, edgecolors=PAPER, linewidth=0.4, zorder=2)
        for span, (left, width) in zip(spans if numbered else [], boxes, strict=False):
            name = str(span.action.microbatch)
            if width > 0.0125 * len(name) * longest:
                ink = PAPER if span.action.kind in "BW" and pale[span.action.stage] < 0.2 else INK
                place = {"ha": "center", "va": "center_baseline", "size": 7.5, "color": ink, "in_layout": False}
                ax.text(left + width / 2, -row, name, **place)
    ax.set_yticks([-row for row in range(len(timeline.ranks))], [f"rank {rank}" for rank in timeline.ranks])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(-len(timeline.ranks) + 0.45, 0.55)
    ax.set_xlim(0, longest * 1.005)
    ax.set_title(f"{title} ({timeline.kind})".strip(), size=10, color=INK, loc="left")


def _paleness(actions: Sequence[Action]) -> dict[int, float]:
    """How much white is mixed into the colours of each of a rank's stages, as long as a number can be read there."""
    stages = sorted({action.stage for action in actions})
    return {stage: 0.4 * i / max(1, len(stages) - 1) for i, stage in enumerate(stages)}


def _mixed(colour: str, white: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(part + (1 - part) * white for part in to_rgb(colour))


def _legend(fig: Figure, timelines: Iterable[Timeline]) -> None:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for timeline in timelines for span in timeline.spans}
    patches = [Patch(facecolor=COLOURS[kind], label=f"{kind}: {KINDS[kind]}") for kind in COLOURS if kind in kinds]
    patches.append(Patch(facecolor=FAINT, label="idle"))
    fig.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def in_flight(timeline: Timeline, rank: int) -> tuple[list[float], list[int]]:
    """(times, how many stage inputs the rank holds from each of them on), for a step curve.

    >>> from minidist.schedule import build, simulate
    >>> in_flight(simulate(build("gpipe", ranks=1, microbatches=2)), rank=0)
    ([0.0, 1.0, 4.0, 6.0], [1, 2, 1, 0])
    """
    changes: dict[float, int] = {}
    for start, end in timeline.in_flight(rank):
        for time, change in ((start, 1), (end, -1)):
            changes[time] = changes.get(time, 0) + change
    times, held, now = sorted(changes), [], 0
    for time in times:
        now += changes[time]
        held.append(now)
    return times, held


def pipeline_explorer() -> Explorer:
    """What does a schedule make of its ranks' time and memory?"""

    def draw(
        schedule: str,
        ranks: int,
        micro_batches: int,
        stages_a_rank: int,
        forward: float,
        input_gradient: float,
        weight_gradient: float,
        message: float,
    ) -> Figure:
        try:
            program = build(schedule, ranks, micro_batches, stages_a_rank)
        except ValueError as error:
            return _refused(str(error))
        f, i, w = (time / stages_a_rank for time in (forward, input_gradient, weight_gradient))
        return overview(program, simulate(program, f, i, w, message), schedule)

    options = {
        "schedule": tuple(SCHEDULES),
        "ranks": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
        "micro batches": (*range(1, 25), 32, 48, 64),
        "stages a rank": (1, 2, 3, 4),
        "forward [of a rank's layers]": (0.5, 1, 1.5, 2, 3),
        "input gradient [of a rank's layers]": (0.5, 1, 1.5, 2, 3),
        "weight gradient [of a rank's layers]": (0.5, 1, 1.5, 2, 3),
        "message": (0, 0.05, 0.1, 0.25, 0.5, 1),
    }
    ones = {name: 1 for name in options if name.endswith("layers]")}
    return Explorer(draw, options, {"schedule": "1f1b", "ranks": 4, "micro batches": 8, **ones})


def overview(program: Program, timeline: Timeline, name: str) -> Figure:
    """The grid of a program's run; below it what every rank holds over time, and both bubble figures."""
    height = 0.27 * program.ranks + 0.5
    shape = {"height_ratios": [height, 2.0], "width_ratios": [2.1, 1]}
    fig, (grid, right, held, rates) = canvas(9.2, height + 3.0, 2, 2, gridspec_kw=shape)
    cells = right.get_gridspec()
    assert cells is not None
    right.remove()
    grid.set_subplotspec(cells[0, :])
    sent = len(messages(program))
    title = f"{name}: takes {timeline.makespan:.4g}, a micro-batch alone {_alone(timeline):.4g}; {sent} messages"
    _grid(grid, timeline, 1.0, timeline.makespan or 1.0, title)
    grid.set_xlabel("time")
    _held(held, program, timeline)
    _rates(rates, timeline)
    _legend(fig, [timeline])
    return fig


def _alone(timeline: Timeline) -> float:
    """Time of one micro-batch through all stages and back."""
    return sum(span.seconds for span in timeline.spans if span.action.microbatch == 0)


def _held(ax: Axes, program: Program, timeline: Timeline) -> None:
    """What forward passes keep, in units of a micro-batch through all layers of a rank."""
    for rank, peak in zip(timeline.ranks, timeline.peak_in_flight, strict=True):
        stages = len(program.stages_of(rank))
        times, counts = in_flight(timeline, rank)
        shown = rank in (timeline.ranks[0], timeline.ranks[-1])
        label = f"rank {rank}: at most {peak / stages:g}" if shown else None
        ax.step(times, [n / stages for n in counts], where="post", color=rank_colour(rank), lw=1.6, label=label)
    ax.set_ylim(bottom=0)
    ax.set_xlim(0, timeline.makespan * 1.005 or 1.0)
    ax.grid(alpha=0.25)
    ax.set_xlabel("time")
    ax.set_ylabel("micro-batches held")
    ax.set_title(f"Activations of each rank ({timeline.kind})", size=10, color=INK, loc="left")
    ax.legend(fontsize=8.5, loc="lower center", edgecolor=PAPER)


def _rates(ax: Axes, timeline: Timeline) -> None:
    rates = {"of the step": timeline.bubble, "of a rank's\nown span": timeline.bubble_rate}
    for i, share in enumerate(rates.values()):
        ax.barh(i, share, color=GREY, edgecolor=INK, lw=0.6, height=0.5)
        halo(ax.text(share + 0.02, i, f"{share:.1%}", va="center", size=9, color=INK))
    ax.set_yticks(range(len(rates)), list(rates))
    ax.set_ylim(len(rates) - 0.4, -0.6)
    ax.set_xlim(0, 1.15)
    ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    ax.set_xlabel("idle share of time")
    ax.set_title(f"Bubble ({timeline.kind})", size=10, color=INK, loc="left")


def _refused(why: str) -> Figure:
    """What the explorer shows where there is no such program."""
    from textwrap import fill

    fig, (ax,) = canvas(9.2, 1.6)
    ax.text(0.02, 0.5, fill(f"Refused: {why}", 95), size=10, color=INK, va="center", transform=ax.transAxes)
    ax.set_axis_off()
    return fig
