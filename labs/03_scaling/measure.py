"""What every rank of lab 03 does: train, once with averaging and once without in turns, and time both."""

from __future__ import annotations

import gc
import json
import os
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from settings import MODELS, Settings
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import minidist as md


def measure(world: md.Comm, settings: Settings) -> dict[str, Any]:
    """One run's measurements, gathered from all ranks; every rank returns the same.

    Times are in seconds, one a step: that of the slowest rank. `compute_s` is the same step of a throw-away replica
    that averages nothing, taken in turns with the real one: the difference is the communication that computing
    did not hide.
    """
    batch = settings.global_batch(world.size)
    if world.device.type == "cpu":
        torch.set_num_threads(settings.threads)
    model = md.GPT(MODELS[settings.model], seed=0).to(world.device)
    step, losses = training_step(model, settings.mechanism, settings, world)
    alone, _ = training_step(md.GPT(MODELS[settings.model], seed=0).to(world.device), "none", settings, world)

    step_s, compute_s, sent = [], [], 0.0
    gc.disable()
    for _ in range(settings.warmup + settings.steps):
        before = world.recorder.bytes_sent()
        step_s.append(timed(step, world))
        sent = world.recorder.bytes_sent() - before
        compute_s.append(timed(alone, world))
    gc.enable()

    ranks = gather({"host": socket.gethostname(), "device": device_name(world), "cores": cores(), "sent": sent}, world)
    return {
        "ranks": world.size,
        "device_type": world.device.type,
        "hosts": [rank["host"] for rank in ranks],
        "devices": [rank["device"] for rank in ranks],
        "cores_of_host": {rank["host"]: rank["cores"] for rank in ranks},
        "global_batch": batch,
        "tokens_per_step": batch * MODELS[settings.model].seq,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": slowest(step_s[settings.warmup :], world),
        "compute_s": slowest(compute_s[settings.warmup :], world),
        "sent_bytes_per_rank": None if settings.mechanism == "ddp" else [rank["sent"] for rank in ranks],
        "losses": world.all_reduce(torch.stack(losses), op="mean").tolist(),
    }


def training_step(
    model: torch.nn.Module, mechanism: str, settings: Settings, world: md.Comm
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that trains one step on this rank's share of the global batch, and the list it leaves its losses in.

    All tokens count and shares are equal, so the mean over the ranks is the loss of the global batch.
    """
    batch, seq = settings.global_batch(world.size), MODELS[settings.model].seq
    text = md.stdlib_tokens(seed=0, seq=seq, batch=batch)
    shares = [text.batch(step, rank=world.rank, ranks=world.size) for step in range(4)]
    data = [(tokens.to(world.device), targets.to(world.device)) for tokens, targets in shares]
    replica, average = replicate(model, mechanism, settings, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses: list[torch.Tensor] = []

    def step() -> None:
        tokens, targets = data[len(losses) % len(data)]
        optimizer.zero_grad()
        loss = cross_entropy(replica(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        average()
        optimizer.step()
        losses.append(loss.detach())

    return step, losses


def replicate(
    model: torch.nn.Module, mechanism: str, settings: Settings, world: md.Comm
) -> tuple[torch.nn.Module, Callable[[], object]]:
    """The model as the mechanism wraps it, and what has to be called after the backward pass."""
    if mechanism == "naive":
        return model, lambda: md.average_gradients(model, world)
    if mechanism == "bucketed":
        return md.DataParallel(model, world, bucket_mb=settings.bucket_mb, overlap=False), lambda: None
    if mechanism == "overlapped":
        return md.DataParallel(model, world, bucket_mb=settings.bucket_mb, overlap=True), lambda: None
    if mechanism == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=settings.bucket_mb), lambda: None
    return model, lambda: None


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
