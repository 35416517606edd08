"""Lab 06, before the session: `python labs/06_pipeline/prelab.py`. About a minute on two CPU cores; needs no GPU.

It checks on this machine what the session relies on, so that no GPU minute is spent on finding it out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from settings import SCHEDULES, STAGES_PER_RANK
from torch import Tensor
from torch.nn.functional import cross_entropy

import minidist as md
from labs.shared.prelab import prelab, ranks_meet

CONFIG = md.GPTConfig(layers=4, dim=16, heads=2, vocab=256, seq=16, tie=False)
RANKS, MICROBATCHES, BATCH = 2, 6, 12


def main(arguments: list[str]) -> int:
    """Run the checks in order and stop at the first that fails; returns the exit status."""
    checks = {
        "ranks meet": ranks_meet,
        "gradients of every schedule are those of one process": gradients_agree,
        "1F1B keeps fewer activations than GPipe, in as many bytes as the simulator says": memory_agrees,
    }
    return prelab(Path(__file__).parent, checks, __doc__, arguments)


def gradients_agree() -> str:
    model = md.GPT(CONFIG, seed=0).double()
    tokens, targets = batch()
    mean_loss(model(tokens), targets).backward()
    alone = {name: p.grad for name, p in model.named_parameters()}
    for schedule in SCHEDULES:
        found: dict[str, Tensor] = {}
        for grads, _ in md.launch(one_step, ranks=RANKS, args=(schedule,)):
            found |= grads
        worst = max((found[name] - grad).abs().max().item() for name, grad in alone.items() if grad is not None)
        if not worst < 1e-12:
            return f"{schedule} on {RANKS} ranks is {worst:.1e} away from one process; float64 allows 1e-12"
    return ""


def memory_agrees() -> str:
    """What the first rank holds more in GPipe is so many micro-batches more."""
    peaks, counts = {}, {}
    for schedule in ("gpipe", "1f1b"):
        peaks[schedule] = md.launch(one_step, ranks=RANKS, args=(schedule,))[0][1]
        counts[schedule] = md.schedule.simulate(program(schedule)).peak_in_flight[0]
    each = md.launch(one_step, ranks=RANKS, args=("gpipe", MICROBATCHES - 1))[0][1]
    one = peaks["gpipe"] - each  # what GPipe's last micro-batch adds
    expected = (counts["gpipe"] - counts["1f1b"]) * one
    more = peaks["gpipe"] - peaks["1f1b"]
    if not abs(more - expected) <= 0.1 * expected:
        return f"GPipe holds {more} bytes more than 1F1B on rank 0, {expected} expected"
    return ""


def program(schedule: str, microbatches: int = MICROBATCHES) -> md.schedule.Program:
    return md.schedule.build(schedule, RANKS, microbatches, STAGES_PER_RANK.get(schedule, 1))


def one_step(world: md.Comm, schedule: str, microbatches: int = MICROBATCHES) -> tuple[dict[str, Tensor], int]:
    """This rank's gradients of a batch, float64, and the most bytes that its tensors held meanwhile."""
    order = program(schedule, microbatches)
    parts = md.split_stages(md.GPT(CONFIG, seed=0).double(), order.stages)
    mine = [parts[number] for number in order.stages_of(world.rank)]
    pipeline = md.PipelineParallel(mine, order, world, mean_loss)
    tokens, targets = (each[: BATCH // MICROBATCHES * microbatches] for each in batch())
    for parameter in (p for stage in mine for p in stage.parameters()):
        parameter.grad = torch.zeros_like(parameter)  # so that it is there at every peak
    with md.PeakMemory(t for stage in mine for p in stage.parameters() for t in (p, p.grad) if t is not None) as peak:
        pipeline.step(tokens, targets)
    return {name: p.grad for stage in mine for name, p in stage.named_parameters() if p.grad is not None}, peak.nbytes


def batch() -> tuple[Tensor, Tensor]:
    return md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=BATCH).batch(0)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
