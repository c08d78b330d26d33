"""Parts of a graph that run in micro-batches while the rest takes the batch as a whole: Unity's Pipeline and Batch.

    %0: f32[2,4] = conjoin::pipeline(input:x, dim=0, count=4)      every fourth sample, for each of four micro-batches
    %1: f32[2,9] = linear(%0, param:w)                             runs four times
    %2: f32[8,9] = conjoin::batch(%1, dim=0, count=4)              the batch together again

A micro-batch has every n-th sample, so that a piece of a split batch has its part of every one, and nothing is sent to
cut it. What depends on a `pipeline` and is not behind a `batch` is a part; where one leads to another, there are more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from conjoin.errors import StrategyError
from conjoin.ir.builder import is_random
from conjoin.ir.expansion import drop_unused
from conjoin.ir.graph import Graph
from conjoin.ir.micro_batches import Cutting
from conjoin.ir.nodes import Node, Value
from conjoin.ops import BATCH, PIPELINE, Split


@dataclass(frozen=True, slots=True)
class MicroBatchedPart:
    """Some operators that run for one micro-batch after the other."""

    count: int
    nodes: frozenset[Node]
    """With what cuts and joins."""


def cut_part_in_micro_batches(graph: Graph, count: int) -> Graph:
    """The graph with all that works on samples apart, from its inputs on, in so many micro-batches; StrategyError where
    nothing is learned there."""
    excluded = set[Node]()
    while True:
        first, last = (_PartCutting(graph, count, number, excluded) for number in (0, count - 1))
        made, other = first.run(), last.run()
        more = first.refused or last.refused
        if not more and made != other:  # what is not the same for every micro-batch needs all samples
            there = set(other.nodes)
            more = {first.origins[node] for node in made.nodes if node not in there and node in first.origins}
        if not more:
            break
        excluded |= more
    if not _learns(made, {node for part in micro_batched_parts(made) for node in part.nodes}):
        raise StrategyError(
            f"A part of {graph.name} was to run in {count} micro-batches. From its inputs on nothing that it learns "
            f"works on samples apart from others. Do without part={count}."
        )
    return made


def _learns(graph: Graph, inside: set[Node]) -> bool:
    """Whether these nodes read parameters, or what is made of such for all samples, as casts are."""
    learned = {Value(leaf) for leaf in graph.leaves if leaf.trainable}
    for node in graph.nodes:
        if node not in inside and not learned.isdisjoint(node.inputs):
            learned.update(node.outputs())
    return any(node.op != PIPELINE and not learned.isdisjoint(node.inputs) for node in inside)


class _PartCutting:
    """A graph as far as it is cut."""

    def __init__(self, graph: Graph, count: int, number: int, excluded: set[Node]) -> None:
        self._graph, self._count, self._excluded = graph, count, excluded
        self._cutting = Cutting(graph, count, number, inside=True)
        self._size = self._cutting.cut[0].type.shape[0]
        self._joined: dict[Value, Value] = {}
        """What is there as a whole: late, or joined from micro-batches."""
        self._made = {value: node for node in graph.nodes for value in node.outputs()}
        self.origins: dict[Node, Node] = {}
        """Of the nodes that were added for a micro-batch, what they stand for."""
        self.refused = set[Node]()
        """What may not run in micro-batches, since it would have to be drawn again as a whole."""

    def run(self) -> Graph:
        old = self._graph
        late = [node for node in old.nodes if not self._add_apart(node)]
        read = [value for node in late for value in node.inputs]
        for value in (*read, *old.outputs, *(value for _, value in old.updates)):
            if isinstance(value, Value):
                self._join(value)  # all at the end of the part, as what their layouts take belongs to it
        for node in late:
            self._add_late(node)
        outputs = tuple(self._whole(v) if isinstance(v, Value) else v for v in old.outputs)
        updates = tuple((name, self._whole(value)) for name, value in old.updates)
        made = self._cutting.builder.finish(
            old.name,
            training=old.training,
            inputs=old.inputs,
            outputs=outputs,
            updates=updates,
            loss=old.loss,
            input_structure=old.input_structure,
            output_structure=old.output_structure,
        )
        return drop_unused(replace(made, rounding=old.rounding))

    def _add_apart(self, node: Node) -> bool:
        if node in self._excluded:
            return False
        done = self._cutting.add_apart(node)
        for value in node.outputs():
            part = self._cutting.part(value)
            if part is not None and isinstance(part[0].owner, Node):
                self.origins.setdefault(part[0].owner, node)
        return done

    def _add_late(self, node: Node) -> None:
        self._cutting.add_whole(node, {value: self._whole(value) for value in node.inputs})
        self._joined.update((value, self._found(value)) for value in node.outputs())

    def _found(self, value: Value) -> Value:
        found = self._cutting.whole(value)
        assert found is not None, "it was just added"
        return found

    def _whole(self, value: Value) -> Value:
        """A value of the whole batch: as it is there, joined, or made again of what is, as views are."""
        self._join(value)
        if value not in self._joined:
            found = self._cutting.whole(value)
            if found is None:
                node = self._made[value]
                if is_random(node.op, node.args):
                    self.refused.add(node)
                self._add_late(node)
                found = self._found(value)
            self._joined[value] = found
        return self._joined[value]

    def _join(self, value: Value) -> None:
        """Put a value of the micro-batches together, where it is not there as a whole and can be."""
        part = self._cutting.part(value)
        if value in self._joined or part is None or self._cutting.whole(value) is not None:
            return
        if self._can_be_joined(value, part[1]):
            assert isinstance(part[1], Split)
            self._joined[value] = self._cutting.call(BATCH, part[0], part[1].dim, self._count)

    def _can_be_joined(self, value: Value, placement: object) -> bool:
        """Whether a dim is the batch alone: of samples that are flattened with others there is no every n-th."""
        return isinstance(placement, Split) and value.type.shape[placement.dim] == self._size


def micro_batched_parts(graph: Graph) -> tuple[MicroBatchedPart, ...]:
    """The parts of a graph that run in micro-batches, in order; ValueError where they are not well formed."""
    if not any(node.op == PIPELINE or node.op == BATCH for node in graph.nodes):
        return ()
    walk = _Walk(graph)
    return tuple(MicroBatchedPart(count, frozenset(nodes)) for (_, count), nodes in sorted(walk.parts.items()))


class _Walk:
    """Which nodes of a graph run in micro-batches."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.parts: dict[tuple[int, int], list[Node]] = {}
        """By how many parts lead to one, and its number of micro-batches."""
        self._inside: dict[Value, tuple[int, int]] = {}
        self._level: dict[Value, int] = {}
        latest = 0
        for node in graph.nodes:
            part, level = self._add(node)
            if part is not None and node.op != BATCH and part[0] < latest:
                raise self._fault(node, "stands behind what the micro-batches before it are needed for")
            latest = max(latest, level)
        kept = (*graph.outputs, *(value for _, value in graph.updates))
        if any(isinstance(value, Value) and value in self._inside for value in kept):
            raise ValueError(f"the graph gives out a micro-batch: it ends in {BATCH} before")
        if len({level for level, _ in self.parts}) < len(self.parts):
            raise ValueError("parts in different numbers of micro-batches run side by side")

    def _fault(self, node: Node, why: str) -> ValueError:
        number = self._graph.numbers[next(iter(node.outputs()))]
        return ValueError(f"%{number} = {node.op} {why}")

    def _add(self, node: Node) -> tuple[tuple[int, int] | None, int]:
        """The part that a node is of, and how many parts lead to it."""
        parts = {self._inside[value] for value in node.inputs if value in self._inside}
        level = max((self._level.get(value, 0) for value in node.inputs if value not in self._inside), default=0)
        if node.op == PIPELINE:
            if parts:
                raise self._fault(node, "cuts a micro-batch again")
            parts = {(level, int(node.args[2]))}
        if len(parts) > 1:
            raise self._fault(node, "reads micro-batches of different parts")
        if not parts:
            if node.op == BATCH:
                raise self._fault(node, "joins what is no micro-batch")
            self._level.update(dict.fromkeys(node.outputs(), level))
            return None, level
        part = parts.pop()
        if level > part[0]:
            raise self._fault(node, "reads in a micro-batch what is made of all of them")
        self.parts.setdefault(part, []).append(node)
        if node.op != BATCH:
            self._inside.update(dict.fromkeys(node.outputs(), part))
            return part, part[0]
        if node.args[2] != part[1]:
            raise self._fault(node, f"joins {node.args[2]} micro-batches of {part[1]}")
        self._level.update(dict.fromkeys(node.outputs(), part[0] + 1))
        return part, part[0]
