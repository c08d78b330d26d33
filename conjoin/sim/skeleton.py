"""What does not depend on layouts in a training step: which operators run, what they read, where gradients go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from conjoin.comm import GradientFlow
from conjoin.ir import (
    Choice,
    Graph,
    Leaf,
    LeafKind,
    Node,
    Plan,
    Source,
    Value,
    calls_as_they_lie,
    is_random,
    kept_between_steps,
    origin,
    parallelize,
)
from conjoin.ops import CAST, Call, Layout, TensorType, call_cache


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
class Task:
    """A call on whole tensors, the types it makes, and the operands to which it gives a gradient."""

    call: Call
    types: tuple[TensorType, ...]
    needs: tuple[int, ...]
    is_kept: bool = False
    """Whether it is made once and kept between steps: then it takes nothing of a step."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Operators that a skeleton does not have: equal periods of a length, before the operator at the seam."""

    seam: int
    count: int
    length: int
    leaves: tuple[tuple[int, int, int], ...]
    """Every leaf that is read in them, with those that are read likewise in the periods before and behind the seam."""


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A training step without layouts; what follows from it is found once, however many layouts are tried."""

    graph: Graph
    roots: tuple[Root, ...]
    operators: tuple[Operator, ...]
    results: tuple[int, ...]
    """What comes out of the step: outputs, then new values of buffers."""
    readers: tuple[tuple[tuple[int, int], ...], ...]
    """For every tensor who reads it: operator and operand, in the order they run."""
    draws: tuple[int, ...]
    """The operators that draw random numbers."""
    left_out: tuple[LeftOut, ...] = ()
    """Where operators are left out: leaves are all there."""

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], tuple[int, ...]]:
        """The tasks that there are, each once, and for every operator which it is."""
        numbers: dict[Task, int] = {}
        places = tuple(
            numbers.setdefault(
                Task(op.call, tuple(t.laid_out(()) for t in op.node.types), op.needs, op.is_kept), len(numbers)
            )
            for op in self.operators
        )
        return tuple(numbers), places

    @cached_property
    def outputs(self) -> Mapping[int, int]:
        """For every tensor that an operator makes, which of its outputs it is."""
        return {root: i for operator in self.operators for i, root in enumerate(operator.makes)}

    @cached_property
    def backs(self) -> tuple[tuple[bool, ...], ...]:
        """For every tensor which of its readers give it a gradient."""
        return tuple(tuple(operand in self.operators[p].needs for p, operand in readers) for readers in self.readers)

    @cached_property
    def last_back(self) -> tuple[tuple[int, int], ...]:
        """For every tensor the last reader that gives it a gradient, whose backward is the first; (-1, -1) for none."""
        return tuple(
            next((reader for reader, back in zip(reversed(readers), reversed(backs), strict=True) if back), (-1, -1))
            for readers, backs in zip(self.readers, self.backs, strict=True)
        )

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """The tensors that are parameters."""
        return tuple(i for i, root in enumerate(self.roots) if root.leaf and root.leaf.kind is LeafKind.PARAMETER)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The parameters that are trained."""
        return tuple(i for i, root in enumerate(self.roots) if root.leaf is not None and root.leaf.is_trained)

    @cached_property
    def casts(self) -> Mapping[int, int]:
        """What parameters are cast to, with the parameter of each."""
        readers = ((self.operators[p], root) for root in self.parameters for p, _ in self.readers[root])
        return {
            operator.makes[0]: root
            for operator, root in readers
            if operator.node.op == CAST and self.roots[operator.makes[0]].type.dtype.is_floating_point
        }


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
    return _taken_apart(graph, graph.sources)


def put_together(skeleton: Skeleton, layouts: Layouts) -> Graph:
    """The graph in some layouts: what was taken apart, perhaps laid out otherwise."""
    graph = skeleton.graph
    leaves = {graph.leaves[i]: layout for i, layout in layouts.leaves.items()}
    choices = {op.node: choice for op, choice in zip(skeleton.operators, layouts.choices, strict=True)}
    values = [i for i, value in enumerate(graph.outputs) if isinstance(value, Value)]
    return parallelize(graph, leaves, choices, dict(zip(values, layouts.results, strict=False)))


@call_cache(32)
def _taken_apart(graph: Graph, _lines: tuple[Source | None, ...]) -> tuple[Skeleton, Layouts]:
    """Once for graphs that compute the same and come from the same lines of the user."""
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
        find_readers(operators, len(roots)),
        tuple(i for i, op in enumerate(operators) if is_random(op.node.op, op.node.args)),
    )
    leaves = {i: leaf.type.layout for i, leaf in enumerate(graph.leaves)}
    return skeleton, Layouts(leaves, tuple(choices), tuple(value.type.layout for value in results))


def find_readers(operators: Sequence[Operator], num_roots: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every tensor who reads it."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_roots)]
    for position, operator in enumerate(operators):
        for operand, root in enumerate(operator.reads):
            found[root].append((position, operand))
    return tuple(map(tuple, found))
