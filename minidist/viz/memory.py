"""What a rank keeps: which slices of the training state, and how many bytes of it, by stage and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from minidist.plan import hardware
from minidist.plan.memory import SHARDED, Held, zero_memory
from minidist.viz.charts import SERIES, between
from minidist.viz.explore import Explorer
from minidist.viz.style import (
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    PAPER,
    SKY,
    VERMILLION,
    bare,
    canvas,
    halo,
    logarithmic,
    quantity,
    rank_colour,
    scale_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "params": ("parameters", SKY, ""),
        "grads": ("gradients", ORANGE, "//"),
        "optimizer": ("optimizer's state", GREEN, ".."),
    }
)
MOST_RANKS = 1024


# ---- which slices ----------------------------------------------------------------------------------------------------


def kept(ranks: int = 4, moments: int = 2) -> Figure:
    """Who keeps what between steps: a panel for each stage, a row for each rank, a box for each state.

    A box has a piece for each rank; filled are those that this rank keeps, in its colour where no other rank does, grey
    where all do. moments: how many numbers the optimizer remembers for a parameter.
    """
    columns = {"parameters": "params", "gradients": "grads"}
    columns |= {f"moment {i + 1}" if moments > 1 else "moment": "optimizer" for i in range(moments)}
    fig, axes = canvas(8.6, 0.34 * ranks + 1.15, 1, len(SHARDED))
    for ax, (stage, cut) in zip(axes, SHARDED.items(), strict=True):
        for column, (name, state) in enumerate(columns.items()):
            for rank in range(ranks):
                _box(ax, 1.25 * column, -1.3 * rank, rank, ranks, state in cut)
            ax.text(1.25 * column + 0.5, 1.12, name, ha="left", va="bottom", size=8, rotation=40, color=INK)
        ax.set_xlim(-0.15, 1.25 * len(columns) + 0.65)
        ax.set_ylim(-1.3 * (ranks - 1) - 0.1, 3.3)
        bare(ax)
        ax.set_title(f"stage {stage}" if stage else "stage 0: plain data parallelism", size=10, color=INK)
    for rank in range(ranks):
        axes[0].text(-0.25, -1.3 * rank + 0.5, f"rank {rank}", ha="right", va="center", size=9, color=INK)
    return fig


def _box(ax: Axes, x: float, y: float, rank: int, ranks: int, cut: bool) -> None:
    from matplotlib.patches import Rectangle

    for piece in range(ranks):
        here = piece == rank or not cut
        colour = rank_colour(rank) if cut else GREY
        bottom, height = y + 1 - (piece + 1) / ranks, 1 / ranks
        ax.add_patch(Rectangle((x, bottom), 1, height, facecolor=colour if here else PAPER, edgecolor="none"))
    ax.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=INK, linewidth=0.9))


# ---- how many bytes --------------------------------------------------------------------------------------------------

PRECISIONS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"float32": (4, 4, 0), "bfloat16": (2, 2, 4), "bfloat16, gradients float32": (2, 4, 4)}
)
"""Bytes a parameter of weights and gradients, and of the float32 master copy that 16-bit weights need."""
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"SGD": 0, "SGD with momentum": 4, "AdamW": 8})
"""Bytes a parameter of what the optimizer remembers, in float32."""
CHIPS = (hardware.H100, hardware.H200, hardware.B200)
CHIP_STEP = 0.28  # how much higher the name of the next larger one stands, in bars

Measured = Mapping[tuple[str, str], Mapping[int, Mapping[int, float]]]
"""(precision, optimizer) -> stage -> ranks -> measured bytes for each parameter of the model."""


def held(stage: int, parameters: float, ranks: int, precision: str, optimizer: str) -> Held:
    """Bytes one rank keeps, by the names above.

    >>> held(1, 1000, 4, "bfloat16", "AdamW")
    Held(params=2000.0, grads=2000.0, optimizer=3000.0)
    """
    weight, grad, master = PRECISIONS[precision]
    return zero_memory(parameters, ranks, stage, weight, grad, master + OPTIMIZERS[optimizer])


def memory(parameters: float, ranks: int, precision: str, optimizer: str, measured: Measured | None = None) -> Figure:
    """Bytes of training state that a rank keeps: by stage over the number of ranks, and at `ranks` by what they are.

    Lines are predicted, points measured. On the right a model of so many parameters, and the memory of some chips.
    """
    points = (measured or {}).get((precision, optimizer), {})
    fig, (left, right) = canvas(9.0, 3.7, 1, 2, gridspec_kw={"width_ratios": [1, 1.15]})
    _over_ranks(left, points, ranks, precision, optimizer)
    _by_state(right, [held(stage, parameters, ranks, precision, optimizer) for stage in range(4)])
    kind = "measured" if points else "predicted"  # the points; lines are predicted in any case, as in `curves`
    left.set_title(f"{precision}, {optimizer} ({kind})", size=10, color=INK, loc="left")
    name = f"{parameters / 1e9:g} billion parameters on {ranks} rank{'s' if ranks > 1 else ''} (predicted)"
    right.set_title(name, size=10, color=INK, loc="left")
    return fig


def _over_ranks(
    ax: Axes, points: Mapping[int, Mapping[int, float]], ranks: int, precision: str, optimizer: str
) -> None:
    worlds = between(1, MOST_RANKS, by_ratio=True)  # also between whole numbers: a smooth curve
    ends: dict[float, list[str]] = {}
    for stage in range(4):
        colour, marker = SERIES[stage], MARKERS[stage]
        total = [held(stage, 1, n, precision, optimizer).total for n in worlds]  # pyright: ignore[reportArgumentType]
        ax.plot(worlds, total, "-", color=colour, lw=1.8)
        if stage in points:
            n, nbytes = zip(*points[stage].items(), strict=True)
            ax.plot(n, nbytes, marker, color=colour, mec=INK, mew=0.6, ms=6.5, zorder=3)
        ends.setdefault(total[-1], []).append(str(stage))
    for height, stages in ends.items():
        name = f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
        halo(ax.text(1.15 * MOST_RANKS, height, name, va="center", size=9, color=INK))
    ax.axvline(ranks, color=INK, lw=1, ls=":")
    ax.set_xscale("log")
    logarithmic(ax.xaxis, 1, MOST_RANKS)
    ax.set_xlim(0.85, 9 * MOST_RANKS)
    ax.set_ylim(bottom=-0.3)
    ax.grid(alpha=0.25)
    ax.set_xlabel("ranks")
    ax.set_ylabel("kept by one rank [bytes per parameter]")


def _by_state(ax: Axes, stages: Sequence[Held]) -> None:
    longest = max(stage.total for stage in stages)
    size, unit = scale_of(longest, "bytes")
    for i, stage in enumerate(stages):
        end = 0.0
        for field, (name, colour, hatch) in STATES.items():
            width = getattr(stage, field) / size
            label = name if i == 0 and width else None
            ax.barh(i, width, left=end, color=colour, hatch=hatch, edgecolor=INK, lw=0.6, height=0.62, label=label)
            end += width
        halo(ax.text(end + 0.01 * longest / size, i, quantity(stage.total, "bytes"), va="center", size=9, color=INK))
    chips = sorted((c for c in CHIPS if 0.02 * longest < c.memory_bytes < 1.15 * longest), key=lambda c: c.memory_bytes)
    for place, chip in enumerate(chips):
        x, y = chip.memory_bytes / size, -0.55 - CHIP_STEP * place  # one above the other: the lines may be close
        ax.plot((x, x), (len(stages) - 0.5, y), color=VERMILLION, lw=1.2, ls="--")
        halo(ax.text(x + 0.008 * longest / size, y, chip.name.split(" ")[0], va="center", size=8, color=INK))
    ax.set_yticks(range(len(stages)), [f"stage {i}" for i in range(len(stages))])
    ax.set_ylim(len(stages) - 0.5, -0.9 - CHIP_STEP * (len(CHIPS) - 1))
    ax.set_xlim(0, 1.25 * longest / size)
    ax.set_xlabel(f"kept by one rank [{unit}]")
    ax.legend(frameon=False, fontsize=8.5, loc="lower right")


def memory_explorer(measured: Measured | None = None) -> Explorer:
    """How much of the training state does one rank keep? measured: points for the predicted curves."""

    def draw(parameters: float, ranks: int, precision: str, optimizer: str) -> Figure:
        return memory(parameters * 1e9, ranks, precision, optimizer, measured)

    options = {
        "parameters [billion]": (0.1, 0.5, 1, 3, 7.5, 13, 30, 70, 175, 400, 1000),
        "ranks": (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        "precision": tuple(PRECISIONS),
        "optimizer": tuple(OPTIMIZERS),
    }
    start = {"parameters [billion]": 7.5, "ranks": 64, "precision": "bfloat16", "optimizer": "AdamW"}
    return Explorer(draw, options, start)
