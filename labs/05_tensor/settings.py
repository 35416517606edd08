"""What one run of lab 05 is: checked when it is built, and written into every result."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import minidist as md

TASKS = ("ranks", "width", "sequence", "layout", "free")
MODELS = {
    "tiny": md.GPTConfig(layers=1, dim=32, heads=4, vocab=256, seq=16),
    "laptop": md.GPTConfig(layers=2, dim=256, heads=8, vocab=256, seq=128),
    "gpu": md.GPTConfig(layers=8, dim=2048, heads=16, vocab=256, seq=1024),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """One run. tp: ranks that a layer is cut over; None: all of them. dim: instead of the model's own width."""

    task: str = "free"
    model: str = "laptop"
    dim: int | None = None
    dtype: str = "float32"
    tp: int | None = None
    sequence: bool = False
    batch: int = 8
    steps: int = 20
    warmup: int = 3
    threads: int = 1

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("model", tuple(MODELS)), ("dtype", tuple(DTYPES))):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose from {', '.join(known)}")
        for name in ("tp", "batch", "steps", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")
        if self.warmup < 1:
            raise ValueError(
                f"--warmup {self.warmup}: must be at least 1, the first step also builds what later ones use"
            )
        try:
            self.config()
        except ValueError as error:
            raise ValueError(f"--dim {self.dim}: {error}") from None

    def config(self) -> md.GPTConfig:
        """The shape of the model."""
        base = MODELS[self.model]
        return base if self.dim is None else replace(base, dim=self.dim)

    def axes(self, ranks: int) -> dict[str, int]:
        """The mesh: tensor parallelism innermost, and data parallelism over the rest.

        >>> Settings(tp=2).axes(8), Settings().axes(4)
        ({'dp': 4, 'tp': 2}, {'dp': 1, 'tp': 4})

        Raises ValueError for ranks that make no such mesh, and a batch or a model that it cannot share out.
        """
        tp = ranks if self.tp is None else self.tp
        if ranks % tp:
            raise ValueError(f"--tp {tp} does not divide {ranks} ranks")
        config, dp = self.config(), ranks // tp
        if config.heads % tp or config.ffn % tp:
            fitting = [n for n in range(1, config.heads + 1) if config.heads % n == config.ffn % n == 0]
            raise ValueError(
                f"{config.heads} heads and {config.ffn} hidden numbers cannot be cut over {tp} ranks: "
                f"use --tp {', '.join(map(str, fitting))}, or another model"
            )
        if self.batch % dp:
            raise ValueError(
                f"--batch {self.batch} is the global batch and does not divide by {dp} replicas: "
                f"use {max(self.batch // dp, 1) * dp} or {(self.batch // dp + 1) * dp}"
            )
        return {"dp": dp, "tp": tp}
