"""What actions take on this machine, read off a run, so that other schedules can be simulated with it."""

from collections.abc import Iterable
from statistics import median

from minidist.timeline import Timeline


def costs(timelines: Timeline | Iterable[Timeline]) -> dict[str, list[float]]:
    """Seconds of a forward pass, an input and a weight gradient at each stage: medians of a run of all ranks.

    timelines: of the ranks, and of several steps, if you like. What comes is what `simulate` takes:
    simulate(program, **costs(timelines)). Where the run has whole backward passes only, they are
    I, and W is 0; so simulate programs without a split from runs without, since both halves together take longer.

    Raises: ValueError for timelines that lack a stage, such as that of one rank alone, or all backward passes.

    >>> from minidist.schedule.library import build
    >>> from minidist.schedule.simulate import simulate
    >>> costs(simulate(build("zb_h1", ranks=2, microbatches=3), F=[3, 5], I=2, W=1))
    {'F': [3.0, 5.0], 'I': [2.0, 2.0], 'W': [1.0, 1.0]}
    """
    seconds: dict[tuple[int, str], list[float]] = {}
    for span in (span for each in _all(timelines) for span in each.spans):
        if hasattr(span.action, "microbatch"):
            seconds.setdefault((span.action.stage, span.action.kind), []).append(span.seconds)
    if not seconds:
        raise ValueError("there is no action of a pipeline in these timelines: take that of a `step`, or of `simulate`")
    stages = range(1 + max(stage for stage, _ in seconds))
    if lacking := [stage for stage in stages if (stage, "F") not in seconds]:
        raise ValueError(f"stage {lacking[0]} is not in these timelines: give those of all ranks")
    if not any(kind in "BI" for _, kind in seconds):
        raise ValueError("these timelines have forward passes only, as `evaluate` has: take those of a `step`")

    def middle(stage: int, *kinds: str) -> float:
        """Of the first kind that there is."""
        return median(next((seconds[stage, kind] for kind in kinds if (stage, kind) in seconds), [0.0]))

    first_of = {"F": ("F",), "I": ("I", "B"), "W": ("W",)}
    return {kind: [middle(stage, *kinds) for stage in stages] for kind, kinds in first_of.items()}


def _all(timelines: Timeline | Iterable[Timeline]) -> Iterable[Timeline]:
    return [timelines] if isinstance(timelines, Timeline) else timelines
