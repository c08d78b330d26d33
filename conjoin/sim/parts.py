"""Parts of a graph that run in micro-batches, as spans of operators: each runs so often, and again in the backward.

What a micro-batch makes is gone when the next begins, as what is made inside a segment that is run again.
"""

from __future__ import annotations

from typing import NamedTuple

from conjoin.ir import Graph, Segment, micro_batched_parts, operators_of
from conjoin.ops import BATCH


class PartSpan(NamedTuple):
    """From the first to the last operator of a part, and how many micro-batches it runs in."""

    first: int
    last: int
    times: int

    @property
    def segment(self) -> Segment:
        return Segment(self.first, self.last)


def part_spans(graph: Graph) -> tuple[PartSpan, ...]:
    """The parts of a graph in order; what stands among their operators is taken for one of them."""
    places = {node: place for place, node in enumerate(operators_of(graph))}
    found = []
    for part in micro_batched_parts(graph):
        inside = [places[node] for node in part.nodes if node in places and node.op != BATCH]
        found.append(PartSpan(min(inside), max(inside), part.count))
    return tuple(found)
