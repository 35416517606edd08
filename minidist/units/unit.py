"""Which parameters of a model travel together: a unit for each of its blocks, and one for what is in no block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from minidist.comm.comm import Comm
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

    def check_entered(self) -> None:
        """A gradient comes: raise RuntimeError unless the backward pass has entered, and found the parameters here."""
        if not self.in_backward:
            raise RuntimeError(
                f"block {self.path} computed while its parameters may have been away: call it by itself, block(x), use "
                "its weights nowhere else, and return no view that is changed in place; or pass blocks= without it"
            )

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


def check_arguments(comm: Any, optimizer: Any, groups: Any) -> None:
    """Raise TypeError for what is no Comm, or no function, where one is wanted."""
    for ranks in comm if isinstance(comm, tuple) else (comm,):
        if not isinstance(ranks, Comm):
            raise TypeError(f"comm is an axis of the mesh, as mesh['dp'], not {type(ranks).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer) or not (optimizer is None or callable(optimizer)):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer makes one, out of parameter groups: lambda groups: md.SGD(groups, lr=0.1), not {name}"
        )
    if not (groups is None or callable(groups)):
        raise TypeError(f"groups gives a parameter's options: lambda name, p: {{...}}, not {type(groups).__name__}")


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model: every item of the lists and sequences among its children; of a sequence its own.

    A list in a list is nothing that could be called, and its items are layers.

    >>> list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))))
    ['0', '2']
    """
    found = {}
    lists: list[tuple[str, nn.Module]] = list(module.named_children())
    if isinstance(module, nn.Sequential):
        lists = [("", module)]
    while lists:
        path, part = lists.pop(0)
        if isinstance(part, nn.ModuleList | nn.Sequential) or not can_be_called(part):
            for key, block in part.named_children():
                item = f"{path}.{key}".lstrip("."), block
                if can_be_called(block):
                    found[item[0]] = block
                else:
                    lists.append(item)
    return {path: block for path, block in found.items() if any(True for _ in block.parameters())}


def can_be_called(module: nn.Module) -> bool:
    """Whether it has a forward pass, which a list of modules does not."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


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
    if lists := [path for path, block in named.items() if not can_be_called(block)]:
        raise ValueError(f"{lists[0]} is a list, which nobody calls: pass its items as blocks")
    for inner in named:
        if outer := [path for path in named if inner.startswith(f"{path}.")]:
            raise ValueError(f"block {inner} is inside block {outer[0]}: pass one of them")
    return named
