"""What every rank of lab 04 does: train in one of ZeRO's stages, and measure memory, time and traffic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from settings import BYTES_EACH, MODELS, PRECISIONS, Settings
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from labs.shared.measuring import gather, in_turns, machine

STATES = ("params", "grads", "optimizer")


@dataclass
class Trained:
    """Something that trains: a step of it, what it holds after a backward pass, and its losses so far."""

    step: Callable[[], None]
    held: Callable[[], dict[str, int]]
    losses: list[torch.Tensor]


def measure(world: md.Comm, settings: Settings) -> dict[str, Any]:
    """One run's measurements, gathered from all ranks; every rank returns the same.

    Memory comes first, in a step of its own: counting every tensor takes time. Times are in seconds, one a step: that
    of the slowest rank. `compute_s` is a step of a rank that trains alone, taken in turns with the real one: the
    difference is the communication that computing did not hide.
    """
    if world.device.type == "cpu":
        torch.set_num_threads(settings.threads)
    sharded = build(settings, world)
    held, peak = memory(sharded, world)
    alone = by_minidist(settings, world, alone=True)

    times = in_turns(sharded.step, alone.step, settings, world)
    before = world.recorder.bytes_sent()
    sharded.step()
    ranks = gather({"sent": world.recorder.bytes_sent() - before, "held": held, "peak": peak}, world)
    parameters = sum(p.numel() for p in md.GPT(MODELS[settings.model]).parameters())
    predicted = md.zero_memory(parameters, settings.shards(world.size), settings.stage, *BYTES_EACH[settings.precision])
    measured = {
        **machine(ranks, world),
        **times,
        "parameters": parameters,
        "tokens_per_step": settings.batch_per_rank * world.size * MODELS[settings.model].seq,
        "held_bytes_per_rank": {state: [rank["held"][state] for rank in ranks] for state in STATES},
        "predicted_bytes": {state: getattr(predicted, state) for state in STATES},
        "peak_bytes_per_rank": [rank["peak"] for rank in ranks],
        "sent_bytes_per_rank": None if settings.library == "torch" else [rank["sent"] for rank in ranks],
        "losses": world.all_reduce(torch.stack(sharded.losses).float(), op="mean").tolist(),
    }
    return measured | of_the_fullest(measured)


def of_the_fullest(measured: dict[str, Any]) -> dict[str, Any]:
    """Of memory, the numbers of the rank that holds most.

    >>> held = {"held_bytes_per_rank": {"params": [8, 6], "grads": [4, 3]}, "peak_bytes_per_rank": [20, 21]}
    >>> of_the_fullest({**held, "predicted_bytes": {"params": 7.5}})
    {'state_bytes': 12, 'predicted_state_bytes': 7.5, 'peak_bytes': 21}
    """
    return {
        "state_bytes": max(map(sum, zip(*measured["held_bytes_per_rank"].values(), strict=True))),
        "predicted_state_bytes": sum(measured["predicted_bytes"].values()),
        "peak_bytes": max(measured["peak_bytes_per_rank"]),
    }


# ---- what is trained -------------------------------------------------------------------------------------------------


def build(settings: Settings, world: md.Comm) -> Trained:
    return by_torch(settings, world) if settings.library == "torch" else by_minidist(settings, world)


def by_minidist(settings: Settings, world: md.Comm, alone: bool = False) -> Trained:
    """`md.Zero` over all ranks, over parts of them, or, alone, over this rank only."""
    comm: Any = world
    shards = settings.shards(world.size)
    if alone:
        comm = md.Mesh({"others": world.size, "self": 1}, world)["self"]
    elif shards < world.size:
        mesh = md.Mesh({"replicate": world.size // shards, "shard": shards}, world)
        comm = mesh["shard"], mesh["replicate"]
    dtype = PRECISIONS[settings.precision]
    model = md.GPT(MODELS[settings.model], seed=0).to(world.device, dtype)
    z = md.Zero(model, comm, 0 if alone else settings.stage, adamw, grad_dtype=dtype)

    def step() -> None:
        z.zero_grad()
        backward()
        z.step()

    backward, losses = backward_pass(z, z.no_sync, settings, world)
    return Trained(step, lambda: {state: z.memory()[state] for state in STATES}, losses)


def by_torch(settings: Settings, world: md.Comm) -> Trained:
    """DistributedDataParallel for stage 0, fully_shard for stage 3."""
    model = md.GPT(MODELS[settings.model], seed=0).to(world.device)
    replica: Any = model
    if settings.stage == 0:
        replica = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    no_sync = replica.no_sync if settings.stage == 0 else nullcontext
    backward, losses = backward_pass(replica, no_sync, settings, world)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    def held() -> dict[str, int]:
        return {
            "params": md.storage_bytes(model.parameters()),
            "grads": md.storage_bytes(p.grad for p in model.parameters()),
            "optimizer": md.storage_bytes(md.optimizer_tensors(optimizer)),
        }

    return Trained(step, held, losses)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-4)


def backward_pass(
    model: torch.nn.Module, no_sync: Callable[[], Any], settings: Settings, world: md.Comm
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that makes the gradients of one step, micro-batch by micro-batch, and the list of its losses.

    All tokens count and shares are equal, so the mean over the ranks is the loss of the global batch.
    """
    seq = MODELS[settings.model].seq
    text = md.stdlib_tokens(seed=0, seq=seq, batch=settings.batch_per_rank * world.size)
    shares = [text.batch(step, rank=world.rank, ranks=world.size) for step in range(4)]
    data = [tuple(each.to(world.device).chunk(settings.micro_batches) for each in share) for share in shares]
    losses: list[torch.Tensor] = []

    def backward() -> None:
        pieces = list(zip(*data[len(losses) % len(data)], strict=True))
        total = torch.zeros((), device=world.device)
        for i, (tokens, targets) in enumerate(pieces):
            with no_sync() if i + 1 < len(pieces) else nullcontext():
                loss = cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()) / len(pieces)
                loss.backward()
            total += loss.detach()
        losses.append(total)

    return backward, losses


# ---- measuring -------------------------------------------------------------------------------------------------------


def memory(trained: Trained, world: md.Comm) -> tuple[dict[str, int], int]:
    """What this rank holds after a step, and the most that all tensors held during the next one."""
    trained.step()
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    with md.PeakMemory() as peak:
        trained.step()
    on_gpu = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
    return trained.held(), on_gpu or peak.nbytes
