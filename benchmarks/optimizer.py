"""One optimizer step on the gradients of the benchmark's model: ours against torch's, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

import minidist as md
from benchmarks.alternate import alternate
from benchmarks.data_parallel import FULL, QUICK
from benchmarks.row import Row, compare

BAR = 1.02


def rows(quick: bool) -> Iterator[Row]:
    """AdamW and SGD with momentum."""
    seconds = md.launch(measure, ranks=1, args=(quick,), check=False)[0]
    for name in ("AdamW", "SGD"):
        what = f"md.{name} against torch.optim.{name}, one thread"
        yield compare(f"optimizer/{name}", seconds[f"{name} ours"], seconds[f"{name} torch"], BAR, what)


def measure(world: md.Comm, quick: bool) -> dict[str, list[float]]:
    """Seconds of a step of each optimizer on a model and gradients of its own."""
    torch.set_num_threads(1)
    training = QUICK if quick else FULL
    kinds: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
        "AdamW ours": lambda parameters: md.AdamW(parameters, lr=1e-4),
        "AdamW torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        "SGD ours": lambda parameters: md.SGD(parameters, lr=1e-4, momentum=0.9),
        "SGD torch": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    }
    steps = {name: with_gradients(md.GPT(training.config), kind).step for name, kind in kinds.items()}
    return alternate(steps, world, rounds=5 if quick else 50)


def with_gradients(
    model: torch.nn.Module, kind: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """An optimizer of this kind on the model's parameters, each with a gradient that stays the same."""
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    return kind(model.parameters())
