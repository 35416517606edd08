"""A warm process that forks ranks: starting it, running jobs on it, and leaving nothing behind."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grading.ranks.run import Job, Run
from grading.ranks.world import World

_START_S = 60.0  # for importing torch on a busy machine
_CHUNK = 1 << 16


class NoRanks(RuntimeError):
    """Ranks cannot be started here; the message says why and what to do."""


class RankHost:
    """A warm process, forked for every run; nothing it started outlives it. A context manager, started when needed.

    prefix: a command that the process is started with, such as bwrap and its options; that command must pass open
    descriptors on, and let Python find this package. One run at a time; other threads wait.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.prefix = tuple(prefix)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors: Any = None
        self._said = b""
        self._mark = secrets.token_hex(8)  # in the command line and environment of all that is started
        self._lock = threading.Lock()

    def __enter__(self) -> "RankHost":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the warm process, unless there is one. Raises NoRanks if it does not come up."""
        if self._process is not None and self._process.poll() is None:
            return
        if sys.platform != "linux":
            raise NoRanks("checks fork their ranks, which needs Linux: use the devcontainer, or WSL on Windows")
        self.close()
        mine, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [*self.prefix, sys.executable, "-P", "-m", "grading.ranks.warm", str(theirs.fileno()), self._mark]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(self._mark),
            )
        except OSError as error:
            mine.close()
            raise NoRanks(f"cannot start {command[0]}: {error.strerror}") from None
        finally:
            theirs.close()
        self._control, self._said = mine, b""
        mine.settimeout(_START_S)
        try:
            self._hear()  # it is ready
        except OSError as error:
            self.close()
            raise NoRanks(f"the process that starts the ranks did not come up: {error}") from None
        mine.setblocking(False)

    def close(self) -> None:
        """End the warm process and all that it started."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3)
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            kill_marked(self._mark)
        if self._errors is not None:
            self._errors.close()
        self._process = self._control = self._errors = None

    def run(self, job: Job, waiting: Callable[[str], None] | None = None) -> Run:
        """Make the job's calls on ranks of their own, and say how they went. Raises NoRanks where there can be none.

        waiting: called every now and then in a run that takes long, with what is waited for.
        """
        with self._lock:
            self.start()
            assert self._control is not None
            world = World(job)
            clean = False
            try:
                socket.send_fds(self._control, [b"w"], world.theirs)
                world.close_theirs()
                run = world.watch(self.control, self.exits, waiting)
                clean = self._stop()
            except OSError as error:
                run = world.end("lost", f"the process that starts the ranks went away: {error}", "lost-host")
            except BaseException:  # an interrupt
                clean = self._stop()
                raise
            finally:
                world.close()
                if not clean:
                    self.close()
            return run

    @property
    def control(self) -> socket.socket:
        """The socket to the warm process."""
        assert self._control is not None
        return self._control

    def exits(self) -> dict[int, int]:
        """Ranks that the warm process saw end: rank -> exit code. Raises OSError if that process is gone."""
        return {rank: code for said in self._hear() if "exited" in said for rank, code in [said["exited"]]}

    def _stop(self) -> bool:
        """Have the ranks and all they started ended. True when that is done."""
        self.control.setblocking(True)
        self.control.settimeout(12)
        self.control.sendall(b"s")
        try:
            while True:
                if any("ended" in said for said in self._hear()):
                    self.control.setblocking(False)
                    return True
        except TimeoutError:
            return False

    def _hear(self) -> list[dict[str, Any]]:
        """What the warm process says; blocks as the control socket does. Raises OSError if it is gone."""
        with contextlib.suppress(BlockingIOError):
            data = self.control.recv(_CHUNK)
            if not data and self._process is not None and self._process.poll() is None and not self._said:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
            if not data:
                raise ConnectionError(self._last_words() or "it ended without a word")
            self._said += data
        *lines, self._said = self._said.split(b"\n")
        return [json.loads(line) for line in lines]

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode("utf-8", "replace").strip()


def kill_marked(mark: str, seconds: float = 10.0) -> None:
    """Kill what is left of a warm process that a rank killed: forks have its command line, others its environment.

    Looks until it has found nothing twice: what was being started during one look is seen in the next, and what is
    just taking on another program has neither for a moment.
    """
    deadline = time.monotonic() + seconds
    looked_in_vain = 0
    while looked_in_vain < 2 and time.monotonic() < deadline:
        found = _marked(mark)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        looked_in_vain = 0 if found else looked_in_vain + 1
        time.sleep(0.001)


def _marked(mark: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):  # both empty once it has ended
            with contextlib.suppress(OSError):
                if int(pid) != os.getpid() and mark.encode() in Path(f"/proc/{pid}/{name}").read_bytes():
                    found.append(int(pid))
    return found


def _environment(mark: str) -> dict[str, str]:
    """The warm process's: ours, and where to find this package."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    quiet = {"OMP_NUM_THREADS": "1", "MINIDIST_RANKS": mark}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([root, *([known] if known else [])])}
