"""Ranks without fork, for systems that are not Linux: each is a fresh interpreter, watched by your own process.

Slower to start (every rank imports torch), and less is seen from outside: no processor times, so a deadlock is told
only after nothing has changed for longer. All that ranks and watcher share are files in a private folder.
"""

import contextlib
import mmap
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from json import loads
from typing import IO

from minidist.comm.checked import Board
from minidist.launcher import payload, slots
from minidist.launcher.activity import Stillness, threads_of
from minidist.launcher.job import Ending, Failure, Job
from minidist.launcher.judge import Findings, Judge
from minidist.launcher.output import Output
from minidist.launcher.wire import Kind, Message

STACK = b"stack\n"  # what a rank reads on stdin when it is to write where it is
_TICK = 0.05  # seconds between looks at the ranks


class World:
    """The ranks of one world, and what is known about them. ``show`` is given their output."""

    def __init__(self, job: Job, pieces: Sequence[bytes | memoryview], folder: str, show: Callable[[Message], None]):
        self.job, self.folder, self.show = job, folder, show
        self.found = Findings(job.ranks)
        self.output = [Output(job.output_limit) for _ in range(job.ranks)]
        self.lines: queue.SimpleQueue[tuple[int, str, bytes]] = queue.SimpleQueue()
        self.readers: list[threading.Thread] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        _write(self._path("job"), [job.encode()])
        _write(self._path("inputs"), pieces)
        self.slots = shared(self._path("slots"), slots.nbytes(job.ranks))
        shared(self._path("board"), Board.nbytes(job.ranks)).close()

    def run(self) -> Ending:
        """From the first rank's start to the verdict. An interrupt is a verdict as well."""
        start = time.monotonic()
        verdict = "interrupted"
        try:
            for rank in range(self.job.ranks):
                self._start(rank)
            verdict = self._watch()
        except KeyboardInterrupt:
            pass
        finally:
            try:
                if verdict in ("timeout", "interrupted"):
                    self._ask_for_stacks()
                views = self._views()
            finally:
                self._end()
        self._show_the_rest()
        errors = {rank: output.last_errors for rank, output in enumerate(self.output)}
        stacks = {rank: _text_of(self._path(f"stack-{rank}")) for rank in range(self.job.ranks)}
        exits = {rank: self.found.exits[rank] for rank in sorted(self.found.lost)}
        return Ending(verdict, time.monotonic() - start, views, self.found.failures, exits, stacks, errors)

    def results(self) -> list[int]:
        """An open descriptor of what each rank returned."""
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
        return [os.open(self._path(f"result-{rank}"), flags) for rank in range(self.job.ranks)]

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _start(self, rank: int) -> None:
        env = {**self.job.env, "PYTHONPATH": os.pathsep.join(self.job.path), "OMP_NUM_THREADS": str(self.job.threads)}
        command = [sys.executable, "-P", "-m", "minidist.launcher.spawned", self.folder, str(rank)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self.ranks.append(process)
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            reader = threading.Thread(target=self._read, args=(rank, name, stream), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, rank: int, name: str, stream: IO[bytes]) -> None:
        """In a thread for each pipe, since not every system can wait for several pipes."""
        while data := os.read(stream.fileno(), 1 << 16):
            self.lines.put((rank, name, data))

    def _watch(self) -> str:
        stillness = Stillness(lambda: threads_of(process.pid for process in self.ranks))
        judge = Judge(self.job.timeout, self.job.stall, stillness)
        verdict = None
        while verdict is None:
            self._pass_on(_TICK)
            for rank, process in enumerate(self.ranks):
                self._listen(rank)
                code = process.poll()
                if code is not None and rank not in self.found.settled:
                    self.found.exits[rank] = code
            verdict = judge.verdict(self.found, self._views(), time.monotonic())
        return verdict

    def _pass_on(self, seconds: float) -> None:
        """Show what the ranks wrote within so many seconds."""
        with contextlib.suppress(queue.Empty):
            rank, name, data = self.lines.get(timeout=seconds)
            while True:
                self._show(rank, name, self.output[rank].add(name, data))
                rank, name, data = self.lines.get_nowait()

    def _show(self, rank: int, name: str, text: bytes) -> None:
        if text:
            self.show(Message(Kind.OUT if name == "out" else Kind.ERR, rank, text))

    def _show_the_rest(self) -> None:
        for reader in self.readers:
            reader.join(timeout=1)
        self._pass_on(0.001)
        for rank, output in enumerate(self.output):
            for name in ("out", "err"):
                self._show(rank, name, output.rest(name))

    def _listen(self, rank: int) -> None:
        """A rank says on one line how its function ended: null, or a Failure."""
        said = _text_of(self._path(f"said-{rank}"))
        if rank in self.found.settled or not said.endswith("\n"):
            return
        failure = loads(said)
        self.found.hear(rank, failure and Failure(**failure))

    def _views(self) -> list[slots.Snapshot]:
        return [slots.read(self.slots, rank) for rank in range(self.job.ranks)]

    def _ask_for_stacks(self) -> None:
        for process in self.ranks:
            with contextlib.suppress(OSError, ValueError):
                os.write(process.stdin.fileno(), STACK)  # type: ignore[union-attr]
        time.sleep(0.3)

    def _end(self) -> None:
        for process in self.ranks:
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
        for process in self.ranks:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def run(job: Job, pieces: Sequence[bytes | memoryview], show: Callable[[Message], None]) -> tuple[Ending, list[int]]:
    """One world: how it ended, and a descriptor of each rank's result if it ended well."""
    with tempfile.TemporaryDirectory(prefix="minidist-", ignore_cleanup_errors=True) as folder:
        world = World(job, pieces, folder, show)
        ending = world.run()
        return ending, world.results() if ending.verdict == "ok" else []


def _write(path: str, pieces: Sequence[bytes | memoryview]) -> None:
    with open(path, "wb", buffering=0) as file:
        payload.write(file.fileno(), pieces)


def shared(path: str, size: int) -> mmap.mmap:
    """``size`` bytes of memory that every process which maps this file sees."""
    with open(path, "a+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(100_000)
    except OSError:
        return ""
