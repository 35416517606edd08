"""A rank that is a fresh interpreter: ``python -m minidist.launcher.spawned FOLDER RANK``. See spawn.py."""

import faulthandler
import os
import sys
import threading
from typing import NoReturn

from minidist.launcher import rank as ranks
from minidist.launcher.job import Job
from minidist.launcher.spawn import STACK, shared

_BINARY = getattr(os, "O_BINARY", 0)


def main(folder: str, rank: int) -> NoReturn:
    """Take the seat that the files in ``folder`` describe."""
    path = lambda name: os.path.join(folder, name)
    with open(path("job"), "rb") as file:
        job = Job.decode(file.read())
    inputs = os.open(path("inputs"), os.O_RDONLY | _BINARY)
    create = os.O_RDWR | os.O_CREAT | _BINARY
    said, result, stack = (os.open(path(f"{name}-{rank}"), create) for name in ("said", "result", "stack"))
    slots, board = (shared(path(name), os.path.getsize(path(name))) for name in ("slots", "board"))
    commands, out, err = (os.dup(fd) for fd in range(3))
    threading.Thread(target=_obey, args=(commands, stack), daemon=True).start()
    store = path("store").replace(os.sep, "/")
    ranks.run(ranks.Seat(rank, job, inputs, out, err, said, result, stack, slots, board, store))


def _obey(commands: int, stack: int) -> None:
    """Write the stack when told so; end with the process that started us."""
    while os.read(commands, len(STACK)):
        faulthandler.dump_traceback(stack, all_threads=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
