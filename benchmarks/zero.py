"""A training step of ZeRO: stage 3 against torch's fully_shard, 1 and 2 against DDP with ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from benchmarks.alternate import Step, Times, alternate, in_worlds
from benchmarks.data_parallel import FULL, QUICK, Training, batches
from benchmarks.row import Row, compare

STAGE_3_BAR, SHARDED_OPTIMIZER_BAR, PEAK_BAR = 0.80, 1.0, 1.0
LR = 1e-4

WHAT = {
    "stage 3": "md.Zero(stage=3) against fully_shard of every block and the model; both with torch.optim.AdamW",
    "stage 3, all ours": "md.Zero(stage=3) and md.AdamW against the same",
    "stage 3, keep_last": "md.Zero(stage=3, keep_last=True), as fully_shard keeps what is in no block",
    "stage 1": "md.Zero(stage=1) against DDP with ZeroRedundancyOptimizer; both with torch.optim.AdamW",
    "stage 2": "md.Zero(stage=2) against DDP with ZeroRedundancyOptimizer",
    "stage 0": "md.Zero(stage=0) against DDP",
    "peak memory": "the most bytes that tensors of a rank held at one time in a step, stage 3 against fully_shard",
}


def rows(quick: bool) -> Iterator[Row]:
    """Rows for 2 and 4 ranks: seconds, and bytes at the peak."""
    training = QUICK if quick else FULL
    for ranks in (2,) if quick else (2, 4):
        seconds = in_worlds(measure, ranks, training, rounds=training.rounds)
        name = f"zero/{ranks} ranks/"
        for row, theirs, bar, judged in (
            ("stage 3", "fully_shard", STAGE_3_BAR, ranks > 2),
            ("stage 3, all ours", "fully_shard", STAGE_3_BAR, False),
            ("stage 3, keep_last", "fully_shard", STAGE_3_BAR, False),
            ("stage 1", "sharded optimizer", SHARDED_OPTIMIZER_BAR, True),
            ("stage 2", "sharded optimizer", SHARDED_OPTIMIZER_BAR, True),
            ("stage 0", "ddp", SHARDED_OPTIMIZER_BAR, False),
        ):
            yield compare(name + row, seconds[row], seconds[theirs], bar, WHAT[row], judged)
        ours, theirs = md.launch(peaks, ranks=ranks, args=(training,), check=False)[0]
        yield compare(name + "peak memory", ours, theirs, PEAK_BAR, WHAT["peak memory"], unit="B")


def measure(world: md.Comm, training: Training, rounds: int) -> Times:
    """Seconds of a step of each contender, all in the ranks of this world, each with its own copy of the model."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {
        "fully_shard": torch_step(training, world, *fully_sharded(training, world))[0],
        "sharded optimizer": torch_step(training, world, *with_sharded_optimizer(training))[0],
        "ddp": torch_step(training, world, *replicated(training))[0],
        "stage 3": zero_step(training, world, stage=3)[0],
        "stage 3, all ours": zero_step(training, world, md.AdamW, stage=3)[0],
        "stage 3, keep_last": zero_step(training, world, stage=3, keep_last=True)[0],
        **{f"stage {stage}": zero_step(training, world, stage=stage)[0] for stage in (0, 1, 2)},
    }
    return alternate(steps, world, rounds)


def peaks(world: md.Comm, training: Training) -> list[list[float]]:
    """The peak of a step on every rank, in bytes: of stage 3 and of fully_shard."""
    found = []
    for step, model in (
        zero_step(training, world, stage=3),
        torch_step(training, world, *fully_sharded(training, world)),
    ):
        for _ in range(2):  # the optimizer's state is there from the second on
            with md.PeakMemory(model.parameters()) as peak:
                step()
        found.append(world.all_gather(torch.tensor([float(peak.nbytes)])).tolist())
    return found


def zero_step(
    training: Training, world: md.Comm, adamw: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: object
) -> tuple[Step, nn.Module]:
    make = lambda groups: adamw(groups, lr=LR)  # pyright: ignore[reportCallIssue]
    z = md.Zero(md.GPT(training.config, seed=0), world, optimizer=make, **options)  # pyright: ignore[reportArgumentType]
    return stepper(training, world, z, z.zero_grad, z.step), z


def torch_step(
    training: Training, world: md.Comm, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Step, nn.Module]:
    return stepper(training, world, model, optimizer.zero_grad, optimizer.step), model


def fully_sharded(training: Training, world: md.Comm) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = md.GPT(training.config, seed=0)
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def with_sharded_optimizer(training: Training) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(md.GPT(training.config, seed=0))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)


def replicated(training: Training) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(md.GPT(training.config, seed=0))
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def stepper(
    training: Training,
    world: md.Comm,
    model: nn.Module,
    zero_grad: Callable[[], object],
    update: Callable[[], object],
) -> Step:
    data = batches(training, world.rank, world.size)

    def step() -> None:
        tokens, targets = next(data)
        zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        update()

    return step
