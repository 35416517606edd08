"""A whole model out of its slices, and back: state dicts and gradients. Every function here is collective."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.comm import Comm
from minidist.placement import Shard
from minidist.replicas import broadcast_tensors
from minidist.units.flat import Flat, is_unused


def state_dict(module: nn.Module, flats: Iterable[Flat], comms: Sequence[Comm]) -> dict[str, Any]:
    """The module's state dict with every parameter in full, on the CPU of rank 0; {} on the other ranks."""
    first = is_first(comms)
    values: dict[nn.Parameter, Tensor] = {}
    with _collective("full_state_dict", comms):
        for flat in flats:
            stay = flat.here
            flat.unshard()
            if first:
                pairs = zip(flat.parameters, flat.views, strict=True)
                values |= {parameter: view.to("cpu", copy=True) for parameter, view in pairs}
            if not stay:
                flat.reshard()
    if not first:
        return {}
    whole = {name: _own(value) for name, value in module.state_dict().items()}
    named = module.named_parameters(remove_duplicate=False)
    return whole | {name: values[parameter] for name, parameter in named if parameter in values}


def grads(flats: Iterable[Flat], comms: Sequence[Comm]) -> dict[str, Tensor | None]:
    """Every gradient in full, on rank 0; {} on the other ranks. None where no rank had one."""
    found: dict[str, Tensor | None] = {}
    with _collective("full_grads", comms):
        for flat in flats:
            if flat.trained:
                whole = _gathered_grad(flat)
                for name, view in zip(flat.names, flat.views_of(whole), strict=True):
                    empty = all(map(is_unused, view.flatten()[:1].tolist())) and not view.any()
                    found[name] = None if empty else view.to("cpu", copy=True)
    return found if is_first(comms) else {}


def _gathered_grad(flat: Flat) -> Tensor:
    """[N] on every rank."""
    comm, grad = flat.setting.comm, flat.grad_shard
    if grad is None:
        grad = torch.full((flat.part.stop - flat.part.start,), -0.0, dtype=flat.grad_dtype)
    grad = grad.to(comm.device)
    return comm.all_gather(grad, flat.sizes) if flat.setting.rest.optimizer == Shard() else grad


def load(module: nn.Module, flats: Iterable[Flat], comms: Sequence[Comm], state: Mapping[str, Any]) -> None:
    """Take parameters and buffers from rank 0's state.

    Raises RuntimeError, on all ranks, where names are missing or unknown, or shapes differ.
    """
    names = list(module.named_parameters(remove_duplicate=False))
    with _collective("load_state_dict", comms):
        raise_everywhere(_misfit(module, state) if is_first(comms) else "", comms)
        for flat in flats:
            values = {p: state[name] for name, p in names if name in state} if is_first(comms) else {}
            flat.load([values[p] for p in flat.parameters] if is_first(comms) else None)
        if is_first(comms):
            parameters = {name for name, _ in names}
            rest = {name: value for name, value in state.items() if name not in parameters}
            module.load_state_dict(rest, strict=False)
        for comm in comms:
            broadcast_tensors(module.buffers(), comm)


def _misfit(module: nn.Module, state: Mapping[str, Any]) -> str:
    """What is wrong with a state dict for this module; empty where nothing is."""
    expected = module.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    for name, value in expected.items():
        if name in state and isinstance(value, Tensor) and state[name].shape != value.shape:
            problems.append(f"{name} is {list(state[name].shape)} and should be {list(value.shape)}")
    return "; ".join(problems)


def is_first(comms: Sequence[Comm]) -> bool:
    """Whether this is the first of all ranks."""
    return all(comm.rank == 0 for comm in comms)


def raise_everywhere(problem: str, comms: Sequence[Comm]) -> None:
    """Raise RuntimeError on all ranks if one has a problem."""
    text = torch.tensor(list(problem.encode()), dtype=torch.uint8, device=comms[0].device)
    for comm in comms:
        text = comm.all_gather(text)
    if len(text):
        raise RuntimeError(f"the state dict does not fit the module: {bytes(text.tolist()).decode()}")


def _own(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _collective(name: str, comms: Sequence[Comm]) -> AbstractContextManager[Any]:
    """So that a report about a stuck world says what this rank waits in."""
    return comms[0].watch.waiting(f"{name}, which all ranks have to call")
