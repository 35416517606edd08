"""Your process's side: one zygote, and a conversation with the supervisor of each world."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from minidist.launcher import payload
from minidist.launcher.job import Ending, Job
from minidist.launcher.wire import Channel, Kind, Message

_START = 120.0  # seconds in which a zygote must have imported torch
_PATIENCE = 30.0  # seconds beyond a world's own deadline in which its supervisor must have answered


class Lost(Exception):
    """The supervisor or the zygote went away without an answer."""


class Zygote:
    """The process that forks worlds for this one. Starts when made; ``open_world`` waits until it is ready."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the zygote
        self._lock = threading.Lock()
        self._ready = False
        env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        env["PYTHONPATH"] = os.pathsep.join(path for path in search_path() if os.pathsep not in path)
        command = [sys.executable, "-P", "-m", "minidist.launcher.zygote", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()

    def open_world(self) -> Channel:
        """A channel to the supervisor of a new world. Raises Lost if the zygote is gone."""
        mine, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                self._wait_until_ready()
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        except (OSError, EOFError) as error:
            mine.close()
            raise Lost(self._last_words() or str(error)) from None
        return Channel(mine)

    def close(self) -> None:
        """Let the zygote go."""
        self._control.close()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        self._control.settimeout(_START)
        if self._control.recv(1) != b"r":
            raise EOFError("the process that starts ranks ended while it was starting")
        self._control.settimeout(10)
        self._process.wait()  # what we started has detached the zygote and ended
        self._ready = True

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode("utf-8", "replace").strip()


class Launcher:
    """What a process keeps between launches: its zygote, and whose turn it is."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._zygote: Zygote | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    @contextlib.contextmanager
    def turn(self, concurrent: bool) -> Iterator[None]:
        """One world at a time per process, from whichever thread, unless ``concurrent``."""
        if concurrent:
            yield
            return
        with self._turn:
            yield

    def open_world(self) -> Channel:
        """A channel to a new world's supervisor; starts a zygote if there is none."""
        for last_try in (False, True):
            with self._starting:
                zygote = self._zygote = self._zygote or Zygote()
            try:
                return zygote.open_world()
            except Lost:
                zygote.close()
                with self._starting:
                    if self._zygote is zygote:
                        self._zygote = None
                if last_try:
                    raise
        raise AssertionError("unreachable")

    def _forget(self) -> None:
        """In a forked child: the zygote is the parent's, and so is whatever holds the locks."""
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None
        self._turn, self._starting = threading.Lock(), threading.Lock()


def converse(channel: Channel, job: Job, pieces: Sequence[bytes | memoryview]) -> tuple[Ending, list[Any]]:
    """Run one world: send the job, show the ranks' output, return how it ended and what the ranks returned."""
    try:
        _send_job(channel, job, pieces)
        channel.sock.settimeout(job.timeout + _PATIENCE)
        results: list[Any] = []
        while True:
            message = channel.receive()
            if message.kind == Kind.RESULT:
                results.append(_result(message.fds[0]))
            elif message.kind == Kind.END:
                return Ending.decode(message.body), results
            else:
                show(message)
    except (OSError, EOFError) as error:
        raise Lost(str(error)) from None
    except BaseException:
        _stop(channel)
        raise
    finally:
        channel.close()


def show(message: Message) -> None:
    """Print lines of a rank, each with its label."""
    stream = sys.stdout if message.kind == Kind.OUT else sys.stderr
    lines = message.body.decode("utf-8", "replace").removesuffix("\n").split("\n")
    stream.write("".join(f"[rank {message.rank}] {line}\n" for line in lines))
    stream.flush()


def search_path() -> list[str]:
    """sys.path for another process: absolute, and such that it finds this very package."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = [os.path.abspath(entry) for entry in sys.path]
    return path if package in path else [*path, package]


def _send_job(channel: Channel, job: Job, pieces: Sequence[bytes | memoryview]) -> None:
    inputs = os.memfd_create("inputs")
    try:
        payload.write(inputs, pieces)
        channel.send(Message(Kind.JOB, body=job.encode(), fds=(inputs,)))
    finally:
        os.close(inputs)


def _result(fd: int) -> Any:
    try:
        return payload.read(fd)
    finally:
        os.close(fd)


def _stop(channel: Channel) -> None:
    """Have the world ended, and wait until it is: the supervisor closes its end after its last rank is gone."""
    with contextlib.suppress(OSError):
        channel.sock.shutdown(socket.SHUT_WR)
        channel.sock.settimeout(5)
        while channel.sock.recv(1 << 16):
            pass
