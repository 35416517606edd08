"""What one run of lab 03 is: checked when it is built, and written into every result."""

from __future__ import annotations

from dataclasses import dataclass

import minidist as md

TASKS = ("strong", "weak", "batch", "bucket", "overlap", "free")
MECHANISMS = ("naive", "bucketed", "overlapped", "ddp")
MODELS = {
    "tiny": md.GPTConfig(layers=1, dim=16, heads=2, vocab=256, seq=16),
    "laptop": md.GPTConfig(layers=4, dim=256, heads=4, vocab=256, seq=128),
    "gpu": md.GPTConfig(layers=12, dim=768, heads=12, vocab=256, seq=512),
}


@dataclass(frozen=True)
class Settings:
    """One run. Exactly one of batch (global, strong scaling) and batch_per_rank (weak scaling) is given."""

    task: str = "free"
    model: str = "laptop"
    mechanism: str = "overlapped"
    batch: int | None = None
    batch_per_rank: int | None = None
    bucket_mb: float = 25
    steps: int = 20
    warmup: int = 3
    threads: int = 1

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("model", tuple(MODELS)), ("mechanism", MECHANISMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose from {', '.join(known)}")
        if (self.batch is None) == (self.batch_per_rank is None):
            raise ValueError("give either --batch (global: strong scaling) or --batch-per-rank (weak scaling)")
        if self.task == "strong" and self.batch is None:
            raise ValueError("--task strong keeps the global batch: give --batch, not --batch-per-rank")
        if self.task == "weak" and self.batch_per_rank is None:
            raise ValueError("--task weak keeps each rank's batch: give --batch-per-rank, not --batch")
        for name in ("batch", "batch_per_rank", "bucket_mb", "steps", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be greater than 0")
        if self.warmup < 1:
            raise ValueError(
                f"--warmup {self.warmup}: must be at least 1, the first step also builds what later ones use"
            )

    def global_batch(self, ranks: int) -> int:
        """Sequences of one step over all ranks.

        >>> Settings(batch=16).global_batch(4), Settings(batch_per_rank=4).global_batch(3)
        (16, 12)

        Raises ValueError if the ranks cannot have equal shares.
        """
        if self.batch_per_rank is not None:
            return self.batch_per_rank * ranks
        assert self.batch is not None
        if self.batch % ranks:
            below = self.batch // ranks * ranks
            fitting = f"{below} or {below + ranks}" if below else str(ranks)
            raise ValueError(
                f"--batch {self.batch} is the global batch and does not divide by {ranks} ranks: "
                f"use {fitting}, or fix the share of a rank with --batch-per-rank"
            )
        return self.batch
