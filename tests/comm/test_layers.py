"""name_layer: forward and backward of a layer as spans of the rank, paced where the run is."""

import time

import pytest
import torch
from torch import nn

import minidist as md
from minidist.comm.layers import name_layer

FORWARD_S, BACKWARD_S = 0.03, 0.06


def one_step(world, layers=2):
    """Spans of a forward and a backward pass, and when each layer's gradient was complete."""
    blocks = [nn.Linear(4, 4) for _ in range(layers)]
    ready = {}
    for i, block in enumerate(blocks):
        name_layer(f"{i}", block, world, forward_s=FORWARD_S, backward_s=BACKWARD_S)
        block.weight.register_post_accumulate_grad_hook(lambda _, i=i: ready.update({i: time.monotonic()}))
    x = torch.ones(2, 4, requires_grad=True)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    return world.recorder.timeline(), ready


def test_names_and_order_follow_the_passes():
    timeline, _ = md.launch(one_step, ranks=1)[0]
    assert [span.action for span in timeline.spans] == ["forward 0", "forward 1", "backward 1", "backward 0"]
    assert all(a.end <= b.start for a, b in zip(timeline.spans, timeline.spans[1:], strict=False))
    assert timeline.makespan < 2 * (FORWARD_S + BACKWARD_S)  # nothing sleeps in a run that isn't paced
    assert timeline.kind == "measured"


def test_paced_layers_take_their_time_and_gradients_come_at_its_end():
    timeline, ready = md.launch(one_step, ranks=1, pace=md.Cluster())[0]
    assert timeline.kind == "paced"
    for span in timeline.spans:
        modelled = FORWARD_S if span.action.startswith("forward") else BACKWARD_S
        assert span.seconds >= modelled
    for layer, at in ready.items():  # a bucket must not leave before the modelled computation is over
        (span,) = (span for span in timeline.spans if span.action == f"backward {layer}")
        assert at - span.start > 0.9 * BACKWARD_S


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_untouched(frozen):
    """The hooks only watch: same gradients with and without, also where a layer has nothing to train."""

    def gradients(named):
        def fn(world):
            torch.manual_seed(0)
            block, head = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
            block.weight.requires_grad_(not frozen)
            if named:
                name_layer("block", block, world)
            x = torch.arange(8.0, dtype=torch.float64).reshape(2, 4).requires_grad_()
            head(block(x)).sum().backward()
            return x.grad, block.bias.grad

        return md.launch(fn, ranks=1)[0]

    for with_names, without in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(with_names, without)
