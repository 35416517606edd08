"""A GPT cut into stages: each a module that hands its output to the next."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist.models.gpt import GPT, rotary
from minidist.schedule.layers import split_layers


class GPTStage(nn.Module):
    """Some consecutive blocks of a GPT, with the embedding before the first and the head after the last.

    Parameters keep the names they have in the whole model: a stage with blocks 2 and 3 has `blocks.2.attn.q.weight`.
    tied: pairs of names, on the first and on the last stage, that are one parameter of the whole model.
    """

    def __init__(self, gpt: GPT, blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        self.head_dim = gpt.config.head_dim
        self.tied = [("embed.weight", "head.weight")] if gpt.config.tie else []
        self.embed = gpt.embed if first else None
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        self.norm = gpt.norm if last else None
        self.head = gpt.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """tokens [B, S] at the first stage, else [B, S, D] -> [B, S, D], or logits [B, S, V] at the last."""
        if self.embed is not None:
            x = self.embed(x)
        rotation = rotary(torch.arange(x.shape[1], device=x.device), self.head_dim, x.dtype)
        for block in self.blocks.values():
            x = block(x, rotation)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def split_stages(gpt: GPT, stages: int, costs: Sequence[float] | None = None) -> list[GPTStage]:
    """The GPT as so many stages, sharing its parameters.

    costs: of each block, such as measured seconds; None: all the same, so that stages differ by one block at most.
    The embedding and the head come on top: give the first and last block their cost to make room for them.

    Raises: ValueError for fewer blocks than stages.
    """
    blocks = len(gpt.blocks) if costs is None else list(costs)
    if costs is not None and len(costs) != len(gpt.blocks):
        raise ValueError(f"{len(costs)} costs for {len(gpt.blocks)} blocks: give one for each")
    parts = split_layers(blocks, stages)
    return [GPTStage(gpt, part, i == 0, i == stages - 1) for i, part in enumerate(parts)]
