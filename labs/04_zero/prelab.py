"""Lab 04, before the session: `python labs/04_zero/prelab.py`. About a minute on two CPU cores; needs no GPU.

It checks on this machine what the session relies on, so that no GPU minute is spent on finding it out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from measure import STATES
from torch.nn.functional import cross_entropy

import minidist as md
from labs.shared.prelab import prelab

CONFIG = md.GPTConfig(layers=2, dim=32, heads=2, vocab=256, seq=32)
RANKS, STEPS = 2, 3


def main(arguments: list[str]) -> int:
    """Run the checks in order and stop at the first that fails; returns the exit status."""
    checks = {
        "every stage trains like one process": stages_agree,
        "a rank holds what the formula says": memory_agrees,
        "bytes sent are 2, 2, 2 and 3 times (n-1)/n of the parameters": bytes_agree,
    }
    return prelab(Path(__file__).parent, checks, __doc__, arguments)


def stages_agree() -> str:
    alone = weights(md.launch(train, ranks=1, args=(0,))[0][0])
    for stage in range(4):
        worst = (weights(md.launch(train, ranks=RANKS, args=(stage,))[0][0]) - alone).abs().max().item()
        if not worst < 1e-10:
            return f"stage {stage} on {RANKS} ranks is {worst:.1e} away from one process; float64 allows 1e-10"
    return ""


def memory_agrees() -> str:
    for stage in range(4):
        state, held, _ = md.launch(train, ranks=RANKS, args=(stage,))[0]
        expected = md.zero_memory(len(weights(state)), RANKS, stage, 8, 8, 8)
        for kind in STATES:
            if not abs(held[kind] - getattr(expected, kind)) <= 0.02 * getattr(expected, kind):
                return f"stage {stage}: {held[kind]} bytes of {kind}, {getattr(expected, kind):.0f} expected"
    return ""


def bytes_agree() -> str:
    for stage in range(4):
        state, _, sent = md.launch(train, ranks=RANKS, args=(stage,))[0]
        expected = 8 * STEPS * md.zero_traffic(len(weights(state)), RANKS, stage)
        if not abs(sent - expected) <= 0.01 * expected:
            return f"stage {stage}: {sent} bytes sent by a rank in {STEPS} steps, {expected:.0f} expected"
    return ""


def train(world: md.Comm, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    """Some steps of SGD with momentum in float64: the whole state dict, bytes held, and bytes sent."""
    model = md.GPT(CONFIG, seed=0).double()
    z = md.Zero(model, world, stage, lambda groups: md.SGD(groups, lr=0.1, momentum=0.9))
    text = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8)
    world.recorder.clear()
    for step in range(STEPS):
        tokens, targets = text.batch(step, rank=world.rank, ranks=world.size)
        z.zero_grad()
        cross_entropy(z(tokens).flatten(0, 1), targets.flatten()).backward()
        z.step()
    sent = world.recorder.bytes_sent()
    return z.full_state_dict(), z.memory(), sent


def weights(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """All parameters of a state dict in a row; the head is the embedding and counts once."""
    return torch.cat([value.flatten() for name, value in state.items() if name != "head.weight"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
