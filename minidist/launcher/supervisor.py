"""Watches over one world: forks its ranks, passes their output on, always answers, and leaves no process behind."""

import contextlib
import json
import mmap
import os
import resource
import selectors
import signal
import socket
import time
import traceback
from typing import NoReturn

from minidist.comm.checked import Board
from minidist.launcher import family, rank, slots
from minidist.launcher.activity import Stillness, threads_of
from minidist.launcher.job import Ending, Failure, Job
from minidist.launcher.judge import Findings, Judge
from minidist.launcher.output import Output
from minidist.launcher.wire import Channel, Kind, Message

_TICK = 0.1  # seconds between looks at the ranks
_STREAMS = ("out", "err", "said")


def main(sock: socket.socket, parent: int) -> NoReturn:
    """Serve the one world that is asked for on ``sock``."""
    family.adopt_orphans()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channel = Channel(sock)
    try:
        message = channel.receive()
        job = Job.decode(message.body)
        channel.send(Message(Kind.TAKEN))
        World(channel, parent, job, message.fds).run()
    except (EOFError, ConnectionError):
        pass  # nobody wants an answer any more
    except BaseException:
        traceback.print_exc()  # for Zygote.last_words
    finally:
        family.kill_children()
        os._exit(0)


class World:
    """The ranks of one world while it lasts."""

    def __init__(self, channel: Channel, parent: int, job: Job, inputs: tuple[int, ...]):
        self.channel, self.job, self.inputs = channel, job, inputs
        self.store = f"/proc/self/fd/{os.memfd_create('store')}"  # where the ranks meet: a file in no folder
        self.slots = mmap.mmap(-1, slots.nbytes(job.ranks))
        self.board = mmap.mmap(-1, Board.nbytes(job.ranks))
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ, ("parent", 0))
        family.watch_process(self.selector, parent)
        self.found = Findings(job.ranks)
        self.output = [Output(job.output_limit) for _ in range(job.ranks)]
        self.said = [b""] * job.ranks
        self.stopped = False  # whether the parent wants no more
        self.pids: list[int] = []
        self.results: list[int] = []
        self.stacks: list[int] = []

    def run(self) -> None:
        """From the first fork to the verdict."""
        start = time.monotonic()
        for number in range(self.job.ranks):
            self._fork(number)
        verdict = self._watch()
        if verdict in ("timeout", "interrupted"):
            self._ask_for_stacks()
        views = [slots.read(self.slots, number) for number in range(self.job.ranks)]
        family.kill_children()
        self._drain()
        self._answer(verdict, time.monotonic() - start, views)

    def _fork(self, number: int) -> None:
        ends = {name: os.pipe() for name in _STREAMS}
        self.results.append(os.memfd_create(f"result of rank {number}"))
        self.stacks.append(os.memfd_create(f"stack of rank {number}", 0))
        pid = os.fork()
        if pid == 0:
            self._be_a_rank(number, ends)
        self.pids.append(pid)
        for name, (mine, theirs) in ends.items():
            os.close(theirs)
            os.set_blocking(mine, False)
            self.selector.register(mine, selectors.EVENT_READ, (name, number))

    def _be_a_rank(self, number: int, ends: dict[str, tuple[int, int]]) -> NoReturn:
        """In the child: keep only this rank's own descriptors, and be the rank."""
        try:
            for key in list(self.selector.get_map().values()):
                os.close(key.fd)
            self.selector.close()
            for fd in (*self.results[:-1], *self.stacks[:-1], *(mine for mine, _ in ends.values())):
                os.close(fd)
            inputs = self.inputs[number % len(self.inputs)]
            for fd in set(self.inputs) - {inputs}:
                os.close(fd)
            family.leave_parent()
            out, err, said = (ends[name][1] for name in _STREAMS)
            files = (inputs, out, err, said, self.results[-1], self.stacks[-1])
            rank.run(rank.Seat(number, self.job, *files, self.slots, self.board, self.store))
        finally:
            os._exit(98)

    def _watch(self) -> str:
        judge = Judge(self.job.timeout, self.job.stall, Stillness(lambda: threads_of(self.pids)))
        while not self.stopped:
            self._pass_on(_TICK)
            for pid, code in family.reap().items():
                if pid in self.pids:
                    self.found.exits[self.pids.index(pid)] = code
            views = [slots.read(self.slots, number) for number in range(self.job.ranks)]
            if verdict := judge.verdict(self.found, views, time.monotonic()):
                return verdict
        return "interrupted"

    def _pass_on(self, seconds: float) -> bool:
        """Read what the ranks wrote within so many seconds. True if there was anything."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            name, number = key.data
            if name == "parent":
                self.stopped = True
                self.selector.unregister(key.fd)
                continue
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fd)
                os.close(key.fd)
            elif name == "said":
                self._listen(number, data)
            else:
                self._show(number, name, self.output[number].add(name, data))
        return bool(ready)

    def _listen(self, number: int, data: bytes) -> None:
        """A rank says on one line how its function ended: null, or a Failure."""
        self.said[number] += data
        if not self.said[number].endswith(b"\n"):
            return
        try:
            failure = json.loads(self.said[number])
            self.found.hear(number, failure and Failure(**failure))
        except (ValueError, TypeError):
            self.found.hear(number, Failure("OSError", "OSError: it wrote to a descriptor that is not its own", "", ""))

    def _show(self, number: int, name: str, text: bytes) -> None:
        if text:
            self.channel.send(Message(Kind.OUT if name == "out" else Kind.ERR, number, text))

    def _ask_for_stacks(self) -> None:
        for number, pid in enumerate(self.pids):
            if number not in self.found.settled:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR2)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            self._pass_on(_TICK)

    def _drain(self) -> None:
        """What ended ranks had still in their pipes, and lines that were not finished."""
        while self._pass_on(0):
            pass
        for number, output in enumerate(self.output):
            for name in ("out", "err"):
                self._show(number, name, output.rest(name))

    def _answer(self, verdict: str, seconds: float, views: list[slots.Snapshot]) -> None:
        if verdict == "ok":
            for number, fd in enumerate(self.results):
                self.channel.send(Message(Kind.RESULT, number, fds=(fd,)))
        stacks = {number: _text_of(fd) for number, fd in enumerate(self.stacks)}
        errors = {number: output.last_errors for number, output in enumerate(self.output)}
        found = self.found
        exits = {number: found.exits[number] for number in sorted(found.lost)}
        ending = Ending(verdict, seconds, views, found.failures, exits, stacks, errors)
        self.channel.send(Message(Kind.END, body=ending.encode()))


def _text_of(fd: int) -> str:
    return os.pread(fd, 100_000, 0).decode("utf-8", "replace")
