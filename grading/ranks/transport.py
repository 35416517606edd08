"""A rank's own end: a Comm whose messages all go to the grader, which answers when they are over."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import minidist as md
from grading.ranks import codec

_CHUNK = 1 << 16


class Line:
    """The socket to the grader: one says something, the other answers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._reader, self._heard = sock, codec.Reader(), iter(())
        self.listening = False

    def say(self, value: Any) -> None:
        self._sock.sendall(codec.dump(value))

    def hear(self) -> Any:
        """Block until the grader answers. Raises EOFError when it is gone."""
        self.listening = True
        try:
            while True:
                for value in self._heard:
                    return value
                data = self._sock.recv(_CHUNK)
                if not data:
                    raise EOFError("the grader is gone")
                self._heard = self._reader.feed(data)
        finally:
            self.listening = False


class Work:
    """A communication under way."""

    def __init__(self, owner: "ThroughGrader", number: int, into: Tensor | None, sent: Tensor | None) -> None:
        self._owner, self._number, self._into, self._sent = owner, number, into, sent
        self._copy = None if sent is None else _bytes(sent)

    def wait(self) -> None:
        """Block until it is over; what was received is then in its tensor, and not before."""
        changed = self._copy is not None and self._sent is not None and not torch.equal(self._copy, _bytes(self._sent))
        answer = self._owner.wait(self._number, changed)
        if self._into is not None and isinstance(answer, Tensor):
            self._into.copy_(answer.view(self._into.shape))


class ThroughGrader(md.Transport):
    """Every communication goes over `line`. where: finds the learner's line that is running."""

    def __init__(self, line: Line, where: Callable[[], tuple[str, int, str]]) -> None:
        self.line, self._where = line, where
        self._number = 0
        self._given = ""

    @contextmanager
    def given(self, name: str) -> Iterator[None]:
        """Inside, what is said is said for the function of this name, which stands in for the learner's own."""
        self._given = name
        try:
            yield
        finally:
            self._given = ""

    def wait(self, number: int, changed: bool = False) -> Any:
        """Block until communication `number` is over; what it gave."""
        self.line.say({"op": "wait", "id": number, "changed": changed, "at": self._where()})
        return self.line.hear()["x"]

    def ask(self, key: str) -> Any:
        """The grader's answer to `key`."""
        self.line.say({"op": "ask", "key": key})
        return self.line.hear()["x"]

    def _begin(self, op: str, x: Tensor, into: Tensor | None = None, **more: Any) -> md.Started:
        self._number += 1
        said = {"op": op, "id": self._number, "x": x, "at": self._where(), "given": self._given, **more}
        self.line.say(said)
        return md.Started([Work(self, self._number, into, x if op == "isend" else None)])

    def _collective(self, name: str, x: Tensor, into: Tensor | None = None, **args: Any) -> md.Started:
        return self._begin("collective", x, into, name=name, args=args)

    def all_reduce(self, data: Tensor, op: str) -> md.Started:
        return self._collective("all_reduce", data, data, op=op)

    def reduce(self, data: Tensor, dst: int, op: str) -> md.Started:
        return self._collective("reduce", data, data, dst=dst, op=op)

    def broadcast(self, data: Tensor, src: int) -> md.Started:
        return self._collective("broadcast", data, data, src=src)

    def introduce(self, data: Tensor) -> tuple[list[int], Tensor | None]:
        if data.dim() == 2 and data.shape[1] == 0:  # nothing but a length
            self._collective("lengths", data)
            return self.wait(self._number), None
        self._collective("all_gather", data)
        sizes, whole = self.wait(self._number)
        return sizes, whole.clone()  # memory that can be resized, as of any tensor

    def swap(self, counts: list[int], device: torch.device) -> list[int]:
        raise NotImplementedError("in these ranks all_to_all takes no sizes")

    def all_gather(self, out: Tensor, data: Tensor, sizes: Any) -> md.Started:
        self._collective("all_gather", data)
        number = self._number
        return md.Started(finish=lambda: out.copy_(self.wait(number)[1]))

    def reduce_scatter(self, out: Tensor, data: Tensor, op: str, parts: Any) -> md.Started:
        return self._collective("reduce_scatter", data, out, op=op)

    def all_to_all(self, out: Tensor, data: Tensor, recv: Any, send: Any) -> md.Started:
        return self._collective("all_to_all", data, out)

    def barrier(self) -> md.Started:
        return self._collective("barrier", torch.empty(0))

    def isend(self, data: Tensor, dst: int, tag: int) -> md.Started:
        return self._begin("isend", data, peer=dst, tag=tag)

    def irecv(self, data: Tensor, src: int, tag: int) -> md.Started:
        return self._begin("irecv", data, into=data, peer=src, tag=tag)


class OutOfTime(BaseException):
    """Raised in the learner's code when it has run for too long; no `except Exception` stops it."""


def interrupt_after(line: Line, seconds: float) -> None:
    """Raise OutOfTime where the learner's code is after so many seconds, or when the processor's time is used up.

    A rank that waits for others is left alone: it is not to blame, and the grader sees who is.
    """

    def late(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGXCPU:
            raise OutOfTime("it used up its processor time, which looks like a loop that does not end")
        if not line.listening:
            raise OutOfTime(f"it had not ended after {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGXCPU, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _bytes(x: Tensor) -> Tensor:
    """A copy of x as bytes, whatever its strides (an empty tensor of numpy has stride 0)."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
