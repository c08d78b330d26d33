"""A graph cut into stages: each a graph of its own, whose inputs are what the batch and earlier stages give.

What a stage reads of an earlier one *arrives*: it is an output there and an input here, and its gradient goes back the
same way where it has one. What depends on the batch alone, on constants or on parameters alone is made anew in every
stage that reads it. A parameter that several stages read belongs to the first of them; the others borrow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from conjoin.errors import StrategyError
from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value, frozen, make_leaf, make_node
from conjoin.ir.structure import LEAF, Structure
from conjoin.ops import map_tensors


@dataclass(frozen=True, slots=True)
class Arrival:
    """An input of a stage's graph that another stage makes, and which of that one's outputs it is."""

    input: str
    stage: int
    output: int
    chunks: tuple[int, int] | None = None
    """In how many chunks it is passed on from host to host, and its gradient back; None for chunks of a usual size."""


@dataclass(frozen=True, slots=True)
class StageGraph:
    """What a stage computes of a micro-batch."""

    graph: Graph
    arrivals: tuple[Arrival, ...] = ()
    borrowed: tuple[str, ...] = ()
    """Parameters that belong to an earlier stage."""
    shared: frozenset[str] = frozenset()
    """Parameters that another stage reads, too."""


def cut_in_stages(
    graph: Graph, stage_of: Sequence[int], homes: Mapping[str, int] | None = None
) -> tuple[StageGraph, ...]:
    """The graphs of the stages, given the stage of every node; StrategyError where one reads what a later one makes.

    What no node reads lies with the stage that `homes` names, else with the first.
    """
    work = _Cutting(graph, stage_of, homes or {})
    return tuple(work.cut(stage) for stage in range(max(stage_of, default=0) + 1))


def made_anew(graph: Graph) -> frozenset[Node]:
    """The nodes that every stage may make by itself: of the batch alone, of constants, or of parameters alone."""
    of_batch, of_parameters, varying = set[Value](), set[Value](), set[Value]()
    for leaf in graph.leaves:
        kinds = {LeafKind.INPUT: of_batch, LeafKind.PARAMETER: of_parameters}
        kinds.get(leaf.kind, varying).add(Value(leaf)) if leaf.kind is not LeafKind.CONSTANT else None
    written = {name for name, _ in graph.updates}
    varying = {v for v in varying if isinstance(v.owner, Leaf) and v.owner.name in written}
    found = set[Node]()
    for node in graph.nodes:
        inputs = node.inputs
        batch, parameters = (any(v in of for v in inputs) for of in (of_batch, of_parameters))
        own = is_random(node.op, node.args) or (batch and parameters) or any(v in varying for v in inputs)
        if own:
            varying.update(node.outputs())
            continue
        found.add(node)
        (of_batch if batch else of_parameters if parameters else set()).update(node.outputs())
    return frozenset(found)


class _Cutting:
    """What every stage reads and gives."""

    def __init__(self, graph: Graph, stage_of: Sequence[int], homes: Mapping[str, int]) -> None:
        self.graph, self._homes = graph, homes
        self.stage_of: Mapping[Node, int] = dict(zip(graph.nodes, stage_of, strict=True))
        self.anew = made_anew(graph)
        self._loss = None if graph.loss is None else graph.outputs[graph.loss]
        self._taught = _with_gradient(graph)
        self._learned = self._taught & _reaching(graph.nodes, {self._loss})
        self._nodes = [self._nodes_of(stage) for stage in range(max(stage_of, default=0) + 1)]
        self._given: list[dict[Value, int]] = [self._results_of(stage) for stage in range(len(self._nodes))]
        """By stage, its outputs and their places."""
        for stage, nodes in enumerate(self._nodes):
            for value in self._arriving(stage, nodes):
                source = self._source(value, stage)
                self._given[source].setdefault(value, len(self._given[source]))
        self._owners: dict[Leaf, int] = {}
        self._shared: set[str] = set()
        for stage, nodes in enumerate(self._nodes):
            for value in (value for node in nodes for value in node.inputs):
                if isinstance(value.owner, Leaf) and self._owners.setdefault(value.owner, stage) != stage:
                    self._shared.add(value.owner.name)
        self._writers = {name: self._writer(value) for name, value in graph.updates}
        """By buffer that is changed, the stage that does it."""
        self._check_written()

    def _writer(self, value: Value) -> int:
        return self.stage_of[value.owner] if isinstance(value.owner, Node) else self._owners.get(value.owner, 0)

    def _check_written(self) -> None:
        """What a stage changes no other reads: micro-batches are in several stages at once."""
        for stage, nodes in enumerate(self._nodes):
            for owner in (value.owner for node in nodes for value in node.inputs):
                if isinstance(owner, Leaf) and self._writers.get(owner.name, stage) != stage:
                    raise StrategyError(
                        f"{self.graph.name} was to be cut into {len(self._nodes)} stages. Stage {stage} would read the "
                        f"buffer {owner.name}, and stage {self._writers[owner.name]} change it, when the next "
                        f"micro-batch may have been read already. Ask for fewer stages, or read it where it is changed."
                    )

    def _nodes_of(self, stage: int) -> list[Node]:
        """The nodes that a stage runs, in order: its own, and what these read that it can make itself."""
        results = [*self.graph.outputs, *(value for _, value in self.graph.updates)]
        made = (v.owner for v in results if isinstance(v, Value) and isinstance(v.owner, Node))
        wanted: set[Leaf | Node] = {node for node in made if self.stage_of[node] == stage}
        found: list[Node] = []
        for node in reversed(self.graph.nodes):
            if node in wanted if node in self.anew else self.stage_of[node] == stage:
                found.append(node)
                wanted.update(value.owner for value in node.inputs)
        return found[::-1]

    def _results_of(self, stage: int) -> dict[Value, int]:
        """The loss, where the stage makes it."""
        loss = self._loss
        made = isinstance(loss, Value) and isinstance(loss.owner, Node) and loss.owner in set(self._nodes[stage])
        return {loss: 0} if made and isinstance(loss, Value) else {}

    def _arriving(self, stage: int, nodes: Sequence[Node]) -> list[Value]:
        own = set(nodes)
        read = dict.fromkeys(value for node in nodes for value in node.inputs)
        return [value for value in read if isinstance(value.owner, Node) and value.owner not in own]

    def _source(self, value: Value, stage: int) -> int:
        assert isinstance(value.owner, Node)
        source = self.stage_of[value.owner]
        if source > stage:
            told = self.graph.source_of(value.owner)
            raise StrategyError(
                f"{self.graph.name} was to be cut into {len(self._nodes)} stages. Stage {stage} would read what "
                f"{value.owner.op}{f' ({told})' if told else ''} makes in stage {source}, after it. Let data flow from "
                f"every stage to later ones only."
            )
        return source

    def cut(self, stage: int) -> StageGraph:
        builder, values = GraphBuilder(), dict[Value, Value]()
        nodes = self._nodes[stage]
        read = {value.owner for node in nodes for value in node.inputs if isinstance(value.owner, Leaf)}
        updates = [(name, value) for name, value in self.graph.updates if self._writers[name] == stage]
        unread = {leaf for leaf in self.graph.leaves if leaf not in self._owners and leaf.kind is not LeafKind.INPUT}
        kept = read | {leaf for leaf in unread if self._writers.get(leaf.name, self._homes.get(leaf.name, 0)) == stage}
        kept |= {value.owner for _, value in updates if isinstance(value.owner, Leaf)}
        learned = _reaching(nodes, {self._loss, *(value for value in self._given[stage] if value in self._learned)})
        for leaf in self.graph.leaves:
            if leaf in kept:
                still = self._owners.get(leaf, stage) != stage and Value(leaf) not in learned
                values[Value(leaf)] = builder.add_leaf(frozen(leaf) if still else leaf)
        arrivals = []
        for value in self._arriving(stage, nodes):
            source = self._source(value, stage)
            place = self._given[source][value]
            name = self._free_name(f"stage{source}.{place}")
            arrivals.append(Arrival(name, source, place))
            trainable = value in self._learned
            values[value] = builder.add_leaf(make_leaf(LeafKind.INPUT, name, value.type, trainable=trainable))
        for node in nodes:
            args = map_tensors(node.op, node.args, values.__getitem__)
            made = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
            builder.add_node(made, self.graph.source_of(node))
            values.update(zip(node.outputs(), made.outputs(), strict=True))
        for value in self._given[stage]:
            if value in self._taught and value not in self._learned and value != self._loss:
                values[value] = Value(builder.add_node(make_node("detach", (values[value],), (value.type,))))
        graph = builder.finish(
            f"{self.graph.name} stage {stage}",
            training=self.graph.training,
            inputs=tuple(v for leaf, v in values.items() if _is_input(leaf, v)),
            outputs=tuple(values[value] for value in self._given[stage]),
            updates=tuple((name, values[value]) for name, value in updates),
            loss=0 if self._results_of(stage) else None,
        )
        taken = Structure("tuple", (), (LEAF,) * len(graph.inputs))
        empty, outputs = Structure("tuple"), Structure("tuple", (), (LEAF,) * len(graph.outputs))
        structure = Structure("tuple", (), (taken, Structure("dict"), empty, Structure("dict")))
        graph = replace(graph, rounding=self.graph.rounding, input_structure=structure, output_structure=outputs)
        read_here = (leaf for leaf in self.graph.leaves if leaf.kind is LeafKind.PARAMETER and leaf in read)
        borrowed = tuple(leaf.name for leaf in read_here if self._owners[leaf] != stage)
        return StageGraph(graph, tuple(arrivals), borrowed, frozenset(self._shared))

    def _free_name(self, name: str) -> str:
        taken = {leaf.name for leaf in self.graph.leaves_of(LeafKind.INPUT)}
        while name in taken:
            name += "'"
        return name


def _is_input(value: Value, made: Value) -> bool:
    return isinstance(made.owner, Leaf) and made.owner.kind is LeafKind.INPUT


def _with_gradient(graph: Graph) -> set[Value]:
    """The values that depend on what is trained, in numbers that have a gradient."""
    found = {Value(leaf) for leaf in graph.leaves if leaf.trainable}
    for node in graph.nodes:
        if any(value in found for value in node.inputs) and (node.spec is None or node.spec.smooth):
            found.update(v for v in node.outputs() if v.type.dtype.is_floating_point or v.type.dtype.is_complex)
    return found


def _reaching(nodes: Sequence[Node], ends: Set[object]) -> set[Value]:
    """The values that a gradient comes back to from some values that nodes make."""
    found = {value for node in nodes for value in node.outputs() if value in ends}
    for node in reversed(nodes):
        if (node.spec is None or node.spec.smooth) and any(value in found for value in node.outputs()):
            found.update(node.inputs)
    return found
