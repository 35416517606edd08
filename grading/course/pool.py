"""One process per submission, so many at a time, each with a deadline; whatever they started is gone at the end."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grading.course.settings import CourseError

PR_SET_PDEATHSIG = 1  # the signal that comes when our parent ends
PR_SET_CHILD_SUBREAPER = 36  # processes whose parent ended become our children


@dataclass(frozen=True)
class Ended:
    """How one process ended. code: its exit status, None if it was over its deadline."""

    name: str
    code: int | None
    seconds: float


def run_each(tasks: Mapping[str, Callable[[], None]], jobs: int, deadline_s: float, logs: Path) -> Iterator[Ended]:
    """Run every task in a fork of this process, and yield each as it ends. What a task prints goes to logs/NAME.log.

    On leaving, also early, no process that a task started is left.
    """
    if not hasattr(os, "fork"):
        raise CourseError("grading forks a process per submission, which this system cannot: use the container")
    gc.freeze()  # what is loaded stays shared with the forks
    _adopt_orphans(True)
    others = set(descendants(os.getpid()))  # not ours to end, nor what they start
    waiting, running = list(tasks), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[_start(tasks[name], logs / f"{name}.log")] = name, time.monotonic()
            for pid, code in _ended(running, deadline_s):
                name, since = running.pop(pid)
                _end_group(pid)
                yield Ended(name, code, time.monotonic() - since)
            time.sleep(0.02)
    finally:
        with uninterrupted():
            for pid in running:
                _end(pid)
            end_descendants(others)
            _adopt_orphans(False)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end of this: for what has to be done as a whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _start(task: Callable[[], None], log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        _end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        file = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for stream, target in ((0, nothing), (1, file), (2, file)):
            os.dup2(target, stream)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        task()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended(running: Mapping[int, tuple[str, float]], deadline_s: float) -> list[tuple[int, int | None]]:
    """Those that ended, or are over their deadline and were ended."""
    ended: list[tuple[int, int | None]] = []
    for pid, (_, since) in running.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended.append((pid, os.waitstatus_to_exitcode(status)))
        elif time.monotonic() - since > deadline_s:
            _end(pid)
            ended.append((pid, None))
    return ended


def _end(pid: int) -> None:
    """End a task and everything below it, and reap it."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _end_group(pid: int) -> None:
    """End what is left in the session of a task that ended."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants(others: set[int], tries: int = 200) -> None:
    """End and reap every process below this one, but for others and those below them."""
    for _ in range(tries):
        kept = others.union(*(descendants(pid) for pid in others))
        left = [pid for pid in descendants(os.getpid()) if pid not in kept]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Every process below pid, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
            children.setdefault(int(file.read().rsplit(")", 1)[1].split()[1]), []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _end_with(parent: int) -> None:
    """End this process when its parent does, also by force."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone already
            os._exit(1)


def _adopt_orphans(yes: bool) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
