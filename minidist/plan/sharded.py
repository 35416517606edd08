"""One training step of ZeRO's stage 3, predicted: what is gathered when, and what computing hides of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minidist.timeline import Span, Timeline


@dataclass
class Wire:
    """A link that carries one collective at a time, in the order in which they were asked for."""

    spans: list[Span] = field(default_factory=list)
    free: float = 0.0

    def send(self, name: str, nbytes: float, seconds: float, now: float) -> float:
        """When a collective asked for now is over."""
        start = max(now, self.free)
        self.free = start + seconds
        self.spans.append(Span(0, name, start, self.free, lane="comm", nbytes=int(nbytes)))
        return self.free


def sharded_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    parameter_nbytes: Sequence[float],
    gather_s: Callable[[float], float],
    reduce_s: Callable[[float], float],
    root_nbytes: float = 0.0,
    prefetch: bool = True,
    update_s: float = 0.0,
    ranks: int = 1,
) -> Timeline:
    """The predicted timeline of a step of stage 3, the same on each of `ranks` equal ranks.

    forward_s, backward_s, parameter_nbytes: a value for each layer, from the first to the last. root_nbytes: what
    belongs to no layer (embedding, last norm, head); it takes no time to compute and stays gathered through a pass.
    gather_s, reduce_s: bytes of a layer -> seconds of its all-gather and of its gradients' reduce-scatter.

    A layer begins when it is gathered and the one before it is done. With prefetch the next one is asked for when a
    layer's forward pass begins, and when half of its backward pass is over: before, memory is most in demand. Without,
    a layer is asked for when it is needed. Gradients leave when the next layer's backward pass begins.

    >>> def tenth(nbytes): return nbytes / 10
    >>> step = sharded_step([1, 1], [2, 2], [10, 10], tenth, tenth)
    >>> [(str(span.action), span.start, span.end) for span in step.lane(0, "comm")][:2]
    [('gather 0', 0.0, 1.0), ('gather 1', 1.0, 2.0)]
    >>> step.makespan, sharded_step([1, 1], [2, 2], [10, 10], tenth, tenth, prefetch=False).makespan
    (9.0, 11.0)
    """
    link, compute, now = Wire(), [], 0.0
    layers = range(len(forward_s))
    for name, order, seconds in (("forward", layers, forward_s), ("backward", layers[::-1], backward_s)):
        backward = name == "backward"
        arrived: dict[int, float] = {}

        def gather(layer: int, at: float, arrived: dict[int, float] = arrived) -> None:
            nbytes = parameter_nbytes[layer]
            arrived[layer] = link.send(f"gather {layer}", nbytes, gather_s(nbytes), at)

        if root_nbytes:
            root = link.send("gather root", root_nbytes, gather_s(root_nbytes), now)
            if prefetch and layers:
                gather(order[0], now)
            now = root
        for i, layer in enumerate(order):
            if layer not in arrived:
                gather(layer, now)
            now = max(now, arrived[layer])
            if backward and i:
                _reduce(link, order[i - 1], parameter_nbytes[order[i - 1]], reduce_s, now)
            if prefetch and i + 1 < len(order):
                gather(order[i + 1], now + seconds[layer] / 2 if backward else now)
            compute.append(Span(0, f"{name} {layer}", now, now := now + seconds[layer]))
    if layers:
        _reduce(link, 0, parameter_nbytes[0], reduce_s, now)
    if root_nbytes:
        _reduce(link, "root", root_nbytes, reduce_s, now)
    now = max(now, link.free)
    if update_s:
        compute.append(Span(0, "update", now, now + update_s))
    copies = [Span(r, s.action, s.start, s.end, s.lane, s.nbytes) for r in range(ranks) for s in compute + link.spans]
    return Timeline(copies, ranks=ranks, predicted=True)


def _reduce(link: Wire, layer: object, nbytes: float, reduce_s: Callable[[float], float], now: float) -> None:
    link.send(f"reduce {layer}", nbytes, reduce_s(nbytes), now)
