"""Right answers to assignment 06 in other styles than ours: they earn everything too."""

import heapq
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minidist as md
from grading.check import find, judge
from grading.pack import pack
from grading.ranks.host import RankHost


@pytest.fixture(scope="module")
def host():
    with RankHost() as one:
        yield one


# ---- programs --------------------------------------------------------------------------------------------


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
                share = (targets[m] != -100).sum() / valid  # in float32
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


def lets_go_one_step_later(comm, actions, stage, xs, targets, loss_fn):
    """One micro-batch that is done still has a name, and its send is waited for after the next backward pass."""
    rank, last, alive, done, back = comm.rank, comm.size - 1, {}, None, []
    weights = [(t != -100).double().sum() for t in targets or []]
    losses = []
    for action in actions:
        m = action.microbatch
        if action.kind == "F":
            x = comm.irecv(xs[m], rank - 1).wait().requires_grad_() if rank > 0 else xs[m]
            y = stage(x)
            if rank == last:
                losses.append(loss_fn(y, targets[m]) * weights[m] / sum(weights))
                alive[m] = (x, losses[-1], y, None)
                losses[-1] = losses[-1].item()
            else:
                alive[m] = (x, y, y, comm.isend(y.detach(), rank + 1))
        else:
            now = alive.pop(m)
            now[1].backward(comm.irecv(torch.empty_like(now[2]), rank + 1).wait() if rank < last else None)
            if rank > 0:
                back.append(comm.isend(now[0].grad, rank - 1))
            if done is not None and done[3] is not None:
                done[3].wait()
            done = now
    for handle in [*back, *(done or ())[3:]]:
        if handle is not None:
            handle.wait()
    return sum(losses)


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
            loss = loss_fn(y, targets[m]) * (lengths[m] / sum(lengths))  # type: ignore[index]
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
        ("06.4", lets_go_one_step_later),
        ("06.4", asks_autograd_for_gradients),
        ("06.5", split_as_texts),
        ("06.5", split_newest_first),
        ("06.5", split_before_forward),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_other_right_answers_earn_everything(host: RankHost, exercise: str, function: Any):
    report = judge(exercise, {find(exercise).function: pack(function)}, host)
    assert report.passed, report.text()
