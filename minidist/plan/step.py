"""One training step of data parallelism, predicted: which gradients are ready when, and what their averaging hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minidist.timeline import Span, Timeline


def buckets(gradient_nbytes: Sequence[float], bucket_nbytes: float) -> list[list[int]]:
    """Layers whose gradients travel together, in the order of the backward pass: from the last layer to the first.

    A bucket is closed before the layer that would make it larger than bucket_nbytes; a larger layer has one of its own.

    >>> buckets([10, 10, 10, 25, 10], bucket_nbytes=20)
    [[4], [3], [2, 1], [0]]
    """
    filled: list[list[int]] = []
    room = 0.0
    for layer in reversed(range(len(gradient_nbytes))):
        if not filled or gradient_nbytes[layer] > room:
            filled.append([])
            room = bucket_nbytes
        filled[-1].append(layer)
        room -= gradient_nbytes[layer]
    return filled


def data_parallel_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    gradient_nbytes: Sequence[float],
    all_reduce_s: Callable[[float], float],
    bucket_nbytes: float,
    overlap: bool = True,
    update_s: float = 0.0,
    ranks: int = 1,
) -> Timeline:
    """The predicted timeline of a step, the same on each of `ranks` equal ranks.

    forward_s, backward_s, gradient_nbytes: a value for each layer, from the first to the last. all_reduce_s: bytes of a
    bucket -> seconds. A bucket is averaged when its last gradient is ready and the bucket before it is done; without
    overlap none before the whole backward pass is.

    >>> step = data_parallel_step([1, 1], [2, 2], [10, 10], lambda nbytes: nbytes / 5, bucket_nbytes=10)
    >>> [(str(span.action), span.start, span.end) for span in step.lane(0, "comm")]
    [('bucket 0', 4.0, 6.0), ('bucket 1', 6.0, 8.0)]
    >>> data_parallel_step([1, 1], [2, 2], [10, 10], lambda nbytes: nbytes / 5, 10, overlap=False).makespan
    10.0
    """
    spans: list[Span] = []
    now = 0.0
    for layer, seconds in enumerate(forward_s):
        spans.append(Span(0, f"forward {layer}", now, now := now + seconds))
    ready = [0.0] * len(backward_s)
    for layer in reversed(range(len(backward_s))):
        spans.append(Span(0, f"backward {layer}", now, now := now + backward_s[layer]))
        ready[layer] = now
    free = 0.0 if overlap else now
    for i, layers in enumerate(buckets(gradient_nbytes, bucket_nbytes)):
        nbytes = sum(gradient_nbytes[layer] for layer in layers)
        start = max(free, *(ready[layer] for layer in layers))
        free = start + all_reduce_s(nbytes)
        spans.append(Span(0, f"bucket {i}", start, free, lane="comm", nbytes=int(nbytes)))
    now = max(now, free)
    spans.append(Span(0, "update", now, now + update_s))
    copies = [Span(r, s.action, s.start, s.end, s.lane, s.nbytes) for r in range(ranks) for s in spans]
    return Timeline(copies, ranks=ranks, predicted=True)
