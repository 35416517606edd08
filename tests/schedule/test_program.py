"""Programs as text, what they refuse, and what follows from reads and writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist import schedule
from minidist.schedule import Action, Program, build, parse, simulate, validate
from minidist.schedule.layers import split_layers

ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from("FBIW"), st.integers(0, 999))


@given(st.lists(st.lists(ACTIONS, min_size=1), min_size=1))
def test_text_and_back(rows):
    program = Program.of(rows)
    assert parse(str(program)) == program


def test_empty_cells_are_skipped():
    assert parse("0F0,,0B0,\n\n , 1F0 ,1B0") == parse("0F0,0B0\n1F0,1B0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no program in this text"),
        ("0F0\n1F0,1X0", "rank 1, cell 2: '1X0' is no action"),
        ("0F0,F0", "rank 0, cell 2: 'F0'"),
        ("0F0 0B0", "'0F0 0B0' is no action"),
    ],
)
def test_text_that_is_no_program(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0,0F0\n1F0,1B0", "0F0 is done twice, on rank 0 and on rank 0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", "micro-batch 1 at stage 1 has nothing"),
        ("0F0,0I0\n1F0,1B0", "micro-batch 0 at stage 0 has 0F0, 0I0: it needs F and then B"),
        ("0F0,0B0,0W0\n1F0,1B0", "has 0F0, 0B0, 0W0"),
        ("0F0,0B0\n1F0,1B0,0F1,0B1", "0F1 is on rank 1, and stage 0 on rank 0"),
        ("0B0,0F0\n1F0,1B0", r"rank 0 at 0B0 for act\[0, 0\] \(made by 0F0 on rank 0\)"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", r"rank 0 at 0B0 for g\[1, 0\] \(made by 1B0 on rank 1\); rank 1 at 1F1"),
        ("0F0,0W0,0I0\n1F0,1B0", r"wctx\[0, 0\]"),
        ("0F0,0B0\n1F0,1B0\n3F0,3B0", "micro-batch 0 at stage 2 has nothing"),
    ],
)
def test_programs_that_cannot_run(text, words):
    with pytest.raises(ValueError, match=words):
        validate(parse(text))
    with pytest.raises(ValueError, match=words):
        simulate(parse(text))


def test_a_rank_without_work_is_refused():
    with pytest.raises(ValueError, match="rank 1 has nothing to do"):
        validate(Program.of([[Action(0, "F", 0), Action(0, "B", 0)], []]))


@pytest.mark.parametrize(
    ("name", "v", "hangs"),
    [("gpipe", 1, False), ("1f1b", 1, True), ("zb_h1", 1, True), ("interleaved", 2, True)],
)
def test_blocking_sends(name, v, hangs):
    assert validate(build(name, 4, 8, v)).blocking_hangs is hangs


def test_messages_are_what_crosses_between_ranks():
    found = validate(build("1f1b", 3, 2)).messages
    assert sorted((str(m.tensor), m.src, m.dst) for m in found) == sorted(
        [(f"x[{s}, {m}]", s - 1, s) for s in (1, 2) for m in (0, 1)]
        + [(f"g[{s}, {m}]", s, s - 1) for s in (1, 2) for m in (0, 1)]
    )
    # In a V the last stage of the way down and the first of the way up are on one rank: nothing is sent.
    vee = {(m.tensor.stage, m.tensor.role) for m in validate(build("zb_v", 3, 2, 2)).messages}
    assert vee == {(s, role) for s in (1, 2, 4, 5) for role in "xg"}


def test_costs_per_stage_and_of_messages():
    program = build("gpipe", 2, 1)
    assert simulate(program, F=[1, 2], I=[3, 4], W=[5, 6], comm=0.5).makespan == 1 + 0.5 + 2 + 10 + 0.5 + 8
    for costs, words in (({"F": [1]}, "F=.* one for each of 2 stages"), ({"W": -1}, "W=-1"), ({"comm": -1}, "comm=-1")):
        with pytest.raises(ValueError, match=words):
            simulate(program, **costs)


def test_fewer_micro_batches_and_forward_alone():
    program = build("zb_h1", 4, 8)
    assert program.first(3).microbatches == 3
    validate(program.first(3))
    assert {a.kind for row in program.forward() for a in row} == {"F"}
    assert validate(program.forward()).blocking_hangs is False


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
def test_layers_are_divided_evenly(layers, ranks, per_rank):
    stages = ranks * per_rank
    if layers < stages:
        with pytest.raises(ValueError, match=f"{layers} layers make at most {layers} stages"):
            split_layers(layers, stages)
        return
    parts = split_layers(layers, stages)
    assert [i for part in parts for i in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_layers_are_divided_by_cost(costs, stages):
    if len(costs) < stages:
        return
    import itertools

    parts = split_layers(costs, stages)
    worst = max(sum(costs[i] for i in part) for part in parts)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts)
    assert worst == best
    assert [i for part in parts for i in part] == list(range(len(costs)))


def test_the_30_layers_that_a_floor_would_lose():
    assert [len(part) for part in split_layers(30, 4)] == [8, 8, 7, 7]
    assert schedule.loop(5, 4) == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_costs_of_a_run_simulate_to_that_run(name):
    per_rank = 2 if name in ("interleaved", "zb_v") else 1
    program, stages = build(name, 4, 8, per_rank), 4 * per_rank
    given = {"F": [1.0 + s for s in range(stages)], "I": [2.0 + s for s in range(stages)], "W": [0.5] * stages}
    run = simulate(program, **given, comm=0.25)
    found = schedule.costs(run)
    if not name.startswith("zb"):
        given |= {"I": [i + 0.5 for i in given["I"]], "W": [0.0] * stages}
    assert all(found[kind] == pytest.approx(given[kind]) for kind in "FIW")
    assert simulate(program, **found, comm=0.25).makespan == pytest.approx(run.makespan)


def test_costs_of_a_run_are_what_it_was_simulated_with():
    rounded = lambda found: {kind: [round(seconds, 9) for seconds in each] for kind, each in found.items()}
    seconds = {"F": [1.0, 2.0, 3.0, 4.0], "I": [2.0, 1.0, 4.0, 3.0], "W": [0.5, 1.5, 2.5, 3.5]}
    run = simulate(build("zb_h1", ranks=4, microbatches=8), **seconds, comm=0.3)
    assert rounded(schedule.costs(run)) == seconds
    whole = schedule.costs(simulate(build("1f1b", ranks=4, microbatches=8), **seconds))
    assert whole["I"] == pytest.approx([2.5, 2.5, 6.5, 6.5])
    assert whole["W"] == [0, 0, 0, 0]
    mixed = simulate(build("dualpipe_v", ranks=2, microbatches=6, stages_per_rank=2), **seconds)
    assert rounded(schedule.costs(mixed)) == seconds  # some backward passes whole, some split
    slow = md.Timeline([*run.spans, md.Span(0, Action(0, "F", 8), 100, 200)], ranks=4, predicted=True)
    assert rounded(schedule.costs(slow)) == seconds  # one that was held up says little
    by_rank = [md.Timeline(run.lane(rank), ranks=[rank]) for rank in range(4)]
    assert rounded(schedule.costs(by_rank)) == seconds
    with pytest.raises(ValueError, match="stage 0 is not in these timelines: give those of all ranks"):
        schedule.costs(by_rank[2])
    nothing_to_do = simulate(build("zb_h1", ranks=2, microbatches=2), F=1, I=0, W=2)
    both = [nothing_to_do, simulate(build("1f1b", ranks=2, microbatches=2), F=1, I=0, W=5)]
    assert schedule.costs(both) == {"F": [1, 1], "I": [0, 0], "W": [2, 2]}  # halves, where there are any
    with pytest.raises(ValueError, match="forward passes only"):
        schedule.costs(simulate(build("1f1b", ranks=2, microbatches=2).forward()))
    with pytest.raises(ValueError, match="no action of a pipeline"):
        schedule.costs(md.Timeline([md.Span(0, "forward 1", 0, 1)]))
