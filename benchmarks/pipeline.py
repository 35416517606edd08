"""A step of pipeline parallelism: ours against torch.distributed.pipelining's own runtime, schedule by schedule."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

import minidist as md
from benchmarks.alternate import Step, Times, alternate, in_worlds
from benchmarks.row import Row, compare

BAR = 1.0
SIMULATE_LIMIT_S = 4.0


@dataclass(frozen=True)
class Pipelining:
    """What is trained: a batch of `batch` sequences in so many micro-batches; interleaved has two stages a rank."""

    config: md.GPTConfig
    batch: int
    microbatches: int
    rounds: int


LAPTOP = md.GPTConfig(layers=8, dim=128, heads=4, vocab=256, seq=64, tie=False)
TINY = md.GPTConfig(layers=4, dim=16, heads=2, vocab=256, seq=16, tie=False)
FULL = Pipelining(LAPTOP, batch=32, microbatches=8, rounds=40)
QUICK = Pipelining(TINY, batch=4, microbatches=4, rounds=4)

SCHEDULES = {"gpipe": (1, ScheduleGPipe), "1f1b": (1, Schedule1F1B), "interleaved": (2, ScheduleInterleaved1F1B)}
"""{name: (stages a rank, torch's schedule)}."""


def rows(quick: bool) -> Iterator[Row]:
    """Rows for 4 ranks; and how long the simulator takes."""
    ranks, pipelining = (2, QUICK) if quick else (4, FULL)
    seconds = in_worlds(measure, ranks, pipelining, rounds=pipelining.rounds)
    name = f"pipeline/{ranks} ranks/"
    for schedule, (_, theirs) in SCHEDULES.items():
        what = f"md.PipelineParallel with {schedule} against {theirs.__name__}; forward and backward, same stages"
        yield compare(name + schedule, seconds[schedule], seconds["torch " + schedule], BAR, what)
    what = "md.PipelineParallel with zb_h1, which splits every backward pass, against 1f1b, which does not"
    yield compare(name + "zb_h1 vs 1f1b", seconds["zb_h1"], seconds["1f1b"], BAR, what, judged=False)
    yield simulating(quick)


def measure(world: md.Comm, pipelining: Pipelining, rounds: int) -> Times:
    """Seconds of a step of each contender, all in the ranks of this world, each with its own copy of its stages.

    Raises: AssertionError unless ours and torch's find the same gradients and the same loss.
    """
    torch.set_num_threads(1)
    steps: dict[str, Step] = {"zb_h1": our_trainer("zb_h1", 1, pipelining, world)[0]}
    for schedule, (stages_per_rank, kind) in SCHEDULES.items():
        ours, our_stages = our_trainer(schedule, stages_per_rank, pipelining, world)
        theirs, their_stages = their_trainer(kind, stages_per_rank, pipelining, world)
        agree(ours, our_stages, theirs, their_stages)
        steps |= {schedule: ours, "torch " + schedule: theirs}
    return alternate(steps, world, rounds)


def agree(ours: Callable, our_stages: list[nn.Module], theirs: Callable, their_stages: list[nn.Module]) -> None:
    """One step of each; what this rank found has to be the same but for rounding."""
    our_loss, their_loss = ours(), theirs()
    if their_loss is not None:
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-5, atol=0)
    for mine, other in zip(our_stages, their_stages, strict=True):
        for (name, p), q in zip(mine.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def our_trainer(
    schedule: str, stages_per_rank: int, pipelining: Pipelining, world: md.Comm
) -> tuple[Callable[[], float], list[nn.Module]]:
    """A step, which returns the loss, and this rank's stages."""
    program = md.schedule.build(schedule, world.size, pipelining.microbatches, stages_per_rank)
    stages = md.split_stages(md.GPT(pipelining.config, seed=0), program.stages)
    mine: list[nn.Module] = [stages[s] for s in program.stages_of(world.rank)]
    pipeline = md.PipelineParallel(mine, program, world, mean_loss)
    tokens, targets = batch(pipelining)

    def step() -> float:
        forget(mine)
        return pipeline.step(tokens, targets)

    return step, mine


def their_trainer(
    kind: Callable, stages_per_rank: int, pipelining: Pipelining, world: md.Comm
) -> tuple[Callable[[], float | None], list[nn.Module]]:
    """The same, the loss on the last rank only. Shapes are given at construction, and outputs are not gathered."""
    count = world.size * stages_per_rank
    parts = md.split_stages(md.GPT(pipelining.config, seed=0), count)
    mine: list[nn.Module] = [parts[s] for s in range(world.rank, count, world.size)]
    stages = [static_stage(parts[s], s, count, pipelining) for s in range(world.rank, count, world.size)]
    schedule = kind(stages if stages_per_rank > 1 else stages[0], pipelining.microbatches, loss_fn=mean_loss)
    tokens, targets = batch(pipelining)
    first, last = world.rank == 0, world.rank == world.size - 1

    def step() -> float | None:
        forget(mine)
        losses: list[torch.Tensor] = []
        arguments = (tokens,) if first else ()
        answers = {"target": targets, "losses": losses} if last else {}
        schedule.step(*arguments, **answers, return_outputs=False)
        return torch.stack(losses).mean().item() if last else None

    return step, mine


def static_stage(module: nn.Module, number: int, count: int, pipelining: Pipelining) -> PipelineStage:
    """torch's stage, told beforehand what comes in and what goes out."""
    config, sequences = pipelining.config, pipelining.batch // pipelining.microbatches
    tokens = torch.zeros(sequences, config.seq, dtype=torch.int64)
    hidden = torch.zeros(sequences, config.seq, config.dim, requires_grad=True)
    logits = torch.zeros(sequences, config.seq, config.vocab, requires_grad=True)
    inputs, outputs = tokens if number == 0 else hidden, logits if number == count - 1 else hidden
    return PipelineStage(module, number, count, torch.device("cpu"), input_args=inputs, output_args=outputs)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(pipelining: Pipelining) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, read beforehand: [batch, seq] each."""
    return md.stdlib_tokens(seed=0, seq=pipelining.config.seq, batch=pipelining.batch).batch(0)


def forget(stages: list[nn.Module]) -> None:
    for stage in stages:
        stage.zero_grad()


# ---- the simulator ---------------------------------------------------------------------------------------------------


def simulating(quick: bool) -> Row:
    """Seconds to simulate a large interleaved program, against the limit."""
    ranks, microbatches, stages_per_rank, rounds = (8, 16, 2, 2) if quick else (64, 512, 4, 5)
    program = md.schedule.build("interleaved", ranks, microbatches, stages_per_rank)
    taken = []
    gc.collect()
    gc.disable()  # as in timeit
    try:
        for _ in range(rounds):
            start = time.monotonic()
            md.schedule.simulate(program)
            taken.append(time.monotonic() - start)
    finally:
        gc.enable()
    what = f"md.schedule.simulate: P={ranks}, M={microbatches}, V={stages_per_rank}, against {SIMULATE_LIMIT_S:g} s"
    return compare("pipeline/simulate/limit", taken, [SIMULATE_LIMIT_S] * rounds, 1.0, what)
