"""What one run of lab 06 is: checked when it is built, and written into every result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import minidist as md

TASKS = ("schedule", "microbatches", "size", "stages", "layout", "machines", "free")
MODELS = {
    "tiny": md.GPTConfig(layers=4, dim=16, heads=2, vocab=256, seq=16, tie=False),
    "laptop": md.GPTConfig(layers=8, dim=128, heads=4, vocab=256, seq=64, tie=False),
    "gpu": md.GPTConfig(layers=32, dim=2048, heads=16, vocab=256, seq=1024, tie=False),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
STAGES_PER_RANK = {"interleaved": 2, "zb_v": 2}


@dataclass(frozen=True)
class Settings:
    """One run. microbatches: of a step of each pipeline. size: sequences of a micro-batch.

    pp: ranks of a pipeline; None: all of them. With fewer there are several pipelines, which are replicas. inner: which
    axis runs through neighbouring ranks, "dp" or "pp": with "pp" a pipeline stays as far as it can in one machine.
    """

    task: str = "free"
    model: str = "laptop"
    schedule: str = "1f1b"
    microbatches: int = 8
    size: int = 4
    pp: int | None = None
    inner: str = "pp"
    dtype: str = "float32"
    steps: int = 10
    warmup: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("task", TASKS),
            ("model", tuple(MODELS)),
            ("schedule", SCHEDULES),
            ("inner", ("dp", "pp")),
            ("dtype", tuple(DTYPES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose from {', '.join(known)}")
        for name in ("microbatches", "size", "pp", "steps", "warmup", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")

    @property
    def stages_per_rank(self) -> int:
        return STAGES_PER_RANK.get(self.schedule, 1)

    def axes(self, ranks: int) -> dict[str, int]:
        """The mesh, its inner axis last.

        >>> Settings(pp=2).axes(8), Settings(inner="dp").axes(4)
        ({'dp': 4, 'pp': 2}, {'pp': 4, 'dp': 1})

        Raises ValueError for ranks that make no such mesh, and a model that does not make so many stages.
        """
        pp = ranks if self.pp is None else self.pp
        if ranks % pp:
            raise ValueError(f"--pp {pp} does not divide {ranks} ranks")
        layers, stages = MODELS[self.model].layers, pp * self.stages_per_rank
        if layers < stages:
            raise ValueError(
                f"{layers} layers do not make {stages} stages, {self.stages_per_rank} on each of {pp} ranks: "
                f"use --pp {layers // self.stages_per_rank} or less, or another model"
            )
        axes = {"dp": ranks // pp, "pp": pp}
        return axes if self.inner == "pp" else {"pp": axes["pp"], "dp": axes["dp"]}

    def program(self, ranks: int) -> md.schedule.Program:
        """What the ranks of a pipeline do.

        Raises ValueError for micro-batches that the schedule is not made for.
        """
        return md.schedule.build(self.schedule, self.axes(ranks)["pp"], self.microbatches, self.stages_per_rank)
