"""Lab 05, before the session: `python labs/05_tensor/prelab.py`. About a minute on two CPU cores; needs no GPU.

It checks on this machine what the session relies on, so that no GPU minute is spent on finding it out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import minidist as md
from labs.shared.prelab import prelab, ranks_meet

CONFIG = md.GPTConfig(layers=2, dim=32, heads=4, vocab=256, seq=32)
TOKENS = 8 * CONFIG.seq


def main(arguments: list[str]) -> int:
    """Run the checks in order and stop at the first that fails; returns the exit status."""
    checks = {
        "ranks meet": ranks_meet,
        "gradients are those of one process": gradients_agree,
        "a layer sends what the formula says": bytes_agree,
    }
    return prelab(Path(__file__).parent, checks, __doc__, arguments)


def gradients_agree() -> str:
    model = md.GPT(CONFIG, seed=0).double()
    tokens, targets = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8).batch(0)
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    alone = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for ranks, sequence in ((2, False), (4, False), (4, True)):
        cut, _ = md.launch(one_backward, ranks=ranks, args=(CONFIG.layers, sequence))[0]
        worst = (cut - alone).abs().max().item()
        if not worst < 1e-12:
            return f"{ranks} ranks, sequence={sequence}: {worst:.1e} away from one process; float64 allows 1e-12"
    return ""


def bytes_agree() -> str:
    for ranks, sequence in ((2, False), (4, False), (4, True)):
        (_, one), (_, two) = (md.launch(one_backward, ranks=ranks, args=(n, sequence))[0] for n in (1, 2))
        ways = md.cost.tensor_parallel_layer(TOKENS, CONFIG.dim, ranks, element_nbytes=8, sequence=sequence)
        expected = sum(sum(way.values()) for way in ways.values())
        if two - one != expected:
            return f"{ranks} ranks, sequence={sequence}: a layer sent {two - one} bytes a rank, {expected} expected"
    return ""


def one_backward(world: md.Comm, layers: int, sequence: bool) -> tuple[torch.Tensor, float]:
    """The whole gradient of a batch of 8, as one vector, and the bytes that this rank sent for it."""
    config = md.GPTConfig(layers=layers, dim=CONFIG.dim, heads=CONFIG.heads, vocab=CONFIG.vocab, seq=CONFIG.seq)
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.tensor_parallel(md.GPT(config, seed=0).double(), mesh["tp"], sequence=sequence)
    tokens, targets = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8).batch(0)
    world.recorder.clear()
    md.token_loss(model(tokens), targets, mesh["dp"], tp=mesh["tp"]).backward()
    sent = world.recorder.bytes_sent()
    whole = md.full_grads(model).values()
    return torch.cat([grad.flatten() for grad in whole if grad is not None]), sent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
