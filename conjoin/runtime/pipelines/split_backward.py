"""A backward pass in two: the gradients of what arrived first, those of parameters later, and nothing computed twice.

Autograd's graph of a pass falls apart. Nodes from which what arrived is reached are *inner*; the others lead to
parameters alone. The first part runs inner nodes, and notes the gradients that come to those which have an edge to an
outer node: the rest of a linear layer, say, whose weight is outside. The second part runs each of them once more, for
these edges alone, and then everything outside, from all edges at once, so that bundles have all their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from conjoin.runtime.program.gradient_sums import add_gradients

Edge = tuple[Node, int]
"""A node, and which of its gradients comes over the edge."""


class SplitBackward:
    """One pass between its two parts."""

    def __init__(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        edges = map(get_gradient_edge, outputs)
        self._ends = list(zip(edges, gradients, strict=True))
        self._arrived = list(arrived)
        targets = {get_gradient_edge(x).node for x in arrived}
        self._inner = _leading_to([edge.node for edge, _ in self._ends], targets)
        self._shared = _reached_by_several([(n, node) for node in self._inner for n, _ in self._outer_edges(node)])
        """The outer nodes that several inner ones lead to."""
        self._noted: dict[Node, tuple[Tensor | None, ...]] = {}

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of what arrived."""
        inner = [(edge, gradient) for edge, gradient in self._ends if edge.node in self._inner]
        if not inner:
            return [None] * len(self._arrived)
        handles = [node.register_prehook(_Note(node, self._noted)) for node in self._inner if self._outer_edges(node)]
        try:
            edges, gradients = zip(*inner, strict=True)
            found = torch.autograd.grad(edges, self._arrived, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return list(found)

    def _outer_edges(self, node: Node) -> list[Edge]:
        """Where a gradient leaves what is inner."""
        return [(n, k) for n, k in node.next_functions if n is not None and n not in self._inner]

    def _ways_around(self, node: Node) -> list[Node]:
        """The inner nodes after one through which its outer nodes are reached, too, as by a weight that is used twice:
        what comes that way is found by the other use."""
        if all(n not in self._shared for n, _ in self._outer_edges(node)):
            return []
        return [child for child, _ in node.next_functions if child is not None and child in self._inner]

    def add_weight_gradients(self, parameters: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Add the gradients of parameters to those they have, and let others have theirs."""
        found: dict[Edge, Tensor] = {}
        for edge, gradient in self._ends:
            if edge.node not in self._inner:
                _add(found, (edge.node, edge.output_nr), gradient)
        for node, noted in self._noted.items():
            outer = self._outer_edges(node)
            sources = [(GradientEdge(node, i), gradient) for i, gradient in enumerate(noted) if gradient is not None]
            edges, gradients = zip(*sources, strict=True)
            targets = [GradientEdge(n, k) for n, k in outer]
            handles = [child.register_prehook(_nothing) for child in self._ways_around(node)]
            try:
                made = torch.autograd.grad(edges, targets, gradients, retain_graph=True, allow_unused=True)
            finally:
                for handle in handles:
                    handle.remove()
            for place, gradient in zip(outer, made, strict=True):
                if gradient is not None:
                    _add(found, place, gradient)
        if found and (parameters or others):
            starts = [GradientEdge(n, k) for n, k in found]
            add_gradients(starts, list(found.values()), parameters, others)


class _Note:
    """Notes the gradients that come to a node."""

    def __init__(self, node: Node, noted: dict[Node, tuple[Tensor | None, ...]]) -> None:
        self._node, self._noted = node, noted

    def __call__(self, gradients: Any) -> None:
        self._noted[self._node] = tuple(gradients)


def _nothing(gradients: Any) -> Any:
    """Zeros instead of the gradients that come to a node."""
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _add(found: dict[Edge, Tensor], edge: Edge, gradient: Tensor) -> None:
    found[edge] = found[edge] + gradient if edge in found else gradient


def _leading_to(roots: Sequence[Node], targets: set[Node]) -> set[Node]:
    """The nodes from which a target is reached."""
    readers: dict[Node, list[Node]] = {}
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is not None:
                readers.setdefault(child, []).append(node)
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
    found = {target for target in targets if target in seen}
    waiting = list(found)
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader not in found:
                found.add(reader)
                waiting.append(reader)
    return found


def _reached_by_several(waiting: list[tuple[Node, Node]]) -> set[Node]:
    """The outer nodes that several inner ones lead to, of pairs of an outer node and an inner one before it."""
    first: dict[Node, Node] = {}
    found = set[Node]()
    while waiting:
        outer, reader = waiting.pop()
        if outer in found or (seen := first.get(outer)) == reader:
            continue
        if seen is None:
            first[outer] = reader
        else:
            found.add(outer)
        waiting += [(child, reader) for child, _ in outer.next_functions if child is not None]
    return found
