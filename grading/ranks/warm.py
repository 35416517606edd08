"""A process that has torch imported once, and forks ranks whenever it is asked to. It runs no code of a learner itself.

Started by host.py as ``python -m grading.ranks.warm DESCRIPTOR MARK``, perhaps in a sandbox. It ends, with all that
it ever started, when the other end of its socket is closed.
"""

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time

import cloudpickle  # noqa: F401  imported here, once, for all ranks
import numpy.random  # noqa: F401
import torch.distributed
import torch.fx.experimental.symbolic_shapes  # noqa: F401  y.backward(grad) needs it: more than a second a rank

import minidist  # noqa: F401
from grading.ranks import rank

_PR_SET_CHILD_SUBREAPER = 36
_TICK = 0.02  # seconds between looks at who has ended
# That ranks may start, all together. A limit of the system's (RLIMIT_NPROC) would count all that its user runs, and
# would not hold for root.
MOST_PROCESSES = 64
TOO_MANY = 1000  # told as the exit code of a rank whose world had more


def main(control: socket.socket) -> None:
    """Serve one world after the other until the grader is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whoever loses its parent becomes our child
    gc.freeze()
    _tell(control, ready=os.getpid())
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 253)
        if not message:
            break
        if fds:
            _serve(control, fds)
    kill_children()


def _serve(control: socket.socket, fds: list[int]) -> None:
    """One world. fds: for each rank its socket and where it prints. Ends when the grader says so or is gone."""
    pids = {_fork(fds[2 * i], fds[2 * i + 1]): i for i in range(len(fds) // 2)}
    for fd in fds:
        os.close(fd)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while not selector.select(_TICK):
            if len(descendants()) > MOST_PROCESSES + len(pids):
                for each in pids.values():
                    _tell(control, exited=[each, TOO_MANY])
                kill_children()
                pids = {}
            for pid, code in _reap().items():
                if pid in pids:
                    _tell(control, exited=[pids[pid], code])
    control.recv(1)
    kill_children()
    _tell(control, ended=True)


def _fork(sock: int, out: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        rank.run(socket.socket(fileno=sock), out)
    finally:
        os._exit(98)


def _tell(control: socket.socket, **said: object) -> None:
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(said).encode() + b"\n")


def _reap() -> dict[int, int]:
    """Children that have ended: process id -> exit code, negative for a signal."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def kill_children(seconds: float = 10.0) -> bool:
    """Kill all that came of this process, also what loses its parent meanwhile, until none is left. True if so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _reap()
        stopped: set[int] = set()
        while new := descendants() - stopped:
            for pid in new:
                _signal(pid, signal.SIGSTOP)  # what stands still forks no more: without this, some outrun the killing
            stopped |= new
        if not stopped:
            return True
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.001)
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def descendants() -> set[int]:
    """Every process that this one or one of its descendants started, and that has not been reaped."""
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        new = set(_children(todo.pop())) - found
        found |= new
        todo += new
    return found


def _children(parent: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children") as file:
                found += [int(pid) for pid in file.read().split()]
    except OSError:
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel without this list
            return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent_of(pid) == parent]
    return found


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
