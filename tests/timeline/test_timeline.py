"""Timeline: intervals against counting cells, shares against hand-worked runs, the trace against its format."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.timeline import Span, Timeline, common, length, peak, rows, union

cells = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


def covered(intervals):
    """The unit cells that whole-numbered intervals cover: the slow, obvious way to do interval arithmetic."""
    return {cell for start, end in intervals for cell in range(start, end)}


@given(cells, cells)
def test_interval_arithmetic_is_that_of_cells(a, b):
    assert covered(union(a)) == covered(a)
    assert all(left[1] < right[0] for left, right in zip(union(a), union(a)[1:], strict=False))
    assert all(start < end for start, end in union(a))
    assert length(a) == len(covered(a))
    assert covered(common(a, b)) == covered(a) & covered(b)
    sizes = range(1, len(a) + 1)
    at = [[size for (start, end), size in zip(a, sizes, strict=True) if start <= t < end] for t in range(20)]
    assert peak(a) == max(map(len, at))
    assert peak(a, sizes) == max(map(sum, at))


@given(cells.map(lambda intervals: [i for i in intervals if i[0] < i[1]]))
def test_rows_never_overlap_and_are_as_few_as_possible(intervals):
    row = rows(intervals)
    for mine in set(row):
        assert peak([interval for interval, r in zip(intervals, row, strict=True) if r == mine]) == 1
    assert max(row, default=-1) + 1 == peak(intervals)


def gpipe(ranks, microbatches):
    """Spans of a pipeline with unit times: rank r starts forward i at r + i, backward i after its successor's."""
    ahead = microbatches + ranks - 1
    forward = [Span(r, f"{r}F{i}", r + i, r + i + 1) for r in range(ranks) for i in range(microbatches)]
    start = lambda r, i: ahead + ranks - 1 - r + i
    return forward + [
        Span(r, f"{r}B{i}", start(r, i), start(r, i) + 1) for r in range(ranks) for i in range(microbatches)
    ]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (4, 1), (4, 8), (8, 24)])
def test_the_bubble_of_a_pipeline_is_the_textbook_formula(ranks, microbatches):
    timeline = Timeline(gpipe(ranks, microbatches), ranks, predicted=True)
    assert timeline.makespan == 2 * (microbatches + ranks - 1)
    assert timeline.bubble == timeline.idle_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_bubble_rate_forgives_late_starts_and_early_ends():
    # Rank 0 works from 0 to 4, rank 1 from 2 to 6, both without a pause: only the makespan sees something idle.
    staggered = Timeline([Span(0, "F0", 0, 4), Span(1, "F0", 2, 6)])
    assert staggered.bubble == pytest.approx(1 / 3)
    assert staggered.bubble_rate == 0
    # Communication after the last computation lengthens the step, and is none of the bubble rate's business.
    assert Timeline([*staggered.spans, Span(0, "all_reduce", 6, 9, "comm")]).bubble_rate == 0
    # A pause counts; the rank with the longest own time decides.
    paused = Timeline([Span(0, "F0", 0, 2), Span(0, "B0", 4, 6), Span(1, "F0", 2, 6)])
    assert paused.bubble_rate == pytest.approx(1 - 4 / 6)


def test_a_rank_that_did_nothing_is_idle():
    spans = [Span(0, "F0", 0, 1)]
    assert Timeline(spans).bubble == 0
    assert Timeline(spans, ranks=4).bubble == 0.75
    assert Timeline(spans, ranks=[0, 7]).ranks == (0, 7)
    with pytest.raises(ValueError, match=r"spans of ranks \[0\]"):
        Timeline(spans, ranks=[1, 2])


def test_busy_counts_nested_spans_once():
    timeline = Timeline([Span(0, "step", 0, 10), Span(0, "backward", 2, 6), Span(0, "send", 9, 12, "comm")])
    assert timeline.busy(0) == 10
    assert timeline.busy(0, "comm") == 3
    assert timeline.busy(5) == 0


def test_overlap_is_within_a_rank_and_over_all_of_them():
    compute, comm = Span(0, "backward", 0, 4), Span(0, "all_reduce", 2, 6, "comm")
    assert Timeline([compute, comm]).overlap == 0.5
    assert Timeline([compute, Span(1, "all_reduce", 2, 6, "comm")]).overlap == 0, "another rank's work hides nothing"
    # Two collectives under way at once are not twice the time.
    assert Timeline([compute, comm, Span(0, "all_reduce", 3, 6, "comm")]).overlap == 0.5
    # 2 of 4 seconds hidden on rank 0, 1 of 1 on rank 1.
    both = Timeline([compute, comm, Span(1, "backward", 0, 4), Span(1, "all_reduce", 0, 1, "comm")])
    assert both.overlap == pytest.approx(3 / 5)
    assert Timeline([compute]).overlap == 0


def test_peaks():
    spans = [Span(0, "isend", i, i + 3, "comm", nbytes=10 * (i + 1)) for i in range(3)]
    timeline = Timeline([*spans, Span(1, "isend", 0, 9, "comm", nbytes=1000)])
    assert timeline.peak_spans(0) == 3
    assert timeline.peak_nbytes(0) == 60
    assert timeline.peak_spans(0, "compute") == 0


def test_merging_puts_the_ranks_of_one_run_together():
    parts = [Timeline([Span(r, "F0", r, r + 1)], ranks=[r], paced=True) for r in range(3)]
    merged = parts[0].merge(parts[1:])
    assert merged == Timeline([Span(r, "F0", r, r + 1) for r in range(3)], paced=True)
    assert parts[0].merge(parts[1]).ranks == (0, 1)
    with pytest.raises(ValueError, match="measured and predicted"):
        Timeline([]).merge(Timeline([], predicted=True))
    with pytest.raises(ValueError, match="measured and paced"):
        merged.merge(Timeline([]))


def test_an_empty_timeline_answers_everything():
    empty = Timeline([])
    assert (empty.makespan, empty.bubble, empty.bubble_rate, empty.overlap) == (0, 0, 0, 0)
    assert empty.perfetto()["traceEvents"] == []


def test_a_span_does_not_end_before_it_starts():
    with pytest.raises(ValueError, match="F0 on rank 1 ends at 1, before its start at 2"):
        Span(1, "F0", 2, 1)
    with pytest.raises(ValueError, match="before its start"):
        Span(1, "F0", float("nan"), 1)


def check_trace(trace):
    """What Perfetto's importer needs: names and threads declared, times in range, spans of a thread nested or apart."""
    trace = json.loads(json.dumps(trace))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    for event in slices:
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["pid"] in processes
        assert (event["pid"], event["tid"]) in threads
    for thread in threads:
        mine = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread]
        assert peak(mine) <= 1, "spans of one thread overlap"
    return processes, threads, slices


class Action:
    def __str__(self):
        return "2F0"


def test_perfetto_trace(tmp_path):
    spans = [
        Span(3, Action(), 100.0, 100.5),
        Span(3, "all_reduce", 100.25, 101.0, "comm", nbytes=4096),
        Span(3, "all_gather", 100.5, 101.5, "comm", nbytes=64),
        Span(0, "step", 100.0, 101.0),
    ]
    path = Timeline(spans, paced=True).save(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    processes, threads, slices = check_trace(trace)
    assert processes == {0: "rank 0 (paced)", 3: "rank 3 (paced)"}
    assert sorted(threads.values()) == ["comm", "comm 2", "compute", "compute"]
    assert trace["otherData"] == {"times": "paced"}
    assert len(slices) == len(spans)
    reduce = next(event for event in slices if event["name"] == "all_reduce")
    assert (reduce["ts"], reduce["dur"], reduce["args"]) == (250000.0, 750000.0, {"nbytes": 4096})
    assert any(event["name"] == "2F0" for event in slices)
    # The same check refuses a trace that puts all of a lane on one thread.
    for event in trace["traceEvents"]:
        event["tid"] = 0
    with pytest.raises(AssertionError, match="overlap"):
        check_trace(trace)


def test_kind_says_where_the_times_come_from():
    assert Timeline([]).kind == "measured"
    assert Timeline([], paced=True).kind == "paced"
    assert Timeline([], predicted=True).kind == "predicted"
    assert str(Timeline([Span(0, "F0", 0, 2)], predicted=True)) == "predicted timeline: 1 spans, ranks [0], 2 s"
