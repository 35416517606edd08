"""A backward pass in two halves: the gradient of what came in, and later that of the weights.

Somewhere below the output, the graph of a stage forks: one branch leads to the stage's input, others to weights alone.
The first half goes along the branches to the input only, and notes at every fork the gradient that came there. The
second half goes from the forks along the other branches. So each product is computed once: at a matrix product
y = x W, the first half computes dx = dy W', the second dW = x' dy.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), 2; the forks are our way to find the halves.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Grads = Sequence[Tensor | None]


def backward(outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Grads:
    """Both halves at once: weights get their `grad` added, and the gradients of the inputs (leaves) are returned."""
    torch.autograd.backward(outputs, grads)
    found = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    return found


@dataclass
class Weights:
    """The second half of a backward pass: `run` adds to the weights' `grad`. Until then it holds what it needs.

    forks: for each fork its node, the gradients that came to it, and where its branches to weights begin. early: where
    branches begin of which the gradient is known. rest: the same, for what no input can be reached from.
    """

    forks: list[tuple[Any, list[Tensor | None], list[GradientEdge]]] = field(default_factory=list)
    early: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    rest: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)

    def run(self) -> None:
        """Once."""
        for node, came, branches in self.forks:
            given = {i: grad for i, grad in enumerate(came) if grad is not None}
            handle = node.register_prehook(partial(_as_given, given))
            try:
                roots = [GradientEdge(node, i) for i in given]
                found = torch.autograd.grad(roots, branches, [*given.values()], retain_graph=True, allow_unused=True)
            finally:
                handle.remove()
            self.early += [(edge, grad) for edge, grad in zip(branches, found, strict=True) if grad is not None]
        handles = [edge.node.register_prehook(partial(_as_given, {edge.output_nr: grad})) for edge, grad in self.early]
        try:
            _backward(self.early)
        finally:
            for handle in handles:
                handle.remove()
        _backward(self.rest)
        self.forks, self.early, self.rest = [], [], []


def _as_given(given: dict[int, Tensor], again: Grads) -> tuple[Tensor | None, ...]:
    """The gradients that a node was reached with before, in place of what hooks on tensors make of them once more."""
    return tuple(given.get(i, grad) for i, grad in enumerate(again))


def _backward(begins: Sequence[tuple[GradientEdge, Tensor]]) -> None:
    if begins:
        torch.autograd.backward([edge for edge, _ in begins], [grad for _, grad in begins])


def input_gradient(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Grads, Weights]:
    """The first half: gradients of the inputs, and what remains to be done. Without inputs that is everything."""
    edges = [get_gradient_edge(output) for output in outputs]
    if not inputs:
        return [], Weights(rest=list(zip(edges, grads, strict=True)))
    graph = _Graph([edge.node for edge in edges], [get_gradient_edge(x).node for x in inputs])
    forks, early = graph.forks()
    weights = Weights(rest=[(e, g) for e, g in zip(edges, grads, strict=True) if e.node not in graph.to_input])
    came: dict[Any, list[Tensor | None]] = {}
    handles = [node.register_prehook(lambda grads, node=node: came.update({node: list(grads)})) for node in forks]
    roots = [(output, g) for output, e, g in zip(outputs, edges, grads, strict=True) if e.node in graph.to_input]
    wanted: list[Any] = [*inputs, *early]
    try:
        found = torch.autograd.grad(
            [output for output, _ in roots],
            wanted,
            [grad for _, grad in roots],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    first, known = found[: len(inputs)], found[len(inputs) :]
    weights.early = [(edge, grad) for edge, grad in zip(early, known, strict=True) if grad is not None]
    weights.forks = [(node, came[node], branches) for node, branches in forks.items() if node in came]
    return first, weights


class _Graph:
    """The nodes between some outputs and some inputs. to_input: those from which an input can be reached."""

    def __init__(self, roots: Sequence[Any], ends: Sequence[Any]) -> None:
        self.nodes = _children_first(roots)
        self.to_input = set(ends)
        self.to_weight: set[Any] = set()
        for node in self.nodes:
            children = [child for child, _ in node.next_functions]
            if not self.to_input.isdisjoint(children):
                self.to_input.add(node)
            elif node not in ends and (hasattr(node, "variable") or not self.to_weight.isdisjoint(children)):
                self.to_weight.add(node)

    def forks(self) -> tuple[dict[Any, list[GradientEdge]], list[GradientEdge]]:
        """{node on the way to the input: where its branches to weights begin}; and what is to be taken at once.

        At once: the weights that several branches lead to, since going along one of them would come by the others; and
        the branches of a function in Python, which computes all its gradients whenever it is asked for one.
        """
        branches = [
            (node, GradientEdge(child, i))
            for node in self.nodes
            if node in self.to_input
            for child, i in dict.fromkeys(node.next_functions)
            if child in self.to_weight
        ]
        below = [_children_first([edge.node]) for _, edge in branches]
        met = Counter(node for nodes in below for node in nodes)
        early: dict[tuple[Any, int], GradientEdge] = {}
        late: dict[Any, list[GradientEdge]] = {}
        for (node, edge), nodes in zip(branches, below, strict=True):
            if any(met[each] > 1 for each in nodes):
                early |= {(leaf, 0): GradientEdge(leaf, 0) for leaf in nodes if hasattr(leaf, "variable")}
            elif isinstance(node, torch.autograd.function.BackwardCFunction):
                early[edge.node, edge.output_nr] = edge
            else:
                late.setdefault(node, []).append(edge)
        return late, list(early.values())


def _children_first(roots: Sequence[Any]) -> list[Any]:
    """Every node that can be reached, each after all that it leads to. Keeps them alive, and with it their identity."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
