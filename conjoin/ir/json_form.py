"""The versioned JSON form of a graph, its file, and its fingerprint."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from conjoin.errors import GraphError
from conjoin.ir.builder import GraphBuilder
from conjoin.ir.custom_operators import read_statements, statements_to_json
from conjoin.ir.files import read_json, write_file
from conjoin.ir.graph import Graph, Result
from conjoin.ir.limits import MAX_NESTING, MAX_NUMBER, check_constant, check_count
from conjoin.ir.literals import literal_from_json, literal_to_json
from conjoin.ir.nodes import Leaf, LeafKind, Node, Source, Value, make_leaf, make_node
from conjoin.ir.parser import add_new, bind_checked, checked_number, checked_results
from conjoin.ir.printer import is_default
from conjoin.ir.structure import structure_from_json, structure_to_json
from conjoin.ir.types import parse_type
from conjoin.ops import signature

FORMAT = "conjoin.graph"
VERSION = 1


def _reference(value: Value, graph: Graph) -> dict[str, Any]:
    if isinstance(value.owner, Leaf):
        return {"leaf": str(value.owner)}
    return {"value": graph.numbers[value]}


def _encode(item: Any, graph: Graph) -> Any:
    if isinstance(item, Value):
        return _reference(item, graph)
    return [_encode(part, graph) for part in item] if isinstance(item, tuple) else literal_to_json(item)


def _encode_leaf(leaf: Leaf) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": leaf.kind.value, "name": leaf.name, "type": str(leaf.type)}
    if leaf.trainable:
        entry["trainable"] = True
    if leaf.aliases:
        entry["aliases"] = list(leaf.aliases)
    if leaf.data is not None:
        entry["data"] = base64.b64encode(leaf.data).decode()
    return entry


def _encode_node(node: Node, graph: Graph) -> dict[str, Any]:
    args = {
        parameter.name: _encode(value, graph)
        for parameter, value in zip(signature(node.op).parameters, node.args, strict=True)
        if not is_default(parameter, value)
    }
    entry: dict[str, Any] = {"op": node.op, "args": args, "types": [str(output) for output in node.types]}
    if node.occurrence:
        entry["occurrence"] = node.occurrence
    if node.pinned:
        entry["pinned"] = True
    return entry


def _program(graph: Graph) -> dict[str, Any]:
    """Everything that decides what the graph computes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "training": graph.training,
        "leaves": [_encode_leaf(leaf) for leaf in graph.leaves],
        "nodes": [_encode_node(node, graph) for node in graph.nodes],
        "inputs": [_encode(item, graph) for item in graph.inputs],
        "outputs": [_encode(item, graph) for item in graph.outputs],
        "updates": [[name, _encode(value, graph)] for name, value in graph.updates],
        "loss": graph.loss,
        "input_structure": structure_to_json(graph.input_structure),
        "output_structure": structure_to_json(graph.output_structure),
    }


def to_json(graph: Graph) -> dict[str, Any]:
    """A graph as plain data for `json`."""
    sources = [None if s is None else [s.file, s.line, s.module] for s in graph.sources]
    operators = statements_to_json(graph)
    stated = {"operators": operators} if operators else {}
    return {**_program(graph), **stated, "name": graph.name, "sources": sources}


def fingerprint(graph: Graph, *, constants: bool = True) -> str:
    """A digest of what the graph computes: the same in every process and on every machine, blind to names of files.

    Without `constants` their values do not count: a graph captured on the meta device has none.

    >>> from conjoin.ir import parse_graph
    >>> lines = ['graph "g" eval', "input:x f32[2]", "takes [input:x] in null", "%0: f32[2] = relu(input:x)"]
    >>> fingerprint(parse_graph("\\n".join([*lines, "returns [%0] in null"])))[:12]
    '5bc7e0a43218'
    """
    program = _program(graph)
    if not constants:
        program["leaves"] = [{k: v for k, v in leaf.items() if k != "data"} for leaf in program["leaves"]]
    canonical = json.dumps(program, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


_Kind = TypeVar("_Kind")
_KEYS = {
    "format", "version", "name", "training", "leaves", "nodes", "inputs", "outputs", "updates", "loss",
    "input_structure", "output_structure", "sources", "operators",
}  # fmt: skip
_LEAF_KEYS = {"trainable", "aliases", "data"}
_NODE_KEYS = {"occurrence", "pinned"}


def _typed(value: Any, kind: type[_Kind], what: str) -> _Kind:
    """The value, which must be exactly of that type: no number is a truth, no text a list."""
    if type(value) is not kind:
        raise ValueError(f"{what} is {str(value)[:60]!r}, not of type {kind.__name__}")
    return value


class _Loader:
    """Rebuilds a graph from plain data, trusting none of it."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.values: list[Value] = []

    def decode(self, item: Any, depth: int = 0) -> Any:
        match item:
            case {"leaf": str(name), **rest} if not rest:
                leaf = self.builder.leaf(name)
                if leaf is None:
                    raise ValueError(f"there is no leaf {name[:60]!r}")
                return Value(leaf)
            case {"value": int(number), **rest} if not rest and not isinstance(number, bool):
                if not 0 <= number < len(self.values):
                    raise ValueError(f"value {number} is used before it is made")
                return self.values[number]
            case list() if depth < MAX_NESTING:
                return tuple(self.decode(part, depth + 1) for part in item)
            case list():
                raise ValueError("lists are nested too deeply")
        return literal_from_json(item)

    def leaf(self, entry: Any) -> None:
        match entry:
            case {"kind": str(kind), "name": str(name), "type": str(type_text), **rest} if rest.keys() <= _LEAF_KEYS:
                facts: dict[Any, Any] = rest
            case _:
                raise ValueError(f"{str(entry)[:60]} is not a leaf")
        leaf_type = parse_type(type_text)
        trainable = _typed(facts.get("trainable", False), bool, "trainable")
        aliases = tuple(_typed(alias, str, "an alias") for alias in _typed(facts.get("aliases", []), list, "aliases"))
        data = None
        if "data" in facts:
            data = check_constant(base64.b64decode(_typed(facts["data"], str, "data"), validate=True), leaf_type)
        if self.builder.leaf(f"{kind}:{name}") is not None:
            raise ValueError(f"there are two leaves {kind}:{name[:60]}")
        leaf = make_leaf(LeafKind(kind), name, leaf_type, trainable=trainable, aliases=aliases, data=data)
        self.builder.add_leaf(leaf)

    def node(self, entry: Any, source: Source | None) -> None:
        match entry:
            case {"op": str(op), "args": dict(args), "types": list(types), **rest} if rest.keys() <= _NODE_KEYS:
                marks: dict[Any, Any] = rest
            case _:
                raise ValueError(f"{str(entry)[:60]} is not a node")
        unknown = args.keys() - {parameter.name for parameter in signature(op).parameters}
        if unknown:
            raise ValueError(f"{op} does not take {', '.join(sorted(map(str, unknown)))}")
        bound = bind_checked(op, (), {name: self.decode(value) for name, value in args.items()})
        outputs = tuple(parse_type(_typed(text, str, "a type")) for text in types)
        occurrence = checked_number(_typed(marks.get("occurrence", 0), int, "occurrence"))
        pinned = _typed(marks.get("pinned", False), bool, "pinned")
        node = add_new(self.builder, make_node(op, bound, outputs, occurrence=occurrence, pinned=pinned), source)
        self.values.extend(node.outputs())

    def results(self, entries: Any) -> tuple[Result, ...]:
        return checked_results(tuple(self.decode(entry) for entry in entries))

    def update(self, entry: Any) -> tuple[str, Value]:
        match entry:
            case [str(name), reference]:
                value = self.decode(reference)
                if isinstance(value, Value):
                    return name, value
        raise ValueError(f"{str(entry)[:60]} is not an update of a buffer")


def _source(entry: Any) -> Source | None:
    match entry:
        case None:
            return None
        case [str(file), int(line), str(module)] if not isinstance(line, bool):
            return Source(file, checked_number(line), module)
    raise ValueError(f"{str(entry)[:60]} is not a source")


def _loss(loss: Any) -> int | None:
    return None if loss is None else checked_number(_typed(loss, int, "loss"))


def _load(data: dict[str, Any]) -> Graph:
    if data.keys() - _KEYS:
        raise ValueError(f"{', '.join(sorted(map(repr, data.keys() - _KEYS)))[:200]} is unknown")
    lists = ("leaves", "nodes", "inputs", "outputs", "updates", "sources")
    leaves, nodes, inputs, outputs, updates, sources = (_typed(data[key], list, key) for key in lists)
    check_count(len(leaves) + len(nodes))
    read_statements(data.get("operators", []))
    loader = _Loader()
    for entry in leaves:
        loader.leaf(entry)
    taken = loader.results(inputs)
    if sources and len(sources) != len(nodes):
        raise ValueError(f"there are {len(nodes)} nodes and {len(sources)} sources")
    for entry, source in zip(nodes, sources or [None] * len(nodes), strict=True):
        loader.node(entry, _source(source))
    return loader.builder.finish(
        _typed(data["name"], str, "name"),
        training=_typed(data["training"], bool, "training"),
        inputs=taken,
        outputs=loader.results(outputs),
        updates=tuple(loader.update(entry) for entry in updates),
        loss=_loss(data["loss"]),
        input_structure=structure_from_json(data["input_structure"]),
        output_structure=structure_from_json(data["output_structure"]),
    )


def from_json(data: Any) -> Graph:
    """Rebuild a graph from plain data; GraphError says what is wrong with it."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise GraphError(
            f"This is not a graph: its 'format' is not {FORMAT!r}. Another kind of file was given. Check the path."
        )
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise GraphError(
            f"The graph has format version {_shown(version)}, this program reads version {VERSION}. "
            f"It was written by another release. Capture the model again."
        )
    try:
        return _load(data)
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise GraphError(
            f"The graph data is malformed: {reason[:300]}. It was damaged or edited wrongly. Capture the model again."
        ) from None


def _shown(version: Any) -> str:
    return str(version) if type(version) is int and 0 <= version < MAX_NUMBER else f"of type {type(version).__name__}"


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph to a file, aside first and then renamed, so that a half-written file never stands there."""
    write_file(path, json.dumps(to_json(graph), indent=1), "graph", GraphError)


def load_graph(path: str | Path) -> Graph:
    """Read a graph file."""
    return from_json(read_json(path, "graph", GraphError))
