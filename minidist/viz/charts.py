"""Measured beside predicted: bars for one number, curves for many."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.viz.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    canvas,
    logarithmic,
    quantity,
    scale_of,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)  # colours of curves, in order


def beside(
    measured: float,
    predicted: float | None = None,
    prediction: float | None = None,
    unit: str = "",
    title: str = "",
    paced: bool = False,
    axis: str = "",
) -> Figure:
    """One measured number beside what the formula and the learner predicted; None leaves a bar open.

    unit: "bytes", "bytes/s", "s" or any word. axis: what the numbers are; the unit is added to it.
    """
    kind = "paced" if paced else "measured"
    rows = [("your prediction", prediction, ORANGE), ("formula", predicted, GREEN), (kind, measured, BLUE)]
    shown = [row for row in rows if row[0] != "formula" or predicted is not None]
    fig, (ax,) = canvas(7.2, 0.55 * len(shown) + 1.0)
    longest = max((abs(value) for _, value, _ in shown if value is not None), default=0) or 1
    size, unit_name = scale_of(longest, unit)
    for y, (_, value, colour) in enumerate(shown):
        text = "still open: set your prediction above and run again" if value is None else quantity(value, unit)
        length = (value or 0) / size
        ax.barh(y, length, color=colour, height=0.62, edgecolor=INK, linewidth=0.6)
        ax.text(length + 0.015 * longest / size, y, text, va="center", size=9.5, color=GREY if value is None else INK)
    ax.set_yticks(range(len(shown)), [name for name, _, _ in shown], size=10)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * longest / size)
    ax.set_xlabel(f"{axis} [{unit_name}]".strip() if unit else axis)
    ax.set_title(f"{title} ({kind})".strip(), size=11, color=INK, loc="left")
    return fig


def curves(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float]],
    predicted: Mapping[str, Sequence[float] | Callable[[float], float]] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    paced: bool = False,
    log: str = "",
) -> Figure:
    """Measured points and predicted lines over the same x; a name that is in both has one colour.

    predicted: a value for each x, or a function of x, which is drawn smoothly. xlabel, ylabel: with their units.
    log: "x", "y" or "xy".
    """
    fig, (ax,) = canvas(7.2, 3.6)
    predicted = predicted or {}
    names = list(dict.fromkeys([*measured, *predicted]))
    colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    under = _under(list(measured.values()))
    for i, (name, y) in enumerate(measured.items()):
        look: dict[str, Any] = {"ms": 6.5, "mec": INK, "mew": 0.6}
        if any(under):  # some lie on one another: each a ring, the earlier the wider
            look = {"ms": 6.5 + 4.5 * under[i], "mec": colours[name], "mew": 1.6, "mfc": "none"}
        ax.plot(x, y, MARKERS[i % len(MARKERS)], color=colours[name], label=name, zorder=3, **look)
    fine = between(min(x), max(x), "x" in log)
    for name, y in predicted.items():
        label = f"{name}, predicted" if name in measured else name
        points = (fine, [y(at) for at in fine]) if callable(y) else (x, y)
        ax.plot(*points, "-", color=colours[name], lw=1.8, label=label, zorder=2)
    if "x" in log:
        ax.set_xscale("log")
        logarithmic(ax.xaxis, *ax.get_xlim())
    if "y" in log:
        ax.set_yscale("log")
        logarithmic(ax.yaxis, *ax.get_ylim())
    else:
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    if not log and all(isinstance(at, int) for at in x):
        whole_numbers(ax.xaxis)  # there is no half rank, and no half step
    ax.grid(alpha=0.25)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    kind = "predicted" if not measured else "paced" if paced else "measured"
    ax.set_title(f"{title} ({kind})".strip(), size=11, color=INK, loc="left")
    if len(names) > 1 or predicted:
        ax.legend(frameon=False, fontsize=9)
    return fig


def _under(rows: Sequence[Sequence[float]]) -> list[int]:
    """For each row of points how many later ones lie on it, and would hide it.

    >>> _under([[1.0, 2.0], [1.0, 2.001], [1.0, 3.0]])
    [1, 0, 0]
    """

    def on(row: Sequence[float], later: Sequence[float]) -> bool:
        return all(math.isclose(a, b, rel_tol=0.005) for a, b in zip(row, later, strict=True))

    return [sum(on(row, later) for later in rows[i + 1 :]) for i, row in enumerate(rows)]


def between(first: float, last: float, by_ratio: bool, steps: int = 100) -> list[float]:
    """Values from first to last, at equal distances or, for a logarithmic axis, at equal ratios.

    >>> between(1, 4, False, steps=3), between(1, 8, True, steps=3)
    ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 8.0])
    """
    shares = [i / steps for i in range(steps + 1)]
    if by_ratio:
        return [round(first * (last / first) ** share, 12) for share in shares]
    return [first + (last - first) * share for share in shares]


def alpha_beta(
    sizes: Sequence[float],
    seconds: Sequence[float],
    alpha_s: float,
    beta_s_per_byte: float,
    title: str = "",
    paced: bool = False,
) -> Figure:
    """Time of a message or collective against its size, with the fitted line alpha + beta x size and its two parts.

    sizes in bytes. Where the parts cross, at alpha / beta bytes, latency and bandwidth cost the same.
    """
    fig, (ax,) = canvas(7.2, 3.8)
    ms = 1e3
    smooth = between(min(size for size in sizes if size > 0), max(sizes), by_ratio=True)
    fitted = [(alpha_s + beta_s_per_byte * size) * ms for size in smooth]
    ax.plot(sizes, [t * ms for t in seconds], "o", color=BLUE, mec=INK, mew=0.6, ms=6.5, zorder=4, label="measured")
    ax.plot(smooth, fitted, "-", color=ORANGE, lw=2, zorder=3, label="fit: alpha + beta x size")
    low = min(*fitted, *(t * ms for t in seconds))
    ax.axhline(alpha_s * ms, color=GREEN, ls="--", lw=1.3, label=f"alpha alone: {quantity(alpha_s, 's')}")
    by_size = [beta_s_per_byte * size * ms for size in smooth]
    rate = quantity(1 / beta_s_per_byte, "bytes/s") if beta_s_per_byte else "unlimited"
    ax.plot(smooth, by_size, ":", color=GREY, lw=1.8, label=f"beta x size alone: {rate}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(bottom=low / 3)
    logarithmic(ax.xaxis, *ax.get_xlim())
    logarithmic(ax.yaxis, *ax.get_ylim())
    ax.grid(alpha=0.25)
    ax.set_xlabel("size [bytes]")
    ax.set_ylabel("time [ms]")
    ax.set_title(f"{title} ({'paced' if paced else 'measured'})".strip(), size=11, color=INK, loc="left")
    ax.legend(frameon=False, fontsize=9)
    return fig
