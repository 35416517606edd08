"""One world of ranks from the first message to the verdict: the loop that listens to them."""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grading.ranks import codec
from grading.ranks.relay import Relay, Reply, Wrong
from grading.ranks.run import Job, Run
from grading.ranks.warm import MOST_PROCESSES, TOO_MANY

_GRACE_S = 1.0  # after a rank has failed: so long the others may still end on their own
_WORD_S = 2.0  # between words about what is waited for
_CHUNK = 1 << 16
_MOST_BYTES = 1 << 29  # that one rank may send in a run


class Link:
    """One rank's socket and pipe, read and written without ever blocking."""

    def __init__(self, limit: int) -> None:
        self.sock, self.their_sock = socket.socketpair()
        self.pipe, self.their_pipe = os.pipe()
        self.sock.setblocking(False)
        os.set_blocking(self.pipe, False)
        self.reader, self.received = codec.Reader(), 0
        self.out = bytearray()
        self.printed, self.dropped, self.limit = b"", 0, limit

    @property
    def open(self) -> bool:
        return self.sock.fileno() >= 0

    def say(self, value: Any) -> None:
        self.out += codec.dump(value)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        with contextlib.suppress(OSError):
            while self.out and self.open:
                del self.out[: self.sock.send(self.out)]

    def hear(self) -> list[Any] | None:
        """What the rank said; None when its socket is closed. Raises codec.Damaged."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        self.received += len(data)
        if self.received > _MOST_BYTES:
            raise codec.Damaged(f"it sent more than {_MOST_BYTES:,} bytes")
        return list(self.reader.feed(data)) if data else None

    def read_prints(self) -> bool:
        """Take what it printed, as much as is kept. False at the end."""
        try:
            data = os.read(self.pipe, 1 << 20)
        except BlockingIOError:
            return True
        room = max(self.limit - len(self.printed), 0)
        self.printed += data[:room]
        self.dropped += max(len(data) - room, 0)
        return bool(data)

    @property
    def text(self) -> str:
        """What it printed, and how much of it is not shown."""
        shown = self.printed.decode("utf-8", "replace")
        return f"{shown}\n... and {self.dropped:,} bytes more" if self.dropped else shown


class World:
    """The ranks of one job, from the first message to the verdict."""

    def __init__(self, job: Job) -> None:
        self.job, self.relay = job, Relay(job)
        self.links = [Link(job.limits.printed_bytes) for _ in range(job.ranks)]
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()
        for rank, link in enumerate(self.links):
            self.selector.register(link.sock, selectors.EVENT_READ, ("said", rank))
            self.selector.register(link.pipe, selectors.EVENT_READ, ("printed", rank))
            link.say(self._orders(rank))

    @property
    def theirs(self) -> list[int]:
        """The ranks' ends, two descriptors each."""
        return [fd for link in self.links for fd in (link.their_sock.fileno(), link.their_pipe)]

    def close_theirs(self) -> None:
        for link in self.links:
            link.their_sock.close()
            os.close(link.their_pipe)
            link.their_pipe = -1

    def close(self) -> None:
        self.selector.close()
        for link in self.links:
            link.sock.close()
            link.their_sock.close()
            for fd in (link.pipe, link.their_pipe):
                with contextlib.suppress(OSError):
                    os.close(fd)
            link.pipe = link.their_pipe = -1

    def _orders(self, rank: int) -> dict[str, Any]:
        """What this rank is told, and nothing of the others."""
        job = self.job
        return {
            "rank": rank,
            "function": job.function,
            "body": job.body,
            "given": dict(job.given),
            "calls": [(len(call), dict(call[rank])) if rank < len(call) else None for call in job.calls],
            "seed": job.seed,
            "limits": asdict(job.limits),
        }

    def watch(
        self,
        control: socket.socket,
        exits: Callable[[], dict[int, int]],
        waiting: Callable[[str], None] | None = None,
    ) -> Run:
        """Listen until nothing can happen any more, or the time is over.

        control: readable when `exits` has news: ranks whose process ended, and their exit codes. waiting: told what is
        waited for, once in so many seconds.
        """
        next_word = self.started + _WORD_S
        self.selector.register(control, selectors.EVENT_READ, ("host", -1))
        late = self.started + self.job.limits.seconds + _GRACE_S
        first_bad = None
        while not self.relay.settled:
            now = time.monotonic()
            if self.relay.bad and first_bad is None:
                first_bad = now
            if waiting is not None and now > next_word:
                next_word = now + _WORD_S
                waiting(self.waits_for())
            if now > late or (first_bad is not None and now > first_bad + _GRACE_S):
                break
            try:
                self._listen(exits)
            except Wrong as wrong:
                return self.end(wrong.verdict, wrong.why, wrong.mistake, wrong.rank)
        return self._verdict()

    def waits_for(self) -> str:
        """What the run waits for now, and until when."""
        running = [str(rank) for rank, seat in enumerate(self.relay.seats) if seat.state == "running"]
        who = f"rank {running[0]} has" if len(running) == 1 else f"ranks {', '.join(running)} have"
        passed, most = time.monotonic() - self.started, self.job.limits.seconds
        return f"{who} not returned after {passed:.0f} s; after {most:g} s the run is ended, and the report says where."

    def _listen(self, exits: Callable[[], dict[int, int]]) -> None:
        for rank, link in enumerate(self.links):
            if link.open:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0)
                self.selector.modify(link.sock, wanted, ("said", rank))
        for key, events in self.selector.select(0.1):
            what, rank = key.data
            if what == "host":
                for gone, code in exits().items():
                    self._gone(gone, code)
            elif what == "printed":
                if not self.links[rank].read_prints():
                    self.selector.unregister(key.fileobj)
            else:
                if events & selectors.EVENT_WRITE:
                    self.links[rank].flush()
                if events & selectors.EVENT_READ:
                    self._hear(rank)

    def _hear(self, rank: int) -> None:
        try:
            said = self.links[rank].hear()
            for each in said or ():
                self._tell(self.relay.receive(rank, each))
        except Wrong:
            raise
        except Exception as error:  # whatever a rank says, that is a verdict
            self.relay.lose(rank, f"sent something that is no message: {error}")
            said = None
        if said is None and self.links[rank].open:
            self.selector.unregister(self.links[rank].sock)
            self.links[rank].sock.close()

    def _tell(self, replies: list[Reply]) -> None:
        for rank, reply in replies:
            self.links[rank].say(reply)

    def _gone(self, rank: int, code: int) -> None:
        """The warm process saw this rank's process end."""
        if not 0 <= rank < self.job.ranks or self.relay.seats[rank].state in ("failed", "lost"):
            return
        if self.links[rank].open:
            self._hear(rank)  # its last words may still be there
        if self.relay.seats[rank].state not in ("failed", "lost") and not self.relay.finished:
            self.relay.lose(rank, _exit_text(code))

    def _verdict(self) -> Run:
        relay = self.relay
        if relay.finished:
            return self.end("ok")
        running = [rank for rank, seat in enumerate(relay.seats) if seat.state == "running"]
        if relay.bad:
            rank = relay.bad[0]
            seat = relay.seats[rank]
            if seat.kind == "OutOfTime":
                return self.end("timeout", f"rank {rank}: {seat.why}", "endless-loop", rank)
            verb = "raised " if seat.state == "failed" else ""
            mistake = {"NotImplementedError": "not-written"}.get(seat.kind, "raises" if verb else "process-ended")
            return self.end("error", f"rank {rank} {verb}{seat.why}", mistake, rank)
        if running:
            why = f"rank {running[0]} had not ended after {self.job.limits.seconds:g} s, and does not react."
            return self.end("timeout", why, "endless-loop", running[0])
        why, mistake = relay.stuck()
        return self.end("deadlock", why, mistake)

    def end(self, verdict: str, why: str = "", mistake: str = "", rank: int | None = None) -> Run:
        """The run with this verdict."""
        for link in self.links:
            with contextlib.suppress(OSError):
                while link.read_prints() and self._more(link):
                    pass
        relay = self.relay
        return Run(
            verdict,
            tuple(relay.results),
            tuple(relay.messages),
            tuple(relay.collectives),
            tuple(relay.asked),
            tuple(link.text for link in self.links),
            relay.call,
            rank,
            why,
            mistake,
            time.monotonic() - self.started,
        )

    def _more(self, link: Link) -> bool:
        """Whether there is something in the pipe now."""
        with selectors.DefaultSelector() as selector:
            selector.register(link.pipe, selectors.EVENT_READ)
            return bool(selector.select(0)) and link.dropped < 1 << 26


def _exit_text(code: int) -> str:
    """How a process ended, for its rank's sentence."""
    if code == TOO_MANY:
        return f"was ended: more than {MOST_PROCESSES} processes were started, which looks like a fork without an end."
    if code >= 0:
        return f"ended its own process with exit code {code} instead of returning."
    name = signal.Signals(-code).name
    causes = {
        "SIGSEGV": "crashed: it read or wrote memory that is not its own",
        "SIGABRT": "crashed: native code gave up",
        "SIGXCPU": "used up its processor time: a loop that does not end",
        "SIGKILL": "was killed, by itself, by the limit on its processor time, or because memory ran out",
    }
    return f"{causes.get(name, 'ended')} ({name})."
