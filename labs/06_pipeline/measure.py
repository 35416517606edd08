"""What every rank of lab 06 does: train a model cut into stages, and measure time, waiting, messages and memory."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from settings import DTYPES, MODELS, Settings
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import minidist as md
from labs.shared.measuring import gather, in_turns, machine, synchronize

EXCHANGES = 12
"""Round trips between two ranks that time a message, after two that do not count."""


def measure(world: md.Comm, settings: Settings) -> dict[str, Any]:
    """One run's measurements, gathered from all ranks; every rank returns the same.

    Memory comes first, in a step of its own: counting every tensor takes time. Times are in seconds, one a step: that
    of the slowest rank. `compute_s` is what a rank computes if everything lies ready for it, taken in turns with the
    real step: the difference is waiting. What is simulated takes the seconds of every action from the same run.
    """
    if world.device.type == "cpu":
        torch.set_num_threads(settings.threads)
    mesh, program = md.Mesh(settings.axes(world.size), world), settings.program(world.size)
    trained = build(settings, mesh, program)
    kept = {number: kept_bytes(trained, number, settings) for number in trained.stages}
    memory = state_and_peak(trained, world)
    alone = step_alone(trained, settings, mesh)

    times = in_turns(trained.step, alone, settings, world)
    if world.device.type == "cuda":  # what was timed so far is when kernels were handed to the GPU
        trained.pipeline.comm = Waiting(mesh["pp"])  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(settings.steps):
            synchronize(world.device)
            world.barrier()
            trained.step()
    facts = {
        "coordinate": mesh.coordinate,
        "steps": trained.timelines[-settings.steps :],
        "messages": message_seconds(program, mesh["pp"], settings),
        "kept": kept,
        **memory,
    }
    ranks = gather(facts, world)
    pipeline = sorted((r for r in ranks if not r["coordinate"]["dp"]), key=lambda rank: rank["coordinate"]["pp"])
    return {
        **machine(ranks, world),
        **mesh.axes,
        **times,
        **predicted_and_measured(program, pipeline),
        "tokens_per_step": settings.size * settings.microbatches * mesh["dp"].size * MODELS[settings.model].seq,
        "losses": world.all_reduce(torch.tensor(trained.losses, device=world.device), op="mean").tolist(),
    }


# ---- what is trained -------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """This rank's part of the model and a step of it. timelines: of every step, (stage, kind, micro-batch, start, end),
    in seconds from the start of the step.
    """

    pipeline: md.PipelineParallel
    optimizer: torch.optim.Optimizer
    data: list[tuple[Tensor, Tensor]]
    replicas: md.Comm
    losses: list[float] = field(default_factory=list)
    timelines: list[list[tuple[int, str, int, float, float]]] = field(default_factory=list)

    @property
    def stages(self) -> dict[int, nn.Module]:
        return self.pipeline.stages

    def step(self) -> None:
        """Forward, backward, average over the replicas, AdamW."""
        tokens, targets = self.data[len(self.losses) % len(self.data)]
        began = time.monotonic()
        self.optimizer.zero_grad()
        self.losses.append(self.pipeline.step(tokens, targets))
        if self.replicas.size > 1:
            for stage in self.stages.values():
                md.average_gradients(stage, self.replicas)
        self.optimizer.step()
        spans = self.pipeline.timeline.spans
        self.timelines.append([(*span.action, span.start - began, span.end - began) for span in spans])


def build(settings: Settings, mesh: md.Mesh, program: md.schedule.Program) -> Trained:
    """The stages of this rank. Every replica has its share of the global batch, the same on all ranks of a pipeline."""
    pp, dp = mesh["pp"], mesh["dp"]
    whole = md.GPT(MODELS[settings.model], seed=0).to(DTYPES[settings.dtype])
    parts = md.split_stages(whole, program.stages)
    mine = [parts[number].to(pp.device) for number in program.stages_of(pp.rank)]
    optimizer = torch.optim.AdamW([p for stage in mine for p in stage.parameters()], lr=3e-4)
    batch = settings.size * settings.microbatches * dp.size
    text = md.stdlib_tokens(seed=0, seq=MODELS[settings.model].seq, batch=batch)
    shares = [text.batch(step, rank=dp.rank, ranks=dp.size) for step in range(4)]
    data = [(tokens.to(dp.device), targets.to(dp.device)) for tokens, targets in shares]
    return Trained(md.PipelineParallel(mine, program, pp, mean_loss), optimizer, data, dp)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def step_alone(trained: Trained, settings: Settings, mesh: md.Mesh) -> Callable[[], None]:
    """A step in which all that this rank's stages read lies ready, on copies of them: nothing is sent or waited for."""
    stages = {number: copy.deepcopy(stage) for number, stage in trained.stages.items()}
    optimizer = torch.optim.AdamW([p for stage in stages.values() for p in stage.parameters()], lr=3e-4)
    ends = {number: example(trained, number, settings) for number in stages}

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(settings.microbatches):
            for number, stage in stages.items():
                out = forward(trained, stage, number, *ends[number])
                out.backward(torch.ones_like(out))
        optimizer.step()

    return step


def example(trained: Trained, number: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """What goes into a stage, tokens [size, S] or numbers [size, S, D]; and the targets of a micro-batch."""
    tokens, targets = (each[: settings.size] for each in trained.data[0])
    if number == 0:
        return tokens, targets
    shape = (*tokens.shape, MODELS[settings.model].dim)
    hidden = torch.randn(shape, device=tokens.device, dtype=DTYPES[settings.dtype])
    return hidden.requires_grad_(), targets


def forward(trained: Trained, stage: nn.Module, number: int, x: Tensor, targets: Tensor) -> Tensor:
    """What comes out of a stage: of the last one its loss."""
    out = stage(x)
    return mean_loss(out, targets) if number == trained.pipeline.program.stages - 1 else out


# ---- measuring -------------------------------------------------------------------------------------------------------


class Waiting:
    """A Comm whose computations end when the GPU has done them, so that their times are the GPU's."""

    def __init__(self, comm: md.Comm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    @contextmanager
    def compute(self, action: Any, seconds: float | None = None) -> Iterator[None]:
        with self._comm.compute(action, seconds=seconds):
            yield
            synchronize(self._comm.device)


def kept_bytes(trained: Trained, number: int, settings: Settings) -> int:
    """What one micro-batch leaves on this rank between forward and backward pass of a stage, weights not counted."""
    stage = trained.stages[number]
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, targets = example(trained, number, settings)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = forward(trained, stage, number, x, targets)
    note(x)
    note(out)
    return sum(storages.values())


def state_and_peak(trained: Trained, world: md.Comm) -> dict[str, int]:
    """Weights, gradients and optimizer's state, and the most that all tensors of this rank held during a step."""
    trained.step()
    parameters = [p for stage in trained.stages.values() for p in stage.parameters()]
    state = [*parameters, *(p.grad for p in parameters), *md.optimizer_tensors(trained.optimizer)]
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    with md.PeakMemory(tensor for tensor in state if tensor is not None) as peak:
        trained.step()
    on_gpu = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
    return {"state": md.storage_bytes(state), "peak": on_gpu or peak.nbytes}


def message_seconds(program: md.schedule.Program, pp: md.Comm, settings: Settings) -> dict[str, float]:
    """Seconds of a micro-batch's message between this rank and others with which it exchanges some, {"0-1": ...}.

    Half the median round trip, each pair of ranks on its own; noted by the lower of the two.
    """
    config = MODELS[settings.model]
    parcel = torch.zeros(settings.size, config.seq, config.dim, device=pp.device, dtype=DTYPES[settings.dtype])
    pairs = sorted({tuple(sorted((m.src, m.dst))) for m in md.schedule.messages(program)})
    found = {}
    for low, high in pairs:
        pp.barrier()
        if pp.rank not in (low, high):
            continue
        trips = [round_trip(pp, parcel, high if pp.rank == low else low, pp.rank == low) for _ in range(EXCHANGES + 2)]
        if pp.rank == low:
            found[f"{low}-{high}"] = statistics.median(trips[2:]) / 2
    return found


def round_trip(pp: md.Comm, parcel: Tensor, peer: int, begins: bool) -> float:
    start = time.perf_counter()
    if begins:
        pp.send(parcel, peer)
        pp.recv(parcel, peer)
    else:
        pp.recv(parcel, peer)
        pp.send(parcel, peer)
    synchronize(pp.device)
    return time.perf_counter() - start


# ---- simulated beside measured ---------------------------------------------------------------------------------------


def predicted_and_measured(program: md.schedule.Program, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A pipeline's figures, from the facts of its ranks in their order. Seconds and shares are medians of the steps."""
    measured = [timeline([rank["steps"][i] for rank in ranks]) for i in range(len(ranks[0]["steps"]))]
    seconds = md.schedule.costs(measured)
    messages = {pair: s for rank in ranks for pair, s in rank["messages"].items()}
    message_s = statistics.mean(messages.values()) if messages else 0.0
    simulated = md.schedule.simulate(program, **seconds, comm=message_s)
    kept = [statistics.mean(rank["kept"].values()) for rank in ranks]
    middle = lambda figure: statistics.median(getattr(each, figure) for each in measured)
    return {
        "stages": program.stages,
        "costs_s": seconds,
        "message_s": messages,
        "pipeline_s": middle("makespan"),
        "simulated_s": simulated.makespan,
        "bubble": middle("bubble"),
        "simulated_bubble": simulated.bubble,
        "bubble_rate": middle("bubble_rate"),
        "simulated_bubble_rate": simulated.bubble_rate,
        "in_flight_per_rank": simulated.peak_in_flight,
        "state_bytes_per_rank": [rank["state"] for rank in ranks],
        "peak_bytes_per_rank": [rank["peak"] for rank in ranks],
        "activation_bytes_per_rank": [rank["peak"] - rank["state"] for rank in ranks],
        "predicted_activation_bytes_per_rank": [
            count * each for count, each in zip(simulated.peak_in_flight, kept, strict=True)
        ],
    }


def timeline(steps: list[list[tuple[int, str, int, float, float]]]) -> md.Timeline:
    """One step of a pipeline, its ranks numbered within it; their clocks all begin at the barrier before the step."""
    return md.Timeline(
        (
            md.Span(rank, md.schedule.Action(stage, kind, microbatch), start, end)
            for rank, spans in enumerate(steps)
            for stage, kind, microbatch, start, end in spans
        ),
        ranks=len(steps),
    )
