"""The published schedules: their closed forms, their published rates, and what they refuse."""

import itertools

import pytest

import minidist as md
from minidist import schedule
from minidist.schedule import SCHEDULES, Action, Program, build, simulate

SIZES = list(itertools.product(range(1, 9), range(1, 25)))  # P, M
SINGLE = [name for name, one in SCHEDULES.items() if one.stages_per_rank == 1]
VEES = [name for name, one in SCHEDULES.items() if one.stages_per_rank == 2]

# Zero Bubble Pipeline Parallelism (arXiv 2401.10241), Tables 5 and 6: P, M, then T_F, T_B, T_W and T_comm in ms, then
# the bubble rates of 1F1B, of 1F1B-I with V stages a rank, of ZB-H1 and of ZB-H2.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, (0.1055, 3), 0.1585, 0.1083),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, (0.0443, 3), 0.0674, 0.0444),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, (0.0628, 4), 0.1045, 0.0559),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, (0.1104, 3), 0.1397, 0.0672),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, (0.0445, 3), 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, (0.1493, 2), 0.1421, 0.0641),
]


def held(name, p, r, m, v=1):
    """Closed forms of the most that rank r of p holds at once."""
    return {
        "gpipe": m,
        "1f1b": min(p - r, m),
        "interleaved": min((v - 1) * p + 2 * (p - 1 - r) + 1, v * m) if v > 1 else min(p - r, m),
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
    }[name]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name):
    for p, m in SIZES:
        timeline = simulate(build(name, p, m))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert timeline.peak_in_flight == [held(name, p, r, m) for r in range(p)]


def test_bubble_of_interleaved():
    for (p, m), v in itertools.product(SIZES, (1, 2, 3)):
        if m % p == 0:
            timeline = simulate(build("interleaved", p, m, v), 1 / v, 1 / v, 1 / v)
            assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
            assert timeline.peak_in_flight == [held("interleaved", p, r, m, v) for r in range(p)]


def test_interleaved_with_one_stage_is_1f1b():
    assert build("interleaved", 4, 8, 1) == build("1f1b", 4, 8)


def test_bubble_of_zero_bubble_schedules():
    for p, m in SIZES:
        if m >= p:
            timeline = simulate(build("zb_h1", p, m))
            assert timeline.bubble == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)
            assert timeline.peak_in_flight == [p] * p
        if m >= 2 * p - 1:
            timeline = simulate(build("zb_h2", p, m))
            assert timeline.peak_in_flight == [2 * p - 1] * p
            assert timeline.bubble_rate == pytest.approx(0, abs=1e-12)
            vee = simulate(build("zb_v", p, m, 2))
            assert vee.bubble_rate == pytest.approx(0, abs=1e-12)
            assert max(vee.peak_in_flight) == 2 * p  # of stages half as long: P micro-batches, as 1F1B


def test_dualpipe_holds_one_micro_batch_more_than_1f1b_on_every_rank():
    for p, m in SIZES:
        if m >= 2 * p:
            timeline = simulate(build("dualpipe_v", p, m, 2))
            assert timeline.peak_in_flight == [2 * p + 1] * p
            # The paper's bubble is for a forward and a backward fused into one action, on two streams; here each runs
            # alone, and what is left is the wait for the first forward pass.
            assert timeline.makespan == pytest.approx(6 * m + p - 1)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"p={row[0]}, m={row[1]}")
def test_published_bubble_rates(row):
    p, m, f, i, w, comm, one_f_one_b, (interleaved, v), zb_h1, zb_h2 = row
    rate = lambda name, v=1: simulate(build(name, p, m, v), f / v, i / v, w / v, comm).bubble_rate
    assert [round(rate(name), 4) for name in ("1f1b", "zb_h1", "zb_h2")] == [one_f_one_b, zb_h1, zb_h2]
    assert rate("interleaved", v) == pytest.approx(interleaved, rel=0.05)


def test_every_schedule_is_valid_and_complete_for_any_size():
    for name, (p, m) in itertools.product(SCHEDULES, SIZES):
        v = SCHEDULES[name].stages_per_rank or 2
        if name == "interleaved" and m % p:
            continue
        program = build(name, p, m, v)
        schedule.validate(program)
        assert (program.ranks, program.stages, program.microbatches) == (p, p * v, m)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ifib", 2, 4), "they are gpipe, 1f1b"),
        (("1f1b", 0, 4), "ranks=0 must be a whole number from 1 on"),
        (("1f1b", 2, 0), "microbatches=0 must be"),
        (("1f1b", 2, True), "microbatches=True must be"),
        (("interleaved", 4, 6, 2), "6 is no multiple of 4, take 4 or 8"),
        (("interleaved", 4, 3, 2), "3 is no multiple of 4, take 4$"),
        (("1f1b", 4, 8, 2), "interleaved takes any number"),
        (("zb_v", 4, 8, 1), "zb_v has 2 on every rank"),
        (("dualpipe_v", 4, 8, 3), "dualpipe_v has 2 on every rank"),
    ],
)
def test_illegal_combinations_name_legal_ones(arguments, words):
    with pytest.raises(ValueError, match=words):
        build(*arguments)


def test_the_usual_interleaved_formula_hangs_where_the_last_round_is_not_full():
    """C24: with 6 micro-batches on 4 ranks it waits for micro-batches that are not there."""
    from minidist.schedule.library import interleaved

    program = Program.of(interleaved(rank, 4, 6, 2) for rank in range(4)).first(6)
    assert {a.microbatch for a in interleaved(0, 4, 6, 2)} == set(range(8))
    ahead = [next(i for i, a in enumerate(row) if a.kind == "B") - 1 for row in build("interleaved", 4, 8, 2)]
    assert ahead == [10, 8, 6, 4]
    assert simulate(build("1f1b", 4, 2), I=0.5, W=0.5).makespan == 10
    assert program.microbatches == 6


def test_greedy_makes_gpipe_and_1f1b():
    for p, m in itertools.product(range(1, 7), range(1, 13)):
        assert schedule.greedy(p, m, prefer=schedule.forward_first) == build("gpipe", p, m)
        assert schedule.greedy(p, m, limit=lambda rank, p=p: p - rank) == build("1f1b", p, m)


def test_greedy_makes_a_vee_that_is_split():
    program = schedule.greedy(4, 8, 2, schedule.vee, limit=lambda rank: 8, split=True)
    schedule.validate(program)
    assert [program.stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert max(simulate(program).peak_in_flight) <= 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks=0 must be a whole number from 1 on"),
        ({"microbatches": 2.0}, "microbatches=2.0 must be a whole number from 1 on"),
        ({"stages_per_rank": -1}, "stages_per_rank=-1 must be"),
        ({"I": -1.0}, "must be seconds, 0 or more"),
        ({"W": float("nan")}, "must be seconds, 0 or more"),
        ({"stage_map": lambda stage, ranks: 0}, r"puts stages 0 to 1 on ranks \[0, 0\]: each of 2 ranks needs one"),
        ({"stage_map": lambda stage, ranks: stage + 1}, r"on ranks \[1, 2\]: each of 2 ranks needs one"),
    ],
)
def test_greedy_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        schedule.greedy(**{"ranks": 2, "microbatches": 2, **options})


def test_greedy_says_when_its_limit_stops_it():
    with pytest.raises(ValueError, match="raise the limit"):
        schedule.greedy(2, 2, limit=lambda rank: 0)


def grid(timeline):
    """A row a rank, a column a time unit: digits for forward, letters for backward and I, w for W."""
    rows = []
    for rank in timeline.ranks:
        cells = ["."] * round(timeline.makespan)
        for span in timeline.lane(rank):
            m, kind = span.action.microbatch, span.action.kind
            sign = {"F": "0123456789"[m], "W": "w"}.get(kind, "abcdefghij"[m])
            cells[round(span.start) : round(span.end)] = [sign] * round(span.seconds)
        rows.append("".join(cells))
    return rows


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_golden_grids(name, golden):
    v = SCHEDULES[name].stages_per_rank or 2
    program = build(name, 4, 8, v)
    timeline = simulate(program)
    assert golden(name, [f"{name}   bubble {timeline.bubble:.3f}", *grid(timeline), "", *str(program).splitlines()])


def test_what_the_facade_gives():
    assert md.schedule.parse(str(md.schedule.build("zb_h1", ranks=8, microbatches=24))) == build("zb_h1", 8, 24)
    assert Action(2, "F", 0) in md.schedule.build("gpipe", 4, 1)[2]
