"""Odd answers to assignment 06, what their reports say, variants, and what the checks take to be right."""

import functools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import grading
import minidist as md
from grading.check import find, judge
from grading.checks import clock, orders, programs, stages
from grading.checks.ps06 import VARIANTS
from grading.pack import pack
from grading.ranks.host import RankHost
from grading.report import Report
from minidist.schedule import Action

SOURCE = Path(grading.__file__).parent / "src" / "ps06_pipeline_parallelism.py"


@pytest.fixture(scope="module")
def host():
    with RankHost() as one:
        yield one


def judged(host: RankHost, exercise: str, function: Any) -> Report:
    asked = VARIANTS.get(exercise) or find(exercise)
    return judge(asked, {asked.function: pack(function)}, host)


@functools.cache
def reference(name: str) -> Any:
    cells = re.split(r"^# %%.*$", SOURCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    space = {"torch": torch, "Action": Action, "__name__": "__main__"}
    exec("\n".join(cell for cell in cells if "### BEGIN SOLUTION" in cell), space)
    return space[name]


# ---- odd and hostile -------------------------------------------------------------------------------------------------


def for_ever(*args):
    while True:
        yield "0F0"


def never(*args):
    while True:
        pass


def raises_later(*args):
    yield "0F0"
    raise RuntimeError("in the middle")


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("exercise", ["06.1", "06.2", "06.5"])
@pytest.mark.parametrize(
    ("answer", "mistakes", "said"),
    [
        (lambda *args: None, "no-result", "Return the actions of this rank"),
        (lambda *args: 7, "no-result", "Return the actions of this rank"),
        (for_ever, "done-twice micro-batch-left-out wrong-stage", "0F0"),
        (lambda *args: ["0F0"] * 10_000_000, "done-twice micro-batch-left-out wrong-stage", "0F0"),
        (raises_later, "raises", "in the middle"),
        (lambda *args: [Unspeakable()], "wrong-values", "<Unspeakable> is no action here"),
        (lambda *args: [(0, "F", 10**5000)], "wrong-values", "no action here"),
        (lambda *args: [(0, "F", 99999)], "wrong-values", "0F99999 is no action here"),
        (lambda *args: [(0, "F", 0.5)], "wrong-values", "no action here"),
        (lambda *args: [(0, "forward", 0)], "wrong-values", "0forward0 is no action here"),
        (lambda *args: [Action(-1, "F", 0)], "wrong-values", "-1F0 is no action here"),
        (lambda *args: "0F0;0B0", "wrong-values", "0F0;0B0 is no action here"),
        (lambda *args: {"0F0": 1}, "micro-batch-left-out", "Missing"),
        (lambda *args: [], "micro-batch-left-out", "Missing"),
    ],
)
def test_what_is_no_row_has_a_clear_verdict(host: RankHost, exercise: str, answer: Any, mistakes: str, said: str):
    report = judged(host, exercise, answer)
    assert report.points == 0
    assert report.results[0].mistake in mistakes.split(), report.text()
    assert said in report.text()


def test_a_row_without_an_end_is_told(host: RankHost):
    report = judged(host, "06.1", never)
    assert report.results[0].mistake == "endless-loop", report.text()


def test_who_waits_for_data_is_told_what_is_data(host: RankHost):
    def nothing_is_there(program, reads, writes, seconds, comm):
        raise ValueError("no rank can go on")

    report = judged(host, "06.3", nothing_is_there)
    assert report.points == 0
    assert "no rank can go on" in report.text()
    assert "This program can run. What no action writes is data" in " ".join(report.text().split())


@pytest.mark.parametrize(
    ("change", "mistake", "said"),
    [
        (lambda starts: None, "no-result", "got  a NoneType"),
        (lambda starts: list(starts.values()), "no-result", "got  a list"),
        (lambda starts: dict.fromkeys(starts, float("nan")), "wrong-values", "at nan"),
        (lambda starts: dict.fromkeys(starts, float("inf")), "wrong-values", "at inf"),
        (lambda starts: dict.fromkeys(starts, "soon"), "wrong-values", "at 'soon'"),
        (lambda starts: dict.fromkeys(starts), "wrong-values", "at None"),
        (lambda starts: dict(list(starts.items())[1:]), "no-result", "0F0 has none"),
        (lambda starts: {**dict(list(starts.items())[1:]), None: 0.0}, "wrong-values", "is no action of this program"),
        (lambda starts: {**starts, **{(9, "F", m): 0.0 for m in range(10**5)}}, "no-result", "of too many"),
    ],
)
def test_what_are_no_start_times_has_a_clear_verdict(host: RankHost, change: Any, mistake: str, said: str):
    right = reference("start_times")

    def changed(program, reads, writes, seconds, comm):
        return change(right(program, reads, writes, seconds, comm))

    report = judged(host, "06.3", changed)
    assert report.points == 0
    assert report.results[0].mistake == mistake, report.text()
    assert said in report.text()


def test_what_is_no_step_has_a_clear_verdict(host: RankHost):
    right = reference("run_actions")

    def calls_the_stage_too_often(comm, actions, stage, *args):
        for x in [*args[0], args[0][0]]:
            stage(torch.zeros_like(x))

    def loses_the_gradient(comm, actions, stage, *args):
        loss = right(comm, actions, stage, *args)
        stage.weight.grad = None
        return loss

    def gradient_of_another_kind(comm, actions, stage, *args):
        loss = right(comm, actions, stage, *args)
        stage.weight.data = torch.zeros(2, dtype=torch.complex64)
        stage.weight.grad = torch.zeros(2, dtype=torch.complex64)
        return loss

    def loss_of_nothing(*args):
        right(*args)
        return float("nan")

    def loss_of_many(comm, *args):
        return torch.ones(3) * right(comm, *args)

    def sends_to_nobody(comm, actions, stage, *args):
        comm.isend(torch.zeros(1), comm.size)

    for answer, points, said in (
        (calls_the_stage_too_often, 0, "the stage was called more than 4 times"),
        (loses_the_gradient, 0, "The weight has no gradient"),
        (gradient_of_another_kind, 0, "One process gets another gradient"),
        (loss_of_nothing, 11, "got  nan"),
        (loss_of_many, 11, "The last rank returns the loss, a number"),
        (sends_to_nobody, 0, "dst=3 is no rank of this Comm"),
    ):
        report = judged(host, "06.4", answer)
        assert report.points == points, report.text()
        assert said in report.text(), report.text()


# ---- what a report says ----------------------------------------------------------------------------------------------


def test_an_orders_mistakes_are_told_apart(host: RankHost):
    def w_at_the_next_forward(row, rank, ranks):
        split, owed, held = [], [], 0
        for action in row:
            if action.kind == "F":
                if held == ranks:
                    split.append(owed.pop(0))
                    held -= 1
                held += 1
            else:
                owed.append(action._replace(kind="W"))
            split.append(action if action.kind == "F" else action._replace(kind="I"))
        return split + owed

    report = judged(host, "06.5", w_at_the_next_forward)
    assert report.lost() == ["bubble"]
    assert report.result("bubble").mistake == "put-off-too-long"
    assert "leaves W to the end that would have filled a wait before" in report.text()


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("end", "mistake"), [("first", "gradient-of-data"), ("last", "ends-are-special")])
def test_ends_that_send_as_the_others_do_are_named(host: RankHost, end: str, mistake: str, around: bool):
    def sends(comm, actions, stage, xs, targets, loss_fn):
        rank, last, kept, handles = comm.rank, comm.size - 1, {}, []
        peer = (lambda r: r % comm.size) if around else (lambda r: r)
        for _, kind, m in actions:
            if kind == "F":
                x = (comm.recv(xs[m], rank - 1) if rank else xs[m]).requires_grad_()
                y = stage(x)
                if rank < last or end == "last":
                    handles.append(comm.isend(y.detach().clone(), peer(rank + 1)))
                kept[m] = x, loss_fn(y, targets[m]) / len(xs) if rank == last else y
            else:
                x, y = kept.pop(m)
                y.backward(comm.recv(torch.empty_like(y), rank + 1) if rank < last else None)
                if rank or end == "first":
                    handles.append(comm.isend(x.grad, peer(rank - 1)))
        for handle in handles:
            handle.wait()

    report = judged(host, "06.4", sends)
    assert report.results[0].mistake == mistake, report.text()


def test_1f1b_with_blocking_sends_is_shown_where_it_stands(host: RankHost):
    right = reference("run_actions")

    def blocks(comm, actions, stage, xs, targets, loss_fn):
        class Blocking:
            rank, size, irecv, recv = comm.rank, comm.size, comm.irecv, comm.recv

            def isend(self, x, dst):
                comm.send(x, dst)
                return self

            def wait(self):
                pass

        return right(Blocking(), actions, stage, xs, targets, loss_fn)

    report = judged(host, "06.4", blocks)
    assert report.lost() == ["1F1B"]
    text = report.result("1F1B").text
    assert "Deadlock: nobody can go on." in text
    assert "comm.send(x, dst)" in text
    assert "begin it with isend, and wait for it later" in " ".join(text.split())


# ---- variants --------------------------------------------------------------------------------------------------------


def test_variants_of_pipelines(host: RankHost):
    def last_first(rank, ranks, microbatches):
        return [f"{rank}F{m}" for m in range(microbatches)] + [f"{rank}B{m}" for m in range(microbatches)][::-1]

    def eager(rank, ranks, microbatches):
        return orders_of_eager(ranks, microbatches)[rank]

    def orders_of_eager(ranks, microbatches):
        rows = []
        for rank in range(ranks):
            row, f = [], 0
            for b in range(microbatches):
                while f < min(b + 2 * (ranks - rank) - 1, microbatches):
                    row.append((rank, "F", f))
                    f += 1
                row.append((rank, "B", b))
            rows.append(row)
        return rows

    def busy(program, reads, writes, seconds, comm):
        at = {name: rank for rank, row in enumerate(program) for action in row for name in reads(action)}
        home = {action: rank for rank, row in enumerate(program) for action in row}
        starts, made, free = {}, {}, [0.0] * len(program)
        written = {name for action in home for name in writes(action)}
        waiting = [list(row) for row in program]
        while any(waiting):
            ready = [row[0] for row in waiting if row and all(n in made for n in reads(row[0]) if n in written)]
            if not ready:
                raise ValueError("stuck")
            for action in ready:
                rank = home[action]
                waiting[rank].pop(0)
                there = [made[name][rank != made[name][2]] for name in reads(action) if name in written]
                starts[action] = max([free[rank], *there])
                end = starts[action] + seconds(action)
                sends = any(at.get(name, rank) != rank for name in writes(action))
                free[rank] = end + comm * sends
                made.update({name: (end, end + comm, rank) for name in writes(action)})
        return starts

    def points(variant: str, function: Any) -> tuple[int, int]:
        report = judged(host, variant, function)
        return report.points, report.most

    assert points("06.1-backwards", last_first) == (7, 7)
    assert points("06.1-backwards", reference("gpipe")) == (6, 7)
    assert points("06.2-eager", eager) == (8, 8)
    assert points("06.2-eager", reference("one_f_one_b")) == (5, 8)
    assert points("06.3-busy", busy) == (8, 8)
    assert points("06.3-busy", reference("start_times")) == (6, 8)


# ---- what the checks take to be right --------------------------------------------------------------------------------


def test_oracles_of_programs():
    """Worked out by hand, or published."""
    one_f_one_b = [list(row) for row in md.schedule.build("1f1b", 4, 2)]
    assert programs.makespan(one_f_one_b) == 3 * (2 + 4 - 1)  # C24, with F + B = 3
    split = [list(row) for row in md.schedule.build("zb_h1", 4, 8)]
    assert programs.makespan(split) == 3 * 8 + 4 - 1
    assert [programs.in_flight(row, "W") for row in split] == [4, 4, 4, 4]
    assert orders.split_time(split, 4, 8) is None
    assert orders.split_memory(split, 4, 8) is None
    assert [programs.in_flight(row, "B") for row in md.schedule.build("1f1b", 4, 8)] == [4, 3, 2, 1]
    in_between = [Action(0, kind, m) for kind, m in (("F", 0), ("B", 0), ("F", 1), ("F", 2), ("B", 1), ("B", 2))]
    assert programs.in_flight(in_between, "B") == 2
    eager = orders.eager(4, 8)
    assert orders.eager_memory(eager, 4, 8) is None
    assert programs.makespan(eager, comm=1.0) < programs.makespan(list(md.schedule.build("1f1b", 4, 8)), comm=1.0)


def test_the_clock_agrees_with_the_simulator():
    """Two programs of ours for one rule."""
    for name, stages_per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)):
        program = md.schedule.build(name, 3, 6, stages_per_rank)
        prices = {"F": 1.5, "B": 4.0, "I": 1.25, "W": 2.75}
        mine = clock.times(program, {str(a): prices[a.kind] for row in program for a in row}, 0.5)
        spans = md.schedule.simulate(program, F=1.5, I=1.25, W=2.75, comm=0.5).spans
        assert mine == {str(span.action): span.start for span in spans}


def test_the_gradients_asked_for_are_those_of_the_whole_batch():
    facts = stages.draw(random.Random(3), "gpipe", 2, 4, uneven=True).facts[0]
    assert facts.tokens == [3, 2, 3, 2]
    scale = [torch.cat([torch.full((len(x), 1), s[m]) for m, x in enumerate(facts.xs)]) for s in facts.scales]
    weights = [weight.clone().requires_grad_() for weight in facts.weights]
    x = torch.cat(list(facts.xs))
    for rank, weight in enumerate(weights):
        x = torch.tanh(x @ weight.T) * scale[rank]
    loss = F.cross_entropy(x, torch.cat(list(facts.targets)), ignore_index=-100)
    for got, right in zip(facts.grads(facts.shares()), torch.autograd.grad(loss, weights), strict=True):
        assert torch.allclose(got, right, rtol=0, atol=1e-14)
    assert facts.loss(facts.shares()) == pytest.approx(loss.item(), abs=1e-14)
