"""Segments of a graph: consecutive operators, named in a plan file by the first and the last tensor they make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from operator import itemgetter

from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Node
from conjoin.ir.reshards import is_parallel


class Segment(tuple[int, int]):
    """The first and the last of consecutive operators, by their place among all that are no reshards.

    What some of them make may be kept where the others are run again: these are as they were, without being run.

    >>> first, last = Segment(3, 7, kept=(5,))
    >>> first, last, Segment(3, 7) == (3, 7), Segment(3, 7, kept=(5,)) == (3, 7)
    (3, 7, True, False)
    """

    kept: frozenset[int]

    def __new__(cls, first: int, last: int, kept: Iterable[int] = ()) -> Segment:
        made = super().__new__(cls, (first, last))
        made.kept = frozenset(kept)
        return made

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.kept == (other.kept if isinstance(other, Segment) else set())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def __reduce__(self) -> tuple[type[Segment], tuple[int, int, frozenset[int]]]:
        return Segment, (*self, self.kept)


_NAME = re.compile(r"%(\d{1,9})\.\.%(\d{1,9})(?: but((?: %\d{1,9}){1,4096}))?")


def operators_of(graph: Graph) -> tuple[Node, ...]:
    """The nodes that compute: all but reshards."""
    return tuple(node for node in graph.nodes if not is_parallel(node))


def asked_segments(graph: Graph) -> tuple[Segment, ...]:
    """What the user asked to be run again, by `torch.utils.checkpoint`: as far as its operators follow on."""
    sources = [graph.source_of(node) for node in operators_of(graph)]
    numbered = [(place, source.segment if source else 0) for place, source in enumerate(sources)]
    runs = [list(run) for number, run in groupby(numbered, key=itemgetter(1)) if number]
    return tuple(Segment(run[0][0], run[-1][0]) for run in runs if len(run) > 1)


def segment_texts(graph: Graph, segments: Iterable[tuple[int, int]]) -> Iterator[str]:
    """The names of segments in a plan file: `%3..%7`, or `%3..%7 but %5` where what makes %5 is not run again."""
    operators = operators_of(graph)
    for segment in segments:
        made = [[graph.numbers[value] for value in node.outputs()] for node in operators[segment[0] : segment[1] + 1]]
        places = sorted(segment.kept) if isinstance(segment, Segment) else []
        kept = "".join(f" %{made[place - segment[0]][0]}" for place in places)
        yield f"%{made[0][0]}..%{made[-1][-1]}{' but' if kept else ''}{kept}"


def parse_segments(graph: Graph, names: Iterable[str], *, as_read: bool = False) -> tuple[Segment, ...]:
    """The segments of some names, in order; ValueError where one is none, or two have an operator in common.

    With `as_read` numbers are those of the text that the graph was read from, which an editor need not count.
    """
    numbers = _numbers(graph, as_read)
    found = sorted(_parse(name, numbers) for name in names)
    for (first, last), (start, _) in pairwise(found):
        if start <= last:
            raise ValueError(f"two segments to recompute have operators in common: {first} to {last} and from {start}")
    return tuple(found)


def _numbers(graph: Graph, as_read: bool) -> Mapping[int, int]:
    """For every number of an output the place of the operator that makes it."""
    labels = dict(zip(graph.nodes, graph.labels, strict=True)) if as_read and graph.labels else {}
    found: dict[int, int] = {}
    for place, node in enumerate(operators_of(graph)):
        for i, value in enumerate(node.outputs()):
            found[labels[node] + i if labels else graph.numbers[value]] = place
    return found


def _parse(name: str, numbers: Mapping[int, int]) -> Segment:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name[:60]!r} does not name consecutive operators, as '%3..%7' does")
    first, last = (numbers.get(int(number)) for number in match.groups()[:2])
    if first is None or last is None or first > last:
        raise ValueError(f"{name[:60]} does not begin and end with tensors that operators make one after the other")
    kept = [numbers.get(int(word[1:])) for word in (match.group(3) or "").split()]
    inside = [place for place in kept if place is not None and first <= place <= last]
    if len(inside) < len(kept):
        raise ValueError(f"{name[:60]} keeps what no operator of it makes")
    return Segment(first, last, inside)
