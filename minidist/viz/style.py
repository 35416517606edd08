"""How every figure looks: one palette, a white canvas, labels with units. The first figure loads matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# Okabe and Ito, "Color universal design" (2008): told apart with every common kind of colour blindness. In the order of
# ranks; neighbours differ in lightness too, so that a print in grey still separates them.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
INK, DARK, FAINT, PAPER = "#222222", "#555555", "#D9D9D9", "#FFFFFF"
RANK_COLOURS = (ORANGE, BLUE, YELLOW, GREEN, SKY, VERMILLION, PURPLE, DARK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def rank_colour(rank: int) -> str:
    """The colour of a rank, the same in every figure; from the ninth rank on they repeat.

    >>> rank_colour(0) == rank_colour(8) == ORANGE
    True
    """
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def canvas(
    width: float = 8.0, height: float = 3.2, rows: int = 1, columns: int = 1, **options
) -> tuple[Figure, list[Axes]]:
    """A white figure of width x height inches and its axes, row by row.

    The face is white whatever the notebook's theme, because ink chosen for one theme vanishes in the other. The figure
    is closed at once, so that a notebook shows it once, where the cell returns it, and keeps no copy.
    """
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        rows, columns, figsize=(width, height), dpi=110, layout="constrained", facecolor=PAPER, squeeze=False, **options
    )
    plt.close(fig)
    flat = list(axes.flat)
    for ax in flat:
        ax.set_facecolor(PAPER)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(INK)
        ax.tick_params(colors=INK, labelsize=9)
    return fig, flat


def bare(ax: Axes) -> None:
    """Takes frame and ticks away: for pictures, which have no scale."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    ax.set_aspect("equal")


def halo(text: Text) -> None:
    """A white rim around a text inside a shape, so that it reads on every colour of the palette."""
    from matplotlib.patheffects import withStroke

    text.set_path_effects([withStroke(linewidth=2.5, foreground=PAPER)])
    text.set_in_layout(False)  # its shape has been laid out already, and measuring texts is what takes long


def logarithmic(axis: Axis, least: float, most: float) -> None:
    """Label a logarithmic axis 1, 10, 100, 1k, 10k, ...; over less than two decades 1, 2, 5, 10, 20, ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < 100 * least else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_locator(NullLocator())


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def short(value: float) -> str:
    """A tick's label.

    >>> [short(value) for value in (0.01, 5, 2000, 10_000, 5e6, 1e9)]
    ['0.01', '5', '2000', '10k', '5M', '1G']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10e3 and value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def png(fig: Figure) -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    fig.savefig(file, format="png", facecolor=fig.get_facecolor())
    return file.getvalue()


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """The prefix that suits a value: (what to divide by, name of the unit). Decimal for bytes; s, ms or us for seconds.

    >>> scale_of(590592, "bytes"), scale_of(0.0042, "s"), scale_of(3, "ranks")
    ((1000.0, 'kB'), (0.001, 'ms'), (1, 'ranks'))
    """
    steps = {
        "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
        "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")),
        "s": ((1, "s"), (1e-3, "ms"), (1e-6, "us")),
    }
    # A value that would print as 1000 of a unit is 1 of the next.
    return next(((size, name) for size, name in steps.get(unit, ()) if abs(value) * 1.0001 >= size), (1, unit))


def quantity(value: float, unit: str) -> str:
    """A number a person can read, with its unit.

    >>> quantity(590592, "bytes"), quantity(12, "bytes"), quantity(0.0042, "s"), quantity(2.5, "nats")
    ('590.6 kB', '12 bytes', '4.2 ms', '2.5 nats')
    >>> quantity(1e9 - 1, "bytes")
    '1 GB'
    """
    size, name = scale_of(value, unit)
    return f"{value / size:.4g} {name}".strip()
