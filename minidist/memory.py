"""Bytes that tensors hold: of some tensors, or of all there are while something runs, and the most of them at a time.

Counted are storages, each once however many tensors are views of it, with the size they have at that moment: what is
asked for, not what the process has from the system, which includes the interpreter, libraries and freed memory.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes these tensors hold on to. Of one that is cut over ranks (torch's DTensor) this rank's part counts.

    >>> import torch
    >>> x = torch.zeros(6)
    >>> storage_bytes([x, x[:2], None])
    24
    """
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = _local(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """All tensors in an optimizer's state, but for single numbers: torch keeps its step count as one."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())


class PeakMemory(TorchDispatchMode):
    """Around a piece of a program: `nbytes` is the most that its tensors held at one time.

        with PeakMemory(module.parameters()) as peak:
            loss(module(x)).backward()
        peak.nbytes

    It sees every storage that an operation of torch returned or was given while it was active, and those of `tensors`.
    What an operation allocates and frees inside itself stays unseen. It slows the program down: do not time it.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.nbytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}
        self._see(list(tensors))

    def reset(self) -> None:
        """Forget the peak: it begins at what is held now."""
        self.nbytes = self.now()

    def now(self) -> int:
        """What is held at this moment."""
        return sum(storage.nbytes() for ref in list(self._live.values()) if (storage := ref()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of every operation."""
        self._see((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._see(out)
        self.nbytes = max(self.nbytes, self.now())
        return out

    def _see(self, value: Any) -> None:
        for tensor in tensors_in(value):
            storage = _local(tensor).untyped_storage()
            key = storage._cdata
            if key not in self._live:
                self._live[key] = weakref.ref(storage, lambda _, key=key: self._live.pop(key, None))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, be it one, or a tuple, list or mapping of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def _local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)
