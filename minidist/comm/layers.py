"""Which layer a rank is computing: forward and backward of a module as named spans, paced where the run is."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from torch import nn

from minidist.comm.comm import Comm


def name_layer(
    name: str, layer: nn.Module, comm: Comm, forward_s: float | None = None, backward_s: float | None = None
) -> None:
    """Record every forward and backward pass of `layer` as `forward NAME` and `backward NAME` of this rank.

    forward_s, backward_s: what they take on the modelled cluster; in a run that isn't paced they take what they take.
    The layer's input must require a gradient, or autograd would not say when its backward pass ends.
    """
    spans, real_s = ExitStack(), 0.0

    def begin(action: str, seconds: float | None) -> None:
        spans.enter_context(comm.compute(f"{action} {name}", seconds=seconds))

    def begin_backward(*_: Any) -> None:
        begin("backward", backward_s)
        if comm.pace is not None and backward_s is not None:
            # The layer's gradients leave while it is still in its backward pass. On the modelled cluster that is near
            # the end of backward_s, so sleep before computing, and leave what computing took the last time.
            time.sleep(max(0.0, backward_s - real_s))
        nonlocal started
        started = time.monotonic()

    def end_backward(*_: Any) -> None:
        nonlocal real_s
        real_s = time.monotonic() - started
        spans.close()

    started = 0.0
    layer.register_forward_pre_hook(lambda *_: begin("forward", forward_s))
    layer.register_forward_hook(lambda *_: spans.close())
    layer.register_full_backward_pre_hook(begin_backward)
    layer.register_full_backward_hook(end_backward)
