"""Answers to assignment 06 in other styles than ours, odd ones, variants, and what its checks take to be right."""

import functools
import heapq
import itertools
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


# ---- right in another way --------------------------------------------------------------------------------------------


def yields_texts(rank, ranks, microbatches):
    for m in range(microbatches):
        yield f"{rank}F{m}"
    for m in reversed(range(microbatches)):
        yield f" {rank}B{m} "


def one_text(rank, ranks, microbatches):
    forward = ",".join(f"{rank}F{m}" for m in range(microbatches))
    return forward + ",\n" + forward.replace("F", "B")


def lists_with_numbers_of_torch(rank, ranks, microbatches):
    numbers = torch.arange(microbatches)
    return [[torch.tensor(rank), kind, m] for kind in ("F", "B") for m in numbers]


def chains(rank, ranks, microbatches):
    return itertools.chain.from_iterable(zip([rank] * microbatches, kind * microbatches, range(99)) for kind in "FB")  # noqa: B905


def by_what_is_in_flight(rank, ranks, microbatches):
    forward = backward = 0
    while backward < microbatches:
        if forward < microbatches and forward - backward < ranks - rank:
            yield (rank, "F", forward)
            forward += 1
        else:
            yield (rank, "B", backward)
            backward += 1


def by_slots(rank, ranks, microbatches):
    """Every action at the tick at which it would run, if F and B took one tick each."""
    ticks = {}
    for m in range(microbatches):
        ticks[rank + 2 * m if m >= ranks - rank else rank + m] = f"{rank}F{m}"
        ticks[2 * ranks - 1 - rank + 2 * m] = f"{rank}B{m}"
    return [ticks[tick] for tick in sorted(ticks)]


def by_greed(rank, ranks, microbatches):
    return md.schedule.greedy(ranks, microbatches, limit=lambda each: ranks - each)[rank]


def by_recursion(rank, ranks, microbatches):
    def rest(f, b):
        if b == microbatches:
            return ()
        if f < min(b + ranks - rank, microbatches):
            return ((rank, "F", f), *rest(f + 1, b))
        return ((rank, "B", b), *rest(f, b + 1))

    return rest(0, 0)


def memoised(program, reads, writes, seconds, comm):
    """Each start from the starts before it; a circle is met again while it is being computed."""
    home, before, writer = {}, {}, {}
    for rank, row in enumerate(program):
        for i, action in enumerate(row):
            home[action], before[action] = rank, row[i - 1] if i else None
            writer.update(dict.fromkeys(writes(action), action))
    open_, known = set(), {}

    def start(action):
        if action in known:
            return known[action]
        if action in open_:
            raise ValueError(f"{action} waits for itself")
        open_.add(action)
        times = [0]
        if before[action] is not None:
            times.append(start(before[action]) + seconds(before[action]))
        for name in reads(action):
            if name in writer:
                made = writer[name]
                times.append(start(made) + seconds(made) + (comm if home[made] != home[action] else 0))
        known[action] = max(times)
        return known[action]

    return {str(action): torch.tensor(start(action), dtype=torch.float64) for row in program for action in row}


def by_events(program, reads, writes, seconds, comm):
    """A queue of ends, as a simulator of events has it."""
    makers = {name: rank for rank, row in enumerate(program) for action in row for name in writes(action)}
    there, at, queue, starts, busy = {}, [0] * len(program), [], {}, [False] * len(program)
    now = 0.0

    def try_all():
        for rank, row in enumerate(program):
            if busy[rank] or at[rank] == len(row):
                continue
            action = row[at[rank]]
            times = [
                there.get(name, float("inf")) + comm * (makers[name] != rank)
                for name in reads(action)
                if name in makers
            ]
            begin = max([now, *times])
            if begin == now:
                starts[tuple(action)] = now
                busy[rank] = True
                heapq.heappush(queue, (now + seconds(action), rank, "end"))
            elif begin < float("inf"):
                heapq.heappush(queue, (begin, rank, "look"))

    try_all()
    while queue:
        now, rank, what = heapq.heappop(queue)
        if what == "end":
            there.update(dict.fromkeys(writes(program[rank][at[rank]]), now))
            at[rank] += 1
            busy[rank] = False
        try_all()
    if any(i < len(row) for i, row in zip(at, program, strict=True)):
        raise ValueError("stuck")
    return starts


def relaxes(program, reads, writes, seconds, comm):
    """Moves starts back until nothing changes; what moves for ever is a circle."""
    home = {action: rank for rank, row in enumerate(program) for action in row}
    writer = {name: action for action in home for name in writes(action)}
    waits = {
        action: [(writer[n], comm * (home[writer[n]] != r)) for n in reads(action) if n in writer]
        for action, r in home.items()
    }
    for row in program:
        for one, other in itertools.pairwise(row):
            waits[other].append((one, 0.0))
    starts = dict.fromkeys(home, 0.0)
    for _ in range(len(home) + 1):
        new = {a: max([0.0, *(starts[b] + seconds(b) + more for b, more in waits[a])]) for a in home}
        if new == starts:
            return starts
        starts = new
    raise ValueError("a circle")


def blocking_receives(comm, actions, stage, xs, targets, loss_fn):
    ins, outs, handles = {}, {}, []
    loss = torch.zeros((), dtype=torch.float64)
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    if last:
        valid = sum(int((t != -100).sum()) for t in targets)
    for action in actions:
        m = action.microbatch
        if action.kind == "F":
            if not first:
                comm.recv(xs[m], comm.rank - 1)
                xs[m].requires_grad = True
            ins[m], outs[m] = xs[m], stage(xs[m])
            if not last:
                handles.append(comm.isend(outs[m].detach().clone(), comm.rank + 1))
        else:
            out = outs.pop(m)
            if last:
                share = int((targets[m] != -100).sum()) / valid
                part = loss_fn(out, targets[m])
                (part * share).backward()
                loss += part.detach() * share
            else:
                out.backward(comm.recv(torch.zeros_like(out), comm.rank + 1))
            if not first:
                handles.append(comm.isend(ins.pop(m).grad, comm.rank - 1))
    [handle.wait() for handle in handles]
    return loss


def posts_receives_ahead(comm, actions, stage, xs, targets, loss_fn):
    """All receives are posted before anything runs, and messages have tags."""
    rank, end = comm.rank, comm.size - 1
    coming = {m: comm.irecv(x, rank - 1, tag=m) for m, x in enumerate(xs)} if rank else {}
    back = {m: comm.irecv(torch.empty_like(x), rank + 1, tag=100 + m) for m, x in enumerate(xs)} if rank < end else {}
    state, gone, loss = {}, [], 0.0
    count = sum((t != -100).sum() for t in targets) if rank == end else 1

    def forward(m):
        nonlocal loss
        x = coming.pop(m).wait().requires_grad_() if rank else xs[m]
        y = stage(x)
        if rank == end:
            y = F.cross_entropy(y, targets[m], ignore_index=-100, reduction="sum") / count
            loss += y.item()
            state[m] = (x, y, None)
        else:
            state[m] = (x, y, comm.isend(y.detach(), rank + 1, tag=m))

    def backward(m):
        x, y, sent = state.pop(m)
        if rank == end:
            y.backward()
        else:
            grad = back.pop(m).wait()
            (y * grad).sum().backward()
            sent.wait()
        if rank:
            gone.append(comm.isend(x.grad, rank - 1, tag=100 + m))

    for _, kind, m in actions:
        {"F": forward, "B": backward}[kind](m)
    for handle in gone:
        handle.wait()
    return loss


def asks_autograd_for_gradients(comm, actions, stage, xs, targets, loss_fn):
    """grad is summed by hand."""
    parameters, alive, sends = list(stage.parameters()), {}, []
    lengths = [int((t != -100).sum()) for t in targets] if targets is not None else []
    total = 0
    while actions:
        _, kind, m = actions.pop(0)
        if kind == "F":
            x = torch.empty_like(xs[m])
            if comm.rank:
                comm.irecv(x, comm.rank - 1).wait()
            else:
                x.copy_(xs[m])
            x.requires_grad_(True)
            y = stage(x)
            send = comm.isend(y.detach(), comm.rank + 1) if comm.rank + 1 < comm.size else None
            alive[m] = x, y, send
            continue
        x, y, send = alive[m]
        del alive[m]
        if send is None:
            loss = loss_fn(y, targets[m]) * (lengths[m] / sum(lengths))
            total += float(loss)
            of_x, *rest = torch.autograd.grad(loss, [x, *parameters])
        else:
            grad = comm.recv(torch.empty_like(y), comm.rank + 1)
            send.wait()
            of_x, *rest = torch.autograd.grad(y, [x, *parameters], grad)
        for parameter, more in zip(parameters, rest, strict=True):
            parameter.grad = more if parameter.grad is None else parameter.grad + more
        if comm.rank:
            sends.append(comm.isend(of_x, comm.rank - 1))
        del x, y, send
    for each in sends:
        each.wait()
    return total


def split_as_texts(row, rank, ranks):
    back = [action.microbatch for action in row if action.kind == "B"]
    for action in row:
        if action.kind == "F":
            yield str(action)
        else:
            yield f"{rank}I{action.microbatch}"
            if (done := back.index(action.microbatch) + 1) > rank:
                yield f"{rank}W{back[done - 1 - rank]}"
    yield from (f"{rank}W{m}" for m in back[max(len(back) - rank, 0) :])


def split_newest_first(row, rank, ranks):
    found, owed = [], []
    for stage, kind, m in row:
        found.append((stage, {"B": "I"}.get(kind, kind), m))
        if kind == "B":
            owed.append((stage, "W", m))
        while len(owed) > rank:
            found.append(owed.pop())
    return tuple(found + owed[::-1])


def split_before_forward(row, rank, ranks):
    """W where room is needed, before the next F, or once there is none."""
    split, owed, held, left = [], [], 0, sum(action.kind == "F" for action in row)
    for action in row:
        if action.kind == "F":
            if held == ranks:
                split.append(owed.pop(0))
                held -= 1
            held, left = held + 1, left - 1
            split.append(action)
        else:
            split.append(action._replace(kind="I"))
            owed.append(action._replace(kind="W"))
            if left == 0 and len(owed) > rank:
                split.append(owed.pop(0))
    return split + owed


@pytest.mark.parametrize(
    ("exercise", "function"),
    [
        ("06.1", yields_texts),
        ("06.1", one_text),
        ("06.1", lists_with_numbers_of_torch),
        ("06.1", chains),
        ("06.2", by_what_is_in_flight),
        ("06.2", by_slots),
        ("06.2", by_greed),
        ("06.2", by_recursion),
        ("06.3", memoised),
        ("06.3", by_events),
        ("06.3", relaxes),
        ("06.4", blocking_receives),
        ("06.4", posts_receives_ahead),
        ("06.4", asks_autograd_for_gradients),
        ("06.5", split_as_texts),
        ("06.5", split_newest_first),
        ("06.5", split_before_forward),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_other_right_answers_earn_everything(host: RankHost, exercise: str, function: Any):
    report = judged(host, exercise, function)
    assert report.passed, report.text()


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
    def changed(program, reads, writes, seconds, comm):
        return change(memoised(program, reads, writes, seconds, comm))

    report = judged(host, "06.3", changed)
    assert report.points == 0
    assert report.results[0].mistake == mistake, report.text()
    assert said in report.text()


def test_what_is_no_step_has_a_clear_verdict(host: RankHost):
    right = blocking_receives

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
    def blocks(comm, actions, stage, xs, targets, loss_fn):
        class Blocking:
            rank, size, irecv, recv = comm.rank, comm.size, comm.irecv, comm.recv

            def isend(self, x, dst):
                comm.send(x, dst)
                return self

            def wait(self):
                pass

        return blocking_receives(Blocking(), actions, stage, xs, targets, loss_fn)

    report = judged(host, "06.4", blocks)
    assert report.lost() == ["1F1B"]
    text = report.result("1F1B").text
    assert "Deadlock: nobody can go on." in text
    assert "comm.send(x, dst)" in text
    assert "begin it with isend, and wait for it later" in " ".join(text.split())


# ---- variants --------------------------------------------------------------------------------------------------------


def test_variants_of_pipelines(host: RankHost):
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

    assert points("06.1-backwards", yields_texts) == (7, 7)
    assert points("06.1-backwards", reference("gpipe")) == (6, 7)
    assert points("06.2-eager", eager) == (8, 8)
    assert points("06.2-eager", reference("one_f_one_b")) == (6, 8)
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
