"""Processes below us: finding, reaping and ending all of them, also those that tried to leave the family."""

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """From now on descendants whose parent ends become our children, so that none can hide."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def leave_parent() -> None:
    """In a forked child: a session of its own, the usual signals, no core file, and an end with the parent."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def watch_process(selector: selectors.BaseSelector, pid: int) -> int:
    """Make ``selector`` wake when process ``pid`` ends. Returns the descriptor it reports; -1 if there is no way."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
    selector.register(fd, selectors.EVENT_READ, ("parent", 0))
    return fd


def children() -> list[int]:
    """The process ids of our children."""
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent_of(pid) == me]


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def reap() -> dict[int, int]:
    """Collect the children that have ended: process id -> exit code, negative for a signal."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def kill_children(spare: Collection[int] = (), seconds: float = 10.0) -> bool:
    """Kill every child and its process group, then whatever that orphaned onto us, until none is left. True if so."""
    deadline = time.monotonic() + seconds
    while left := set(children()) - set(spare):
        if time.monotonic() > deadline:
            return False
        for pid in left:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        pause = 0.0005
        while left & set(children()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    return True


def wait_for_end(pids: Collection[int], seconds: float) -> None:
    """Wait until none of these children is left, at most so long."""
    left, deadline = set(pids), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left -= reap().keys()
        time.sleep(0.02)
