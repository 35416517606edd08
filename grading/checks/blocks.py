"""Layers that are cut over ranks: how ranks of assignment 05 are called, and how what they return is judged.

An answer gives an output, and through autograd the gradients of its inputs. The gradient of the output is asked of the
grader after the forward pass, so the grader's clock tells the messages of the two passes apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist as md
from grading.exercise import Case, Finding, Judge, equal, show
from grading.ranks.run import Collective, Run

TOLERANCE = 1e-9
ALLOWED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "lengths"})


# ---- inside ranks ----------------------------------------------------------------------------------------------------


def called(
    function: Callable[..., Any], comm: Any, ask: Any, names: Any, args: Any, backward: bool, refuses: bool
) -> dict[str, Any]:
    """The body: floating tensors among the arguments are leaves. `backward` False: only the forward pass is looked at.

    An exception of the backward pass is a result, and a ValueError of the call if that is what the call `refuses` with.
    """
    values = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in args]
    found: dict[str, Any] = {"y": None, "refused": "", "raised": "", "grads": {}}
    try:
        y = function(comm, *values)
    except ValueError as error:
        if not refuses:
            raise
        return {**found, "refused": str(error) or "ValueError"}
    if not torch.is_tensor(y):
        return found
    found["y"] = y.detach()
    if backward:
        grad = ask("gradient")
        if y.shape != grad.shape:  # it is wrong already, but the other ranks may wait in their backward
            grad = torch.ones_like(y)
        if y.requires_grad:
            try:
                (y * grad).sum().backward()  # y.backward(grad) imports sympy, which takes seconds
            except (RuntimeError, TypeError, ValueError) as error:
                found["raised"] = str(error).splitlines()[0]
        leaves = [(name, x) for name, x in zip(names, values, strict=True) if torch.is_tensor(x) and x.requires_grad]
        found["grads"] = {name: x.grad for name, x in leaves}
    return found


class Copy(torch.autograd.Function):
    """The same x on all ranks; backward adds the parts up."""

    @staticmethod
    def forward(ctx: Any, x: Any, all_reduce: Any) -> Any:
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.all_reduce(grads[0].clone()), None


class Sum(torch.autograd.Function):
    """The sum over the ranks; backward hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Any, all_reduce: Any) -> Any:
        return all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


# What stands in for the learner's own. The calls of comm that each makes are read off its code.


def given_copy_ranks(comm: Any, x: Any) -> Any:
    return Copy.apply(x, comm.all_reduce)


def given_sum_ranks(comm: Any, x: Any) -> Any:
    return Sum.apply(x, comm.all_reduce)


def given_column(comm: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    return F.linear(Copy.apply(x, comm.all_reduce), weight, bias)


def given_row(comm: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    y = Sum.apply(F.linear(x, weight), comm.all_reduce)
    return y if bias is None else y + bias


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What a known mistake gives: mine is the value that rank `rank` then has for `key`, None where it has none."""

    mistake: str
    key: str
    mine: Callable[[int], Any]
    why: str


@dataclass(frozen=True)
class Facts:
    """What a call is judged by. right: for each rank what its output "y" and the gradients of its inputs are. known:
    mistakes to look for, in this order. tokens, width: sizes for the criteria on messages."""

    right: Sequence[Mapping[str, Tensor]]
    known: Sequence[Known] = ()
    sizes: Mapping[str, int] | None = None


def cut(x: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """The rank's part of x along a dim."""
    part = md.partition(x.shape[dim], ranks)[rank]
    return x.narrow(dim, part.start, part.stop - part.start)


def case_of(
    label: str,
    args: Sequence[Mapping[str, Any]],
    facts: Facts,
    grads: Sequence[Tensor] | None = None,
    refuses: bool = False,
) -> Case:
    """args: for each rank what its call gets, by name. grads: the gradient of each rank's output; None: no backward."""
    how = {"backward": grads is not None, "refuses": refuses}
    calls = tuple({"names": list(mine), "args": list(mine.values()), **how} for mine in args)
    answers = tuple({} if grads is None else {"gradient": grad} for grad in grads or [None] * len(args))
    return Case((calls,), (facts,), (f"n = {len(args)}, {label}",), (answers,))


def dense(function: Callable[..., Tensor], inputs: Mapping[str, Any], grad: Tensor | None = None) -> dict[str, Tensor]:
    """What one process gets: the output "y", and with its gradient those of the inputs."""
    leaves = {
        name: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    y = function(**leaves)
    found = {"y": y.detach()}
    if grad is not None:
        (y * grad).sum().backward()
        found |= {name: x.grad for name, x in leaves.items() if isinstance(x, Tensor) and x.grad is not None}
    return found


# ---- judging ---------------------------------------------------------------------------------------------------------


def right(*keys: str, otherwise: str = "") -> Judge:
    """A judge: the output "y", or the gradients of inputs of these names, are right on every rank."""

    def judge(case: Case, run: Run) -> Finding | None:
        return next((found for key in keys if (found := wrong(case, run, key, otherwise)) is not None), None)

    return judge


def wrong(case: Case, run: Run, key: str, otherwise: str = "") -> Finding | None:
    """What is wrong with the output, or with the gradient of one input."""
    facts, results = case.facts[0], run.results[0]
    got = [result["y"] if key == "y" else result["grads"].get(key) for result in results]
    expected = [mine[key] for mine in facts.right]
    ranks = [rank for rank in range(case.ranks) if not equal(got[rank], expected[rank], TOLERANCE)]
    if not ranks:
        return None
    rank = ranks[0]
    shown = {"label": case.labels[0], "rank": rank, "expected": show(expected[rank]), "got": show(got[rank])}
    what = "" if key == "y" else f"The gradient of {key}: "
    for each in facts.known:
        if each.key == key and all(_same(got[r], each.mine(r)) for r in range(case.ranks)):
            return Finding(f"{what}{each.why}", each.mistake, **shown)
    if key == "y" and not isinstance(got[rank], Tensor):
        return Finding("Your function returned no tensor: end it with return.", "no-result", **shown)
    if got[rank] is None:
        why = results[rank]["raised"] or "It is None: autograd found no way from the output to it."
        return Finding(
            f"{what}{why} A detach(), a .data or a call of comm lies between. Comm's calls are data to autograd: put "
            "one into the forward of a torch.autograd.Function, whose backward says what becomes of gradients.",
            "backward-follows",
            **shown,
        )
    if isinstance(got[rank], Tensor) and got[rank].shape != expected[rank].shape:
        why = f"{what}the shape is {list(got[rank].shape)} where {list(expected[rank].shape)} is asked for."
        return Finding(f"{why} {otherwise}".strip(), "wrong-shape", **shown)
    return Finding(f"{what}{otherwise or 'one process gets other numbers.'}", "wrong-values", **shown)


def _same(got: Any, other: Any) -> bool:
    return got is None if other is None else equal(got, other, TOLERANCE)


def gradients_right(case: Case, run: Run) -> bool:
    """Whether all gradients are right. If not, what backward sent has cost its points already."""
    return all(wrong(case, run, key) is None for key in case.facts[0].right[0] if key != "y")


def passes(run: Run, rank: int) -> tuple[list[Collective], list[Collective]]:
    """The collectives of one rank, in its forward and in its backward pass. Lengths are small, and free."""
    turn = min((note.when for note in run.asked if note.rank == rank), default=2**60)
    parts = [part for part in run.collectives_of(0, rank) if part.name != "lengths"]
    return [part for part in parts if part.begun < turn], [part for part in parts if part.begun > turn]


def said(parts: Sequence[Collective]) -> str:
    """Collectives as a report shows them."""
    return ", ".join(f"{part.name} of {part.elements}" for part in parts) or "none"
