"""Checks of assignment 06: pipeline parallelism, as programs, on a clock, and on real tensors."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import minidist as md
from grading.checks import clock, orders, programs, stages
from grading.exercise import Case, Criterion, Exercise
from grading.ranks.run import Limits

NOTHING: frozenset[str] = frozenset()
SHORT = Limits(seconds=8.0, cpu_seconds=2)  # numbers in, numbers out


def draw_programs(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {"basic": [programs.many(rng)], "any": [programs.any_number(rng)]}


# ---- 06.1 all forward, all backward ----------------------------------------------------------------------------------

GPIPE = Exercise(
    id="06.1",
    function="gpipe",
    task="gpipe(rank, ranks, microbatches): the actions of a rank, all forward passes before all backward passes.",
    criteria=(
        Criterion("basic", 1, "basic", programs.complete(), basic=True),
        Criterion("forward first", 3, "basic", programs.has(orders.forward_first)),
        Criterion("one order", 1, "basic", programs.has(orders.one_order)),
        Criterion("any M and P", 1, "any", programs.for_any(), explain=programs.explain_any),
    ),
    draw=draw_programs,
    body=programs.rows_of,
    allowed=NOTHING,
    limits=SHORT,
)


# ---- 06.2 one forward, one backward ----------------------------------------------------------------------------------


def little_held_and_no_waiting(memory: programs.Property, time: programs.Property) -> tuple[Criterion, ...]:
    return (
        Criterion("basic", 1, "basic", programs.complete(), basic=True),
        Criterion("in flight", 3, "basic", programs.has(memory)),
        Criterion("no waiting", 3, "basic", programs.has(time)),
        Criterion("any M and P", 1, "any", programs.for_any(memory, time), explain=programs.explain_any),
    )


ONE_F_ONE_B = Exercise(
    id="06.2",
    function="one_f_one_b",
    task="one_f_one_b(rank, ranks, microbatches): the actions of a rank in 1F1B.",
    criteria=little_held_and_no_waiting(orders.one_f_one_b_memory, orders.no_waiting),
    draw=draw_programs,
    body=programs.rows_of,
    allowed=NOTHING,
    limits=SHORT,
)


# ---- 06.3 when an action starts --------------------------------------------------------------------------------------


def draw_times(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    build, delay = md.schedule.build, rng.choice((0.5, 0.75))
    return {
        "basic": [
            clock.case_of("GPipe, P = 3, M = 4, every action 1 s", build("gpipe", 3, 4)),
            clock.case_of("1F1B, P = 3, M = 5, every action 1 s", build("1f1b", 3, 5)),
        ],
        "costs": [
            clock.case_of("1F1B, P = 3, M = 4, F and B of different length", build("1f1b", 3, 4), clock.dear(rng)),
            clock.case_of("GPipe, P = 2, M = 3, F and B of different length", build("gpipe", 2, 3), clock.dear(rng)),
        ],
        "messages": [
            clock.case_of(f"1F1B, P = 3, M = 4, comm = {delay}", build("1f1b", 3, 4), delay=delay),
            clock.case_of(f"GPipe, P = 2, M = 3, comm = {delay}", build("gpipe", 2, 3), delay=delay),
        ],
        "programs": [
            clock.case_of("I and W", build("zb_h1", 3, 4)),
            clock.case_of(
                "two stages on each rank, and reads in another order", build("interleaved", 2, 4, 2), backwards=True
            ),
            clock.case_of(f"a V of 4 stages on 2 ranks, and comm = {delay}", build("zb_v", 2, 4, 2), delay=delay),
            clock.case_of("one rank", build("1f1b", 1, 3), backwards=True),
        ],
        "stuck": clock.stuck(rng),
    }


START_TIMES = Exercise(
    id="06.3",
    function="start_times",
    task="start_times(program, reads, writes, seconds, comm): when every action of a program starts.",
    criteria=(
        Criterion("basic", 3, "basic", clock.right_times, basic=True, explain=clock.explain_stop),
        Criterion("costs", 1, "costs", clock.right_times),
        Criterion("messages", 2, "messages", clock.right_times),
        Criterion("any program", 1, "programs", clock.any_times, explain=clock.explain_kinds),
        Criterion("stuck", 1, "stuck", clock.refuses, explain=clock.explain_refusal),
    ),
    draw=draw_times,
    body=clock.times_of,
    allowed=NOTHING,
    limits=SHORT,
)


# ---- 06.4 carrying it out --------------------------------------------------------------------------------------------


def draw_stages(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {
        "basic": [stages.draw(rng, "gpipe", 3, 4), stages.draw(rng, "gpipe", 2, 5)],
        "1f1b": [stages.draw(rng, "1f1b", 3, 5), stages.draw(rng, "1f1b", 2, 3)],
        "tokens": [stages.draw(rng, "gpipe", 2, 4, ", with 3, 2, 3 and 2 tokens that count", uneven=True)],
    }


RUN_ACTIONS = Exercise(
    id="06.4",
    function="run_actions",
    task="run_actions(comm, actions, stage, xs, targets, loss_fn): carry out a rank's actions; gradients add up in "
    "grad, and the last rank returns the loss.",
    criteria=(
        Criterion("basic", 4, "basic", stages.right_gradients, basic=True, explain=stages.explain_basic),
        Criterion("loss", 1, "basic", stages.right_loss),
        Criterion("1F1B", 2, "1f1b", stages.follows, explain=stages.explain_order),
        Criterion("tokens", 2, "tokens", stages.right_gradients),
        Criterion("frees", 2, "basic", stages.frees),
        Criterion("messages", 1, "basic", stages.only_needed),
    ),
    draw=draw_stages,
    body=stages.run_program,
)


# ---- 06.5 weight gradients later -------------------------------------------------------------------------------------


def draw_splits(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    return {"basic": [programs.many(rng, times=2)], "any": [programs.any_number(rng)]}


ZERO_BUBBLE = Exercise(
    id="06.5",
    function="zero_bubble",
    task="zero_bubble(row, rank, ranks): a row of 1F1B with I for each B, and W where the rank would wait.",
    criteria=(
        Criterion("basic", 1, "basic", programs.complete("FIW"), basic=True),
        Criterion("memory", 2, "basic", programs.has(orders.split_memory, "FIW")),
        Criterion("bubble", 5, "basic", programs.has(orders.split_time, "FIW")),
        Criterion(
            "any M and P",
            1,
            "any",
            programs.for_any(orders.split_memory, orders.split_time, kinds="FIW"),
            explain=programs.explain_any,
        ),
    ),
    draw=draw_splits,
    body=programs.split_rows,
    allowed=NOTHING,
    limits=SHORT,
)
EXERCISES = (GPIPE, ONE_F_ONE_B, START_TIMES, RUN_ACTIONS, ZERO_BUBBLE)


# ---- variants, for instructors to draw: other tasks under the same number --------------------------------------------


def draw_busy(rng: random.Random) -> Mapping[str, Sequence[Case]]:
    busy = clock.Rule(held=True)
    drawn = dict(draw_times(rng))
    return drawn | {"messages": [clock.under(case, busy) for case in drawn["messages"]]}


VARIANTS = {
    each.id: each
    for each in (
        replace(
            GPIPE,
            id="06.1-backwards",
            task=f"{GPIPE.task} The backward passes begin with the last micro-batch.",
            criteria=(*GPIPE.criteria, Criterion("last first", 1, "basic", programs.has(orders.backwards))),
        ),
        replace(
            ONE_F_ONE_B,
            id="06.2-eager",
            task="one_f_one_b(rank, ranks, microbatches): 1F1B that hides its messages. With messages that take as "
            "long as F, no rank waits longer than it has to; rank r has at most 2 (P - r) - 1 micro-batches in flight.",
            criteria=little_held_and_no_waiting(orders.eager_memory, orders.eager_time),
        ),
        replace(
            START_TIMES,
            id="06.3-busy",
            task=f"{START_TIMES.task} A rank that sends is busy with it for comm seconds after the action.",
            draw=draw_busy,
        ),
    )
}
"""To use one, assign it to a name in a private folder's checks: `GPIPE = ps06.VARIANTS["06.1-backwards"]`."""
