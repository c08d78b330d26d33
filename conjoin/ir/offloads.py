"""What a plan keeps on the host: tensors of the step, named as `%12`, by the operator that makes each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Value
from conjoin.ir.segments import Segment, operators_of

Made = tuple[int, int]
"""A tensor: the place of the operator that makes it among all that are no reshards, and which of its outputs it is."""
_NAME = re.compile(r"%(\d{1,9})")


def tensor_text(graph: Graph, made: Made) -> str:
    """The name of a tensor in a plan file."""
    return f"%{graph.numbers[tuple(operators_of(graph)[made[0]].outputs())[made[1]]]}"


def parse_tensors(graph: Graph, names: Iterable[str], *, as_read: bool = False) -> tuple[Made, ...]:
    """The tensors of some names, in the order they are made; ValueError where one is none that an operator makes.

    With `as_read` numbers are those of the text that the graph was read from.
    """
    labels = dict(zip(graph.nodes, graph.labels, strict=True)) if as_read and graph.labels else {}
    known: dict[int, Made] = {}
    for place, node in enumerate(operators_of(graph)):
        for i, value in enumerate(node.outputs()):
            known[labels[node] + i if labels else graph.numbers[value]] = place, i
    found: set[Made] = set()
    for name in names:
        match = _NAME.fullmatch(name)
        made = known.get(int(match.group(1))) if match else None
        if made is None:
            raise ValueError(f"{name[:60]!r} is to lie on the host, and names no tensor that an operator makes")
        if made in found:
            raise ValueError(f"{name} is to lie on the host twice")
        found.add(made)
    return tuple(sorted(found))


def check_offloads(graph: Graph, tensors: Sequence[Made], segments: Sequence[Segment]) -> None:
    """ValueError where nobody would keep a tensor: the backward pass makes it again."""
    operators = operators_of(graph)
    places = {value: place for place, node in enumerate(operators) for value in node.outputs()}
    for place, i in tensors:
        inside = next((segment for segment in segments if segment[0] <= place <= segment[1]), None)
        if inside is None:
            continue
        readers = _readers(graph, tuple(operators[place].outputs())[i], places)
        if all(inside[0] <= reader <= inside[1] for reader in readers):
            name = tensor_text(graph, (place, i))
            raise ValueError(f"{name} is to lie on the host, and the backward pass makes it again: nobody keeps it")


def _readers(graph: Graph, value: Value, places: dict[Value, int]) -> list[int]:
    """The places of the operators that read a value, through reshards too; one beyond all for what comes out."""
    found, waiting = [], [value]
    while waiting:
        read = waiting.pop()
        found += [len(places) + 1] if read in graph.outputs else []
        for user in graph.users.get(read, ()):
            outputs = tuple(user.outputs())
            if outputs and outputs[0] in places:
                found.append(places[outputs[0]])
            else:
                waiting += outputs
    return found
