"""What actions take on this machine, read off a run, so that other schedules can be simulated with it."""

from statistics import median

from minidist.timeline import Timeline


def costs(timeline: Timeline) -> dict[str, list[float]]:
    """Seconds of a forward pass, an input and a weight gradient at each stage: the medians of a run of all its ranks.

    What `simulate` takes: simulate(program, **costs(timeline)). Where the run has whole backward passes only, they are
    I, and W is 0; so simulate programs without a split from runs without, since both halves together take longer.

    Raises: ValueError for a timeline that lacks a stage, such as that of one rank alone.

    >>> from minidist.schedule.library import build
    >>> from minidist.schedule.simulate import simulate
    >>> costs(simulate(build("zb_h1", ranks=2, microbatches=3), F=[3, 5], I=2, W=1))
    {'F': [3.0, 5.0], 'I': [2.0, 2.0], 'W': [1.0, 1.0]}
    """
    seconds: dict[tuple[int, str], list[float]] = {}
    for span in timeline.spans:
        if hasattr(span.action, "microbatch"):
            seconds.setdefault((span.action.stage, span.action.kind), []).append(span.seconds)
    if not seconds:
        raise ValueError("there is no action of a pipeline in this timeline: take that of a `step`, or of `simulate`")
    stages = range(1 + max(stage for stage, _ in seconds))
    if lacking := [stage for stage in stages if (stage, "F") not in seconds]:
        raise ValueError(f"stage {lacking[0]} is not in this timeline: merge those of all ranks")
    found = {kind: [median(seconds.get((stage, kind), [0.0])) for stage in stages] for kind in "FBIW"}
    found["I"] = [halves or whole for halves, whole in zip(found["I"], found["B"], strict=True)]
    return {kind: found[kind] for kind in "FIW"}
