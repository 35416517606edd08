"""One rank: a process that joins the world, runs the function, and hands over what came of it."""

import contextlib
import faulthandler
import io
import json
import linecache
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from mmap import mmap
from typing import Any, NoReturn

import torch

from minidist.comm.checked import Board
from minidist.comm.comm import Comm
from minidist.launcher import instrument, payload
from minidist.launcher.failure import describe, unsendable
from minidist.launcher.job import COULD_NOT_START, Failure, Job
from minidist.launcher.slots import Slot, State
from minidist.launcher.world import join, seed_generators

STACK_SIGNAL = getattr(signal, "SIGUSR2", None)  # asks a rank to write its stack, where there are such signals


@dataclass(frozen=True)
class Seat:
    """All that a rank is given. Open descriptors: its ``inputs`` (a payload), and where it writes: ``out`` and ``err``,
    how its function ended (``said``), what that returned (``result``), and where it is when asked (``stack``)."""

    rank: int
    job: Job
    inputs: int
    out: int
    err: int
    said: int
    result: int
    stack: int
    slots: mmap
    board: mmap
    store: str  # the file through which the ranks find each other


def run(seat: Seat) -> NoReturn:
    """Be a rank. Stays alive at the end, so that no peer sees a closed connection: whoever watches ends it."""
    try:
        _dress(seat)
        slot = Slot(seat.slots, seat.rank)
        failure = _play(seat, slot)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(seat.said, json.dumps(failure and asdict(failure)).encode() + b"\n")
        while True:
            time.sleep(3600)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(COULD_NOT_START)


def _play(seat: Seat, slot: Slot) -> Failure | None:
    """Join the world and run the function: None if it returned, else what went wrong."""
    try:
        fn, args, pace = payload.read(seat.inputs)
        payload.adopt_main(fn)
        world = _join(seat, slot, pace)
        instrument.watch_torch(slot)
        slot.set(State.RUNNING)
        value = fn(world, *args)
    except BaseException as error:
        slot.set(State.FAILED)
        return describe(error)
    try:
        payload.write(seat.result, payload.dump(value).pieces)
    except BaseException as error:
        slot.set(State.FAILED)
        return unsendable(value, error)
    slot.set(State.DONE)
    return None


def _join(seat: Seat, slot: Slot, pace: Any) -> Comm:
    job = seat.job
    device = torch.device("cuda", seat.rank) if job.backend == "nccl" else torch.device("cpu")
    extras: dict[str, Any] = {"watch": slot, "board": Board(seat.board, seat.rank, job.ranks), "check": job.check}
    if pace is not None:
        from minidist.comm.pace import Pace

        extras["pace"] = Pace(pace)
    meet = f"file://{seat.store}"
    patience = job.timeout + 30  # whoever watches speaks first
    return join(job.backend, meet, seat.rank, job.ranks, patience, job.seed, device, **extras)


def _dress(seat: Seat) -> None:
    """Give this process the descriptors, directory, environment and seeds of a rank."""
    rank, job = str(seat.rank), seat.job
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(seat.out, 1)
    os.dup2(seat.err, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (_unbuffered(fd) for fd in (1, 2))
    faulthandler.enable(seat.stack, all_threads=True)  # gloo gives up in a thread of its own
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, seat.stack, all_threads=False, chain=False)
    os.environ.clear()
    os.environ.update(job.env, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(job.ranks), MINIDIST_RANK=rank)
    os.chdir(job.cwd)
    sys.path[:] = job.path
    for name, text in job.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    torch.set_num_threads(job.threads)
    seed_generators(job.seed)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """Text that has left the process when write returns, so that none is lost if the rank crashes right after."""
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]
