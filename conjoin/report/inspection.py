"""What is in a graph: operators, parameters, work, memory, and what each operator can be split along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conjoin.ir import Graph, Leaf, LeafKind, Node, Value, fingerprint
from conjoin.ops import Partial, ShardingRule, Split, bytes_read, bytes_written, flops, sharding_rules


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """All calls of one operator together."""

    op: str
    count: int
    flops: float
    bytes: int
    """Read and written."""
    splits: tuple[str, ...]
    """How the output lies when an index of some call is split: `S(0)`, …, or `P` for a partial sum."""
    opaque: bool
    """Whether some call is not understood: the operator is not declared, or not in this form."""
    expandable: bool
    """Whether it can be taken apart into operators that split where it does not."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A summary of a graph."""

    name: str
    training: bool
    fingerprint: str
    num_nodes: int
    num_parameters: int
    parameter_bytes: int
    num_trainable: int
    buffer_bytes: int
    input_bytes: int
    forward_flops: float
    activation_bytes: int
    """Results of all operators that are not views: what training keeps for backward if nothing is recomputed."""
    peak_bytes: int
    """The most that is alive at once in a forward pass that keeps nothing, without parameters and buffers."""
    operators: tuple[OperatorSummary, ...]

    @property
    def opaque(self) -> tuple[str, ...]:
        """Operators that are not understood."""
        return tuple(summary.op for summary in self.operators if summary.opaque)

    def to_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "operators"}
        operators = [{name: getattr(op, name) for name in op.__slots__} for op in self.operators]
        listed = [{**op, "splits": list(op["splits"])} for op in operators]
        return {**fields, "opaque": list(self.opaque), "operators": listed}


def _outcome(rule: ShardingRule) -> str:
    """The output of a split as one word; P when any output is a partial sum."""
    if any(isinstance(placement, Partial) for placement in rule.outputs):
        return "P"
    return next((str(placement) for placement in rule.outputs if isinstance(placement, Split)), "B")


def split_outcomes(node: Node) -> tuple[str, ...]:
    """How the output of one call may lie, over all its sharding rules that split an index."""
    if node.spec is None:
        return ()
    rules = sharding_rules(node.spec, node.call)
    return tuple(sorted({_outcome(rule) for rule in rules if rule.index is not None}))


def _summarise(op: str, nodes: list[Node]) -> OperatorSummary:
    specs = [node.spec for node in nodes]
    outcomes: set[str] = set()
    work, moved = 0.0, 0
    for node, spec in zip(nodes, specs, strict=True):
        outcomes.update(split_outcomes(node))
        if spec is not None:
            work += flops(spec, node.call)
            moved += bytes_read(spec, node.call) + bytes_written(spec, node.call)
        else:
            moved += sum(value.type.bytes for value in (*node.inputs, *node.outputs()))
    expandable = any(spec is not None and spec.expansion is not None for spec in specs)
    return OperatorSummary(op, len(nodes), work, moved, tuple(sorted(outcomes)), None in specs, expandable)


def _is_view(node: Node) -> bool:
    return node.spec is not None and node.spec.view


def _activation_bytes(graph: Graph) -> int:
    return sum(output.bytes for node in graph.nodes if not _is_view(node) for output in node.types)


def _storage(value: Value) -> Value:
    """The value whose memory this one lives in: views share that of their input."""
    while isinstance(value.owner, Node) and _is_view(value.owner) and value.owner.inputs:
        value = value.owner.inputs[0]
    return value


def peak_bytes(graph: Graph) -> int:
    """The largest sum of live results over the program, each freed after its last use; inputs and state not counted."""
    last: dict[Value, int] = {}
    for i, node in enumerate(graph.nodes):
        for value in node.inputs:
            last[_storage(value)] = i
    kept = {_storage(v) for v in (*graph.outputs, *(value for _, value in graph.updates)) if isinstance(v, Value)}
    live = peak = 0
    ends: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        for value in node.outputs():
            if isinstance(value.owner, Leaf) or _storage(value) != value:
                continue
            live += value.type.bytes
            if value not in kept:
                ends[last.get(value, i)] = ends.get(last.get(value, i), 0) + value.type.bytes
        peak = max(peak, live)
        live -= ends.pop(i, 0)
    return peak


def inspect(graph: Graph) -> Inspection:
    """Summarise a graph.

    >>> import torch
    >>> from conjoin.frontends import capture
    >>> inspect(capture(torch.nn.Linear(4, 2), torch.zeros(3, 4))).num_parameters
    10
    """
    by_op: dict[str, list[Node]] = {}
    for node in graph.nodes:
        by_op.setdefault(node.op, []).append(node)
    summaries = [_summarise(op, nodes) for op, nodes in by_op.items()]
    parameters, buffers, inputs = (graph.leaves_of(k) for k in (LeafKind.PARAMETER, LeafKind.BUFFER, LeafKind.INPUT))
    return Inspection(
        name=graph.name,
        training=graph.training,
        fingerprint=fingerprint(graph),
        num_nodes=len(graph.nodes),
        num_parameters=sum(leaf.type.num_elements for leaf in parameters),
        parameter_bytes=sum(leaf.type.bytes for leaf in parameters),
        num_trainable=sum(leaf.type.num_elements for leaf in parameters if leaf.trainable),
        buffer_bytes=sum(leaf.type.bytes for leaf in buffers),
        input_bytes=sum(leaf.type.bytes for leaf in inputs),
        forward_flops=sum(summary.flops for summary in summaries),
        activation_bytes=_activation_bytes(graph),
        peak_bytes=peak_bytes(graph),
        operators=tuple(sorted(summaries, key=lambda s: (-s.flops, -s.bytes, s.op))),
    )
