"""Which parameters of a model travel together: a unit for each of its blocks, and one for what is in no block."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from minidist.units.flat import Flat, Setting


class Unit:
    """A part of the model whose parameters travel together: a flat tensor for each kind of them, mostly one."""

    def __init__(self, path: str, module: nn.Module, named: Mapping[str, nn.Parameter], setting: Setting) -> None:
        self.path, self.module = path, module
        kinds: dict[Any, dict[str, nn.Parameter]] = {}
        for name, p in named.items():
            kinds.setdefault((p.dtype, p.device, p.requires_grad), {})[name] = p
        self.flats = [Flat(kind, setting) for kind in kinds.values()]
        self.in_backward = False  # this backward pass has reached it
        self.launched = False  # its gradients are being reduced, or have been

    def waiting(self) -> int:
        """How many gradients this backward pass has not brought yet."""
        return sum(len(flat.waiting) for flat in self.flats)

    def start_unshard(self) -> None:
        """Begin to gather its parameters."""
        for flat in self.flats:
            flat.start_unshard()

    def unshard(self) -> None:
        """Its parameters are here."""
        self.start_unshard()
        for flat in self.flats:
            flat.unshard()

    def reshard(self) -> None:
        """Free its parameters."""
        for flat in self.flats:
            flat.reshard()


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model: every item of the lists and sequences among its children; of a sequence its own.

    >>> list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))))
    ['0', '2']
    """
    found = {}
    lists = [("", module)] if isinstance(module, nn.Sequential) else list(module.named_children())
    for path, part in lists:
        if isinstance(part, nn.ModuleList | nn.Sequential):
            found |= {f"{path}.{key}".lstrip("."): block for key, block in part.named_children()}
    return {path: block for path, block in found.items() if any(True for _ in block.parameters())}


def divide(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Parameter]]:
    """Every parameter's unit: {path of a block: {name: parameter}}. "" is the model itself, whose unit is around all.

    It has what is in no block, and what several share: a tied parameter is in one unit that covers all its users.
    """
    users: dict[nn.Parameter, set[str]] = {}
    for path, block in blocks.items():
        for parameter in block.parameters():
            users.setdefault(parameter, set()).add(path)
    inside = {parameter for block in blocks.values() for parameter in block.parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in inside and not any(name.startswith(f"{path}.") for path in blocks):
            users[parameter].add("")
    units: dict[str, dict[str, nn.Parameter]] = {path: {} for path in ("", *blocks)}
    for name, parameter in module.named_parameters():
        if parameter.numel():
            paths = users.get(parameter, {""})
            units[next(iter(paths)) if len(paths) == 1 else ""][name] = parameter
    return units


def named_blocks(module: nn.Module, blocks: Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    """The blocks by their paths in the module. Raises ValueError for a part that is not in it, or inside another."""
    if blocks is None:
        return blocks_of(module)
    paths = {part: path for path, part in module.named_modules()}
    if strangers := [type(block).__name__ for block in blocks if not paths.get(block)]:
        raise ValueError(f"{strangers[0]} is no part of this module: pass parts of it as blocks")
    named = {paths[block]: block for block in blocks}
    for inner in named:
        if outer := [path for path in named if inner.startswith(f"{path}.")]:
            raise ValueError(f"block {inner} is inside block {outer[0]}: pass one of them")
    return named
