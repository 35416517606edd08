"""Make calls to torch.distributed visible from outside: whoever uses it directly also gets a deadlock report."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minidist.launcher.frames import Library
from minidist.launcher.slots import Slot

_BLOCKING = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("new_group", "new_subgroups"),
)


def watch_torch(slot: Slot) -> None:
    """Wrap torch.distributed's functions in this process, so that what they wait for shows in ``slot``."""
    library = Library.here()
    for name in _BLOCKING:
        if hasattr(c10d, name):
            wrapped = _watched(name, getattr(c10d, name), slot, library)
            for module in (c10d, dist):
                if hasattr(module, name):
                    setattr(module, name, wrapped)


def _watched(name: str, call: Callable[..., Any], slot: Slot, library: Library) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from_comm = library.holds(sys._getframe(1).f_code.co_filename)  # Comm says itself what it waits for
        if slot.nested or from_comm:
            return call(*args, **kwargs)
        with slot.waiting(name):
            result = call(*args, **kwargs)
        if isinstance(result, list):
            return [_Work(work, name, slot) if hasattr(work, "wait") else work for work in result]
        return _Work(result, name, slot) if hasattr(result, "wait") else result

    return wrapped


class _Work:
    """An asynchronous operation whose ``wait`` is seen."""

    def __init__(self, work: Any, name: str, slot: Slot):
        self._work, self._name, self._slot = work, name, slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._slot.waiting(f"{self._name}.wait()"):
            return self._work.wait(*args, **kwargs)
