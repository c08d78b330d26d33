"""The text form of a graph: one line per leaf and node, readable by eye, read back by the parser.

graph "mlp" train
input:x f32[4,8]
param:fc.weight f32[16,8] trainable
takes [input:x] in {"kind":"tuple","keys":[],"children":[null]}
%0: f32[4,16] = linear(input:x, param:fc.weight)  @ "mlp.py":12 "fc"
%1: f32[] = sum(%0)
returns [%1] in null loss 0
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from conjoin.ir.literals import literal_text
from conjoin.ir.nodes import Leaf, Node, Section, Source, Value, typed_key
from conjoin.ir.structure import structure_to_json
from conjoin.ops import Kind, Parameter, signature

if TYPE_CHECKING:
    from conjoin.ir.graph import Graph, Result


def value_text(value: Value, numbers: Mapping[Value, int]) -> str:
    """A reference to a value: `%3`, or the leaf's kind and name."""
    return leaf_text(value.owner) if isinstance(value.owner, Leaf) else f"%{numbers[value]}"


def leaf_text(leaf: Leaf) -> str:
    """A reference to a leaf; names that are not plain words are quoted."""
    plain = leaf.name and all(c.isascii() and (c.isalnum() or c in "._") for c in leaf.name)
    return f"{leaf.kind.value}:{leaf.name if plain else json.dumps(leaf.name)}"


def _argument_text(value: Any, numbers: Mapping[Value, int]) -> str:
    if isinstance(value, Value):
        return value_text(value, numbers)
    if isinstance(value, tuple):
        return f"[{', '.join(_argument_text(item, numbers) for item in value)}]"
    return literal_text(value)


def arguments_text(node: Node, numbers: Mapping[Value, int]) -> str:
    """The arguments of a node: leading tensors by position, the rest by name, defaults left out."""
    parts, by_name = [], False
    for parameter, value in zip(signature(node.op).parameters, node.args, strict=True):
        if is_default(parameter, value):
            by_name = True
            continue
        by_name = by_name or parameter.kind is Kind.ATTRIBUTE
        text = _argument_text(value, numbers)
        parts.append(f"{parameter.name}={text}" if by_name else text)
    return ", ".join(parts)


def is_default(parameter: Parameter, value: Any) -> bool:
    """Whether an argument is what the signature would fill in (none, where it says nothing)."""
    return bool(typed_key(value) == typed_key(parameter.default))


def _source_text(source: Source | None) -> str:
    if source is None:
        return ""
    module = f" {json.dumps(source.module)}" if source.module else ""
    segment = f" segment {source.segment}" if source.segment else ""
    return f"  @ {json.dumps(source.file)}:{source.line}{module}{segment}"


def node_text(node: Node, numbers: Mapping[Value, int], source: Source | None = None) -> str:
    """One node as a line."""
    left = ", ".join(f"%{numbers[value]}: {value.type}" for value in node.outputs())
    marks = (f" #{node.occurrence}" if node.occurrence else "") + (" pinned" if node.pinned else "")
    return f"{left} = {node.op}({arguments_text(node, numbers)}){marks}{_source_text(source)}"


def _section_text(section: Section) -> str:
    return f"section {json.dumps(section.of)} dim {section.dim} from {section.start} of {section.whole}"


def _leaf_line(leaf: Leaf) -> str:
    parts = [leaf_text(leaf), str(leaf.type)]
    parts += ["trainable"] if leaf.trainable else []
    parts += ["channels-last"] if leaf.channels_last else []
    parts += [f"also {json.dumps(alias)}" for alias in leaf.aliases]
    parts += [_section_text(leaf.section)] if leaf.section is not None else []
    parts += [f"= b64:{base64.b64encode(leaf.data).decode()}"] if leaf.data is not None else []
    return " ".join(parts)


def _structure_text(structure: Any) -> str:
    return json.dumps(structure_to_json(structure), separators=(",", ":"))


def _lines(graph: Graph) -> Iterator[str]:
    numbers = graph.numbers

    def result(value: Result) -> str:
        return value_text(value, numbers) if isinstance(value, Value) else literal_text(value)

    yield f"graph {json.dumps(graph.name)} {'train' if graph.training else 'eval'}{graph.rounding}"
    yield from map(_leaf_line, graph.leaves)
    yield f"takes [{', '.join(map(result, graph.inputs))}] in {_structure_text(graph.input_structure)}"
    for i, node in enumerate(graph.nodes):
        yield node_text(node, numbers, graph.sources[i] if graph.sources else None)
    for name, value in graph.updates:
        yield f"update {json.dumps(name)} = {value_text(value, numbers)}"
    loss = f" loss {graph.loss}" if graph.loss is not None else ""
    yield f"returns [{', '.join(map(result, graph.outputs))}] in {_structure_text(graph.output_structure)}{loss}"


def print_graph(graph: Graph) -> str:
    """The whole graph as text."""
    return "\n".join(_lines(graph)) + "\n"
