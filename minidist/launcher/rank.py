"""One rank: a process forked by the supervisor. It joins the world, runs the function, and hands over what came."""

import ctypes
import faulthandler
import io
import json
import linecache
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from mmap import mmap
from typing import Any, NoReturn

import torch

from minidist.comm.comm import Comm
from minidist.launcher import instrument, payload
from minidist.launcher.frames import Library
from minidist.launcher.job import Failure, Job
from minidist.launcher.slots import Slot, State
from minidist.launcher.world import join, seed_generators

STACK_SIGNAL = signal.SIGUSR2  # asks a rank to write its stack
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
)


@dataclass(frozen=True)
class Ends:
    """A rank's own descriptors: its output, where its failure and its result go, where faulthandler writes."""

    out: int
    err: int
    said: int
    result: int
    stack: int


def run(rank: int, job: Job, inputs: int, ends: Ends, slots: mmap, board: mmap, store: str) -> NoReturn:
    """Be rank ``rank``. Stays alive afterwards, so that peers see no closed connection; the supervisor ends it."""
    code = 97
    try:
        _become_a_rank(rank, job, ends)
        slot = Slot(slots, rank)
        slot.set(State.STARTING)
        said = _play(rank, job, inputs, ends, slot, board, store)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(ends.said, json.dumps(said).encode() + b"\n")
        time.sleep(1e9)
        code = 0
    except BaseException as error:
        os.write(2, f"rank {rank} could not be run: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _play(rank: int, job: Job, inputs: int, ends: Ends, slot: Slot, board: mmap, store: str) -> dict[str, Any] | None:
    """Join the world and run the function. Returns None if it returned, else what went wrong."""
    try:
        fn, args, pace = payload.read(inputs)
        os.close(inputs)
        world = _join(rank, job, slot, board, store, pace)
        instrument.watch_torch(slot)
        slot.set(State.RUNNING)
        value = fn(world, *args)
    except BaseException as error:
        slot.set(State.FAILED)
        return asdict(describe(error))
    try:
        payload.write(ends.result, payload.dump(value).pieces)
    except BaseException as error:
        slot.set(State.FAILED)
        return asdict(_unsendable(value, error))
    slot.set(State.DONE)
    return None


def _become_a_rank(rank: int, job: Job, ends: Ends) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: never outlive the supervisor
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(ends.out, 1)
    os.dup2(ends.err, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (_unbuffered(fd) for fd in (1, 2))
    faulthandler.enable(ends.stack, all_threads=False)
    faulthandler.register(STACK_SIGNAL, ends.stack, all_threads=False, chain=False)
    os.environ.clear()
    os.environ.update(job.env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks), MINIDIST_RANK=str(rank))
    os.chdir(job.cwd)
    sys.path[:] = job.path
    for name, text in job.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    torch.set_num_threads(job.threads)
    seed_generators(job.seed)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """Text that is in the pipe when write returns, so that nothing is lost if the rank crashes right after."""
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]


def _join(rank: int, job: Job, slot: Slot, board: mmap, store: str, pace: Any) -> Comm:
    device = torch.device("cuda", rank) if job.backend == "nccl" else torch.device("cpu")
    extras: dict[str, Any] = {"watch": slot}
    if job.check or pace is not None:
        from minidist.comm.checked import Board

        extras["board"] = Board(board, rank, job.ranks)
    if pace is not None:
        from minidist.comm.pace import Pace

        extras["pace"] = Pace(pace)
    patience = job.timeout + 30  # the supervisor speaks first
    return join(job.backend, f"file://{store}", rank, job.ranks, patience, job.seed, device, **extras)


def describe(error: BaseException) -> Failure:
    """The exception as the user should read it: its notes, its causes, and the user's own frames."""
    library = Library.here()
    shown = traceback.TracebackException.from_exception(error)
    own = [frame for frame in shown.stack if not library.holds(frame.filename)]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    _keep_user_frames(shown, library, set())
    text = "".join(shown.format())
    message = "".join(traceback.format_exception_only(error)).strip()
    peer = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_GONE)
    return Failure(type(error).__name__, message[:4000], place, text[:20_000], peer)


def _keep_user_frames(shown: traceback.TracebackException, library: Library, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    own = [frame for frame in shown.stack if not library.holds(frame.filename)]
    if own:
        shown.stack[:] = own
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if other is not None:
            _keep_user_frames(other, library, seen)


def _unsendable(value: Any, error: BaseException) -> Failure:
    what = f"it returned a {type(value).__name__} that cannot be sent back to your process: {error}"
    advice = "Return tensors, arrays, numbers, strings, and lists or dicts of them."
    return Failure(type(error).__name__, f"{what}\n{advice}", "", f"{what}\n{advice}\n")


def board_nbytes(ranks: int) -> int:
    """Bytes of shared memory that Comm's checked and paced modes need."""
    from minidist.comm.checked import Board

    return Board.nbytes(ranks)
