"""Ranks as boxes: each a process with its own memory, joined by the groups they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.viz.style import INK, bare, canvas, rank_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOX, PITCH = 2.6, 3.0  # width of a box and distance of two, in lines of text


def world(facts: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]] | None = None) -> Figure:
    """A box for each rank with what it said of itself, and under them a bar for each group.

    facts: rank -> {what: value}, as a run returned it. groups: name -> ranks in it; None: the world of all of them.
    """
    from matplotlib.patches import FancyBboxPatch

    ranks = len(facts)
    groups = {"world": range(ranks)} if groups is None else groups
    lines = max(len(fact) for fact in facts)
    height = 0.55 * lines + 0.9
    fig, (ax,) = canvas(max(4.0, 2.15 * ranks), 0.62 * (height + 0.7 * len(groups)) + 0.25)
    for rank, fact in enumerate(facts):
        left = rank * PITCH
        shape = {"boxstyle": "round,pad=0.02,rounding_size=0.15", "facecolor": "#FFFFFF", "linewidth": 2}
        ax.add_patch(FancyBboxPatch((left, 0), BOX, height, edgecolor=rank_colour(rank), **shape))
        ax.text(left + BOX / 2, height - 0.4, f"rank {rank}", ha="center", va="center", weight="bold", color=INK)
        for i, (what, value) in enumerate(fact.items()):
            text = f"{what}  {value}"
            ax.text(left + BOX / 2, height - 1.0 - 0.55 * i, text, ha="center", va="center", size=9, color=INK)
    for i, (name, members) in enumerate(groups.items()):
        y, xs = -0.45 - 0.7 * i, [rank * PITCH + BOX / 2 for rank in members]
        ax.plot(xs, [y] * len(xs), "-o", color=INK, lw=2, ms=6)
        ax.text(max(xs) + 0.25, y, name, ha="left", va="center", size=9, color=INK)
    ax.set_xlim(-0.2, ranks * PITCH + 0.8)
    ax.set_ylim(-0.45 - 0.7 * len(groups) + 0.2, height + 0.2)
    bare(ax)
    return fig
