"""A plan as annotated code: every operator with its split, every collective with the bytes it puts on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from conjoin.comm import (
    BACKWARD,
    FORWARD,
    Collective,
    PerRank,
    Traffic,
    Transfer,
    held_bytes,
    recomputed,
    sum_per_rank,
)
from conjoin.ir import (
    Graph,
    LeafKind,
    Mark,
    Node,
    Pipeline,
    Plan,
    Source,
    Value,
    arguments_text,
    custom_operators,
    is_parallel,
    make_node,
    origin,
    place,
    plain_call,
    stored_leaf,
    value_text,
)
from conjoin.machine import Mesh
from conjoin.ops import Layout, TensorType, flops, map_tensors

AGREEMENT = "agreement of random draws"


@dataclass(frozen=True, slots=True)
class Shipment:
    """A tensor, or a bundle of parameters, that collectives bring into another layout or other regions."""

    tensors: tuple[str, ...]
    """As named in the plan."""
    type: TensorType | None
    """Of the tensor, where it is one."""
    becomes: Layout | None
    """The layout it is brought into; None where only the regions change, or the layouts of a bundle differ."""
    collectives: tuple[Collective, ...]
    parameters: tuple[str, ...] = ()
    """Those that move: as they are stored, or as their casts."""

    @property
    def what(self) -> str:
        """What moves, in words."""
        if not self.tensors:
            return AGREEMENT
        if self.type is not None:
            return f"{self.tensors[0]} {self.type}"
        return f"{len(self.tensors)} parameters"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the model: a line of the annotated code."""

    node: Node
    outputs: tuple[str, ...]
    """The names of what it makes, as in the plan."""
    arguments: str
    """What it is called with, tensors by the names of their makers."""
    splits: tuple[tuple[str, tuple[str, ...]], ...]
    """The indices of the operator that are split, each with the axes that split it."""
    source: Source | None
    before: tuple[Shipment, ...]
    after: tuple[Shipment, ...]
    again: bool = False
    """Whether the backward pass runs it once more."""


@dataclass(frozen=True, slots=True)
class KindTotal:
    """What one kind of collective sends in a training step."""

    kind: str
    forward: PerRank
    backward: PerRank


@dataclass(frozen=True)
class Explanation:
    """What a plan does in one training step."""

    name: str
    training: bool
    strategy: str
    mesh: Mesh
    model: Mark
    machine: Mark
    precision: str
    """In which most of the work is done, and whether that was asked for."""
    parameter_bytes: int
    stored_bytes: int
    """Of the parameters, on the rank that stores most."""
    memory: tuple[tuple[str, int], ...]
    """Memory actions, and to how many tensors each is done."""
    substitutions: tuple[tuple[str, int], ...]
    custom: tuple[tuple[str, str], ...]
    """Operators that torch does not come with, each with the module that registers it."""
    num_micro_batches: int
    """One after the other; the operators are those of one, what is sent is that of all."""
    start: tuple[Shipment, ...]
    operators: tuple[Operator, ...]
    results: tuple[Shipment, ...]
    """What moves so that outputs and buffers lie as stated: the sum of the loss is here."""

    @property
    def shipments(self) -> Iterator[Shipment]:
        """Everything that moves, in the order of the forward pass."""
        yield from self.start
        for operator in self.operators:
            yield from operator.before
            yield from operator.after
        yield from self.results

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step."""
        return tuple(collective for shipment in self.shipments for collective in shipment.collectives)

    @property
    def num_regathered(self) -> int:
        """How many parameters are gathered again for the backward pass, as they are stored or as their casts."""
        again = (s for s in self.shipments if any(c.direction == BACKWARD and not c.of_gradient for c in s.collectives))
        return len({name for shipment in again for name in shipment.parameters})

    @property
    def num_recomputed(self) -> int:
        """How many operators the backward pass runs again."""
        return sum(operator.again for operator in self.operators)

    def sent(self, kind: str | None = None, direction: str | None = None) -> PerRank:
        """The bytes that every rank sends in a step: all, or those of one kind of collective, or of one direction."""
        found = (c for c in self.collectives if kind in (None, c.kind) and direction in (None, c.direction))
        return sum_per_rank((collective.sent for collective in found), self.mesh.size)

    def bytes_of(self, rank: int) -> int:
        """The bytes one rank sends in a step: what its communicator counts for a forward and a backward pass."""
        return self.sent()[rank]

    @property
    def totals(self) -> tuple[KindTotal, ...]:
        """What is sent, for every kind of collective."""
        kinds = sorted({collective.kind for collective in self.collectives})
        return tuple(KindTotal(kind, self.sent(kind, FORWARD), self.sent(kind, BACKWARD)) for kind in kinds)

    def summary_to_json(self) -> dict[str, Any]:
        """The header as plain data."""
        sent = self.sent()
        return {
            "name": self.name,
            "training": self.training,
            "strategy": self.strategy,
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "num_devices": self.mesh.size,
            "model": {"name": self.model.name, "fingerprint": self.model.fingerprint},
            "machine": {"name": self.machine.name, "fingerprint": self.machine.fingerprint},
            "precision": self.precision,
            "parameter_bytes": self.parameter_bytes,
            "stored_bytes": self.stored_bytes,
            "memory": dict(self.memory),
            "num_regathered": self.num_regathered,
            "num_micro_batches": self.num_micro_batches,
            "num_recomputed": self.num_recomputed,
            "substitutions": dict(self.substitutions),
            "num_operators": len(self.operators),
            "custom_operators": dict(self.custom),
            "bytes_sent": {"largest": sent.largest, "total": sent.total, "by_rank": list(sent.all)},
            "bytes_by_kind": [
                {"kind": total.kind, FORWARD: _counts(total.forward), BACKWARD: _counts(total.backward)}
                for total in self.totals
            ],
        }

    def to_json(self) -> dict[str, Any]:
        """The whole explanation as plain data."""
        return {
            **self.summary_to_json(),
            "start": list(map(_shipment_to_json, self.start)),
            "operators": list(map(_operator_to_json, self.operators)),
            "results": list(map(_shipment_to_json, self.results)),
        }


def _counts(sent: PerRank) -> dict[str, int]:
    return {"largest": sent.largest, "total": sent.total}


def _shipment_to_json(shipment: Shipment) -> dict[str, Any]:
    return {
        "tensors": list(shipment.tensors),
        "type": None if shipment.type is None else str(shipment.type),
        "becomes": None if shipment.becomes is None else layout_text(shipment.becomes),
        "collectives": [
            {
                "kind": c.kind,
                "axes": list(c.axes),
                "direction": c.direction,
                "of_gradient": c.of_gradient,
                "bytes_sent": _counts(c.sent),
            }
            for c in shipment.collectives
        ],
    }


def _operator_to_json(operator: Operator) -> dict[str, Any]:
    source = operator.source
    return {
        "op": operator.node.op,
        "outputs": list(operator.outputs),
        "types": list(map(str, operator.node.types)),
        "arguments": operator.arguments,
        "splits": {index: list(axes) for index, axes in operator.splits},
        "module": source.module if source else "",
        "file": source.file if source else None,
        "line": source.line if source else None,
        "again": operator.again,
        "before": list(map(_shipment_to_json, operator.before)),
        "after": list(map(_shipment_to_json, operator.after)),
    }


def layout_text(layout: Layout) -> str:
    """A layout in one word.

    >>> layout_text(())
    'I'
    """
    return ",".join(f"{axis}:{placement}" for axis, placement in layout) or "I"


def explain(plan: Plan) -> Explanation:
    """What a legal plan does: the operators in order, and between them what is sent."""
    graph, traffic = plan.graph, Traffic(plan)
    nodes = [node for node in graph.nodes if not is_parallel(node)]
    start = _shipments(traffic.at_start(nodes), graph)
    again = {place for segment in recomputed(plan) for place in range(segment[0], segment[1] + 1)}
    again -= {place for segment in recomputed(plan) for place in segment.kept}
    operators = tuple(_explain_node(node, plan, traffic, place in again) for place, node in enumerate(nodes))
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    parameters = graph.leaves_of(LeafKind.PARAMETER)
    return Explanation(
        name=graph.name,
        training=graph.training,
        strategy=plan.strategy,
        mesh=plan.mesh,
        model=plan.model,
        machine=plan.machine,
        precision=precision_text(plan),
        parameter_bytes=sum(leaf.type.bytes for leaf in parameters),
        stored_bytes=sum_per_rank((held_bytes(leaf.type, plan.mesh) for leaf in parameters), plan.mesh.size).largest,
        memory=_count(action.action for action in plan.memory),
        substitutions=_count(substitution.name for substitution in plan.substitutions),
        custom=tuple(custom_operators(graph).items()),
        num_micro_batches=plan.accumulation.steps if plan.accumulation is not None else 1,
        start=start,
        operators=operators,
        results=_shipments((t for value in results for t in traffic.before(value)), graph),
    )


def precision_text(plan: Plan | Pipeline) -> str:
    """The precision that a plan was asked for in; otherwise what most of it is computed in."""
    return plan.precision.partition("@")[0] or f"{main_dtype(plan.graph)}, as the model is"


def main_dtype(graph: Graph) -> str:
    """The dtype that most of the work of a model is done in."""
    work: Counter[torch.dtype] = Counter()
    for node in graph.nodes:
        if node.spec is not None and node.types and not is_parallel(node):
            work[node.types[0].dtype] += int(flops(node.spec, plain_call(node)))
    return str(max(work, key=lambda dtype: work[dtype], default=torch.float32)).removeprefix("torch.")


def _count(names: Iterator[str]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(names).items())


def _explain_node(node: Node, plan: Plan, traffic: Traffic, again: bool) -> Operator:
    graph = plan.graph
    placed = place(node, plan.mesh)
    bare = make_node(node.op, map_tensors(node.op, node.args, origin), node.types, occurrence=node.occurrence)
    before = _shipments(traffic.before_node(node, placed), graph)
    return Operator(
        node=node,
        outputs=tuple(value_text(value, graph.numbers) for value in node.outputs()),
        arguments=arguments_text(bare, graph.numbers),
        splits=placed.splits,
        source=graph.source_of(node),
        before=before,
        after=_shipments(traffic.after_node(node, placed), graph),
        again=again,
    )


def _shipments(transfers: Iterator[Transfer] | list[Transfer], graph: Graph) -> tuple[Shipment, ...]:
    return tuple(_shipment(transfer, graph) for transfer in transfers)


def _shipment(transfer: Transfer, graph: Graph) -> Shipment:
    names = tuple(value_text(value, graph.numbers) for value in transfer.tensors)
    alone = transfer.tensors[0].type if len(transfer.tensors) == 1 else None
    stored = (stored_leaf(value) for value in transfer.tensors)
    parameters = tuple(leaf.name for leaf in stored if leaf is not None)
    return Shipment(names, alone, transfer.target, transfer.collectives, parameters)
