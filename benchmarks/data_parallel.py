"""A training step of data parallelism: ours, one row a mechanism, against torch's DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from benchmarks.alternate import Step, Times, alternate, in_worlds
from benchmarks.row import Row, compare

BAR = 1.02


@dataclass(frozen=True)
class Training:
    """What is trained: the model of every comparison, on the global batch that all ranks share."""

    config: md.GPTConfig
    batch: int
    rounds: int


FULL = Training(md.GPTConfig(layers=4, dim=256, heads=4, vocab=256, seq=128), batch=16, rounds=50)
QUICK = Training(md.GPTConfig(layers=1, dim=16, heads=2, vocab=256, seq=16), batch=4, rounds=4)

WHAT = {
    "naive": "one all-reduce a parameter after the backward pass (md.average_gradients)",
    "bucketed": "one all-reduce a bucket after the backward pass (md.DataParallel(overlap=False))",
    "overlapped": "one all-reduce a bucket as soon as it is full, during the backward pass (md.DataParallel)",
    "overlapped vs DDP with views": "md.DataParallel against DDP(gradient_as_bucket_view=True, static_graph=True)",
    "all ours": "md.DataParallel and md.AdamW against DDP and torch.optim.AdamW",
    "one process": "md.DataParallel on all ranks against one process with a thread a core, same global batch",
}


def rows(quick: bool) -> Iterator[Row]:
    """Rows for 2 and 4 ranks."""
    training = QUICK if quick else FULL
    for ranks in (2,) if quick else (2, 4):
        seconds = in_worlds(measure, ranks, training, rounds=training.rounds)
        name = f"data_parallel/{ranks} ranks/"
        for mechanism in ("naive", "bucketed", "overlapped"):
            judged = mechanism == "overlapped"
            yield compare(name + mechanism, seconds[mechanism], seconds["ddp"], BAR, WHAT[mechanism], judged)
        for row, theirs, bar in (
            ("overlapped vs DDP with views", "ddp views", BAR),
            ("one process", "one process", 1.0),
        ):
            yield compare(name + row, seconds["overlapped"], seconds[theirs], bar, WHAT[row], judged=False)
        yield compare(name + "all ours", seconds["all ours"], seconds["ddp"], BAR, WHAT["all ours"], judged=False)


def measure(world: md.Comm, training: Training, rounds: int) -> Times:
    """Seconds of a step of each contender, all in the ranks of this world, each with its own copy of the model."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {
        "ddp": trainer(training, world, DistributedDataParallel),
        "naive": naive_trainer(training, world),
        "bucketed": trainer(training, world, lambda model: md.DataParallel(model, world, overlap=False)),
        "overlapped": trainer(training, world, lambda model: md.DataParallel(model, world)),
        "all ours": trainer(training, world, lambda model: md.DataParallel(model, world), md.AdamW),
        "ddp views": trainer(
            training,
            world,
            lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True),
        ),
        "one process": one_process_trainer(training, world),
    }
    return alternate(steps, world, rounds)


def trainer(
    training: Training,
    world: md.Comm,
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Step:
    """One step of this rank's share: forward, backward (which averages the gradients), AdamW."""
    replica = wrap(md.GPT(training.config, seed=0))
    return stepper(replica, batches(training, world.rank, world.size), optimizer)


def naive_trainer(training: Training, world: md.Comm) -> Step:
    model = md.GPT(training.config, seed=0)
    data = batches(training, world.rank, world.size)
    return stepper(model, data, torch.optim.AdamW, lambda: md.average_gradients(model, world))


def one_process_trainer(training: Training, world: md.Comm) -> Step:
    """Rank 0 trains on the whole batch with all cores; the others go straight to the next barrier."""
    if world.rank != 0:
        return lambda: None
    step = stepper(md.GPT(training.config, seed=0), batches(training, 0, 1), torch.optim.AdamW)

    def with_all_cores() -> None:
        torch.set_num_threads(cores())
        step()
        torch.set_num_threads(1)

    return with_all_cores


def stepper(
    model: torch.nn.Module,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    kind: Callable[..., torch.optim.Optimizer],
    synchronize: Callable[[], object] = lambda: None,
) -> Step:
    optimizer = kind(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens, targets = next(data)
        optimizer.zero_grad()
        logits = model(tokens)
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        synchronize()
        optimizer.step()

    return step


def batches(
    training: Training, rank: int, ranks: int, distinct: int = 8
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rank's share of the global batches, read beforehand and repeated for ever: reading is not timed."""
    text = md.stdlib_tokens(seed=0, seq=training.config.seq, batch=training.batch)
    ready = [text.batch(step, rank=rank, ranks=ranks) for step in range(distinct)]
    while True:
        yield from ready


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
