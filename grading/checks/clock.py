"""When the actions of a program start: cases of 06.3, and what known mistakes give."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import minidist as md
from grading.checks.programs import text_of
from grading.exercise import Case, Finding
from grading.ranks.run import Run
from minidist.schedule import Action, Name, Program

Times = dict[str, float]


# ---- inside ranks ----------------------------------------------------------------------------------------------------


def times_of(
    function: Callable[..., Any],
    comm: Any,
    ask: Any,
    program: str,
    seconds: Mapping[str, float],
    delay: float,
    backwards: bool,
    refuses: bool,
) -> dict[str, Any]:
    """Body of 06.3. backwards: what an action reads is named in the other order. refuses: a ValueError is a result."""
    rows, stages = [list(row) for row in md.schedule.parse(program)], md.schedule.parse(program).stages

    def reads(action: Any) -> list[Name]:
        return md.schedule.reads(Action(*action), stages)[:: -1 if backwards else 1]

    def writes(action: Any) -> list[Name]:
        return md.schedule.writes(Action(*action), stages)

    def lasts(action: Any) -> float:
        return seconds[text_of(action)]

    found: dict[str, Any] = {"times": None, "refused": "", "said": ""}
    try:
        answer = function(rows, reads, writes, lasts, delay)
    except ValueError as error:
        if not refuses:
            raise
        return {**found, "refused": str(error) or "ValueError"}
    if not isinstance(answer, Mapping) or len(answer) > len(seconds):
        return {**found, "said": f"a {type(answer).__name__}" + (" of too many" if isinstance(answer, Mapping) else "")}
    times: dict[str, Any] = {}
    for action, start in answer.items():
        try:
            times[text_of(action)] = float(start)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            times[text_of(action)] = f"{start!r:.40}"
    return {**found, "times": times}


# ---- the rule, and its mistakes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How start times follow.

    late: what an action waits for, of the times at which what it reads is there. away: (home of a tensor, rank, its
    stage, reader's stage) -> whether a message brings it. held: sending keeps a rank busy. clock: the number of the
    clock that an action waits for; None: it waits for none. price: what an action is taken to last. reader_pays: what
    is read is there after the reader's seconds.
    """

    late: Callable[[Sequence[float]], float] = lambda there: max(there, default=0.0)
    away: Callable[[int, int, int, int], bool] = lambda home, rank, made_at, read_at: home != rank
    held: bool = False
    clock: Callable[[int, Action], int | None] = lambda rank, action: rank
    price: Callable[[float], float] = lambda seconds: seconds
    reader_pays: bool = False


RIGHT = Rule()


def times(program: Program, seconds: Mapping[str, float], delay: float = 0.0, rule: Rule = RIGHT) -> Times:
    """{action as text: its start}.

    >>> one = {"0F0": 1.0, "1F0": 1.0, "1B0": 2.0, "0B0": 2.0}
    >>> times(md.schedule.build("gpipe", 2, 1), one, delay=0.5)
    {'0F0': 0.0, '1F0': 1.5, '1B0': 2.5, '0B0': 5.0}
    """
    free: dict[int, float] = {}
    made: dict[Name, tuple[float, int, int]] = {}
    read_by = {n: r for r, row in enumerate(program) for a in row for n in md.schedule.reads(a, program.stages)}
    found: Times = {}
    for span in md.schedule.simulate(program).spans:  # each after all that it waits for
        rank, action = span.rank, span.action
        length, there = rule.price(seconds[str(action)]), []
        for name in md.schedule.reads(action, program.stages):
            if name in made:  # else it is data
                at, home, stage = made[name]
                late = delay if rule.away(home, rank, stage, action.stage) else 0.0
                there.append(at + late + (length if rule.reader_pays else 0.0))
        clock = rule.clock(rank, action)
        start = max(rule.late(there), free.get(clock, 0.0) if clock is not None else 0.0)
        found[str(action)] = start
        writes = md.schedule.writes(action, program.stages)
        end = start + length
        if clock is not None:
            free[clock] = end + delay * (rule.held and any(read_by.get(name, rank) != rank for name in writes))
        ready = start if rule.reader_pays else end
        made.update(dict.fromkeys(writes, (ready, rank, action.stage)))
    return found


@dataclass(frozen=True)
class Known:
    """What a mistake is, and the rule that it follows."""

    mistake: str
    rule: Rule
    why: str


KNOWN = (
    Known(
        "ignores-busy-rank",
        Rule(clock=lambda rank, action: None),
        "A rank does one action at a time, in the order of its row: the next one starts when the one before has ended, "
        "also if all that it reads is there.",
    ),
    Known(
        "ignores-what-it-reads",
        Rule(late=lambda there: 0.0),
        "Each rank's actions follow one another without a gap. An action waits for what it reads, until the action "
        "that writes it has ended.",
    ),
    Known(
        "all-cost-the-same",
        Rule(price=lambda seconds: 1.0),
        "Every action was taken to last 1 second. seconds(action) says how long it lasts.",
    ),
    Known(
        "reader-pays",
        Rule(reader_pays=True),
        "What is read is there when the action that wrote it has ended. The reader's own seconds come after its start.",
    ),
    Known(
        "messages-take-no-time",
        Rule(away=lambda home, rank, made_at, read_at: False),
        "What was made on another rank is there comm seconds after the action that made it.",
    ),
    Known(
        "message-on-one-rank",
        Rule(away=lambda home, rank, made_at, read_at: True),
        "Nothing is sent where the rank that made it reads it: it is there at once.",
    ),
    Known(
        "stage-for-rank",
        Rule(away=lambda home, rank, made_at, read_at: made_at != read_at),
        "Two stages of one rank send each other nothing. It is the ranks that have to differ.",
    ),
    Known(
        "stage-for-rank",
        Rule(clock=lambda rank, action: action.stage),
        "Each stage was given a clock of its own. A rank with two stages does one action at a time all the same.",
    ),
    Known(
        "sending-keeps-busy",
        Rule(held=True),
        "A message is on its way while its sender goes on: comm counts for the reader, not for the rank that sends.",
    ),
    Known(
        "one-input-only",
        Rule(late=lambda there: there[0] if there else 0.0),
        "An action waits for all that it reads, whatever their order. Only one of them was looked at.",
    ),
    Known(
        "one-input-only",
        Rule(late=lambda there: there[-1] if there else 0.0),
        "An action waits for all that it reads, whatever their order. Only one of them was looked at.",
    ),
)


# ---- cases: facts hold the program, its seconds and the delay --------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    program: Program
    seconds: Mapping[str, float]
    delay: float
    rule: Rule
    backwards: bool


def case_of(
    label: str,
    program: Program,
    seconds: Callable[[Action], float] = lambda action: 1.0,
    delay: float = 0.0,
    backwards: bool = False,
    rule: Rule = RIGHT,
    refuses: bool = False,
) -> Case:
    prices = {str(action): seconds(action) for row in program for action in row}
    call = {
        "program": str(program),
        "seconds": prices,
        "delay": delay,
        "backwards": backwards,
        "refuses": refuses,
    }
    return Case(((call,),), (Facts(program, prices, delay, rule, backwards),), (label,))


def under(case: Case, rule: Rule) -> Case:
    """The same program, with the start times that another rule gives."""
    return replace(case, facts=(replace(case.facts[0], rule=rule),))


def dear(rng: random.Random) -> Callable[[Action], float]:
    """Seconds that differ by kind and by stage."""
    kinds = {"F": rng.choice((1.5, 2.5)), "B": rng.choice((3.0, 4.0)), "I": 1.25, "W": 2.25}
    return lambda action: kinds[action.kind] + 0.5 * (action.stage % 2)


def stuck(rng: random.Random) -> list[Case]:
    """Programs that cannot go on."""
    build = md.schedule.build("1f1b", 2, rng.choice((3, 4)))
    last = [Action(1, "B", 0), Action(1, "F", 0), *build[1][2:]]
    ahead = [Action(0, "F", 0), Action(0, "B", 0), *(a for a in build[0] if a.microbatch > 0)]
    other = [*(a for a in build[1] if a.microbatch > 0), Action(1, "F", 0), Action(1, "B", 0)]
    return [
        case_of("1B0 before 1F0", Program.of([build[0], last]), refuses=True),
        case_of("each rank waits for the other", Program.of([ahead, other]), refuses=True),
    ]


# ---- judging ---------------------------------------------------------------------------------------------------------


def right_times(case: Case, run: Run) -> Finding | None:
    """Whether every action starts when it can."""
    facts: Facts = case.facts[0]
    label, result = case.labels[0], run.results[0][0]
    got, expected = result["times"], times(facts.program, facts.seconds, facts.delay, facts.rule)
    if got is None:
        why = "Return a dict: the start of every action of the program, in seconds, by action."
        return Finding(why, "no-result", label, None, f"a dict of {len(expected)}", result["said"])
    if odd := sorted(set(got) - set(expected)):
        return Finding(f"{odd[0]} is no action of this program.", "wrong-values", label)
    if missing := [action for action in expected if action not in got]:
        why = (
            f"{missing[0]} and {len(missing) - 1} more have no start time."
            if missing[1:]
            else f"{missing[0]} has none."
        )
        return Finding(
            f"{why} The dict has one for each action.", "no-result", label, None, f"{len(expected)}", f"{len(got)}"
        )
    wrong = [action for action in expected if not _same(got[action], expected[action])]
    if not wrong:
        return None
    action = min(wrong, key=lambda each: expected[each])
    rank = next(r for r, row in enumerate(facts.program) if action in map(str, row))
    shown = (label, rank, f"{action} at {expected[action]:g}", f"at {got[action]}")
    for each in KNOWN:
        other = times(facts.program, facts.seconds, facts.delay, each.rule)
        if all(_same(got[a], other[a]) for a in expected):
            return Finding(each.why, each.mistake, *shown)
    why = (
        f"{action} is the first that is wrong. It starts when rank {rank} is free and all that it reads is there"
        f"{', comm seconds later where another rank made it' if facts.delay else ''}."
    )
    return Finding(why, "wrong-values", *shown)


def _same(got: Any, expected: float) -> bool:
    return isinstance(got, float) and isclose(got, expected, rel_tol=1e-9, abs_tol=1e-9)


def explain_stop(case: Case, run: Run) -> Finding | None:
    """Why a function stops at a program that can run."""
    if "ValueError" not in run.why:
        return None
    why = f"{run.why}\nThis program can run. What no action writes is data, and there from the start."
    return Finding(why, run.mistake, case.labels[0], run.rank)


def explain_kinds(case: Case, run: Run) -> Finding | None:
    """Why a run with another kind of program fails."""
    why = (
        f"{run.why}\nThis program has {case.labels[0]}. reads, writes and seconds say all that there is to know of an "
        "action; which kinds there are, and which rank has a stage, the rule need not know."
    )
    return Finding(why, "knows-one-schedule", case.labels[0], run.rank)


PAID = frozenset({"messages-take-no-time", "message-on-one-rank", "sending-keeps-busy"})
"""Mistakes that have cost their points where the criterion on messages looked."""


def any_times(case: Case, run: Run) -> Finding | None:
    """As `right_times`; what no rule explains comes of something that only some programs have."""
    found = right_times(case, run)
    if found is None or found.mistake in PAID:
        return None
    forgets = found.mistake == "one-input-only" and not case.facts[0].backwards  # looks at the right one elsewhere
    if not forgets and found.mistake not in ("wrong-values", "no-result"):
        return found
    why = "" if forgets else f"{found.why}\n"
    return Finding(
        f"{why}This program has {case.labels[0]}: whatever the rule needs to know, reads and writes say.",
        "knows-one-schedule",
        found.label,
        found.rank,
        found.expected,
        found.got,
    )


REFUSE = "Say so when no rank can go on: raise ValueError."


def refuses(case: Case, run: Run) -> Finding | None:
    """Whether a program that cannot go on is refused with a ValueError."""
    if run.results[0][0]["refused"]:
        return None
    times = run.results[0][0]["times"]
    got = f"{len(times)} start times" if times is not None else run.results[0][0]["said"]
    why = f"Not every action of this program can start. {REFUSE}"
    return Finding(why, "stuck-goes-unnoticed", case.labels[0], None, "a ValueError", got)


def explain_refusal(case: Case, run: Run) -> Finding | None:
    """Why a program that cannot go on ends in another way."""
    mistake = "endless-loop" if run.mistake == "endless-loop" else "fails-deep-inside"
    return Finding(
        f"{run.why}\nNot every action of this program can start. {REFUSE}", mistake, case.labels[0], run.rank
    )
