"""Is this a well-formed graph? Every fault is found and told with its place, not only the first."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from conjoin.errors import GraphError
from conjoin.ir.graph import Graph
from conjoin.ir.legality import plain_call
from conjoin.ir.limits import MAX_PIECES
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value, fits
from conjoin.ir.sections import section_faults
from conjoin.ops import (
    OPAQUE,
    Call,
    OpSpec,
    TensorType,
    find_spec,
    output_types,
    signature,
    spec_for,
    types_on_meta,
)

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, and where."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def find_faults(graph: Graph) -> tuple[Fault, ...]:
    """Everything that is wrong with a graph; empty when it is well formed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch may warn of a call it is asked about; that is for those who run it
        return (*_leaf_faults(graph), *_node_faults(graph), *_boundary_faults(graph))


def verify(graph: Graph) -> Graph:
    """The graph itself when it is well formed; otherwise GraphError lists the faults."""
    faults = find_faults(graph)
    if not faults:
        return graph
    listed = "\n".join(f"  {fault}" for fault in faults[:_SHOWN])
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise GraphError(
        f"The graph {graph.name!r} is not well formed: {len(faults)} fault{'s' if len(faults) > 1 else ''} found. "
        f"It was edited wrongly, or written for other operators. "
        f"Correct these or capture the model again:\n{listed}{more}"
    )


def _leaf_faults(graph: Graph) -> Iterator[Fault]:
    seen: set[str] = set()
    for leaf in graph.leaves:
        if str(leaf) in seen:
            yield Fault(str(leaf), "the name is used twice")
        seen.add(str(leaf))
        if leaf.trainable and leaf.kind not in (LeafKind.PARAMETER, LeafKind.INPUT):
            yield Fault(str(leaf), "only parameters are trainable, and inputs that another stage makes")
        if leaf.data is not None and leaf.kind is not LeafKind.CONSTANT:
            yield Fault(str(leaf), "only constants carry data")
        elif leaf.data is not None and len(leaf.data) != leaf.type.bytes:
            yield Fault(str(leaf), f"{len(leaf.data):,} bytes of data do not fill {leaf.type}")
    yield from (Fault(where, what) for where, what in section_faults(graph))


def _node_faults(graph: Graph) -> Iterator[Fault]:
    known: set[Leaf | Node] = set(graph.leaves)
    judged: dict[Any, tuple[str, ...]] = {}
    for i, node in enumerate(graph.nodes):
        if node in known:
            yield Fault(node_place(graph, i), "stands twice")
        for what in _form_faults(node) or _call_faults(node, known, judged):
            yield Fault(node_place(graph, i), what)
        known.add(node)


def node_place(graph: Graph, place: int) -> str:
    """Where a reader finds a node: its name in the text form, the operator, and the user's line where known."""
    source = graph.sources[place] if place < len(graph.sources) else None
    return f"{graph.label_of(place)} {graph.nodes[place].op}" + (f" at {source}" if source else "")


def _form_faults(node: Node) -> list[str]:
    """What keeps a node from being read as a call at all."""
    try:
        known = signature(node.op)
    except LookupError as error:
        return [str(error)]
    if node.op.startswith(OPAQUE) and find_spec(node.op.removeprefix(OPAQUE)) is None:
        return ["is not declared at all: write its name alone"]
    if len(node.args) != len(known.parameters):
        return [f"takes {len(known.parameters)} arguments, {len(node.args)} are given"]
    pairs = zip(known.parameters, node.args, strict=True)
    return [f"cannot take what is given for {p.name!r}" for p, argument in pairs if not fits(p.kind, argument)]


def _call_faults(node: Node, known: set[Leaf | Node], judged: dict[Any, tuple[str, ...]]) -> Iterator[str]:
    """What is wrong with a call; equal calls on equal types are judged once, those of torch once in a process."""
    if signature(node.op).mutates:
        yield "writes to its inputs"
        return
    missing = [value for value in node.inputs if not _is_made(value, known)]
    if missing:
        yield f"reads {len(missing)} value(s) that are not made before it"
    if all(_has_type(value) for value in node.inputs):
        key = plain_call(node), tuple(output.laid_out(()) for output in node.types)
        if key not in judged:
            judged[key] = _faults_of(*key) if "::" in node.op else _faults_of_torch(*key)
        yield from judged[key]


def _has_type(value: Value) -> bool:
    return 0 <= value.index < (1 if isinstance(value.owner, Leaf) else len(value.owner.types))


def _is_made(value: Value, known: set[Leaf | Node]) -> bool:
    return value.owner in known and _has_type(value)


def _faults_of(call: Call, stated: tuple[TensorType, ...]) -> tuple[str, ...]:
    return tuple(_size_faults(call) or _type_faults(call, stated))


_faults_of_torch = lru_cache(maxsize=1 << 14)(_faults_of)
"""For operators that nobody registers anew."""


def _size_faults(call: Call) -> list[str]:
    """A call that makes more tensors than a graph can name is not tried."""
    count = _num_tensors(call)
    return [f"makes {count:,} tensors, the limit is {MAX_PIECES:,}"] if count > MAX_PIECES else []


def _num_tensors(call: Call) -> int:
    """How many tensors a call cuts its operand into or makes on the way; 0 for one that makes a fixed number."""
    name = call.op.partition(".")[0]
    if name not in _MANY or not call.tensors:
        return 0
    shape, dim = call.tensors[0].shape, call["dim"] or 0
    size = shape[dim] if type(dim) is int and -len(shape) <= dim < len(shape) else 0
    if type(call["split_size"]) is int:
        return -(-size // max(call["split_size"], 1))
    if type(call["chunks"]) is int:
        return min(call["chunks"], size)
    if type(call["sections"]) is int:
        return int(call["sections"])
    if name == "diff":
        return min(call["n"], size) if type(call["n"]) is int else 0
    return size if name.startswith("unbind") else 0


_MANY = frozenset({
    "split", "unsafe_split", "split_copy", "chunk", "unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit",
    "unbind", "unbind_copy", "diff",
})  # fmt: skip


def _type_faults(call: Call, stated: tuple[TensorType, ...]) -> Iterator[str]:
    """What the declaration, else torch, says of the outputs, against what the graph states.

    Torch is asked first whether it takes the operands at all: a declaration may take that for granted.
    """
    known = call.tensors or find_spec(call.op.removeprefix(OPAQUE)) is not None
    try:
        spec = spec_for(call)
        accepted = types_on_meta(call) if known and not _is_private(call, spec) else None
        derived = accepted if spec is None else output_types(spec, call)
    except Exception as error:  # an operator may refuse its operands with any error; it is told, never swallowed
        yield f"does not fit its operands: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return
    if derived is None and not known:
        yield "is not declared and takes no tensor: only declared operators may make tensors from nothing"
    elif derived is not None and derived != stated:
        yield f"gives {', '.join(map(str, derived))}, the graph states {', '.join(map(str, stated))}"


def _is_private(call: Call, spec: OpSpec | None) -> bool:
    """torch's internal operators nobody declared: asking some of them without data ends the process."""
    return spec is None and call.op.removeprefix(OPAQUE).startswith("_")


def _boundary_faults(graph: Graph) -> Iterator[Fault]:
    known: set[Leaf | Node] = {*graph.leaves, *graph.nodes}
    buffers = {leaf.name: leaf for leaf in graph.leaves_of(LeafKind.BUFFER)}
    for i, output in enumerate(graph.outputs):
        if isinstance(output, Value) and not _is_made(output, known):
            yield Fault(f"output {i}", "is not made by the graph")
    for name, value in graph.updates:
        if name not in buffers:
            yield Fault(f"update {name}", "there is no such buffer")
        elif not isinstance(value, Value) or not _is_made(value, known):
            yield Fault(f"update {name}", "the value is not made by the graph")
        elif value.type != buffers[name].type:
            yield Fault(f"update {name}", f"{value.type} does not fit the buffer's {buffers[name].type}")
    yield from _structure_faults(graph)
    if graph.loss is not None:
        loss = graph.outputs[graph.loss] if 0 <= graph.loss < len(graph.outputs) else None
        if not isinstance(loss, Value) or not _has_type(loss) or not _is_loss(loss.type):
            yield Fault("loss", f"output {graph.loss} is not a floating-point number")


def _is_loss(type: TensorType) -> bool:
    return type.shape == () and type.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _structure_faults(graph: Graph) -> Iterator[Fault]:
    if graph.input_structure.num_leaves != len(graph.inputs):
        yield Fault("inputs", f"{len(graph.inputs)} are named, the structure has {graph.input_structure.num_leaves}")
    if graph.output_structure.num_leaves != len(graph.outputs):
        yield Fault("outputs", f"{len(graph.outputs)} are named, the structure has {graph.output_structure.num_leaves}")
    given = {value.owner for value in graph.inputs if isinstance(value, Value)}
    inputs = graph.leaves_of(LeafKind.INPUT)
    for i, value in enumerate(graph.inputs):
        if isinstance(value, Value) and value.owner not in inputs:
            yield Fault(f"input {i}", "is not an input leaf of the graph")
    for leaf in inputs:
        if leaf not in given:
            yield Fault(str(leaf), "is not among the inputs")
