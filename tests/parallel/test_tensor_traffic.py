"""The recorder counts what `md.cost.tensor_parallel_layer` says, and weight gradients are computed meanwhile."""

from collections import Counter
from unittest import mock

import pytest
import torch

import minidist as md
from minidist.sharded import entry

B, S = 3, 5  # 15 tokens: no number of ranks here divides them


def config(layers, **options):
    return md.GPTConfig(layers=layers, dim=32, heads=4, seq=8, vocab=64, **options)


def bytes_sent(world, layers, sequence, plan=None, **options):
    """{direction: {what: bytes this rank sent}} of one step, and {what: calls}."""
    shape = config(layers, **options)
    module = md.tensor_parallel(md.GPT(shape), world, plan, sequence=sequence)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    found, calls = {}, Counter()
    for way in ("forward", "backward"):
        world.recorder.clear()
        if way == "forward":
            out = module(tokens)
        else:
            out.sum().backward()
        sent = Counter()
        for call in world.recorder.calls:
            sent[call.label or call.op] += call.sent
            calls[way, call.label or call.op] += 1
        found[way] = dict(sent)
    return found, calls


def one_layer(world, sequence, **options):
    """What a second layer adds to the first: bytes and calls."""
    (one, few), (two, many) = (bytes_sent(world, layers, sequence, **options) for layers in (1, 2))
    added = {way: {what: two[way][what] - one[way].get(what, 0) for what in two[way]} for way in two}
    return added, many - few


def order_of_backward(world):
    """When the collective of a region's entry begins and ends, and when its weights' gradients are computed."""
    events = []
    start, grads = entry.Entry.start_sum, entry._weight_grads

    def start_sum(each, grad):
        handle = start(each, grad)
        events.append("collective started")
        wait = handle.wait
        handle.wait = lambda: (events.append("waited for"), wait())[1]
        return handle

    def weight_grads(*args):
        events.append("weight gradients")
        return grads(*args)

    with (
        mock.patch.object(entry.Entry, "start_sum", start_sum),
        mock.patch.object(entry, "_weight_grads", weight_grads),
    ):
        bytes_sent(world, 1, sequence=False)
    return events


def everything(world):
    flat = {name: role for name, role in md.gpt_plan(config(1)).items() if role != md.roles.Enter()}
    return {
        "plain": one_layer(world, False),
        "sequence": one_layer(world, True),
        "repeated": one_layer(world, False, kv_heads=1),
        "fault: layer by layer": one_layer(world, False, plan=flat),
        "order": order_of_backward(world),
        "spans": {span.action for span in world.recorder.timeline().spans},
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_recorded_bytes_are_those_of_the_formula(ranks):
    predicted = {
        sequence: md.cost.tensor_parallel_layer(B * S, 32, ranks, sequence=sequence) for sequence in (False, True)
    }
    for found in md.launch(everything, ranks=ranks):
        added, calls = found["plain"]
        assert added == predicted[False]
        assert calls == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
        added, calls = found["sequence"]
        assert added == predicted[True]
        ops = ("all_gather", "reduce_scatter")
        assert calls == {
            **{(way, op): 2 for way in ("forward", "backward") for op in ops},
            ("backward", "regather"): 2,
            ("backward", "norm gradients"): 2,
        }
        forward = predicted[True]["forward"]
        assert sum(forward.values()) == predicted[False]["forward"]["all_reduce"]
        assert found["order"] == ["collective started", "weight gradients", "waited for"] * 3
        if ranks > 1:
            shared = 2 * md.cost.bytes_sent("all_reduce", 8 * 32 * 4, ranks)  # k and v: one head of 8, [8, 32]
            assert found["repeated"][0]["backward"] == {**predicted[False]["backward"], "shared heads": shared}
            assert found["fault: layer by layer"][1]["backward", "all_reduce"] == 5
            assert found["fault: layer by layer"][0] != predicted[False]
