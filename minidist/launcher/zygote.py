"""A process that has imported torch once and forks a supervisor for every world. Single-threaded, so fork is safe.

It is started as ``python -m minidist.launcher.zygote SOCKET PARENT`` and ends when the parent process does.
"""

import gc
import os
import selectors
import signal
import socket
import sys

import cloudpickle  # noqa: F401  imported here, once, for all ranks
import numpy.random  # noqa: F401
import torch.distributed  # noqa: F401

import minidist  # noqa: F401
from minidist.launcher import family, supervisor
from minidist.launcher.frames import Library


def main(control: socket.socket, parent: int) -> None:
    """Fork a supervisor for every socket that comes over ``control``, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    family.adopt_orphans()
    Library.here()  # what it looks up is then known to all ranks
    gc.freeze()  # keeps the collector from touching, and so copying, the pages all ranks share
    worlds: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        gone = family.watch_process(selector, parent)
        while True:
            ready = {key.fd for key, _ in selector.select(1.0 if worlds else None)}
            worlds -= family.reap().keys()
            family.kill_children(spare=worlds)
            if gone in ready:
                break
            if control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(control, 1, 1)
                if not message:
                    break
                worlds.add(_fork_supervisor(control, selector, fds[0], parent))
    family.wait_for_end(worlds, seconds=5)
    family.kill_children()


def _fork_supervisor(control: socket.socket, selector: selectors.BaseSelector, fd: int, parent: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        selector.close()
        control.close()
        supervisor.main(socket.socket(fileno=fd), parent)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)
