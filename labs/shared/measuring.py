"""What every rank of every lab does besides its own task: time a step, and say what it ran on."""

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

import minidist as md


def in_turns(
    step: Callable[[], Any], alone: Callable[[], Any], settings: Any, world: md.Comm
) -> dict[str, list[float]]:
    """Seconds of settings.steps steps, in turns with those of `alone`, which sends nothing: {"step_s", "compute_s"}.

    settings.warmup steps before them do not count. Of each step the time of the slowest rank; the difference of the two
    is the communication that computing did not hide. Python's garbage collector waits meanwhile.
    """
    gc.disable()
    try:
        pairs = [(timed(step, world), timed(alone, world)) for _ in range(settings.warmup + settings.steps)]
    finally:
        gc.enable()
    step_s, compute_s = zip(*pairs[settings.warmup :], strict=True)
    return {"step_s": slowest(step_s, world), "compute_s": slowest(compute_s, world)}


def timed(step: Callable[[], Any], world: md.Comm) -> float:
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


def slowest(seconds: tuple[float, ...], world: md.Comm) -> list[float]:
    """Of each step, the time of the rank that took longest."""
    return world.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=world.device), op="max").tolist()


def machine(ranks: list[dict[str, Any]], world: md.Comm) -> dict[str, Any]:
    """What a run was made on, from the facts of all ranks."""
    return {
        "ranks": world.size,
        "device_type": world.device.type,
        "hosts": [rank["host"] for rank in ranks],
        "devices": [rank["device"] for rank in ranks],
        "cores_of_host": {rank["host"]: rank["cores"] for rank in ranks},
    }


def gather(facts: dict[str, Any], world: md.Comm) -> list[dict[str, Any]]:
    """Every rank's facts, and what it runs on, in rank order: one line of JSON each, sent as bytes."""
    facts = {"host": socket.gethostname(), "device": device_name(world), "cores": cores(), **facts}
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
