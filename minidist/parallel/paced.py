"""What a module computes, block by block: as spans of the timeline, and in a paced run in modelled time."""

from collections.abc import Iterator

from torch import nn

from minidist.comm.comm import Comm
from minidist.comm.layers import name_layer


def pace_compute(module: nn.Module, comm: Comm, tokens: int) -> None:
    """Record each block's forward and backward pass from now on, and in a paced run let it take its modelled time.

    The blocks are those of `blocks(module)`, and their names are in the timeline: "forward blocks.0". Modelled are the
    products with weights, at the chip's peak: 2 operations for a weight and token, and twice that backward (arXiv
    2001.08361, 2.1). Products of activations (attention's scores) are left out; short sequences have few. Loss and
    optimizer take the time they take.

    tokens: those of one forward pass on this rank.
    """
    for name, block, weights in blocks(module):
        seconds = None if comm.pace is None else comm.pace.compute_seconds(2.0 * weights * tokens, None)
        name_layer(name, block, comm, forward_s=seconds, backward_s=None if seconds is None else 2 * seconds)


def blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The parts of a module that multiply by weights: name, part, and how many weights.

    Parts are the module's children, and of a list or sequence each item.

    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "layers": mlp})
    >>> [(name, weights) for name, _, weights in blocks(model)]
    [('layers.0', 32), ('layers.2', 16)]
    """
    for name, part in module.named_children():
        inner = part.named_children() if isinstance(part, nn.ModuleList | nn.Sequential) else []
        for full_name, block in [(f"{name}.{key}", child) for key, child in inner] or [(name, part)]:
            if weights := _weights(block):
                yield full_name, block, weights


def _weights(module: nn.Module) -> int:
    """Elements of the matrices that every token is multiplied by: not those of an embedding, where it is looked up."""
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Embedding)]
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.dim() > 1)
