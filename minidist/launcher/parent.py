"""Your process's side: one zygote, and a conversation with the supervisor of each world."""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from minidist.launcher import payload, spawn
from minidist.launcher.job import Ending, Job
from minidist.launcher.wire import Channel, Kind, Message

_START = 120.0  # seconds in which a zygote must have imported torch
_PATIENCE = 30.0  # seconds beyond a world's own deadline in which its supervisor must have answered
_DETACH = "import os, sys\nif os.fork() == 0: os.execv(sys.argv[1], sys.argv[1:])"


class Lost(Exception):
    """The supervisor or the zygote went away without an answer; ``taken``: after ranks may have run."""

    def __init__(self, message: str, taken: bool):
        super().__init__(message)
        self.taken = taken


class Zygote:
    """The process that forks worlds for this one. Made in a moment; it then needs some seconds to import torch.

    It is nobody's child, so that a program's own waits for its children do not meet it, and it ends with this process.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the zygote
        atexit.register(self.close)
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join(entry for entry in search_path() if os.pathsep not in entry)
        with theirs:
            zygote = [sys.executable, "-P", "-m", "minidist.launcher.zygote", str(theirs.fileno()), str(os.getpid())]
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _DETACH, *zygote],
                env={**os.environ, **one_thread, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                check=True,
            )

    def open_world(self) -> Channel:
        """A channel to the supervisor of a new world. Raises Lost if the zygote is gone."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except OSError as error:
                raise Lost(str(error), taken=False) from None
        return Channel(mine)

    def last_words(self) -> str:
        """What it wrote, if anything: an error while it was starting."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Let the zygote go."""
        self._control.close()
        self._log.close()


class Launcher:
    """What a process keeps between launches: its zygote, and whose turn it is."""

    def __init__(self, forks: bool = sys.platform == "linux") -> None:
        self._forks = forks
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

    def warm_up(self) -> None:
        """Start what takes a while, in the background."""
        if self._forks:
            self._own_zygote()

    def _own_zygote(self) -> Zygote:
        """This process's zygote; a new one if there is none."""
        with self._starting:
            if self._zygote is None:
                self._zygote = Zygote()
            return self._zygote

    def run(self, job: Job, pieces: Sequence[bytes | memoryview]) -> tuple[Ending, list[int]]:
        """One world from the first fork to the verdict: how it ended, and a descriptor of each rank's result.

        Raises Lost if no verdict came, KeyboardInterrupt if one came.
        """
        if not self._forks:
            ending, results = spawn.run(job, pieces, show)
            if ending.verdict == "interrupted":
                raise Interrupted(ending)
            return ending, results
        try:
            return self._run(self._own_zygote(), job, pieces)
        except Lost as lost:
            if lost.taken:
                raise
        return self._run(self._own_zygote(), job, pieces)  # the old zygote was killed before it took the job

    def _run(self, zygote: Zygote, job: Job, pieces: Sequence[bytes | memoryview]) -> tuple[Ending, list[int]]:
        try:
            return converse(zygote.open_world(), job, pieces)
        except Lost as lost:
            words = zygote.last_words()
            self._drop(zygote)
            raise Lost(words or str(lost), lost.taken) from None

    def _drop(self, zygote: Zygote) -> None:
        zygote.close()
        with self._starting:
            if self._zygote is zygote:
                self._zygote = None

    def _forget(self) -> None:
        """In a forked child: the zygote is the parent's, and so is whatever holds the locks."""
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None
        self._turn, self._starting = threading.Lock(), threading.Lock()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a notebook's stop button, during a launch. ``ending`` says where the ranks were, if it is known."""

    def __init__(self, ending: Ending | None):
        super().__init__()
        self.ending = ending


def converse(channel: Channel, job: Job, pieces: Sequence[bytes | memoryview]) -> tuple[Ending, list[int]]:
    """Send the job, show the ranks' output, return the ending and the descriptors of the results."""
    results: list[int] = []
    try:
        _send(channel, job, pieces)
        return _listen(channel, job, results), results
    except BaseException as error:
        for fd in results:
            os.close(fd)
        ending = None if isinstance(error, Lost) else _stop(channel)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(ending) from None
        raise
    finally:
        channel.close()


def _send(channel: Channel, job: Job, pieces: Sequence[bytes | memoryview]) -> None:
    inputs = os.memfd_create("inputs")
    try:
        payload.write(inputs, pieces)
        try:
            channel.send(Message(Kind.JOB, body=job.encode(), fds=(inputs,)))
        except OSError as error:
            raise Lost(str(error), taken=False) from None
    finally:
        os.close(inputs)


def _listen(channel: Channel, job: Job, results: list[int]) -> Ending:
    channel.sock.settimeout(_START + job.timeout + _PATIENCE)
    taken = False
    while True:
        try:
            message = channel.receive()
        except (OSError, EOFError) as error:
            raise Lost(str(error), taken) from None
        taken = True
        if message.kind == Kind.RESULT:
            results.append(message.fds[0])
        elif message.kind == Kind.END:
            return Ending.decode(message.body)
        elif message.kind != Kind.TAKEN:
            show(message)


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


def _stop(channel: Channel) -> Ending | None:
    """Have the world ended and wait until it is. The interrupt may have come in the middle of a message, so what is
    left is not read as messages: the ending is the last thing that comes."""
    rest = b""
    with contextlib.suppress(OSError):
        channel.sock.settimeout(10)
        channel.sock.shutdown(socket.SHUT_WR)
        while data := channel.sock.recv(1 << 16):
            rest = (rest + data)[-(1 << 20) :]
    return Ending.find(rest)
