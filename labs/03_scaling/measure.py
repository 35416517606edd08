"""What every rank of lab 03 does: train, once with averaging and once without in turns, and time both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from settings import MODELS, Settings
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from labs.shared.measuring import gather, in_turns, machine


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

    times = in_turns(step, alone, settings, world)
    before = world.recorder.bytes_sent()
    step()
    ranks = gather({"sent": world.recorder.bytes_sent() - before}, world)
    return {
        **machine(ranks, world),
        **times,
        "global_batch": batch,
        "tokens_per_step": batch * MODELS[settings.model].seq,
        "parameters": sum(p.numel() for p in model.parameters()),
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
