"""A communication under way, and who is told that a rank waits for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from minidist.comm.transport import Started


class Watch(Protocol):
    """Told what a rank waits for, so that a stuck world can be explained."""

    def waiting(self, op: str) -> AbstractContextManager[Any]: ...


class NullWatch:
    """A watch nobody reads."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def waiting(self, op: str) -> AbstractContextManager[Any]:
        return self._nothing


class Handle:
    """A communication under way: `wait()` blocks until its result is there and returns it, as often as asked.

    Until then the tensors it was called with belong to it: do not write to them, and read no result from them.
    """

    def __init__(self, what: str, started: Started, finish: Callable[[], Tensor], watch: Watch) -> None:
        self._what, self._watch = what, watch
        self._started: Started | None = started
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result. Raises what the backend raises, for example when a peer is gone."""
        if self._started is not None and self._finish is not None:
            with self._watch.waiting(self._what):
                for work in self._started.works:
                    work.wait()
                self._started.finish()
            self._result = self._finish()
            self._started = self._finish = None
        assert self._result is not None
        return self._result
