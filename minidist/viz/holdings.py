"""Who holds what: pictures of collectives, drawn from the very numbers that ranks held.

The trick is in the numbers. Rank r fills slice s of its tensor with a power of two that nobody else uses. A sum of such
numbers tells which ranks went into it, so a picture needs no bookkeeping beside the run: it reads the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from minidist.viz.style import FAINT, INK, VERMILLION, bare, canvas, halo, rank_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Held = Sequence[Sequence[int]]  # Held[rank] = the marks in that rank's tensor, in order

MOST_RANKS = 7  # 7 x 7 marks fit into an int64
PITCH = 1.45  # from one rank's row to the next, in cells: room for an arrow


def marks(rank: int, ranks: int) -> list[int]:
    """What `rank` fills its tensor with: a mark for each of `ranks` slices, unlike every mark of every other rank.

    >>> marks(0, 2), marks(1, 2)
    ([1, 2], [4, 8])
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"marks for {ranks} ranks do not fit into an int64: use 1 to {MOST_RANKS} ranks")
    return [1 << (rank * ranks + piece) for piece in range(ranks)]


def sources(value: int, ranks: int) -> tuple[str, list[int]]:
    """Which slice a mark or a sum of marks belongs to, and which ranks it came from.

    >>> sources(marks(0, 2)[1] + marks(1, 2)[1], 2)
    ('B', [0, 1])
    >>> sources(0, 2)
    ('', [])
    """
    bits = [bit for bit in range(ranks * ranks) if value >> bit & 1]
    if value < 0 or value >> (ranks * ranks):
        raise ValueError(f"{value} is no sum of marks of {ranks} ranks: fill the tensor with viz.marks(rank, ranks)")
    letters = sorted({chr(ord("A") + bit % ranks) for bit in bits})
    return "".join(letters), sorted({bit // ranks for bit in bits})


def _cell(ax: Axes, x: float, y: float, value: int, ranks: int, strong: bool = False, size: float = 10) -> None:
    """A unit square at (x, y), striped in the colours of the ranks that went into it."""
    from matplotlib.patches import Rectangle

    letter, came_from = sources(value, ranks)
    for i, rank in enumerate(came_from):
        width = 1 / len(came_from)
        ax.add_patch(Rectangle((x + i * width, y), width, 1, facecolor=rank_colour(rank), edgecolor="none"))
    edge, line = (VERMILLION, 3.0) if strong else (INK if came_from else FAINT, 1.0)
    ax.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=edge, linewidth=line, zorder=4 if strong else 3))
    if came_from:
        full = len(came_from) == ranks > 1
        digits = "sum" if full else "+".join(map(str, came_from))
        halo(
            ax.text(x + 0.5, y + 0.64, letter, ha="center", va="center", size=size, weight="bold", color=INK, zorder=5)
        )
        small = size * (0.62 if len(digits) > 3 else 0.75)
        halo(ax.text(x + 0.5, y + 0.26, digits, ha="center", va="center", size=small, color=INK, zorder=5))


def _grid(
    ax: Axes, held: Held, ranks: int, left: float = 0.0, strong: Set[tuple[int, int]] = frozenset(), size: float = 10
) -> None:
    """Rank 0 on top, a row for each rank; `strong` are the (rank, position) to frame."""
    for rank, row in enumerate(held):
        for position, value in enumerate(row):
            strong_here = (rank, position) in strong
            _cell(ax, left + position, -PITCH * rank, value, ranks, strong=strong_here, size=size)


def _names(ax: Axes, ranks: int, left: float = -0.25) -> None:
    for rank in range(ranks):
        ax.text(left, -PITCH * rank + 0.5, f"rank {rank}", ha="right", va="center", size=9, color=INK)


def holdings(cases: dict[str, tuple[Held, Held]], columns: int = 2) -> Figure:
    """Before and after each collective, from what the ranks really held.

    cases: name -> (before, after), each a list over ranks of lists of marks (see `marks`).
    """
    ranks = len(next(iter(cases.values()))[0])
    rows = -(-len(cases) // columns)
    fig, axes = canvas(4.2 * columns, (0.6 * ranks + 0.4) * rows, rows, columns)
    for ax, (name, (before, after)) in zip(axes, cases.items(), strict=False):
        gap = ranks + 1.6
        _grid(ax, before, ranks)
        _grid(ax, after, ranks, left=gap)
        _names(ax, ranks)
        middle = -PITCH * (ranks - 1) / 2 + 0.5
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.5}
        ax.annotate("", (gap - 0.25, middle), (ranks + 0.25, middle), arrowprops=arrow)
        ax.set_xlim(-2.3, gap + ranks + 0.2)
        ax.set_ylim(-PITCH * (ranks - 1) - 0.3, 1.3)
        bare(ax)
        ax.set_title(name, size=11, color=INK)
    for ax in axes[len(cases) :]:
        ax.set_visible(False)
    return fig


def replay(first: Sequence[int], sent: Sequence[int], last: Sequence[int]) -> list[list[int]]:
    """What a rank held before each message it sent, and at the end.

    first, last: its marks before and after. sent: the mark in each message, in order. A rank that passes on a sum holds
    it, so what it sends tells what it held.

    >>> replay([1, 2], [2, 5], [5, 10])
    [[1, 2], [5, 2], [5, 10]]
    """
    ranks, held = len(first), [list(first)]
    for mark in sent:
        letter, _ = sources(mark, ranks)
        now = list(held[-1])
        now[ord(letter) - ord("A")] = mark
        held.append(now)
    return [*held[1:], list(last)]


def sent_in(states: Sequence[Held], step: int) -> set[tuple[int, int]]:
    """The (rank, slice) that the ring's ranks pass on in `step`, read off from what changed at the next rank.

    >>> sorted(sent_in([[[1, 2], [4, 8]], [[1, 10], [5, 8]]], 0))
    [(0, 0), (1, 1)]
    """
    if step + 1 >= len(states):
        return set()
    now, then = states[step], states[step + 1]
    ranks = len(now)
    return {
        ((rank - 1) % ranks, piece)
        for rank in range(ranks)
        for piece, value in enumerate(then[rank])
        if value != now[rank][piece]
    }


def _step_name(step: int, ranks: int) -> str:
    """
    >>> [_step_name(step, 2) for step in range(3)]
    ['reduce-scatter, step 1', 'all-gather, step 1', 'done']
    """
    if step >= 2 * (ranks - 1):
        return "done"
    half, within = divmod(step, ranks - 1)
    return f"{('reduce-scatter', 'all-gather')[half]}, step {within + 1}"


def _draw_ring(ax: Axes, states: Sequence[Held], step: int, size: float) -> None:
    ranks = len(states[0])
    sent = sent_in(states, step)
    _grid(ax, states[step], ranks, strong=sent, size=size)
    for rank, piece in sent:
        down = {"arrowstyle": "-|>", "color": VERMILLION, "linewidth": 2}
        if rank + 1 < ranks:
            start, end = (piece + 0.5, -PITCH * rank), (piece + 0.5, -PITCH * (rank + 1) + 0.95)
            ax.annotate("", end, start, arrowprops=down | {"shrinkA": 0, "shrinkB": 0}, zorder=6)
        else:  # from the last rank back to the first: leaves at the bottom, arrives at the top
            bottom = -PITCH * rank
            ax.annotate("", (piece + 0.5, bottom - 0.55), (piece + 0.5, bottom), arrowprops=down, zorder=6)
            ax.annotate("", (piece + 0.5, 0.95), (piece + 0.5, 1.55), arrowprops=down, zorder=6)
    ax.set_ylim(-PITCH * (ranks - 1) - 0.65, 1.65)
    bare(ax)


def ring_step(states: Sequence[Held], step: int) -> Figure:
    """The ring before `step`: what every rank holds, framed what it passes to the next rank in this step.

    states: what the ranks held before each of the 2(n-1) steps and at the end, `states[step][rank] = marks`.
    """
    ranks = len(states[0])
    fig, (ax,) = canvas(4.8, 0.66 * ranks + 1.2)
    _draw_ring(ax, states, step, size=11)
    _names(ax, ranks)
    ax.set_xlim(-1.9, ranks + 0.3)
    ax.set_title(f"{ranks} ranks: {_step_name(step, ranks)}", size=11, color=INK)
    return fig


def ring_strip(states: Sequence[Held], columns: int = 4) -> Figure:
    """Every step of the ring side by side: `ring_step` without a slider."""
    ranks, rows = len(states[0]), -(-len(states) // columns)
    ratios = [ranks + 2.0] + [ranks + 0.6] * (columns - 1)  # the first column carries the names of the ranks
    inch = 9.0 / sum(ratios)
    height = (PITCH * ranks + 2.0) * inch + 0.3
    fig, axes = canvas(9.0, height * rows, rows, columns, gridspec_kw={"width_ratios": ratios})
    for step, ax in enumerate(axes):
        if step >= len(states):
            ax.set_visible(False)
            continue
        _draw_ring(ax, states, step, size=8.5)
        ax.set_xlim(-1.7 if step % columns == 0 else -0.3, ranks + 0.3)
        if step % columns == 0:
            _names(ax, ranks)
        ax.set_title(_step_name(step, ranks), size=9.5, color=INK)
    return fig
