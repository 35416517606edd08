"""A rank's actions on real tensors: what ranks of 06.4 are given, and how what became of it is judged.

`Stage` and `run_program` run inside ranks, where nothing of this package's checks can be imported: they travel by
value. A stage asks the grader for a number in its forward and in its backward pass, so the grader knows which
micro-batch it was, and when.
"""

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist as md
from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Run
from minidist.schedule import Program

TOLERANCE = 1e-6  # tokens[m] / total, of two whole numbers in tensors, has the precision of float32
IGNORE = -100
DIM = 4  # of what stages pass on, and classes of the loss


# ---- inside ranks ----------------------------------------------------------------------------------------------------


class Seen(torch.autograd.Function):
    """x times a number; backward tells when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, tell: Any) -> Any:
        ctx.scale, ctx.tell = scale, tell
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.tell()
        return grads[0] * ctx.scale, None, None


class Stage(torch.nn.Module):
    """tanh(x W^T), times a number that nobody can know before.

    log: for every pass which one it was, and how many earlier outputs were still in memory when it began.
    """

    def __init__(self, weight: Any, ask: Callable[[str], Any], most: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self._ask, self._most = ask, most
        self._outputs: list[Any] = []
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]"""
        number = len(self._outputs)
        if number >= self._most:
            raise RuntimeError(f"the stage was called more than {self._most} times, once for each F")
        scale = self._begin("forward", number)
        y = Seen.apply(torch.tanh(x @ self.weight.T), scale, lambda: self._begin("backward", number))
        self._outputs.append(weakref.ref(y.untyped_storage()))
        return y

    def _begin(self, what: str, number: int) -> float:
        alive = sum(ref() is not None and ref().nbytes() > 0 for ref in self._outputs)
        self.log.append([what, number, alive])
        return self._ask(f"{what} {number}")


def run_program(
    function: Callable[..., Any], comm: Any, ask: Any, actions: str, weight: Any, xs: Any, targets: Any
) -> dict[str, Any]:
    """Body of 06.4: a stage of this rank, and its actions."""
    row = list(md.schedule.parse(actions)[0])
    stage = Stage(weight, ask, len(xs))
    parameter = stage.weight

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=-100)

    loss = function(comm, row, stage, xs, targets, loss_fn)
    said = type(loss).__name__
    try:
        loss = float(loss)
    except (TypeError, ValueError, RuntimeError):
        loss = None
    return {"loss": loss, "said": said, "grad": parameter.grad, "log": stage.log}


# ---- one process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What one process has. xs, targets: [M]. scales: by rank and micro-batch. program: what the ranks carry out."""

    program: Program
    weights: Sequence[Tensor]
    xs: Sequence[Tensor]
    targets: Sequence[Tensor]
    scales: Sequence[Sequence[float]]

    @property
    def tokens(self) -> list[int]:
        return [int((target != IGNORE).sum()) for target in self.targets]

    def shares(self) -> list[float]:
        """How much each micro-batch's mean counts."""
        return [count / sum(self.tokens) for count in self.tokens]

    def losses(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The mean loss of each micro-batch."""
        found = []
        for m, (x, target) in enumerate(zip(self.xs, self.targets, strict=True)):
            for rank, weight in enumerate(weights):
                x = torch.tanh(x @ weight.T) * self.scales[rank][m]
            found.append(F.cross_entropy(x, target, ignore_index=IGNORE))
        return found

    def loss(self, shares: Sequence[float]) -> float:
        return sum(share * loss.item() for share, loss in zip(shares, self.losses(self.weights), strict=True))

    def grads(self, shares: Sequence[float]) -> list[Tensor]:
        """Every stage's gradient of the losses, each counting so much."""
        weights = [weight.clone().requires_grad_() for weight in self.weights]
        total = torch.stack([s * loss for s, loss in zip(shares, self.losses(weights), strict=True)]).sum()
        return list(torch.autograd.grad(total, weights))


def draw(
    rng: random.Random, schedule: str, ranks: int, microbatches: int, label: str = "", uneven: bool = False
) -> Case:
    """uneven: micro-batches of different sizes, with different numbers of targets that count."""
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    rows = [rng.choice((2, 3))] * microbatches
    ignored = [0] * microbatches
    if uneven:
        rows, ignored = [3, 6, 4, 5][:microbatches], [0, 4, 1, 3][:microbatches]
    xs = [torch.randn(size, DIM, generator=seed, dtype=torch.float64) for size in rows]
    targets = [torch.randint(DIM, (size,), generator=seed) for size in rows]
    for target, number in zip(targets, ignored, strict=True):
        target[:number] = IGNORE
    weights = [torch.randn(DIM, DIM, generator=seed, dtype=torch.float64) for _ in range(ranks)]
    scales = [[rng.choice((0.5, 1.5, 2.0)) for _ in range(microbatches)] for _ in range(ranks)]
    program = md.schedule.build(schedule, ranks, microbatches)
    facts = Facts(program, weights, xs, targets, scales)
    calls = tuple(
        {
            "actions": ",".join(map(str, program[rank])),
            "weight": weights[rank],
            "xs": xs if rank == 0 else [torch.full_like(x, torch.nan) for x in xs],
            "targets": targets if rank == ranks - 1 else None,
        }
        for rank in range(ranks)
    )
    answers = tuple(
        {f"forward {m}": scales[rank][m] for m in range(microbatches)}
        | {f"backward {m}": 1.0 for m in range(microbatches)}
        for rank in range(ranks)
    )
    name = {"gpipe": "GPipe", "1f1b": "1F1B"}[schedule]
    return Case((calls,), (facts,), (f"{name}, P = {ranks}, M = {microbatches}{label}",), (answers,))


# ---- gradients and the loss ------------------------------------------------------------------------------------------


def _known(facts: Facts) -> list[tuple[str, list[float], str]]:
    """Mistakes that give a micro-batch another share: id, shares, why."""
    count, sizes = len(facts.xs), [len(x) for x in facts.xs]
    last = [0.0] * (count - 1) + [facts.shares()[-1]]
    return [
        (
            "sum-not-mean",
            [1.0] * count,
            "That is the gradient of the sum of the micro-batches' losses. The loss is the mean over the batch: a "
            "micro-batch counts by its share of the tokens.",
        ),
        (
            "mean-of-means",
            [1 / count] * count,
            "Every micro-batch counts 1/M. Its mean is over its own tokens, and there are not as many in each.",
        ),
        (
            "padding-counts",
            [size / sum(sizes) for size in sizes],
            f"Micro-batches count by their rows. Targets of {IGNORE} are padding and count nothing.",
        ),
        (
            "padding-counts",
            [tokens / sum(sizes) for tokens in facts.tokens],
            f"The sum of the losses was divided by all rows. Targets of {IGNORE} are padding and do not count.",
        ),
        (
            "sum-not-mean",
            [float(tokens) for tokens in facts.tokens],
            "That is the gradient of the sum over the tokens. Divide by the tokens of the whole batch.",
        ),
        (
            "last-micro-batch-only",
            last,
            "That is the last micro-batch's. Gradients of the micro-batches add up in grad: it is neither cleared nor "
            "overwritten between them.",
        ),
        (
            "divided-twice",
            [share / count for share in facts.shares()],
            "M times too small. Something was divided by the number of micro-batches once more.",
        ),
    ]


def right_gradients(case: Case, run: Run) -> Finding | None:
    """Whether every stage's gradient is that of one process."""
    facts: Facts = case.facts[0]
    right = facts.grads(facts.shares())
    got = [result["grad"] for result in run.results[0]]
    wrong = [rank for rank in range(case.ranks) if not equal(got[rank], right[rank], TOLERANCE)]
    if not wrong:
        return None
    rank = wrong[-1]  # an error comes from behind
    shown = (case.labels[0], rank, show(right[rank]), show(got[rank]))
    calls = [len(passes(run, r)) for r in range(case.ranks)]
    if got[rank] is None and not any(calls):
        why = "The stage was never called. Carry out the actions: F calls it, B goes back through what it returned."
        return Finding(why, "no-result", *shown)
    if got[rank] is None:
        why = "The weight has no gradient: no B of this rank went back through the stage."
        return Finding(why, "forgets-the-backward", *shown)
    known = _known(facts)
    for mistake, shares, why in known:
        other = facts.grads(shares)
        if all(equal(got[r], other[r], TOLERANCE) for r in wrong) and any(
            not equal(other[r], right[r], TOLERANCE) for r in wrong
        ):
            return Finding(why, mistake, *shown)
    if rank < case.ranks - 1:
        why = (
            f"Rank {rank + 1}'s gradient is right, and rank {rank}'s is not. What comes back is the gradient of what "
            "this rank sent, for the same micro-batch."
        )
        return Finding(why, "wrong-gradient-back", *shown)
    return Finding("One process gets another gradient.", "wrong-values", *shown)


def right_loss(case: Case, run: Run) -> Finding | None:
    """Whether the last rank returns the loss of the batch."""
    facts: Facts = case.facts[0]
    rank, result = case.ranks - 1, run.results[0][-1]
    right, got = facts.loss(facts.shares()), result["loss"]
    shown = (case.labels[0], rank, f"{right:.9g}", f"{got:.9g}" if isinstance(got, float) else f"a {result['said']}")
    if not isinstance(got, float):
        why = "The last rank returns the loss, a number: the sum of what the micro-batches add to it."
        return Finding(why, "no-result", *shown)
    if abs(got - right) <= TOLERANCE * max(1.0, abs(right)):
        return None
    losses = [loss.item() for loss in facts.losses(facts.weights)]
    for mistake, other, why in (
        ("sum-not-mean", sum(losses), "That is the sum of the micro-batches' means."),
        ("last-micro-batch-only", losses[-1], "That is the last micro-batch's loss."),
        ("last-micro-batch-only", losses[-1] * facts.shares()[-1], "That is the last micro-batch's part of the loss."),
        ("divided-twice", right / len(losses), "It was divided by the number of micro-batches twice."),
    ):
        if abs(got - other) <= TOLERANCE * max(1.0, abs(other)):
            return Finding(f"{why} The loss is the mean over the tokens of the whole batch.", mistake, *shown)
    return Finding("The loss is the mean over the tokens of the whole batch.", "wrong-values", *shown)


def explain_basic(case: Case, run: Run) -> Finding | None:
    """Why a first run fails, where it is known."""
    label, last = case.labels[0], case.ranks - 1
    to_nobody = f"isend: dst={-1 if run.rank == 0 else case.ranks} is no rank" in run.why
    nothing = "isend takes a tensor, not NoneType" in run.why
    if (run.rank == 0 and (to_nobody or nothing)) or f"rank 0 waits for its isend to rank {last}" in run.why:
        why = f"{run.why}\nThe first stage's input is data. Nobody waits for its gradient, and it is not sent."
        return Finding(why, "gradient-of-data", label, 0)
    if to_nobody or f"rank {last} waits for its isend to rank 0" in run.why:
        why = f"{run.why}\nThe last stage has the loss. What it returns is not sent on, and no gradient comes for it."
        return Finding(why, "ends-are-special", label, last)
    if nothing or "does not require grad" in run.why:
        why = (
            f"{run.why}\nWhat arrives in a message is data to autograd. x.requires_grad_() before the stage is called: "
            "only then does x.grad exist after its backward pass."
        )
        return Finding(why, "input-wants-no-gradient", label, run.rank)
    return None


# ---- order, memory and messages --------------------------------------------------------------------------------------


def passes(run: Run, rank: int) -> list[str]:
    """The passes of a rank's stage, in the order in which the grader was asked."""
    return [note.key for note in sorted(run.asked, key=lambda note: note.when) if note.rank == rank]


def follows(case: Case, run: Run) -> Finding | None:
    """Whether each rank did what its row says, in that order, and came to the right gradients."""
    facts: Facts = case.facts[0]
    for rank, row in enumerate(facts.program):
        words = {"F": "forward", "B": "backward"}
        asked, got = [f"{words[a.kind]} {a.microbatch}" for a in row], passes(run, rank)
        if got != asked:
            why = (
                "The stage's passes came in another order than the row's actions. The program decides, and not the "
                "function that carries it out: go through the actions one by one."
            )
            return Finding(why, "own-order", case.labels[0], rank, _short(asked), _short(got))
    return right_gradients(case, run)


def _short(passes: Sequence[str]) -> str:
    return " ".join(f"{word[0].upper()}{word.split(' ')[1]}" for word in passes)


def explain_order(case: Case, run: Run) -> Finding | None:
    """Why ranks do not come to the end of 1F1B."""
    if run.verdict == "deadlock" and "isend" in run.why:
        why = (
            f"{run.why}\nIn 1F1B two neighbours send to each other at the same time, an activation and a gradient. Who "
            "waits for its send before it receives waits for ever: begin it with isend, and wait for it later."
        )
        return Finding(why, "blocks-while-sending", case.labels[0], run.rank)
    if run.verdict in ("deadlock", "error"):
        why = f"{run.why}\nGo through the row's actions one by one: its order is the program's, here 1F1B."
        return Finding(why, "own-order", case.labels[0], run.rank)
    return None


def frees(case: Case, run: Run) -> Finding | None:
    """Whether outputs whose backward pass is over are given up. One may still have a name."""
    for rank, result in enumerate(run.results[0]):
        done = 0
        for what, number, alive in result["log"]:
            begun = number if what == "forward" else len(case.facts[0].xs)
            if alive > begun - done + 1:
                why = (
                    f"When {what} {number} began, {alive} of the stage's outputs were in memory, and {done} "
                    "micro-batches had been all the way back. After B nothing of a micro-batch may stay: take it out "
                    "of the dict. The handle of an isend holds its tensor too, until it is waited for and gone."
                )
                return Finding(
                    why, "keeps-activations", case.labels[0], rank, f"{begun - done + 1} at most", f"{alive}"
                )
            done += what == "backward"
    return None


def only_needed(case: Case, run: Run) -> Finding | None:
    """Whether the only messages are activations to the next rank, and their gradients back."""
    facts: Facts = case.facts[0]
    sizes = sorted(x.numel() for x in facts.xs)
    for src in range(case.ranks):
        for dst in range(case.ranks):
            got = sorted(m.elements for m in run.messages_of(0) if (m.src, m.dst) == (src, dst))
            asked = sizes if abs(src - dst) == 1 else []
            if got == asked:
                continue
            mistake = "moves-more-than-needed"
            why = "A rank sends what its stage returned to the next one, and the gradient of what it got back. No more."
            if src == 0 and dst == case.ranks - 1 and case.ranks > 2:
                mistake = "gradient-of-data"
                why = "The first stage's input is data. Nobody waits for its gradient."
            return Finding(why, mistake, case.labels[0], src, f"{asked} elements to rank {dst}", f"{got}")
    return None
