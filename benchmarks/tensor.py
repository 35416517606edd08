"""A training step of tensor parallelism: ours, one row a mechanism, against torch's DTensor plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import minidist as md
from benchmarks.alternate import Step, Times, alternate, in_worlds
from benchmarks.data_parallel import FULL, QUICK, Training, batches
from benchmarks.row import Row, compare

BARS = {2: 0.95, 4: 0.82}

WHAT = {
    "layer by layer": "a collective for each column-parallel layer (a plan without md.roles.Enter)",
    "region by region": "one collective where a region begins, beside the weights' gradients (md.tensor_parallel)",
    "region by region vs tutorial plan": "md.tensor_parallel against the same DTensor plan without PrepareModuleInput",
    "sequence": "md.tensor_parallel(sequence=True) against DTensor with SequenceParallel",
}


def rows(quick: bool) -> Iterator[Row]:
    """Rows for 2 and 4 ranks."""
    training = QUICK if quick else replace(FULL, rounds=20)
    for ranks in (2,) if quick else (2, 4):
        seconds = in_worlds(measure, ranks, training, rounds=training.rounds)
        name = f"tensor/{ranks} ranks/"
        for row, ours, theirs, judged in (
            ("layer by layer", "layer by layer", "dtensor", False),
            ("region by region", "region by region", "dtensor", True),
            ("region by region vs tutorial plan", "region by region", "dtensor tutorial", False),
            ("sequence", "sequence", "dtensor sequence", False),
        ):
            yield compare(name + row, seconds[ours], seconds[theirs], BARS[ranks], WHAT[row], judged)


def measure(world: md.Comm, training: Training, rounds: int) -> Times:
    """Seconds of a step of each contender, all in the ranks of this world, each with its own copy of the model.

    The ranks have the same batch, so that of all ranks of data_parallel's comparison.
    """
    torch.set_num_threads(1)
    model = lambda: md.GPT(training.config, seed=0)
    flat = {name: role for name, role in md.gpt_plan(training.config).items() if role != md.roles.Enter()}
    steps: dict[str, Step] = {
        "layer by layer": our_trainer(md.tensor_parallel(model(), world, flat), training, world),
        "region by region": our_trainer(md.tensor_parallel(model(), world), training, world),
        "sequence": our_trainer(md.tensor_parallel(model(), world, sequence=True), training, world),
        "dtensor tutorial": their_trainer(parallelize(model(), world, tutorial_plan), training),
        "dtensor": their_trainer(parallelize(model(), world, shared_input_plan), training),
        "dtensor sequence": their_trainer(parallelize(model(), world, sequence_plan), training),
    }
    return alternate(steps, world, rounds)


def our_trainer(model: torch.nn.Module, training: Training, world: md.Comm) -> Step:
    loss = lambda logits, targets: md.vocab_parallel_cross_entropy(logits, targets, world).mean()
    return stepper(model, training, loss, nullcontext)


def their_trainer(model: torch.nn.Module, training: Training) -> Step:
    loss = lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten())
    return stepper(model, training, loss, loss_parallel)


def stepper(model: torch.nn.Module, training: Training, loss: Callable, around: Callable) -> Step:
    """Forward, loss without gathering the logits, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(training, 0, 1)

    def step() -> None:
        tokens, targets = next(data)
        optimizer.zero_grad()
        with around():
            loss(model(tokens), targets).backward()
        optimizer.step()

    return step


# ---- torch's plans for the same model --------------------------------------------------------------------------------


def parallelize(model: md.GPT, world: md.Comm, plan: Callable[[int], dict[str, ParallelStyle]]) -> torch.nn.Module:
    """The model as DTensors; a tied head stays tied."""
    mesh = DeviceMesh("cpu", list(range(world.size)))
    parallelize_module(model, mesh, plan(len(model.blocks)))
    if model.config.tie:
        model.head.weight = model.embed.weight
    return model


def tutorial_plan(layers: int) -> dict[str, ParallelStyle]:
    """Column- and row-wise as in torch's tutorial on tensor parallelism, embedding and logits by the vocabulary."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in (f"blocks.{i}." for i in range(layers)):
        plan |= {name + layer: ColwiseParallel() for layer in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")}
        plan |= {name + layer: RowwiseParallel() for layer in ("attn.out", "mlp.down")}
    return plan


def shared_input_plan(layers: int) -> dict[str, ParallelStyle]:
    """The same, and what attention and feed-forward get is a DTensor once, whose gradient is reduced once."""
    plan = tutorial_plan(layers)
    for name in (f"blocks.{i}." for i in range(layers)):
        plan[name + "attn"] = PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        )
        plan[name + "mlp"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    return plan


def sequence_plan(layers: int) -> dict[str, ParallelStyle]:
    """The same with sequence parallelism."""
    plan = tutorial_plan(layers) | {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for name in (f"blocks.{i}." for i in range(layers)):
        plan |= {name + layer: SequenceParallel() for layer in ("attn_norm", "mlp_norm")}
        plan |= {name + layer: RowwiseParallel(output_layouts=Shard(1)) for layer in ("attn.out", "mlp.down")}
        plan[name + "attn"] = PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        )
        plan[name + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return plan
