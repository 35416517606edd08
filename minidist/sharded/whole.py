"""A whole model out of tensor-parallel slices: state dicts and gradients. Every function here is collective over tp."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist.placement import Replicate, placement_of, redistribute
from minidist.sharded.layers import Border


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """The whole gradient of each parameter, as one process would have it, on every rank. All ranks of tp must call.

    module: from `tensor_parallel`, or one that holds it. None: no rank has a gradient.
    """
    if hasattr(module, "full_grads"):
        raise TypeError(f"{type(module).__name__} has slices of its own: call its full_grads()")
    border, named = _border(module), dict(module.named_parameters())
    with border.comm.watch.waiting("full_grads, which all ranks have to call"):
        present = torch.tensor([p.grad is not None for p in named.values()], device=border.comm.device).int()
        present = border.comm.all_reduce(present, op="max").tolist()
        return {
            name: _whole(torch.zeros_like(p) if p.grad is None else p.grad, p, border) if anywhere else None
            for (name, p), anywhere in zip(named.items(), present, strict=True)
        }


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """`state_dict` with whole tensors, as the plain module has it, on every rank. All ranks of tp must call."""
    return whole_tensors(module, {name: x.detach() for name, x in module.state_dict(keep_vars=True).items()})


def whole_tensors(module: nn.Module, slices: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Tensors that lie as the module's parameters and buffers of these names do, put together over tp.

    Raises: RuntimeError where a parameter's memory has been freed, by ZeRO.
    """
    placed, border, found = module.state_dict(keep_vars=True), _border(module), {}
    with border.comm.watch.waiting("full_state_dict, which all ranks have to call"):
        for name, x in slices.items():
            if isinstance(placed[name], nn.Parameter) and x is not None and x.numel() > 1 and not any(x.stride()):
                raise RuntimeError(
                    f"{name} is not here: call the full_state_dict() of what is wrapped around the module"
                )
            key = id(placed[name]), None if x is None else x.data_ptr()  # one that has two names travels once
            if key not in found:
                found[key] = None if x is None else _whole(x, placed[name], border)
            found[name] = found[key]
    return {name: found[name] for name in slices}


def on_first_part(module: nn.Module, slices: dict[str, Any]) -> dict[str, Any]:
    """`whole_tensors` on the first rank of tp and {} on the others, if tensor_parallel cut something in the module."""
    borders = list(filter(None, map(_border_of, module.modules())))
    if not borders or not slices:
        return slices
    found = whole_tensors(module, slices)
    return found if borders[0].comm.rank == 0 else {}


def _whole(x: Tensor, parameter: Tensor, border: Border) -> Tensor:
    whole = redistribute(x.to(border.comm.device), placement_of(parameter, border.axis), Replicate(), border.comm)
    return whole.clone(memory_format=torch.contiguous_format)


def _border(module: nn.Module) -> Border:
    found = next(filter(None, map(_border_of, module.modules())), None)
    if found is None:
        raise ValueError(f"{type(module).__name__} has nothing that tensor_parallel cut")
    return found


def _border_of(layer: nn.Module) -> Border | None:
    border = getattr(layer, "border", None) or getattr(getattr(layer, "region", None), "border", None)
    return border if isinstance(border, Border) else None
