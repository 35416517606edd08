"""One rank: it gets a learner's function over its socket, calls it, and says what came of it. Never returns."""

import ctypes
import io
import os
import pickle
import resource
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import minidist as md
from grading.ranks.transport import Line, OutOfTime, ThroughGrader, interrupt_after

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
NO_GROUP = (
    "There is no torch.distributed process group in these ranks: the task is to be done with the comm that your "
    "function gets."
)


def run(sock: socket.socket, out: int) -> NoReturn:
    """Be a rank. sock: to the grader. out: where prints go."""
    code = 97
    try:
        _dress(sock.fileno(), out)
        line = Line(sock)
        job = line.hear()
        _play(line, job)
        code = 0
    except EOFError:
        pass
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {said_by(error)}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _dress(sock: int, out: int) -> None:
    """Give this process a session and output of its own, and none of what others hold."""
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(new, old)
    os.closerange(3, sock)
    os.closerange(sock + 1, 4096)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (_unbuffered(fd) for fd in (1, 2))
    torch.set_num_threads(1)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # other ranks cannot look into this one
    dist.init_process_group = _no_group


def _unbuffered(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]


def _no_group(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(NO_GROUP)


def _limit(limits: Mapping[str, Any]) -> None:
    cpu, size = limits["cpu_seconds"], limits["file_bytes"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    most = _data_bytes() + limits["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data_bytes() -> int:
    """Bytes of data this process has already, as RLIMIT_DATA counts them."""
    with open("/proc/self/status") as file:
        for row in file:
            if row.startswith("VmData:"):
                return int(row.split()[1]) * 1024
    return 4 << 30


def _play(line: Line, job: Mapping[str, Any]) -> None:
    """Make every call of the job, the next one once all ranks have returned."""
    learner = Learner()
    transport = ThroughGrader(line, learner.where)
    try:
        _limit(job["limits"])
        torch.manual_seed(job["seed"])
        body = learner.spare(pickle.loads(job["body"])) if job["body"] else None
        function = learner.load(job["function"], job["given"], transport)
        interrupt_after(line, job["limits"]["seconds"])
        for call in job["calls"]:
            if call is not None:
                size, inputs = call
                comm = md.Comm(transport, tuple(range(size)), job["rank"])
                comm.generator.manual_seed(job["seed"] * 1000 + job["rank"])
                value = body(function, comm, transport.ask, **inputs) if body else function(comm, **inputs)
                _no_threads_left()
                line.say({"op": "returned", "value": value})
            if not line.hear()["go"]:
                return
    except EOFError:
        raise
    except BaseException as error:
        kind, why = learner.describe(error)
        line.say({"op": "failed", "kind": kind, "why": why})
        line.hear()  # until the grader ends this world


def _no_threads_left(seconds: float = 0.5) -> None:
    """Wait for threads that the learner's function started; raises RuntimeError for one that goes on all the same: what
    it says later would belong to no call."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.name.startswith("Dummy-"):  # torch's own
            continue
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            raise RuntimeError(
                f"your function has returned, and {thread.name}, a thread that it started, still runs: wait for it "
                "with join() before you return"
            )


def said_by(error: BaseException) -> str:
    """The words of an exception, whatever its own __str__ does."""
    try:
        return str(error)
    except Exception as another:
        return f"(its __str__ raises {type(another).__name__})"


class Learner:
    """The learner's code in this rank: which frames are theirs, and what is written on a line."""

    def __init__(self) -> None:
        ours = [
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + f"/{name}/"
            for name in (
                "grading",
                "minidist",
            )
        ]
        packages = [os.path.join(path, "") for path in torch.__path__]
        self._library = (*ours, *packages, os.path.join(sysconfig.get_path("stdlib"), ""), "<frozen ")
        self._ours: set[CodeType] = set()
        self._lines: dict[str, tuple[int, list[str]]] = {}

    def load(self, packed: bytes, given: Mapping[str, bytes], transport: ThroughGrader) -> Callable[..., Any]:
        """The function, with those it uses replaced by `given`. packed: what `grading.check.pack` made, or a pickle."""
        function = pickle.loads(packed)
        if isinstance(function, tuple):
            function, self._lines = function
        names = getattr(function, "__globals__", {})
        for name, stand_in in given.items():
            names[name] = _announced(name, self.spare(pickle.loads(stand_in)), transport)
        return function

    def spare(self, ours: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a check, whose frames, with those of what checks define for it, are not the learner's."""
        packages = ("grading.checks.", ours.__module__)
        todo: list[Any] = [ours]
        met: set[int] = set()
        while todo:
            each = todo.pop()
            each = getattr(each, "__func__", each)  # a static method's
            if id(each) in met:
                continue
            met.add(id(each))
            if isinstance(each, type):
                todo += vars(each).values()
            elif isinstance(each, FunctionType):
                todo += [each.__code__]
                todo += [x for x in each.__globals__.values() if str(getattr(x, "__module__", "")).startswith(packages)]
            elif isinstance(each, CodeType):
                self._ours.add(each)
                todo += each.co_consts
        return ours

    def is_theirs(self, frame: FrameType) -> bool:
        """Whether this frame runs code that the learner wrote."""
        return frame.f_code not in self._ours and not frame.f_code.co_filename.startswith(self._library)

    def where(self) -> tuple[str, int, str]:
        """The innermost line of theirs that is running: function, number and text."""
        frame = sys._getframe(1)
        while frame is not None and not self.is_theirs(frame):
            frame = frame.f_back
        return ("", 0, "") if frame is None else self._place(frame, frame.f_lineno)

    def _place(self, frame: FrameType, number: int) -> tuple[str, int, str]:
        name = frame.f_code.co_qualname
        known = next((known for known in self._lines if f"{name}.".startswith(f"{known}.")), "")
        first, lines = self._lines.get(known, (number, []))
        text = lines[number - first] if 0 <= number - first < len(lines) else ""
        return name.replace("<locals>.", ""), number, text.strip()

    def describe(self, error: BaseException) -> tuple[str, str]:
        """The kind of an exception, and what the learner should read: theirs are the only frames."""
        frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__) if self.is_theirs(frame)]
        places = [self._place(frame, number) for frame, number in frames[-4:]]
        rows = [f"    line {number} of {name}: {text}".removesuffix(": ") for name, number, text in places]
        said = said_by(error)
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        if isinstance(error, OutOfTime):
            what = said
        if isinstance(error, ValueError) and "process group has not been initialized" in said:
            what = NO_GROUP
        return type(error).__name__, "\n".join([what[:2000], *rows])


def _announced(name: str, stand_in: Callable[..., Any], transport: ThroughGrader) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with transport.given(name):
            return stand_in(*args, **kwargs)

    return call
