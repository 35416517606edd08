"""The lessons' explorers: each puts sliders on a figure, and is its first figure where there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from minidist.plan import cost
from minidist.plan.hardware import Link
from minidist.plan.step import data_parallel_step
from minidist.timeline import Span, Timeline
from minidist.viz.charts import curves
from minidist.viz.explore import Explorer
from minidist.viz.holdings import Held, ring_step
from minidist.viz.timelines import timelines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def arrival(work_s: Sequence[float], exchange_s: float = 0.02) -> Timeline:
    """Ranks that compute for `work_s` seconds each and then meet in one collective: predicted.

    >>> [(span.rank, round(span.seconds, 2)) for span in arrival([0.1, 0.4]).spans if span.lane == "comm"]
    [(0, 0.32), (1, 0.02)]
    """
    last = max(work_s)
    spans = [Span(rank, "work", 0.0, seconds) for rank, seconds in enumerate(work_s)]
    spans += [Span(rank, "all_reduce", seconds, last + exchange_s, lane="comm") for rank, seconds in enumerate(work_s)]
    return Timeline(spans, predicted=True)


def arrival_explorer(ranks: int = 4) -> Explorer:
    """When does a collective end, if the ranks come to it at different times?"""
    names = [f"rank {rank} works [ms]" for rank in range(ranks)]

    def draw(**work_ms: int) -> Figure:
        work_s = [ms / 1000 for ms in work_ms.values()]
        return timelines({"Everyone waits for the last": arrival(work_s)})

    options = {name: range(20, 401, 20) for name in names}
    return Explorer(draw, options, start=dict(zip(names, (60, 140, 220, 300, 100, 180, 260, 340), strict=False)))


def ring_explorer(recorded: Mapping[int, Sequence[Held]]) -> Explorer:
    """The ring step by step. recorded: number of ranks -> what they held before each step and at the end."""
    longest = max(len(states) for states in recorded.values())

    def draw(ranks: int, step: int) -> Figure:
        states = recorded[ranks]
        return ring_step(states, min(step, len(states) - 1))

    start = {"ranks": max(n for n in recorded if n <= 4)}
    return Explorer(draw, {"ranks": sorted(recorded), "step": range(longest)}, start=start, play="step")


def overlap_explorer(layers: int = 8) -> Explorer:
    """When does overlap hide the averaging of gradients, and what do buckets have to do with it?"""

    def draw(
        ranks: int, backward_of_a_layer: float, gradients_of_a_layer: float, link: float, alpha: float, bucket: float
    ) -> Figure:
        hop = Link(alpha_s=alpha / 1e3, bytes_per_s=link * 1e9)

        def all_reduce_s(nbytes: float) -> float:
            return cost.seconds("all_reduce", int(nbytes), ranks, hop)

        def step(overlap: bool) -> Timeline:
            second = backward_of_a_layer / 1e3
            return data_parallel_step(
                [second / 2] * layers,
                [second] * layers,
                [gradients_of_a_layer * 1e6] * layers,
                all_reduce_s,
                bucket_nbytes=bucket * 1e6,
                overlap=overlap,
                update_s=second / 2,
            )

        without, with_it = step(overlap=False), step(overlap=True)
        hidden = f"{with_it.overlap:.0%} of the communication hidden"
        return timelines(
            {
                f"without overlap: {without.makespan * 1e3:.0f} ms": without,
                f"with overlap: {with_it.makespan * 1e3:.0f} ms, {hidden}": with_it,
            }
        )

    options = {
        "ranks": (2, 4, 8, 16, 64, 256, 1024),
        "backward of a layer [ms]": (2, 5, 10, 20, 40),
        "gradients of a layer [MB]": (5, 10, 25, 50, 100, 200, 400),
        "link [GB/s]": (1, 2, 5, 10, 25, 50, 100, 400),
        "alpha [ms]": (0.001, 0.01, 0.1, 0.5, 1),
        "bucket [MB]": (1, 25, 50, 100, 200, 400, 1000, 4000),
    }
    start = {
        "ranks": 8,
        "backward of a layer [ms]": 10,
        "gradients of a layer [MB]": 50,
        "link [GB/s]": 10,
        "alpha [ms]": 0.01,
        "bucket [MB]": 100,
    }
    return Explorer(draw, options, start)


def cost_explorer() -> Explorer:
    """Which all-reduce is fastest for which size, on how many ranks, over which link?"""

    def draw(ranks: int, alpha: float, link: float) -> Figure:
        hop = Link(alpha_s=alpha / 1e6, bytes_per_s=link * 1e9)
        algorithms = {"ring": "ring", "tree": "tree", "halving-doubling": "halving_doubling"}

        def milliseconds(algorithm: str) -> Callable[[float], float]:
            return lambda size: cost.seconds("all_reduce", int(size), ranks, hop, algorithm) * 1e3

        predicted = {name: milliseconds(algorithm) for name, algorithm in algorithms.items()}
        title = f"All-reduce on {ranks} ranks, alpha {alpha} us, {link} GB/s"
        return curves((1e2, 1e10), {}, predicted, xlabel="size [bytes]", ylabel="time [ms]", title=title, log="xy")

    options = {
        "ranks": (2, 3, 4, 6, 8, 16, 64, 256, 1000, 1024),
        "alpha [us]": (1, 3, 10, 30, 100),
        "link [GB/s]": (1, 10, 50, 450),
    }
    return Explorer(draw, options, start={"ranks": 64, "alpha [us]": 10, "link [GB/s]": 50})
