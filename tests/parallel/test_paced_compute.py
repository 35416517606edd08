"""Paced runs: each block takes the time of its operations, and overlapped averaging hides behind it."""

import torch
from torch import nn

import minidist as md
from minidist.parallel.paced import blocks

# A block's forward pass takes 20 ms and its backward pass 40 ms; averaging its gradients takes 30 ms.
WIDTH, BLOCKS, TOKENS = 64, 5, 8
WEIGHTS = WIDTH * WIDTH
CLUSTER = md.Cluster(
    chips=2,
    chip=md.Chip(flops_per_s=2 * WEIGHTS * TOKENS / 0.020),
    inside=md.Link(bytes_per_s=WEIGHTS * 4 / 0.030),
)


def step(world, overlap):
    """The fastest of four recorded steps (a busy machine delays some), and the gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])
    replica = md.DataParallel(nn.ModuleDict({"layers": module}), world, bucket_mb=WEIGHTS * 4 / 1e6, overlap=overlap)
    md.pace_compute(replica.module, world, TOKENS)
    timelines = []
    for _ in range(4):
        replica.zero_grad()
        world.barrier()
        world.recorder.clear()
        module(torch.arange(TOKENS)).square().sum().backward()
        timelines.append(world.recorder.timeline())
    return min(timelines, key=lambda timeline: timeline.makespan), [p.grad.clone() for p in module.parameters()]


def both(world):
    return step(world, overlap=True), step(world, overlap=False)


def test_overlap_hides_communication_in_a_paced_run():
    for (overlapped, grads), (after, same) in md.launch(both, ranks=2, pace=CLUSTER):
        assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))
        took = {str(span.action): span.end - span.start for span in overlapped.spans if span.lane == "compute"}
        for k in range(1, BLOCKS + 1):
            assert 0.020 <= took[f"forward layers.{k}"] <= 0.040
            assert 0.040 <= took[f"backward layers.{k}"] <= 0.080
        assert overlapped.paced
        # 5 x 60 ms of computing. The last bucket cannot hide; before it there is always a backward pass to hide behind.
        assert overlapped.overlap > 0.6
        assert after.overlap < 0.1
        assert after.makespan - overlapped.makespan > 0.06


def test_blocks_are_the_parts_that_multiply():
    config = md.GPTConfig(layers=2, dim=32, heads=2)
    found = {name: weights for name, _, weights in blocks(md.GPT(config))}
    each = 4 * 32 * 32 + 3 * 32 * config.ffn
    assert found == {"blocks.0": each, "blocks.1": each, "head": 32 * config.vocab}
