"""Which operators of two graphs of one model are the same, whatever their shapes and whichever mode they were made in.

Operators that read the same weights in the same way are, where each graph has one of them. Between two of these, one
after the other, operators of the same kind are taken for each other in order; what one graph has and the other has not,
such as dropout, is passed by. A graph may have layouts: reshards are looked through.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from conjoin.ir import Graph, LeafKind, Node, Value, operators_of, origin
from conjoin.ops import call_cache

IndexPairs = list[tuple[int, int]]


def find_counterparts(graph: Graph, other: Graph) -> dict[Node, Node]:
    """For operators of a graph those of the other that are the same.

    >>> from conjoin.ir import parse_graph
    >>> text = '''graph "g" MODE
    ... param:w f32[4,4]
    ... input:x f32[SIZE,4]
    ... takes [input:x] in null
    ... %0: f32[SIZE,4] = linear(input:x, param:w)
    ... %1: f32[SIZE,4] = relu(%0)
    ... returns [%1] in null
    ... '''
    >>> small, large = (parse_graph(text.replace("SIZE", n).replace("MODE", "eval")) for n in "28")
    >>> [(mine.op, yours.types[0].shape) for mine, yours in find_counterparts(small, large).items()]
    [('linear', (8, 4)), ('relu', (8, 4))]
    """
    (mine, my_keys), (yours, your_keys) = _keyed(graph), _keyed(other)
    found = _by_weights(my_keys, your_keys)
    pairs = dict(found)
    taken = set(pairs.values())
    for (i, j), (next_i, next_j) in pairwise([(-1, -1), *_rising(found), (len(mine), len(yours))]):
        left = [k for k in range(i + 1, next_i) if k not in pairs]
        right = [k for k in range(j + 1, next_j) if k not in taken]
        between = SequenceMatcher(None, [my_keys[k] for k in left], [your_keys[k] for k in right], autojunk=False)
        for block in between.get_matching_blocks():
            pairs.update((left[block.a + k], right[block.b + k]) for k in range(block.size))
    return {mine[i]: yours[pairs[i]] for i in sorted(pairs)}


def _kind(node: Node) -> Hashable:
    return node.op, len(node.inputs), len(node.types)


@call_cache(8)
def _keyed(graph: Graph) -> tuple[tuple[Node, ...], list[tuple[Hashable, ...]]]:
    """The operators of a graph, and what each is: its kind, and what it reads of weights, if anything."""
    operators = operators_of(graph)
    made: dict[Value, Hashable] = {}
    for leaf in graph.leaves:
        if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER):
            made[Value(leaf)] = leaf.name
    keys: list[tuple[Hashable, ...]] = []
    for node in operators:
        read = tuple(made.get(origin(value)) for value in node.inputs)
        keys.append((_kind(node), read) if any(x is not None for x in read) else (_kind(node),))
        if read and all(x is not None for x in read):
            made.update((value, (node.op, value.index, read)) for value in node.outputs())
    return operators, keys


def _by_weights(mine: Sequence[tuple[Hashable, ...]], yours: Sequence[tuple[Hashable, ...]]) -> IndexPairs:
    """The places of what reads the same weights, each once."""
    once = [_once(keys) for keys in (mine, yours)]
    return sorted((i, once[1][key]) for key, i in once[0].items() if key in once[1])


def _once(keys: Sequence[tuple[Hashable, ...]]) -> Mapping[Hashable, int]:
    counts = Counter(keys)
    return {key: i for i, key in enumerate(keys) if len(key) > 1 and counts[key] == 1}


def _rising(places: IndexPairs) -> IndexPairs:
    """The longest row of pairs in which both go on: what stands in another order in the other graph is left out."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for k, (_, j) in enumerate(places):
        at = bisect_left(ends, j)
        before.append(last[at - 1] if at else -1)
        ends[at : at + 1], last[at : at + 1] = [j], [k]
    row: IndexPairs = []
    k = last[-1] if last else -1
    while k >= 0:
        row.append(places[k])
        k = before[k]
    return row[::-1]
