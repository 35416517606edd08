"""Where a layer's matrices are cut over the ranks, and where the sums happen: shapes drawn, not numbers.

A colour is a rank. A tensor that all ranks have alike is grey; one that is cut is striped, vertically if its last dim
is cut and horizontally if its first is; terms of a sum lie on one another, one sheet for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.plan import cost
from minidist.viz.explore import Explorer
from minidist.viz.style import DARK, FAINT, INK, PAPER, bare, canvas, quantity, rank_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CUTS = ("column", "row", "pair", "heads")
ALIKE, COLUMNS, ROWS, TERMS = "alike", "columns", "rows", "terms"
GAP, SHEET = 0.62, 0.09  # between two tensors, and from one sheet of terms to the next


@dataclass(frozen=True)
class Piece:
    """A tensor of the picture: what it is called, its whole shape, and how it lies on the ranks."""

    name: str
    rows: tuple[str, int]
    columns: tuple[str, int]
    lies: str
    before: str = ""  # the sign to its left

    def on_a_rank(self, ranks: int) -> str:
        """Its shape on one rank.

        >>> Piece("A", ("D", 64), ("F", 192), COLUMNS).on_a_rank(4)
        '[64, 48]'
        """
        rows, columns = self.rows[1], self.columns[1]
        if self.lies == ROWS:
            rows //= ranks
        if self.lies == COLUMNS:
            columns //= ranks
        return f"[{rows:,}, {columns:,}]"

    def symbol(self) -> str:
        """Its shape in the notation of this course.

        >>> Piece("A", ("D", 64), ("F", 192), COLUMNS).symbol(), Piece("y", ("T", 8), ("D", 64), TERMS).symbol()
        ('[D, F/tp]', '[T, D] {+tp}')
        """
        rows = f"{self.rows[0]}/tp" if self.lies == ROWS else self.rows[0]
        columns = f"{self.columns[0]}/tp" if self.lies == COLUMNS else self.columns[0]
        return f"[{rows}, {columns}]" + (" {+tp}" if self.lies == TERMS else "")


def pieces(cut: str, tokens: int, width: int, hidden: int) -> list[Piece]:
    """The tensors of a cut from left to right.

    >>> [piece.symbol() for piece in pieces("column", 8, 4, 16)]
    ['[T, D]', '[D, F/tp]', '[T, F/tp]']
    """
    t, d, f = ("T", tokens), ("D", width), ("F", hidden)
    summed = Piece("y", t, d, ALIKE, "sum")
    if cut == "column":
        return [Piece("x", t, d, ALIKE), Piece("A", d, f, COLUMNS, "x"), Piece("x A", t, f, COLUMNS, "=")]
    if cut == "row":
        return [Piece("h", t, f, COLUMNS), Piece("B", f, d, ROWS, "x"), Piece("h B", t, d, TERMS, "="), summed]
    if cut == "pair":
        first = [Piece("x", t, d, ALIKE), Piece("A", d, f, COLUMNS, "x"), Piece("h = f(x A)", t, f, COLUMNS, "f")]
        return [*first, Piece("B", f, d, ROWS, "x"), Piece("h B", t, d, TERMS, "="), summed]
    if cut == "heads":
        return [
            Piece("x", t, d, ALIKE),
            Piece("q, k, v", d, ("D", width), COLUMNS, "x"),
            Piece("heads", t, ("D", width), COLUMNS, "softmax"),
            Piece("out", ("D", width), d, ROWS, "x"),
            Piece("heads out", t, d, TERMS, "="),
            summed,
        ]
    raise ValueError(f"cut={cut!r} is none of {', '.join(CUTS)}")


def cut(
    cut: str, ranks: int = 4, tokens: int = 256, width: int = 64, hidden: int = 192, heads: int = 4, nbytes: int = 4
) -> Figure:
    """How a matrix, a pair of them or attention lies on the ranks, with the shapes on one of them and what is sent.

    tokens: T; width: D; hidden: F; heads: of attention, whose borders are drawn. nbytes: of a number. Sides are
    drawn as the square roots of their lengths. Raises ValueError for sizes that do not divide.
    """
    length, what = {"heads": (heads, "heads"), "column": (hidden, "columns")}.get(cut, (hidden, "hidden numbers"))
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r} is none of {', '.join(CUTS)}")
    if length % ranks or width % heads:
        raise ValueError(f"{length} {what} of width {width} cannot be shared out to {ranks} ranks")
    row = pieces(cut, tokens, width, hidden)
    longest = max(max(piece.rows[1], piece.columns[1]) for piece in row)
    fig, (ax,) = canvas(9.2, 3.3)
    left, deepest = 0.0, max(_side(piece.rows[1], longest) for piece in row) / 2
    for piece in row:
        across, down = _side(piece.columns[1], longest), _side(piece.rows[1], longest)
        if piece.before:
            left += _sign(ax, left, piece.before, ranks)
        _draw(ax, piece, left, across, down, ranks, heads if cut == "heads" else 0)
        extra = SHEET * (ranks - 1) if piece.lies == TERMS else 0.0
        _label(ax, piece, left + (across + extra) / 2, down / 2 + extra, deepest, ranks)
        left += across + extra
    ax.set_xlim(-0.75, left + 0.75)
    ax.set_ylim(-deepest - 1.85, deepest + SHEET * ranks + 0.45)
    bare(ax)
    ax.set_title(_title(cut, ranks, tokens * width * nbytes), size=11, color=INK, loc="left")
    return fig


def _side(length: int, longest: int) -> float:
    return 0.45 + 2.0 * (length / longest) ** 0.5


def _sign(ax: Axes, left: float, sign: str, ranks: int) -> float:
    """What stands between two tensors; returns how much room it takes."""
    if sign in ("x", "="):
        ax.text(left + GAP / 2, 0, {"x": "\N{MULTIPLICATION SIGN}", "=": "="}[sign], **_centred(13))
        return GAP
    room = 1.6 if sign == "sum" else 1.2
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.2 if sign == "sum" else 1.2}
    ax.annotate("", (left + room - 0.12, 0), (left + 0.12, 0), arrowprops=arrow)
    word = ("all-reduce" if ranks > 1 else "alone") if sign == "sum" else sign
    ax.text(left + room / 2, 0.18, word, **_centred(9, "bold" if sign == "sum" else "normal"))
    return room


def _centred(size: float, weight: str = "normal") -> dict[str, Any]:
    return {"ha": "center", "va": "center", "size": size, "color": INK, "weight": weight}


def _draw(ax: Axes, piece: Piece, left: float, across: float, down: float, ranks: int, heads: int) -> None:
    from matplotlib.patches import Rectangle

    def box(x: float, y: float, w: float, h: float, colour: str, z: int = 2) -> None:
        ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor=PAPER, linewidth=0.8, zorder=z))

    bottom = -down / 2
    if piece.lies == ALIKE:
        box(left, bottom, across, down, FAINT)
    elif piece.lies == TERMS:
        for rank in reversed(range(ranks)):
            box(left + SHEET * rank, bottom + SHEET * rank, across, down, rank_colour(rank), 2 + ranks - rank)
    for rank in range(ranks):
        if piece.lies == COLUMNS:
            box(left + across * rank / ranks, bottom, across / ranks, down, rank_colour(rank))
        elif piece.lies == ROWS:
            box(left, bottom + down * (ranks - 1 - rank) / ranks, across, down / ranks, rank_colour(rank))
    for head in range(1, heads if piece.lies in (COLUMNS, ROWS) else 0):
        at = head / heads
        xs, ys = ([left + across * at] * 2, [bottom, bottom + down]), ([left, left + across], [bottom + down * at] * 2)
        ax.plot(*(xs if piece.lies == COLUMNS else ys), color=INK, lw=0.7, ls=":", zorder=3)
    if piece.lies != TERMS:
        ax.add_patch(Rectangle((left, bottom), across, down, fill=False, edgecolor=INK, linewidth=1, zorder=4))


def _label(ax: Axes, piece: Piece, x: float, top: float, depth: float, ranks: int) -> None:
    ax.text(x, top + 0.22, piece.name, **_centred(10, "bold"))
    ax.text(x, -depth - 0.28, piece.symbol(), **_centred(8.5))
    ax.text(x, -depth - 0.62, f"{piece.on_a_rank(ranks)}", **_centred(8.5))
    where = "alike on all" if piece.lies == ALIKE else "on each rank"
    ax.text(x, -depth - 0.93, where, **{**_centred(7.5), "color": DARK})
    if piece.name == "x" and ranks > 1:
        ax.text(x, -depth - 1.48, "its gradient:\nall-reduce", **_centred(8, "bold"))


def _title(cut: str, ranks: int, payload: int) -> str:
    name = {
        "column": "Cut by columns",
        "row": "Cut by rows",
        "pair": "Columns, then rows",
        "heads": "Attention by heads",
    }[cut]
    over = f"{name}, over {ranks} rank{'s' if ranks > 1 else ''}"
    if cut == "column" or ranks == 1:
        return f"{over}: nothing is sent"
    sent = quantity(cost.bytes_sent("all_reduce", payload, ranks), "bytes")
    return f"{over}: one sum of {quantity(payload, 'bytes')}, for which a rank sends {sent}"


def cut_explorer() -> Explorer:
    """Which tensor lies how on the ranks, and what is sent?"""

    def draw(cut_of: str, ranks: int, width: int, hidden: int, tokens: int, heads: int) -> Figure:
        return cut(cut_of, ranks, tokens, width, hidden, heads, nbytes=2)

    options = {
        "cut of": CUTS,
        "ranks": (1, 2, 4, 8),
        "width [numbers]": (64, 512, 1024, 4096, 8192),
        "hidden [numbers]": (256, 2048, 4096, 16384, 32768),
        "tokens": (256, 2048, 8192, 32768),
        "heads": (8, 16, 32, 64),
    }
    start = {"cut of": "pair", "ranks": 4, "width [numbers]": 4096, "hidden [numbers]": 16384, "tokens": 8192}
    return Explorer(draw, options, start)
