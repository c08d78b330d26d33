"""Which tensor of a graph a name means.

A name is that of a parameter or an input (`fc.weight`, `param:fc.weight`, `input:x`), `%3` for what an operator makes,
or the path of a module for what its last operator makes. The kind of an operator (`relu`) or a line of the user's file
(`model.py:12`) does where one operator alone is meant; of several all are told, to choose from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from conjoin.errors import UsageError
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value, origin
from conjoin.search.request import nearest

_KINDS = (LeafKind.PARAMETER, LeafKind.INPUT)
_MOST_TOLD = 20
_LISTED = "Name one by its number"


def find_tensor(graph: Graph, name: str, asked: str = "A layout was asked for the tensor") -> Value:
    """The parameter, input, output of an operator or of a module that a name means."""
    names = dict(_names(graph))
    if name in names:
        return names[name]
    if name.startswith("%"):
        raise UsageError(
            f"{asked} {name[:40]!r}. Operators of {graph.name} make %0 to %{len(graph.numbers) - 1}, counted in the "
            f"graph as it is there. Name one of these, or the path of a module."
        )
    meant = [node for node in _operators(graph) if _is_kind_or_line(graph, node, name)]
    if len(meant) == 1 and len(meant[0].types) == 1:
        return Value(meant[0])
    meant = meant or [node for node in _operators(graph) if name.lower() in operator_line(graph, node).lower()]
    if meant:
        raise UsageError(
            f"{asked} {name[:60]!r}. {graph.name} has no parameter, input or module of that name, but "
            f"{_counted(meant)}. {_LISTED}:\n{_listed(graph, meant)}"
        )
    known = [key for key in names if not key.startswith("%")]
    raise UsageError(
        f"{asked} {name[:60]!r}. {graph.name} has no parameter, input, module, kind of operator or line of that name. "
        f"{nearest(name, known)}"
    )


def find_in_stages(graphs: Sequence[Graph], name: str, asked: str) -> tuple[int, Value]:
    """The stage of a pipeline and what in it a name means: `2: NAME` in stage 2, else in the one stage that has it."""
    number, colon, rest = name.partition(":")
    if colon and number.strip().isdecimal():
        place = int(number)
        if place < len(graphs):
            return place, find_tensor(graphs[place], rest.strip(), asked)
        raise UsageError(
            f"{asked} {name[:60]!r}. The pipeline has stages 0 to {len(graphs) - 1}. Name one of these."
        )
    found, listed = list[tuple[int, Value]](), dict[int, UsageError]()
    for place, graph in enumerate(graphs):
        try:
            found.append((place, find_tensor(graph, name, asked)))
        except UsageError as error:
            if _LISTED in str(error):
                listed[place] = error
    having = sorted([*(place for place, _ in found), *listed])
    if len(having) == 1:
        if listed:
            raise listed[having[0]]
        return found[0]
    if having:
        raise UsageError(
            f"{asked} {name[:60]!r}. Stages {', '.join(map(str, having))} of the pipeline have that. Say in which, as "
            f"{having[0]}:{name[:60]}."
        )
    known = dict.fromkeys(key for graph in graphs for key, _ in _names(graph) if not key.startswith("%"))
    raise UsageError(
        f"{asked} {name[:60]!r}. No stage of the pipeline has a parameter, input, module, kind of operator or line of "
        f"that name. {nearest(name, list(known))}"
    )


def operator_line(graph: Graph, node: Node) -> str:
    """An operator as people find it: its number, its kind, and where in their program it stands."""
    source = graph.source_of(node)
    return f"%{graph.numbers[Value(node)]} {node.op}{f' at {source}' if source else ''}"


def _counted(nodes: list[Node]) -> str:
    return f"{len(nodes)} operators of that kind or place" if len(nodes) > 1 else "an operator of that kind or place"


def _listed(graph: Graph, nodes: list[Node]) -> str:
    lines = [f"  {operator_line(graph, node)}" for node in nodes[:_MOST_TOLD]]
    return "\n".join([*lines, *([f"  and {len(nodes) - _MOST_TOLD} more"] if len(nodes) > _MOST_TOLD else [])])


def _operators(graph: Graph) -> Iterator[Node]:
    """What computes; not what brings tensors from one layout to another."""
    return (node for node in graph.nodes if origin(Value(node)).owner is node)


def _is_kind_or_line(graph: Graph, node: Node, name: str) -> bool:
    """Whether an operator is of a kind (`relu`) or stands in a line (`model.py:12`, or more of its path)."""
    if name == node.op:
        return True
    source = graph.source_of(node)
    path, _, line = name.rpartition(":")
    if source is None or not path or line != str(source.line):
        return False
    given = PurePath(path).parts
    return PurePath(source.file).parts[-len(given) :] == given


def _names(graph: Graph) -> Iterator[tuple[str, Value]]:
    """Every name of a tensor; of two that are the same the later one counts."""
    for node in graph.nodes:
        parts = _module(graph, node).split(".")
        if len(node.types) == 1 and parts[0]:
            yield from ((".".join(parts[:i]), Value(node)) for i in range(1, len(parts) + 1))
    yield from ((f"%{number}", value) for value, number in graph.numbers.items())
    for kind in reversed(_KINDS):
        for leaf in graph.leaves_of(kind):
            for alias in (leaf.name, *leaf.names):
                yield alias, Value(leaf)
                yield f"{kind.value}:{alias}", Value(leaf)


def _module(graph: Graph, node: Node) -> str:
    """The path of the module that a node is called in; where no line is known, that of the first parameter it reads."""
    source = graph.source_of(node)
    if source is not None:
        return source.module
    leaves = (value.owner for value in node.inputs if isinstance(value.owner, Leaf))
    return next((leaf.name.rpartition(".")[0] for leaf in leaves if leaf.kind is LeafKind.PARAMETER), "")
