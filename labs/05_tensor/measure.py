"""What every rank of lab 05 does: train a model that is cut over ranks, and time the same products without the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from settings import DTYPES, Settings
from torch import nn
from torch.nn.functional import cross_entropy

import minidist as md
from labs.shared.measuring import gather, in_turns, machine


def measure(world: md.Comm, settings: Settings) -> dict[str, Any]:
    """One run's measurements, gathered from all ranks; every rank returns the same.

    Times are in seconds, one a step: that of the slowest rank. `compute_s` is the step of a model with the matrices
    that one rank has, which sends nothing, taken in turns with the real one.
    """
    axes, config = settings.axes(world.size), settings.config()
    if world.device.type == "cpu":
        torch.set_num_threads(settings.threads)
    mesh = md.Mesh(axes, world)
    data = batches(settings, mesh)
    model, step, losses = cut_model(settings, mesh, data)
    alone = step_alone(settings, axes["tp"], data, world.device)

    times = in_turns(step, alone, settings, world)
    world.recorder.clear()
    step()
    calls = list(world.recorder.calls)
    kept = activation_bytes(model, data[0][0])

    of_tp = [call for call in calls if call.group == mesh["tp"].ranks and axes["tp"] > 1]
    facts = {
        "sent_tp": sum(call.sent for call in of_tp),
        "sent": sum(call.sent for call in calls),
        "held": sum(p.nbytes for p in model.parameters()),
        "kept": kept,
    }
    ranks = gather(facts, world)
    payload = data[0][0].numel() * config.dim * DTYPES[settings.dtype].itemsize
    return {
        **machine(ranks, world),
        **axes,
        **times,
        "tokens_per_step": settings.batch * config.seq,
        "payload_bytes": payload,
        "layers": config.layers,
        "dim": config.dim,
        "sums": sum(call.op == "all_reduce" and call.nbytes == payload for call in of_tp),
        "collectives": len(of_tp),
        "sent_tp_bytes_per_rank": [rank["sent_tp"] for rank in ranks],
        "sent_bytes_per_rank": [rank["sent"] for rank in ranks],
        "weight_bytes_per_rank": [rank["held"] for rank in ranks],
        "activation_bytes_per_rank": [rank["kept"] for rank in ranks],
        "losses": world.all_reduce(torch.stack(losses), op="mean").tolist(),
    }


def batches(settings: Settings, mesh: md.Mesh) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four steps of this replica's share of the global batch: the same on all ranks of tp."""
    text, dp = md.stdlib_tokens(seed=0, seq=settings.config().seq, batch=settings.batch), mesh["dp"]
    shares = [text.batch(step, rank=dp.rank, ranks=dp.size) for step in range(4)]
    return [(tokens.to(dp.device), targets.to(dp.device)) for tokens, targets in shares]


def cut_model(
    settings: Settings, mesh: md.Mesh, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[nn.Module, Callable[[], None], list[torch.Tensor]]:
    """The model cut over tp, a function that trains one step of it, and the list it leaves its losses in."""
    whole = md.GPT(settings.config(), seed=0).to(mesh["tp"].device, DTYPES[settings.dtype])
    model = md.tensor_parallel(whole, mesh["tp"], sequence=settings.sequence)
    replica = md.DataParallel(model, mesh["dp"]) if mesh["dp"].size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses: list[torch.Tensor] = []

    def step() -> None:
        tokens, targets = data[len(losses) % len(data)]
        optimizer.zero_grad()
        every = tokens.numel() * mesh["dp"].size
        loss = md.token_loss(replica(tokens), targets, mesh["dp"], tokens=every, tp=mesh["tp"])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    return model, step, losses


def step_alone(
    settings: Settings, tp: int, data: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> Callable[[], None]:
    """The same step with the matrices of one rank and no message: what it computes means nothing, its time does."""
    model = narrow(md.GPT(settings.config(), seed=0), tp).to(device, DTYPES[settings.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    words = -(-settings.config().vocab // tp)
    tokens, targets = data[0][0], data[0][1] % words

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()

    return step


def narrow(model: md.GPT, tp: int) -> md.GPT:
    """The model with 1/tp of every layer's heads, hidden numbers and words, as one rank of tp has it."""
    for block in model.blocks:
        for part, names in ((block.attn, ("q", "k", "v")), (block.mlp, ("gate", "up"))):
            for name in names:
                layer = getattr(part, name, None)
                if layer is not None:
                    setattr(part, name, nn.Linear(layer.in_features, layer.out_features // tp, bias=False))
        for part, name in ((block.attn, "out"), (block.mlp, "down")):
            layer = getattr(part, name)
            setattr(part, name, nn.Linear(layer.in_features // tp, layer.out_features, bias=False))
    model.head = nn.Linear(model.head.in_features, -(-model.head.out_features // tp), bias=False)
    return model


def activation_bytes(model: nn.Module, tokens: torch.Tensor) -> int:
    """What a forward pass keeps for the backward pass on this rank, weights not counted."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(tokens)
    del logits
    return sum(storages.values())
