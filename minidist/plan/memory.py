"""What training keeps in memory between steps, per rank, and what ZeRO's stages make of it.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv 1910.02054),
section 3 and figure 1: N parameters in 16 bit take 2 N bytes, their gradients 2 N, and Adam 12 N, which are 32-bit
master weights and two moments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SHARDED: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {0: (), 1: ("optimizer",), 2: ("optimizer", "grads"), 3: ("optimizer", "grads", "params")}
)
"""What each stage cuts over the ranks; the rest every rank keeps in full. All of ZeRO follows from this."""


@dataclass(frozen=True)
class Held:
    """Bytes one rank holds."""

    params: float
    grads: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.params + self.grads + self.optimizer


def check_stage(stage: int) -> None:
    """Raise ValueError unless there is such a stage."""
    if stage not in SHARDED:
        raise ValueError(f"stage={stage!r} is none of {', '.join(map(str, SHARDED))}")


def zero_memory(
    parameters: float,
    ranks: int,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> Held:
    """Bytes per rank between the backward pass and the step. The last three are bytes a parameter.

    optimizer_bytes: moments, and master weights where the optimizer updates a copy. Defaults: Adam
    in mixed precision.

    >>> [zero_memory(1000, 4, stage).total for stage in range(4)]
    [16000.0, 7000.0, 5500.0, 4000.0]

    Raises ValueError for another stage, or fewer than one rank.
    """
    check_stage(stage)
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    each = {"params": param_bytes, "grads": grad_bytes, "optimizer": optimizer_bytes}
    parts = {what: ranks if what in SHARDED[stage] else 1 for what in each}
    return Held(**{what: parameters * n / parts[what] for what, n in each.items()})


def zero_traffic(parameters: float, ranks: int, stage: int) -> float:
    """Elements a rank sends in one step (section 7): 2, 2, 2 and 3 times parameters x (ranks - 1) / ranks.

    Gradients: an all-reduce, which is worth two, or a reduce-scatter where the optimizer is cut. Parameters: gathered
    once after the step, or, where they rest cut, before the forward and before the backward pass.

    >>> [zero_traffic(1000, 4, stage) for stage in range(4)]
    [1500.0, 1500.0, 1500.0, 2250.0]
    """
    check_stage(stage)
    cut = SHARDED[stage]
    grads = 1 if "optimizer" in cut else 2
    gathers = 2 if "params" in cut else 1 if "optimizer" in cut else 0
    return (grads + gathers) * parameters * (ranks - 1) / ranks
