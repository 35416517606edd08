"""What every rank is doing right now, in shared memory, so that the supervisor sees it even when a rank is stuck."""

import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap
from types import FrameType

from minidist.launcher.frames import Library, user_frame

_HEAD = struct.Struct("<QBIIId")  # changes, state, calls, line, other threads, time of the last change
_TEXTS = (("op", 48), ("func", 96), ("file", 480))
_BYTES = 704


class State(IntEnum):
    """The life of a rank, in order."""

    STARTING = 0
    RUNNING = 1  # in its own code
    WAITING = 2  # blocked in a communication call
    DONE = 3
    FAILED = 4


@dataclass(frozen=True)
class Snapshot:
    """One rank as seen from outside. ``calls`` counts its communication calls; ``line`` is in the user's ``file``."""

    state: State = State.STARTING
    calls: int = 0
    op: str = ""  # what it waits in, and where: empty and 0 unless it is WAITING
    file: str = ""
    line: int = 0
    func: str = ""
    threads: int = 0  # Python threads that the function has started
    since: float = 0.0  # time.monotonic() of the last change
    changes: int = 0


def nbytes(ranks: int) -> int:
    """Bytes of shared memory that the slots of ``ranks`` ranks take."""
    return ranks * _BYTES


def read(memory: mmap, rank: int) -> Snapshot:
    """The current state of ``rank``."""
    base = rank * _BYTES
    changes, state, calls, line, threads, since = _HEAD.unpack_from(memory, base)
    texts, at = {}, base + _HEAD.size
    for name, size in _TEXTS if state == State.WAITING else ():
        texts[name] = memory[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")
        at += size
    return Snapshot(State(state), calls, line=line, threads=threads, since=since, changes=changes, **texts)


class Slot:
    """One rank's own slot: it writes, the supervisor reads. This is Comm's ``watch``."""

    def __init__(self, memory: mmap, rank: int):
        self._memory, self._base = memory, rank * _BYTES
        self._changes = self._calls = self._depth = 0
        self._threads = threading.active_count()
        self._library = Library.here()
        self._texts: tuple[str, str, str] = ("", "", "")

    def set(self, state: State) -> None:
        """Say that the rank is now in ``state``, outside any communication call."""
        self._write(state)

    @contextmanager
    def waiting(self, op: str) -> Iterator[None]:
        """Around everything that blocks on other ranks. Calls inside it are part of it.

        Only the main thread counts: while another thread waits, the rank goes on.
        """
        if self._depth or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._depth, self._calls = 1, self._calls + 1
        self._write(State.WAITING, op, user_frame(self._library, sys._getframe(1)))
        try:
            yield
        finally:
            self._depth = 0
            self._write(State.RUNNING)

    @property
    def nested(self) -> bool:
        """Whether the rank is inside ``waiting``."""
        return self._depth > 0

    def _write(self, state: State, op: str = "", frame: FrameType | None = None) -> None:
        self._changes += 1
        code = frame.f_code if frame else None
        texts = (op, code.co_name, code.co_filename) if code else (op, "", "")
        if state == State.WAITING and texts != self._texts:
            self._texts, at = texts, self._base + _HEAD.size
            for text, (_, size) in zip(texts, _TEXTS, strict=True):
                self._memory[at : at + size] = text.encode()[: size - 1].ljust(size, b"\0")
                at += size
        line = (frame.f_lineno or 0) if frame else 0
        others = max(0, threading.active_count() - self._threads)
        _HEAD.pack_into(self._memory, self._base, self._changes, state, self._calls, line, others, time.monotonic())
