"""The fold of a graph: blocks that are equal and stand one after the other, and the graph with few of them.

A graph folds where a stretch of its nodes is the same again and again: the same calls, reading at the same distance
back, or the same tensors from before the stretch, or leaves of their own in the same places. What is decided node by
node in order, as strategies do it, is then decided on the short graph, in which only the first and the last blocks of
the stretch are left, and holds for the others too: where two blocks in the middle are treated alike, so are all that
stand between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from conjoin.ir import Graph, Leaf, LeafKind, Node, Result, Value, make_node
from conjoin.ops import call_cache, map_tensors
from conjoin.sim import Skeleton, Stretch, rank_stretches, take_graph_apart, true_runs

FIRST, LAST = 2, 2
"""Blocks that are left at the beginning of a stretch and at its end."""
_TRIED = 8
"""Stretches of equal calls of which is seen whether blocks read alike, too; those first that leave out the most."""


@dataclass(frozen=True, slots=True)
class Blocks(Stretch):
    """Equal blocks one after the other, by the places of their nodes, of which those in the middle are left out."""

    @property
    def num_dropped(self) -> int:
        """Nodes that the short graph does not have."""
        return self.length * max(0, self.count - FIRST - LAST)

    @property
    def seam(self) -> int:
        """The first place that is left out."""
        return self.start + self.length * FIRST


@dataclass(frozen=True, eq=False)
class Fold:
    """A graph, its short form, and what stands in that for every node and leaf."""

    graph: Graph
    short: Graph
    stretch: Blocks
    leaf_before: Mapping[Leaf, Leaf]
    """For a leaf of a block, that of the block before."""

    def place(self, place: int) -> int:
        """Where the node stands in the short graph that stands for one of the whole."""
        seam, dropped, length = self.stretch.seam, self.stretch.num_dropped, self.stretch.length
        if place < seam:
            return place
        return place - dropped if place >= seam + dropped else seam - length + (place - seam) % length

    @cached_property
    def nodes(self) -> Mapping[Node, Node]:
        """For every node that of the short graph which stands for it."""
        short = self.short.nodes
        return {node: short[self.place(place)] for place, node in enumerate(self.graph.nodes)}

    @cached_property
    def leaves(self) -> Mapping[Leaf, Leaf]:
        """The same for leaves."""
        kept = frozenset(self.short.leaves)
        found: dict[Leaf, Leaf] = {}
        for leaf in self.graph.leaves:
            one = leaf
            while one not in kept:
                one = self.leaf_before[one]
            found[leaf] = one
        return found

    @cached_property
    def skeleton(self) -> Skeleton:
        """Of the short graph."""
        return take_graph_apart(self.short)[0]

    @cached_property
    def middle(self) -> tuple[tuple[tuple[Node, Node], ...], tuple[tuple[Leaf, Leaf], ...]]:
        """Nodes and leaves of the short graph that have to be treated alike: on the two sides of what is left out."""
        nodes, seam, length = self.short.nodes, self.stretch.seam, self.stretch.length
        pairs = zip(nodes[seam - length : seam], nodes[seam : seam + length], strict=True)
        kept = frozenset(self.short.leaves)
        after = {value.owner for node in nodes[seam : seam + length] for value in node.inputs}
        owned = [leaf for leaf in self.short.leaves if leaf in after and leaf in self.leaf_before]
        mirrored = ((leaf, self.leaves[self.leaf_before[leaf]]) for leaf in owned)
        return tuple(pairs), tuple(pair for pair in mirrored if pair[1] in kept)


@call_cache(32)
def fold(graph: Graph) -> Fold | None:
    """The fold that leaves out the most; None where no block is there often enough, or others read inside of blocks."""
    refs, readers = _references(graph), _readers(graph)
    numbers = _numbers([(n.call, n.types, n.pinned, tuple(v.index for v in n.inputs)) for n in graph.nodes])
    least = FIRST + LAST + 1
    for stretch in rank_stretches(numbers, least, range(1, len(numbers) // least + 1))[:_TRIED]:
        found = _verified(graph, stretch, refs, readers)
        short = None if found is None else _shortened(graph, found[0])
        if found is not None and short is not None and len(set(short.nodes)) == len(short.nodes):
            return Fold(graph, short, *found)
    return None


def _references(graph: Graph) -> list[tuple[int | Leaf, ...]]:
    """What every node reads: the place of a node, or a leaf."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    return [
        tuple(value.owner if isinstance(value.owner, Leaf) else places[value.owner] for value in node.inputs)
        for node in graph.nodes
    ]


def _readers(graph: Graph) -> dict[Leaf, list[int]]:
    found: dict[Leaf, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        for value in node.inputs:
            if isinstance(value.owner, Leaf):
                found.setdefault(value.owner, []).append(place)
    return found


def _numbers(keys: Sequence[object]) -> NDArray[np.int64]:
    known: dict[object, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def _verified(
    graph: Graph, stretch: Stretch, refs: Sequence[tuple[int | Leaf, ...]], readers: Mapping[Leaf, list[int]]
) -> tuple[Blocks, dict[Leaf, Leaf]] | None:
    """The part of a stretch in which blocks read alike too, and which leaf of the block before is like which."""
    length = stretch.length
    alike = [
        all(_is_alike(*pair, length, stretch.start) for pair in zip(refs[p], refs[p + length], strict=True))
        for p in range(stretch.start, stretch.end - length)
    ]
    start, end = max(true_runs(np.array(alike, bool)), key=lambda run: run[1] - run[0], default=(0, 0))
    kept = Blocks(stretch.start + start, length, (end - start) // length + 1)
    before: dict[Leaf, Leaf] = {}
    for p in range(kept.start, kept.end - length):
        pairs = zip(refs[p], refs[p + length], strict=True)
        before |= {b: a for a, b in pairs if isinstance(a, Leaf) and isinstance(b, Leaf) and a is not b}
    inner = range(kept.start, kept.end - length)
    if kept.num_dropped and not _is_read_outside(graph, kept, refs, inner) and _is_like(kept, before, readers):
        return kept, before
    return None


def _is_like(stretch: Blocks, before: Mapping[Leaf, Leaf], readers: Mapping[Leaf, list[int]]) -> bool:
    """Whether leaves of blocks are read inside of these alone, each in the same places as the one before."""
    inside = range(stretch.start, stretch.end)
    own = {*before, *before.values()}
    return all(
        [place + stretch.length for place in readers[a]] == readers[b] for b, a in before.items()
    ) and all(place in inside for leaf in own for place in readers[leaf])


def _is_alike(one: int | Leaf, other: int | Leaf, length: int, start: int) -> bool:
    """Whether a node reads the same as the one a block later: at the same distance, the same from before, or a leaf of
    its own."""
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        if one is other:
            return True
        facts = [(leaf.kind, leaf.type, leaf.trainable, bool(leaf.aliases), leaf.data) for leaf in (one, other)]
        return facts[0] == facts[1] and one.kind is not LeafKind.INPUT
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return False
    return other - one == length or (other == one and one < start)


def _is_read_outside(
    graph: Graph, stretch: Blocks, refs: Sequence[tuple[int | Leaf, ...]], inner: range
) -> bool:
    """Whether something behind the stretch, or the caller, reads from another block than the last; or a block from
    further back than the one before."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    results: Iterator[Result] = iter((*graph.outputs, *(value for _, value in graph.updates)))
    owners = [value.owner for value in results if isinstance(value, Value)]
    if any(isinstance(owner, Node) and places[owner] in inner for owner in owners):
        return True
    buffers = {leaf.name for leaf in graph.leaves_of(LeafKind.BUFFER)} & {name for name, _ in graph.updates}
    if any(isinstance(r, Leaf) and r.name in buffers for p in range(stretch.start, stretch.end) for r in refs[p]):
        return True
    if any(r in inner for p in range(stretch.end, len(refs)) for r in refs[p] if isinstance(r, int)):
        return True
    return any(
        isinstance(r, int) and r >= stretch.start and p - r >= 2 * stretch.length
        for p in range(stretch.start, stretch.end)
        for r in refs[p]
    )


def _shortened(graph: Graph, stretch: Blocks) -> Graph:
    """The graph without the blocks in the middle of a stretch."""
    seam, dropped = stretch.seam, stretch.num_dropped
    values = {value: value for node in graph.nodes[:seam] for value in node.outputs()}
    values |= {Value(leaf): Value(leaf) for leaf in graph.leaves}
    gone = graph.nodes[seam : seam + dropped]
    for node, one in zip(gone[-stretch.length :], graph.nodes[seam - stretch.length : seam], strict=True):
        values.update(zip(node.outputs(), one.outputs(), strict=True))
    nodes = list(graph.nodes[:seam])
    for node in graph.nodes[seam + dropped :]:
        args = map_tensors(node.op, node.args, values.__getitem__)
        made = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
        nodes.append(made)
        values.update(zip(node.outputs(), made.outputs(), strict=True))
    read = {value.owner for node in nodes for value in node.inputs}
    read_before = {value.owner for node in graph.nodes for value in node.inputs}
    sources = (*graph.sources[:seam], *graph.sources[seam + dropped :]) if graph.sources else ()
    return replace(
        graph,
        leaves=tuple(leaf for leaf in graph.leaves if leaf in read or leaf not in read_before),
        nodes=tuple(nodes),
        outputs=tuple(values[value] if isinstance(value, Value) else value for value in graph.outputs),
        updates=tuple((name, values[value]) for name, value in graph.updates),
        sources=sources,
        labels=(),
    )
