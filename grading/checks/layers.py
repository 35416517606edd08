"""Layers whose weights are gathered just before use: what ranks of 04.3 are given, and when they held what.

`Layer` and `stage_three` run inside ranks, where nothing of this package's checks can be imported: they travel by
value.
"""

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import minidist as md
from grading.exercise import Case, Finding, equal, show
from grading.ranks.run import Collective, Run

TOLERANCE = 1e-9
PSI = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""What a collective of a tensor of N elements moves, in units of (n - 1) / n N; N is the whole tensor."""


# ---- inside ranks ----------------------------------------------------------------------------------------------------


class Held:
    """Which of the tensors that went through `note` are still in memory, whatever names or views they have."""

    def __init__(self) -> None:
        self.noted: dict[str, list[weakref.ref[torch.UntypedStorage]]] = {}

    def note(self, name: str, x: Tensor) -> None:
        self.noted.setdefault(name, []).append(weakref.ref(x.untyped_storage()))

    def others(self, name: str) -> list[str]:
        """The names beside this one of whose tensors one is alive."""
        return [each for each, refs in self.noted.items() if each != name and any(map(self._alive, refs))]

    def _alive(self, ref: weakref.ref[torch.UntypedStorage]) -> bool:
        storage = ref()
        return storage is not None and storage.nbytes() > 0


class Layer:
    """tanh(h W^T), and its backward pass. Both ask the grader for a number that nobody can know before.

    So a result shows that they were called, and the grader's clock when.
    """

    def __init__(
        self, name: str, shape: Sequence[int], ask: Callable[[str], Any], log: list[Any], weights: Held, grads: Held
    ) -> None:
        """log, weights, grads: one for all layers of a model."""
        self.name, self.shape, self._ask, self._log = name, tuple(shape), ask, log
        self._weights, self._grads = weights, grads

    def forward(self, weight: Any, h: Any) -> Tensor:
        """weight [N], h [B, in] -> [B, out]"""
        more, matrix = self._begin("forward", weight)
        return torch.tanh(h @ matrix.T) + more

    def backward(self, weight: Any, h: Any, grad: Any) -> tuple[Tensor, Tensor]:
        """weight [N], h [B, in] as in forward, grad [B, out] -> gradients of h [B, in] and of weight [N]"""
        scale, matrix = self._begin("backward", weight)
        inner = grad * (1 - torch.tanh(h @ matrix.T) ** 2) * scale
        of_weight = (inner.T @ h).flatten()
        self._grads.note(self.name, of_weight)
        return inner @ matrix, of_weight

    def _begin(self, what: str, weight: Any) -> tuple[float, Tensor]:
        size = self.shape[0] * self.shape[1]
        if not isinstance(weight, Tensor) or weight.dim() != 1 or len(weight) != size:
            got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"layer {self.name}.{what} needs its whole weight, [{size}], and was given {got}")
        self._log.append([f"{what} {self.name}", self._weights.others(self.name), self._grads.others(self.name)])
        self._weights.note(self.name, weight)
        return self._ask(f"{what} {self.name}"), weight.view(self.shape)


def stage_three(
    function: Callable[..., Any], comm: Any, ask: Any, shapes: Any, shards: Any, x: Any, slope: float
) -> dict[str, Any]:
    """Body of 04.3: shards of the weights, and layers to be called with whole ones."""
    log, weights, gradients = [], Held(), Held()
    layers = [Layer(str(i), shape, ask, log, weights, gradients) for i, shape in enumerate(shapes)]
    result = function(comm, layers, [shard.clone() for shard in shards], x, lambda y: slope * y)
    grads = list(result) if isinstance(result, list | tuple) else []
    return {"grads": [grad if isinstance(grad, Tensor) else None for grad in grads], "log": log}


# ---- cases: facts hold the shapes and everyone's whole gradients -----------------------------------------------------


def draw_stage_three(rng: random.Random, widths: Sequence[int], ranks: int, label: str) -> Case:
    """A model with these widths, and another batch on each rank."""
    seed = torch.Generator().manual_seed(rng.getrandbits(40))
    shapes = [(out, width) for width, out in pairwise(widths)]
    weights = [torch.randn(a * b, generator=seed, dtype=torch.float64) for a, b in shapes]
    xs = [torch.randn(2, widths[0], generator=seed, dtype=torch.float64) for _ in range(ranks)]
    slope = rng.choice((1.0, 2.0, 3.0))
    secrets = [
        {
            f"{what} {i}": rng.choice((0.5, 1.5, 2.0, 3.0))
            for what in ("forward", "backward")
            for i in range(len(shapes))
        }
        for _ in range(ranks)
    ]
    calls = tuple(
        {
            "shapes": [list(shape) for shape in shapes],
            "shards": [weight[md.partition(len(weight), ranks)[rank]] for weight in weights],
            "x": xs[rank],
            "slope": slope,
        }
        for rank in range(ranks)
    )
    grads = [whole_gradients(shapes, weights, xs[rank], slope, secrets[rank]) for rank in range(ranks)]
    return Case((calls,), ((shapes, grads),), (f"n = {ranks}, {label}",), (tuple(secrets),))


def whole_gradients(
    shapes: Sequence[tuple[int, int]], weights: Sequence[Tensor], x: Tensor, slope: float, secrets: Mapping[str, float]
) -> list[Tensor]:
    """What one rank's gradients are, of whole weights."""
    held = Held(), Held()
    layers = [Layer(str(i), shape, secrets.__getitem__, [], *held) for i, shape in enumerate(shapes)]
    inputs = [x]
    for layer, weight in zip(layers, weights, strict=True):
        inputs.append(layer.forward(weight, inputs[-1]))
    grad, found = slope * inputs.pop(), []
    for layer, weight in reversed(list(zip(layers, weights, strict=True))):
        grad, of_weight = layer.backward(weight, inputs.pop(), grad)
        found.append(of_weight)
    return found[::-1]


# ---- judging ---------------------------------------------------------------------------------------------------------


def right_shards(case: Case, run: Run) -> Finding | None:
    """Whether each rank returns its slices of the average gradients."""
    shapes, grads = case.facts[0]
    n = case.ranks
    means = [torch.stack([mine[i] for mine in grads]).mean(0) for i in range(len(shapes))]
    for rank, result in enumerate(run.results[0]):
        got = result["grads"]
        if len(got) != len(shapes):
            why = "Return a list with this rank's slice of each layer's gradient."
            return Finding(why, "no-result", case.labels[0], rank, f"{len(shapes)} slices", f"{len(got)}")
        cut = [mean[md.partition(len(mean), n)[rank]] for mean in means]
        for i, right in enumerate(cut):
            if equal(got[i], right, TOLERANCE):
                continue
            own = grads[rank][i]
            known = (
                (
                    "mixed-up-order",
                    cut[-1 - i],
                    "That belongs to another layer. The backward pass meets the last layer first; the list is in the "
                    "order of the layers.",
                ),
                ("sum-not-mean", right * n, 'That is the sum over the ranks. The average is asked for: op="mean".'),
                (
                    "local-is-global",
                    own[md.partition(len(own), n)[rank]],
                    "That is a slice of this rank's own gradient. It has to be averaged over the ranks, which a "
                    "reduce-scatter does while it cuts.",
                ),
                (
                    "whole-sum",
                    means[i],
                    "That is the whole gradient. In stage 3 each rank keeps its slice of it, and nothing more.",
                ),
            )
            mistake, why = next(
                ((mistake, why) for mistake, other, why in known if equal(got[i], other, TOLERANCE)),
                ("wrong-values", "This rank's slice of the average of all ranks' gradients is asked for."),
            )
            return Finding(f"Layer {i}: {why}", mistake, case.labels[0], rank, show(right), show(got[i]))
    return None


def explain_whole(case: Case, run: Run) -> Finding | None:
    """Why a run fails in which a layer was not given its weight."""
    if "needs its whole weight" in run.why:
        why = f"{run.why}\nWhat rests on a rank is a slice. Gather it, comm.all_gather(shard), just before it is used."
        return Finding(why, "shard-for-whole", case.labels[run.call], run.rank)
    return None


def explain_sizes(case: Case, run: Run) -> Finding | None:
    """Why a run fails in which shards have different lengths, or none."""
    label = case.labels[run.call]
    empty = run.rank is not None and any(own == 0 for _, own in _sizes(case, run.rank).values())
    if run.mistake in ("not-all-join", "different-collectives", "different-shapes") or (
        empty and "given [0]" in run.why
    ):
        why = (
            f"{run.why}\nWhere a layer has few elements the last ranks hold none of them. They take part all the same: "
            "an all-gather of an empty shard gives the whole weight, a reduce-scatter gives an empty slice."
        )
        return Finding(why, "absent-are-skipped", label, run.rank)
    if "sizes" in run.why or "must match" in run.why or "needs its whole weight" in run.why:
        why = (
            f"{run.why}\nShards differ in length where n does not divide N: md.partition(N, n) says how. all_gather "
            "finds the lengths out by itself if it is given none."
        )
        return Finding(why, "all-parts-equal", label, run.rank)
    return None


def _sizes(case: Case, rank: int) -> dict[str, tuple[int, int]]:
    """For each layer its elements in all, and on this rank."""
    shapes, _ = case.facts[0]
    sizes = {str(i): a * b for i, (a, b) in enumerate(shapes)}
    parts = {name: md.partition(size, case.ranks)[rank] for name, size in sizes.items()}
    return {name: (sizes[name], parts[name].stop - parts[name].start) for name in sizes}


def _calls(run: Run, rank: int) -> list[tuple[str, str, int]]:
    """What this rank computed: forward or backward, which layer, and when."""
    return [(*note.key.split(" "), note.when) for note in run.asked if note.rank == rank]  # type: ignore[misc]


def _elements(parts: Sequence[Collective], name: str, before: int) -> int:
    return sum(part.elements for part in parts if part.name == name and part.begun < before)


def gathers_late(case: Case, run: Run) -> Finding | None:
    """Whether, when a layer is computed, no more has been gathered than this one and the next."""
    for rank in range(case.ranks):
        sizes, parts = _sizes(case, rank), run.collectives_of(0, rank)
        room = max(own for _, own in sizes.values())
        used = 0
        for what, name, when in _calls(run, rank):
            used += sizes[name][1]
            if _elements(parts, "all_gather", when) > used + room:
                why = (
                    f"When {what} of layer {name} began, more had been gathered than this layer's weight and the next "
                    "one's. All of the model at once is what stage 3 is there to avoid: gather a layer just before it "
                    "is used, in the backward pass too."
                )
                return Finding(why, "whole-model-gathered", case.labels[0], rank)
    return None


def releases(case: Case, run: Run) -> Finding | None:
    """Whether whole weights are given up after use, and gathered anew in the backward pass."""
    layers = len(case.facts[0][0])
    for rank, result in enumerate(run.results[0]):
        for key, weights, _ in result["log"]:
            if len(weights) > 1:
                why = (
                    f"When {key} began, the whole weights of layers {', '.join(weights)} were still in memory: a list, "
                    "a name or a view holds them. After use only the shard may stay."
                )
                return Finding(why, "released-once", case.labels[0], rank)
        turn = max(when for what, _, when in _calls(run, rank) if what == "forward")
        later = sum(part.begun > turn for part in run.collectives_of(0, rank) if part.name in PSI)
        if later < 2 * layers - 3:
            why = (
                "In the backward pass the weights were not gathered again, so they were kept since the forward pass. "
                "Every layer is gathered twice in a step."
            )
            return Finding(why, "released-once", case.labels[0], rank)
    return None


def gradients_leave(case: Case, run: Run) -> Finding | None:
    """Whether each layer's gradient is on its way, and given up, before the next layer's is computed."""
    for rank, result in enumerate(run.results[0]):
        sizes, parts = _sizes(case, rank), run.collectives_of(0, rank)
        due, met = 0, set()
        for what, name, when in _calls(run, rank):
            if what == "backward" and name not in met:
                met.add(name)
                left = _elements(parts, "reduce_scatter", when) + _elements(parts, "all_reduce", when)
                if left < due:
                    why = (
                        f"When backward of layer {name} began, the gradients of the layers behind it had not left. "
                        "Reduce-scatter each one as soon as it is there, and keep the slice."
                    )
                    return Finding(why, "gradients-at-the-end", case.labels[0], rank)
                due += sizes[name][0]
        for key, _, grads in result["log"]:
            if len(grads) > 1:
                why = (
                    f"When {key} began, the whole gradients of layers {', '.join(grads)} were still in memory. After "
                    "the reduce-scatter only the slice may stay."
                )
                return Finding(why, "keeps-full-gradients", case.labels[0], rank)
    return None


def moved(parts: Sequence[Collective], ranks: int) -> int:
    """Elements of whole tensors that collectives moved, in units of (n - 1) / n."""
    return sum(part.elements * PSI.get(part.name, 0) * (ranks if part.name == "all_gather" else 1) for part in parts)


def three_psi(case: Case, run: Run) -> Finding | None:
    """Whether a step moves two all-gathers and one reduce-scatter of the model, and no more."""
    for rank in range(case.ranks):
        size = sum(whole for whole, _ in _sizes(case, rank).values())
        got = moved(run.collectives_of(0, rank), case.ranks)
        if got > 3 * size:
            return Finding(
                "Stage 3 gathers every weight twice and reduce-scatters every gradient once. An all-reduce is as much "
                "as a reduce-scatter and an all-gather.",
                "moves-more-than-needed",
                case.labels[0],
                rank,
                f"{3 * size} elements, 3 x {size}",
                f"{got}",
            )
    return None


def last_stays(case: Case, run: Run) -> Finding | None:
    """Whether the last layer, whose backward follows its forward, was gathered once only."""
    layers = len(case.facts[0][0])
    for rank in range(case.ranks):
        turns = [when for _, name, when in _calls(run, rank) if name == str(layers - 1)]
        between = [part for part in run.collectives_of(0, rank) if turns[0] < part.begun < turns[1]]
        if any(part.name != "reduce_scatter" for part in between):
            why = (
                "Between forward and backward of the last layer there was a gathering. Nothing is computed in between, "
                "so releasing that weight saves no memory at all."
            )
            return Finding(why, "releases-the-last", case.labels[0], rank)
    return None
