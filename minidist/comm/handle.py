"""A communication under way."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor


class Watch(Protocol):
    """Told what a rank waits for, so that a stuck world can be explained."""

    def waiting(self, what: str) -> AbstractContextManager[Any]: ...


class NullWatch:
    """A watch nobody reads."""

    _nothing = nullcontext()

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        return self._nothing


class Handle:
    """A communication under way: `wait()` blocks until its result is there and returns it, as often as asked.

    The tensors it was called with belong to it until then: neither write to them nor read a result from them.
    """

    def __init__(self, what: str, works: Sequence[Any], finish: Callable[[], Tensor], watch: Watch) -> None:
        self._what, self._works, self._watch = what, works, watch
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result. Raises: what the backend raises, for example when a peer is gone."""
        if self._finish is not None:
            with self._watch.waiting(self._what):
                for work in self._works:
                    work.wait()
            self._result, self._finish, self._works = self._finish(), None, ()
        assert self._result is not None
        return self._result
