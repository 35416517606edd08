"""Lab 03, before the session: `python labs/03_scaling/prelab.py`. About a minute on two CPU cores; needs no GPU.

It checks on this machine what the session relies on, so that no GPU minute is spent on finding it out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import minidist as md
from labs.shared.prelab import prelab, ranks_meet

CONFIG = md.GPTConfig(layers=2, dim=32, heads=2, vocab=256, seq=32)


def main(arguments: list[str]) -> int:
    """Run the checks in order and stop at the first that fails; returns the exit status."""
    checks = {
        "ranks meet": ranks_meet,
        "averaged gradients are those of one process": gradients_agree,
        "bytes sent are 2 (n-1)/n of the gradient": bytes_agree,
    }
    return prelab(Path(__file__).parent, checks, __doc__, arguments)


def gradients_agree() -> str:
    alone = gradients(md.launch(one_backward, ranks=1, args=("overlapped",)))
    for mechanism in ("naive", "bucketed", "overlapped"):
        shared = gradients(md.launch(one_backward, ranks=2, args=(mechanism,)))
        worst = (shared - alone).abs().max().item()
        if not worst < 1e-12:
            return f"{mechanism} on 2 ranks is {worst:.1e} away from one process; float64 allows 1e-12"
    return ""


def bytes_agree() -> str:
    for ranks in (2, 4):
        (gradient, sent), *_ = md.launch(one_backward, ranks=ranks, args=("overlapped",))
        optimal = 2 * (ranks - 1) / ranks * gradient.numel() * gradient.element_size()
        if not abs(sent - optimal) <= 0.01 * optimal:
            return f"{ranks} ranks: {sent} bytes sent per rank, {optimal:.0f} expected"
    return ""


def one_backward(world: md.Comm, mechanism: str) -> tuple[torch.Tensor, float]:
    """The gradient of a global batch of 8, as one vector, and the bytes that averaging it sent from this rank."""
    model = md.GPT(CONFIG, seed=0).double()
    replica = model if mechanism == "naive" else md.DataParallel(model, world, overlap=mechanism == "overlapped")
    tokens, targets = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8).batch(0, rank=world.rank, ranks=world.size)
    world.recorder.clear()
    cross_entropy(replica(tokens).flatten(0, 1), targets.flatten()).backward()
    if mechanism == "naive":
        md.average_gradients(model, world)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, world.recorder.bytes_sent()


def gradients(results: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    return results[0][0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
