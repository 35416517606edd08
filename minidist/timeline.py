"""Who did what when: predicted by a simulator or measured on real ranks, one type for both.

A `Span` is one thing a rank did. A `Timeline` holds the spans of some ranks and answers what the lessons ask of them:
how long did it take, how much of it was idle, how much of the communication was hidden. Seconds throughout; the origin
is that of the clock the spans were taken with (a simulator starts at 0).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of instants as disjoint intervals in ascending order; empty intervals vanish.

    >>> union([(4, 5), (0, 2), (1, 3), (3, 3.5), (6, 6)])
    [(0, 3.5), (4, 5)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered, instants covered twice counted once.

    >>> length([(0, 2), (1, 3), (4, 5)])
    4
    """
    return sum(end - start for start, end in union(intervals))


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Instants in both: disjoint intervals in ascending order.

    >>> common([(0, 4), (6, 9)], [(3, 7), (8, 10)])
    [(3, 4), (6, 7), (8, 9)]
    """
    a, b = union(a), union(b)
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def peak(intervals: Sequence[Interval], sizes: Sequence[float] | None = None) -> float:
    """Largest sum of `sizes` (1 each by default) over intervals that hold at one instant.

    An interval holds from its start until just before its end: one that begins where another ends doesn't add to it.

    >>> peak([(0, 2), (1, 3), (2, 4)])
    2
    >>> peak([(0, 2), (1, 3), (2, 4)], sizes=[10, 1, 10])
    11
    """
    sizes = [1] * len(intervals) if sizes is None else sizes
    # At equal times ends come before starts, because their change is negative.
    changes = [
        (time, change)
        for (start, end), size in zip(intervals, sizes, strict=True)
        if start < end
        for time, change in ((start, size), (end, -size))
    ]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def rows(intervals: Sequence[Interval]) -> list[int]:
    """A row for each interval such that no two in one row overlap, as few rows as possible: for drawing.

    >>> rows([(0, 2), (1, 3), (2, 4), (1, 5)])
    [0, 1, 0, 2]
    """
    free_at: list[float] = []
    chosen = [0] * len(intervals)
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start, end = intervals[i]
        row = next((row for row, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[row : row + 1] = [end]
        chosen[i] = row
    return chosen


@dataclass(frozen=True, slots=True)
class Span:
    """One thing one rank did, from `start` to `end` (seconds).

    rank: who. action: what: a string, or anything whose str() says it. lane: "compute", "comm", or a name of your own;
    what overlaps on a rank belongs on different lanes. nbytes: payload of a communication, 0 for anything else.
    Raises ValueError for a span that ends before it starts.
    """

    rank: int
    action: Any
    start: float
    end: float
    lane: str = "compute"
    nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.start <= self.end:
            raise ValueError(f"{self.action} on rank {self.rank} ends at {self.end}, before its start at {self.start}")

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, init=False)
class Timeline:
    """The spans of some ranks, kept in order of start.

    ranks: how many (0 .. ranks-1), or which; None takes those that have a span. A rank that did nothing is idle all the
    time, so say so where it counts. paced: some of the time was slept to imitate other hardware. predicted: computed by
    a simulator, nothing ran.
    """

    spans: tuple[Span, ...]
    ranks: tuple[int, ...]
    paced: bool
    predicted: bool

    def __init__(
        self,
        spans: Iterable[Span],
        ranks: int | Iterable[int] | None = None,
        paced: bool = False,
        predicted: bool = False,
    ) -> None:
        spans = tuple(sorted(spans, key=lambda span: (span.start, span.end)))
        seen = {span.rank for span in spans}
        if ranks is None:
            ranks = seen
        elif isinstance(ranks, int):
            ranks = range(ranks)
        ranks = tuple(sorted(set(ranks)))
        if missing := seen.difference(ranks):
            raise ValueError(f"spans of ranks {sorted(missing)}, but ranks={ranks}: name every rank that has a span")
        for name, value in (("spans", spans), ("ranks", ranks), ("paced", paced), ("predicted", predicted)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"{self.kind} timeline: {len(self.spans)} spans, ranks {list(self.ranks)}, {self.makespan:.4g} s"

    @property
    def kind(self) -> str:
        """ "predicted", "paced" or "measured": what a figure has to say about where its times come from."""
        if self.predicted:
            return "predicted"
        return "paced" if self.paced else "measured"

    @cached_property
    def _lanes(self) -> dict[tuple[int, str], list[Span]]:
        lanes: dict[tuple[int, str], list[Span]] = {}
        for span in self.spans:
            lanes.setdefault((span.rank, span.lane), []).append(span)
        return lanes

    def lane(self, rank: int, lane: str = "compute") -> list[Span]:
        """This rank's spans on this lane, in order of start."""
        return self._lanes.get((rank, lane), [])

    def busy(self, rank: int, lane: str = "compute") -> float:
        """Seconds in which `rank` has a span on `lane`; nested and overlapping spans count once."""
        return length((span.start, span.end) for span in self.lane(rank, lane))

    @cached_property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, over all ranks and lanes."""
        return self.end - self.start

    @cached_property
    def idle_share(self) -> float:
        """1 - busy / (ranks x makespan): the share of the ranks' time without computation. 0 for an empty timeline.

        >>> Timeline([Span(0, "F0", 0, 1), Span(1, "F0", 1, 2)]).idle_share
        0.5
        """
        total = len(self.ranks) * self.makespan
        return 1 - sum(self.busy(rank) for rank in self.ranks) / total if total else 0.0

    @property
    def bubble(self) -> float:
        """What a pipeline calls its idle share."""
        return self.idle_share

    @cached_property
    def bubble_rate(self) -> float:
        """1 - busy of one rank / longest (own end - own start) of any rank: the zero-bubble paper's (arXiv 2401.10241).

        It doesn't charge a rank for starting late or ending early, which the next step's work fills if the optimizer
        doesn't wait for everyone. Computation only. Where ranks are not equally busy, their mean is the "one rank".

        >>> Timeline([Span(0, "F0", 0, 1), Span(0, "F1", 1, 2), Span(1, "F0", 1, 2), Span(1, "F1", 3, 4)]).bubble_rate
        0.33333333333333337
        """
        computing = [spans for rank in self.ranks if (spans := self.lane(rank))]
        longest = max((max(span.end for span in spans) - spans[0].start for spans in computing), default=0.0)
        return 1 - sum(self.busy(rank) for rank in self.ranks) / len(self.ranks) / longest if longest else 0.0

    @cached_property
    def overlap(self) -> float:
        """Share of the communication time hidden under computation of the same rank; 0 where nothing communicates.

        >>> Timeline([Span(0, "backward", 0, 3), Span(0, "all_reduce", 2, 4, lane="comm")]).overlap
        0.5
        """
        hidden = talking = 0.0
        for rank in self.ranks:
            compute, comm = ([(s.start, s.end) for s in self.lane(rank, lane)] for lane in ("compute", "comm"))
            hidden += length(common(compute, comm))
            talking += length(comm)
        return hidden / talking if talking else 0.0

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """For each rank the most micro-batches, each counted for every stage, between F and the end of their B or W.

        Of spans whose action has a stage, a kind and a microbatch, as a pipeline's has; what comes to no end stays.
        """
        return [int(peak(self.in_flight(rank))) for rank in self.ranks]

    def in_flight(self, rank: int) -> list[Interval]:
        """From when to when this rank held each micro-batch of each of its stages, in order of start."""
        spans = [span for span in self.lane(rank) if hasattr(span.action, "microbatch")]
        ends = {(s.action.stage, s.action.microbatch): s.end for s in spans if s.action.kind in ("B", "W")}
        starts = [(s.start, (s.action.stage, s.action.microbatch)) for s in spans if s.action.kind == "F"]
        return [(start, ends.get(key, self.end)) for start, key in starts]

    def peak_spans(self, rank: int, lane: str = "comm") -> int:
        """Most spans of this rank and lane that ran at one instant."""
        return int(peak([(span.start, span.end) for span in self.lane(rank, lane)]))

    def peak_nbytes(self, rank: int, lane: str = "comm") -> int:
        """Most bytes in flight on this rank at one instant: payloads of the spans that ran then, summed."""
        spans = self.lane(rank, lane)
        return int(peak([(span.start, span.end) for span in spans], [span.nbytes for span in spans]))

    def merge(self, others: "Timeline | Iterable[Timeline]") -> "Timeline":
        """One timeline of this one's ranks and the others': what the ranks of one run measured, put together.

        Times are taken as they are, so they must come from one clock (ranks of one host share theirs).
        Raises ValueError for timelines of different kinds.
        """
        timelines = [self, *([others] if isinstance(others, Timeline) else others)]
        if len(kinds := {timeline.kind for timeline in timelines}) > 1:
            raise ValueError(f"cannot merge {' and '.join(sorted(kinds))} timelines: draw them one above the other")
        return Timeline(
            (span for timeline in timelines for span in timeline.spans),
            ranks={rank for timeline in timelines for rank in timeline.ranks},
            paced=self.paced,
            predicted=self.predicted,
        )

    def perfetto(self) -> dict[str, Any]:
        """As a Chrome trace (JSON object format), which ui.perfetto.dev and chrome://tracing open.

        A rank is a process, a lane a thread; spans of one lane that overlap get threads of their own, since within one
        thread the format knows only nesting. Microseconds from the first start. Format: "Trace Event Format", Google.
        """
        events: list[dict[str, Any]] = []
        lanes = sorted({lane for _, lane in self._lanes}, key=lambda lane: (lane != "compute", lane))
        for rank in self.ranks:
            process = {"ph": "M", "pid": rank}
            events.append(process | {"name": "process_name", "args": {"name": f"rank {rank} ({self.kind})"}})
            events.append(process | {"name": "process_sort_index", "args": {"sort_index": rank}})
            threads = 0
            for lane in lanes:
                spans = self.lane(rank, lane)
                tids = [threads + row for row in rows([(span.start, span.end) for span in spans])]
                names = [f"{lane} {row + 1}" if row else lane for row in range(len(set(tids)))]
                for tid, name in enumerate(names, start=threads):
                    thread = {"ph": "M", "pid": rank, "tid": tid}
                    events.append(thread | {"name": "thread_name", "args": {"name": name}})
                    events.append(thread | {"name": "thread_sort_index", "args": {"sort_index": tid}})
                events += [self._trace_event(span, tid) for span, tid in zip(spans, tids, strict=True)]
                threads += len(names)
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"times": self.kind}}

    def _trace_event(self, span: Span, tid: int) -> dict[str, Any]:
        event = {"ph": "X", "name": str(span.action), "cat": span.lane, "pid": span.rank, "tid": tid}
        event |= {"ts": (span.start - self.start) * 1e6, "dur": span.seconds * 1e6}
        return event | ({"args": {"nbytes": span.nbytes}} if span.nbytes else {})

    def save(self, path: str | Path) -> Path:
        """Writes the Perfetto trace to `path` and returns it. Open the file at https://ui.perfetto.dev."""
        path = Path(path)
        path.write_text(json.dumps(self.perfetto()))
        return path
