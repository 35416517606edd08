"""What a layer of tensor parallelism takes on a cluster: computing, and the sums that it waits for, link by link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.plan import cost, hardware
from minidist.plan.hardware import Chip, Link
from minidist.viz.explore import Explorer
from minidist.viz.style import BLUE, GREY, INK, VERMILLION, canvas, quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMS = 4  # of a layer: attention and feed-forward, forward and backward
PARTS = (
    ("computing", BLUE, None),
    ("waiting for sums", VERMILLION, "////"),
    ("this computer's own time", GREY, None),
)


def layer_seconds(
    link: Link, ranks: int, tokens: int, width: int, chip: Chip, share_of_peak: float, nbytes: int = 2
) -> tuple[float, float]:
    """(computing, sums) of one layer on one rank, forward and backward, if every hop of the ring is this link.

    The layer has 12 D^2 weights, two operations for each with a token and twice that going back; attention's scores are
    left out. share_of_peak: of what the chip can do while it computes. nbytes: of a number.

    >>> seconds = layer_seconds(Link(0, 50e9), 8, 8192, 8192, Chip(flops_per_s=1e15), share_of_peak=0.5)
    >>> [round(each * 1e3, 1) for each in seconds]
    [9.9, 18.8]
    """
    flops = 3 * 2 * 12 * width**2 * tokens / ranks
    payload = tokens * width * nbytes
    return chip.seconds(flops) / share_of_peak, SUMS * cost.seconds("all_reduce", payload, ranks, link)


def layer_times(times: Mapping[str, Sequence[float]], title: str = "", paced: bool | None = None) -> Figure:
    """A bar for each name: computing, then what the sums take, then what the computer that ran it needed itself.

    times: name -> seconds of each, of the first two at least. paced: whether they come from a paced run; None:
    predicted.
    """
    fig, (ax,) = canvas(8.4, 0.5 * len(times) + 1.35)
    longest = max(map(sum, times.values())) * 1e3
    bar: dict[str, Any] = {"edgecolor": INK, "lw": 0.6, "height": 0.62}
    for y, parts in enumerate(times.values()):
        left = 0.0
        for seconds, (_, colour, hatch) in zip(parts, PARTS, strict=False):
            ax.barh(y, seconds * 1e3, left=left, color=colour, hatch=hatch, **bar)
            left += seconds * 1e3
        text = quantity(sum(parts), "s") + (f", {parts[1] / sum(parts):.0%} in sums" if parts[1] else "")
        ax.text(left + 0.012 * longest, y, text, va="center", size=9, color=INK)
    for name, colour, hatch in PARTS[: max(map(len, times.values()))]:
        ax.barh([0], [0], color=colour, hatch=hatch, label=name, **bar)
    ax.set_yticks(range(len(times)), list(times), size=9)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.32 * longest)
    ax.set_xlabel("time [ms]")
    kind = "predicted" if paced is None else "paced" if paced else "measured"
    ax.set_title(f"{title} ({kind})".strip(), size=11, color=INK, loc="left")
    fig.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return fig


def links(
    ranks: int = 8, tokens: int = 8192, width: int = 8192, chip: Chip = hardware.H100, share_of_peak: float = 0.5
) -> Figure:
    """One layer in bfloat16 over each of `hardware.LINKS`, and on a chip alone."""
    times = {"one chip, nothing sent": layer_seconds(Link(), 1, tokens, width, chip, share_of_peak)}
    for name, link in hardware.LINKS.items():
        rate = f"{link.bytes_per_s / 1e9:g} GB/s"
        times[f"{name}, {rate}"] = layer_seconds(link, ranks, tokens, width, chip, share_of_peak)
    return layer_times(times, f"A layer of width {width:,}, {tokens:,} tokens, on {ranks} x {chip.name}")


def links_explorer() -> Explorer:
    """Over which links does it pay to cut a layer, and over how many ranks?"""
    chips = {chip.name: chip for chip in (hardware.A100, hardware.H100, hardware.B200)}

    def draw(ranks: int, tokens: int, width: int, chip: str, share_of_peak: float) -> Figure:
        return links(ranks, tokens, width, chips[chip], share_of_peak)

    options = {
        "ranks": (2, 4, 8, 16, 32, 64),
        "tokens": (512, 2048, 8192, 32768),
        "width [numbers]": (1024, 2048, 4096, 8192, 16384),
        "chip": tuple(chips),
        "share of peak": (0.25, 0.5, 0.75, 1.0),
    }
    start = {"ranks": 8, "tokens": 8192, "width [numbers]": 8192, "chip": hardware.H100.name, "share of peak": 0.5}
    return Explorer(draw, options, start)
