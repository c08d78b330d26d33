"""Graphs run call by call with torch, and two runs compared: values, gradients, to the rounding of their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conjoin.ir import Graph, Leaf, Node, Value
from conjoin.ops import AGGREGATE, EMBEDDING_BAG, execute, map_tensors


@dataclass(frozen=True)
class Run:
    """What a graph gives on some leaves: outputs, then gradients of all leaves that have one."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def draw_leaves(graph: Graph, seed: int, *, positive: bool = False) -> list[Tensor]:
    """Tensors for the leaves of a graph; whole numbers are small, or any rows of what they are looked up in."""
    generator = torch.Generator().manual_seed(seed)
    found, rows = [], _rows_looked_up(graph)
    for leaf in graph.leaves:
        shape, dtype = leaf.type.shape, leaf.type.dtype
        if dtype.is_floating_point or dtype.is_complex:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            found.append((drawn.abs() + 0.3 if positive else drawn).to(dtype))
        else:
            low, high = (0, rows[leaf]) if leaf in rows else (-2 if dtype.is_signed else 0, 3)
            found.append(torch.randint(low, high, shape, generator=generator).to(dtype))
    return found


def _rows_looked_up(graph: Graph) -> dict[Leaf, int]:
    """The leaves that rows are looked up with, and how many rows there are."""
    found: dict[Leaf, int] = {}
    for node in graph.nodes:
        for place, count in _lookups(node):
            waiting = [node.inputs[place].owner]
            while waiting:
                owner = waiting.pop()
                if isinstance(owner, Leaf):
                    found[owner] = min(found.get(owner, count), count)
                else:
                    waiting += [value.owner for value in owner.inputs]
    return found


def _lookups(node: Node) -> list[tuple[int, int]]:
    """Which operands are numbers of rows, and how many rows there are."""
    if node.op == AGGREGATE:
        return [(1, node.inputs[0].type.shape[0]), (2, node.types[0].shape[0])]
    return [(1, node.inputs[0].type.shape[0])] if node.op in ("embedding", EMBEDDING_BAG) else []


def run(graph: Graph, leaves: Sequence[Tensor], dtype: torch.dtype | None = None) -> Run:
    """Run a graph; with a dtype, on leaves of that one."""
    own = [_leaf(tensor, dtype) for tensor in leaves]
    values: dict[Value, Tensor] = dict(zip(map(Value, graph.leaves), own, strict=True))
    for node in graph.nodes:
        args = map_tensors(node.op, node.args, values.__getitem__)
        made = execute(node.op, *(_dtype(arg, dtype) if isinstance(arg, torch.dtype) else arg for arg in args))
        values.update(zip(node.outputs(), made if isinstance(made, tuple) else (made,), strict=True))
    outputs = [values[value] for value in graph.outputs if isinstance(value, Value)]
    trained = [output for output in outputs if output.requires_grad]
    if trained:
        torch.autograd.backward(trained, [_weights(output) for output in trained])
    return Run(tuple(output.detach() for output in outputs), tuple(leaf.grad for leaf in own))


def _dtype(asked: torch.dtype, instead: torch.dtype | None) -> torch.dtype:
    """Of a constant, which is of another one where all leaves are."""
    return instead if instead is not None and asked.is_floating_point else asked


def _leaf(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    floats = tensor.dtype.is_floating_point
    made = tensor.detach().clone()
    made = made.to(dtype) if dtype is not None and floats else made
    return made.requires_grad_(floats or tensor.dtype.is_complex)


def _weights(output: Tensor) -> Tensor:
    """What the gradient of an output is taken to be: another number for each element, the same in every run."""
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(output.numel()), dtype=torch.float64)
    return drawn.to(output.dtype)


@dataclass(frozen=True)
class Plain:
    """What a graph gives on some leaves, in double precision, and on leaves that are a rounding apart."""

    leaves: Sequence[Tensor]
    own: Run
    exact: Run
    near: Run

    @staticmethod
    def of(graph: Graph, leaves: Sequence[Tensor]) -> Plain:
        """Run it as often as it takes, for all that is compared with it."""
        own = run(graph, leaves)
        exact = own if _is_double(graph) else run(graph, leaves, torch.float64)
        return Plain(leaves, own, exact, run(graph, [_a_rounding_apart(leaf) for leaf in leaves]))

    def difference(self, after: Graph) -> float:
        """How far another graph is from what this one gives in double precision, in roundings.

        A rounding is as much as this one is off itself, or changes when its leaves are a rounding apart. Infinite where
        the other gives what is no number and this one does not, or a result of another kind.
        """
        runs = (self.own, run(after, self.leaves), self.exact, self.near)
        results = [[*found.outputs, *found.gradients] for found in runs]
        largest = max((_largest(tensor) for tensor in (*self.leaves, *results[2]) if tensor is not None), default=0.0)
        return max((_apart(*found, largest) for found in zip(*results, strict=True)), default=0.0)


def _is_double(graph: Graph) -> bool:
    """Whether a graph computes in double precision as it is."""
    asked = [arg for node in graph.nodes for arg in node.args if isinstance(arg, torch.dtype)]
    found = (*asked, *(leaf.type.dtype for leaf in graph.leaves))
    return all(dtype == torch.float64 for dtype in found if dtype.is_floating_point)


def _largest(tensor: Tensor) -> float:
    numbers = tensor[tensor.isfinite()].double() if tensor.dtype.is_floating_point else tensor.new_zeros(0)
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _a_rounding_apart(leaf: Tensor) -> Tensor:
    if not leaf.dtype.is_floating_point:
        return leaf
    signs = torch.randint(0, 2, leaf.shape, generator=torch.Generator().manual_seed(leaf.numel())) * 2 - 1
    return (leaf.double() * (1 + signs * torch.finfo(leaf.dtype).eps)).to(leaf.dtype)


def _apart(
    one: Tensor | None, other: Tensor | None, exact: Tensor | None, near: Tensor | None, largest: float
) -> float:
    """Where all that is added up cancels, roundings are those of the largest numbers there are."""
    zero = torch.zeros(())
    a, b, true, c = (zero if tensor is None else tensor for tensor in (one, other, exact, near))
    if None not in (one, other) and (a.shape, a.dtype) != (b.shape, b.dtype):
        return float("inf")
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else float("inf")
    x, y, z, w = torch.broadcast_tensors(*(tensor.double() for tensor in (a, b, true, c)))
    if (x.isfinite() & ~y.isfinite()).any():
        return float("inf")
    numbers = x.isfinite() & z.isfinite() & w.isfinite()
    x, y, z, w = (tensor[numbers] for tensor in (x, y, z, w))
    if not x.numel():
        return 0.0
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (a, b))
    rounding = max(float((x - z).abs().max()), float((x - w).abs().max()), eps * largest)
    error = float((y - z).abs().max())
    return error / rounding if rounding else float("inf") if error else 0.0
