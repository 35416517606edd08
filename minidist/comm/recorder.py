"""What a rank called, how much it moved and when: the measured side of every comparison in the course."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from minidist.timeline import Span, Timeline


@dataclass(slots=True)
class Call:
    """One communication of one rank.

    op: name of the Comm method. nbytes: payload in bytes (all_gather: the whole result; reduce_scatter: the whole
    input). sent: bytes this rank sends, for a collective those of a bandwidth-optimal algorithm, for a message those it
    carries. group: the world ranks it ran over. start, end: seconds of `time.monotonic`; end is None while under way.
    rank: the world rank that called. label: what it was for, if the caller said so with `Recorder.label`.
    """

    op: str
    nbytes: int
    sent: int
    group: tuple[int, ...]
    start: float
    end: float | None
    rank: int
    label: str = ""


@dataclass
class Recorder:
    """The calls of one rank in the order it made them, and the computations it named with `Comm.compute`.

    paced: whether the times are those of a modelled cluster, see `minidist.comm.pace`. limit: of more calls or more
    computations than this the older half is forgotten, so that a long run does not fill the memory.
    """

    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    paced: bool = False
    limit: int = 100_000
    _forgotten_bytes: int = 0
    _label: str = ""

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Calls that are begun inside carry this name, so that they can be counted apart from others of the same op."""
        before, self._label = self._label, name
        try:
            yield
        finally:
            self._label = before

    def add(self, call: Call) -> None:
        """Record a call."""
        call.label = self._label
        self.calls.append(call)
        if len(self.calls) > self.limit:
            old = len(self.calls) // 2
            self._forgotten_bytes += sum(call.sent for call in self.calls[:old])
            del self.calls[:old]

    def add_span(self, span: Span) -> None:
        """Record a computation."""
        self.spans.append(span)
        if len(self.spans) > self.limit:
            del self.spans[: len(self.spans) // 2]

    def bytes_sent(self) -> int:
        """Bytes this rank sent since the last `clear`."""
        return self._forgotten_bytes + sum(call.sent for call in self.calls)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.calls.clear()
        self.spans.clear()
        self._forgotten_bytes = 0

    def timeline(self) -> Timeline:
        """Computations and finished communications as spans on the lanes "compute" and "comm"."""
        comm = [
            Span(call.rank, call.label or call.op, call.start, call.end, lane="comm", nbytes=call.nbytes)
            for call in self.calls
            if call.end is not None
        ]
        return Timeline([*self.spans, *comm], paced=self.paced)
