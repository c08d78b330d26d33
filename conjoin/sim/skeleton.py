"""What does not depend on layouts in a training step: which operators run, what they read, where gradients go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conjoin.comm import GradientFlow
from conjoin.ir import (
    Choice,
    Graph,
    Leaf,
    Node,
    Plan,
    Source,
    Value,
    calls_as_they_lie,
    is_random,
    kept_between_steps,
    origin,
)
from conjoin.ops import Call, Layout, TensorType


@dataclass(frozen=True, slots=True)
class Root:
    """A tensor before any reshard: a leaf of the graph, or what an operator makes."""

    type: TensorType
    """Without its layout."""
    leaf: Leaf | None
    maker: int
    """The operator that makes it; -1 for a leaf."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the model, with the tensors it reads and makes by their numbers."""

    node: Node
    call: Call
    """On whole tensors, without layouts."""
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    needs: tuple[int, ...]
    """The operands to which it gives a gradient; none where no gradient comes to it."""
    keeps: tuple[int, ...]
    """The operands whose values its backward reads."""
    remembers: bool
    """Whether autograd may keep anything of it."""
    is_kept: bool
    """Whether it is made once and kept between steps."""
    source: Source | None


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A training step without layouts."""

    graph: Graph
    roots: tuple[Root, ...]
    operators: tuple[Operator, ...]
    results: tuple[int, ...]
    """What comes out of the step: outputs, then new values of buffers."""
    readers: tuple[tuple[tuple[int, int], ...], ...]
    """For every tensor who reads it: operator and operand, in the order they run."""
    draws: tuple[int, ...]
    """The operators that draw random numbers."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """A layout for everything: what leaves are stored in, operators read and make, and results come out in."""

    leaves: Mapping[int, Layout]
    choices: tuple[Choice, ...]
    results: tuple[Layout, ...]


def take_apart(plan: Plan) -> tuple[Skeleton, Layouts]:
    """A plan as what does not depend on layouts, and the layouts."""
    return take_graph_apart(plan.graph)


def take_graph_apart(graph: Graph) -> tuple[Skeleton, Layouts]:
    """The same for a graph; one without layouts is the same on every device."""
    gradients, kept = GradientFlow(graph), frozenset(kept_between_steps(graph)[0])
    calls = calls_as_they_lie(graph)
    numbers: dict[Value, int] = {Value(leaf): i for i, leaf in enumerate(graph.leaves)}
    roots = [Root(leaf.type.laid_out(()), leaf, -1) for leaf in graph.leaves]
    operators: list[Operator] = []
    choices: list[Choice] = []
    for node, call in calls.items():
        for value in node.outputs():
            numbers[value] = len(roots)
            roots.append(Root(value.type.laid_out(()), None, len(operators)))
        inputs = node.inputs
        operators.append(
            Operator(
                node,
                call,
                tuple(numbers[origin(value)] for value in inputs),
                tuple(numbers[value] for value in node.outputs()),
                tuple(i for i in range(len(inputs)) if gradients.reach_operand(node, i)),
                gradients.kept_operands(node),
                gradients.remember(node),
                node in kept,
                graph.source_of(node),
            )
        )
        choices.append(Choice(tuple(v.type.layout for v in inputs), tuple(type.layout for type in node.types)))
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    skeleton = Skeleton(
        graph,
        tuple(roots),
        tuple(operators),
        tuple(numbers[origin(value)] for value in results),
        _readers(operators, len(roots)),
        tuple(i for i, op in enumerate(operators) if is_random(op.node.op, op.node.args)),
    )
    leaves = {i: leaf.type.layout for i, leaf in enumerate(graph.leaves)}
    return skeleton, Layouts(leaves, tuple(choices), tuple(value.type.layout for value in results))


def _readers(operators: list[Operator], num_roots: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_roots)]
    for position, operator in enumerate(operators):
        for operand, root in enumerate(operator.reads):
            found[root].append((position, operand))
    return tuple(map(tuple, found))
