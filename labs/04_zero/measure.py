"""What every rank of lab 04 does: train in one of ZeRO's stages, and measure memory, time and traffic."""

from __future__ import annotations

import gc
import json
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from settings import BYTES_EACH, MODELS, PRECISIONS, Settings
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import minidist as md

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

    step_s, compute_s, sent = [], [], 0.0
    gc.disable()
    for _ in range(settings.warmup + settings.steps):
        before = world.recorder.bytes_sent()
        step_s.append(timed(sharded.step, world))
        sent = world.recorder.bytes_sent() - before
        compute_s.append(timed(alone.step, world))
    gc.enable()

    facts = {"host": socket.gethostname(), "device": device_name(world), "cores": cores(), "sent": sent}
    ranks = gather(facts | {"held": held, "peak": peak}, world)
    parameters = sum(p.numel() for p in md.GPT(MODELS[settings.model]).parameters())
    predicted = md.zero_memory(parameters, settings.shards(world.size), settings.stage, *BYTES_EACH[settings.precision])
    return {
        "ranks": world.size,
        "device_type": world.device.type,
        "hosts": [rank["host"] for rank in ranks],
        "devices": [rank["device"] for rank in ranks],
        "cores_of_host": {rank["host"]: rank["cores"] for rank in ranks},
        "parameters": parameters,
        "tokens_per_step": settings.batch_per_rank * world.size * MODELS[settings.model].seq,
        "held_bytes_per_rank": {state: [rank["held"][state] for rank in ranks] for state in STATES},
        "predicted_bytes": {state: getattr(predicted, state) for state in STATES},
        "peak_bytes_per_rank": [rank["peak"] for rank in ranks],
        "step_s": slowest(step_s[settings.warmup :], world),
        "compute_s": slowest(compute_s[settings.warmup :], world),
        "sent_bytes_per_rank": None if settings.library == "torch" else [rank["sent"] for rank in ranks],
        "losses": world.all_reduce(torch.stack(sharded.losses).float(), op="mean").tolist(),
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


def timed(step: Callable[[], None], world: md.Comm) -> float:
    """Seconds of a step on this rank, from a common start. A GPU works behind the program's back: wait for it twice."""
    synchronize(world.device)
    world.barrier()
    synchronize(world.device)
    start = time.perf_counter()
    step()
    synchronize(world.device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: list[float], world: md.Comm) -> list[float]:
    """Of each step, the time of the rank that took longest."""
    return world.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=world.device), op="max").tolist()


def gather(facts: dict[str, Any], world: md.Comm) -> list[dict[str, Any]]:
    """Every rank's facts, in rank order: one line of JSON each, sent as bytes."""
    line = torch.frombuffer(bytearray(json.dumps(facts).encode() + b"\n"), dtype=torch.uint8)
    lines = bytes(world.all_gather(line.to(world.device)).tolist())
    return [json.loads(each) for each in lines.splitlines()]


def device_name(world: md.Comm) -> str:
    """The GPU's name, or the processor's.

    On Linux the processor's name is in /proc/cpuinfo; elsewhere the platform's word for it has to do.
    """
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use, which in a batch job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
