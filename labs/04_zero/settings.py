"""What one run of lab 04 is: checked when it is built, and written into every result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import minidist as md

TASKS = ("memory", "time", "batch", "accumulation", "precision", "hybrid", "free")
LIBRARIES = ("minidist", "torch")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BYTES_EACH = {"float32": (4, 4, 8), "bfloat16": (2, 2, 12)}
"""Bytes a parameter has of weights, gradients and AdamW's state; in bfloat16 a master copy is part of that."""
MODELS = {
    "tiny": md.GPTConfig(layers=2, dim=16, heads=2, vocab=256, seq=16),
    "laptop": md.GPTConfig(layers=6, dim=256, heads=4, vocab=256, seq=128),
    "gpu": md.GPTConfig(layers=24, dim=1536, heads=16, vocab=256, seq=512),
}


@dataclass(frozen=True)
class Settings:
    """One run. shard: ranks that share one copy of the state; None: all of them. Fewer make it hybrid sharding."""

    task: str = "free"
    model: str = "laptop"
    library: str = "minidist"
    stage: int = 3
    batch_per_rank: int = 4
    micro_batches: int = 1
    precision: str = "float32"
    shard: int | None = None
    steps: int = 10
    warmup: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("task", TASKS),
            ("model", tuple(MODELS)),
            ("library", LIBRARIES),
            ("stage", (0, 1, 2, 3)),
            ("precision", tuple(PRECISIONS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose from {', '.join(map(str, known))}")
        for name in ("batch_per_rank", "micro_batches", "shard", "steps", "warmup", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.library == "torch" and self.stage not in (0, 3):
            raise ValueError(
                f"--library torch --stage {self.stage}: compared are DistributedDataParallel (stage 0) and fully_shard "
                "(stage 3)"
            )
        if self.library == "torch" and (self.shard is not None or self.precision != "float32"):
            raise ValueError(
                "--library torch: compared in float32 and over all ranks; leave out --shard and --precision"
            )
        if self.shard is not None and self.stage == 0:
            raise ValueError(f"--shard {self.shard} --stage 0: stage 0 cuts nothing; use stage 1, 2 or 3")
        if self.batch_per_rank % self.micro_batches:
            raise ValueError(
                f"--batch-per-rank {self.batch_per_rank} does not divide by --micro-batches {self.micro_batches}"
            )

    def shards(self, ranks: int) -> int:
        """Ranks that share one copy of the state.

        >>> Settings().shards(8), Settings(shard=2).shards(8)
        (8, 2)

        Raises ValueError if they do not divide the ranks.
        """
        if self.shard is None:
            return ranks
        if ranks % self.shard:
            legal = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise ValueError(f"--shard {self.shard} does not divide {ranks} ranks: use one of {legal}")
        return self.shard
