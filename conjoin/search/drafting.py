"""From flows to a plan: the layouts of all groups put together, checked, and told with what they were made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from conjoin.ir import (
    Choice,
    Graph,
    Leaf,
    Mark,
    MemoryAction,
    Node,
    Plan,
    Substitution,
    Value,
    asked_segments,
    can_expand,
    check_plan,
    choose,
    computation_digest,
    expand,
    model_mark,
    parallelize,
    plain_call,
    recompute_actions,
    rules_for,
)
from conjoin.machine import Machine
from conjoin.ops import CAST, Layout, Placement, make_layout
from conjoin.search.facts import Facts, study
from conjoin.search.propagation import Flow, output_placements
from conjoin.search.request import Request
from conjoin.search.unfusing import unfuse

_EXPANDED = "expansion checked against the operator, forward and backward"
_UNFUSED = "an output feature of a layer depends on its own weights alone"


@dataclass(frozen=True, slots=True)
class Draft:
    """What a strategy decides: the flows of its groups, outermost first, and what departs from them."""

    request: Request
    """With every degree filled in."""
    flows: tuple[Flow, ...]
    storage: Mapping[Leaf, Layout] = field(default_factory=dict)
    """Leaves that are stored in another layout than the flows say."""
    memory: tuple[MemoryAction, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """A draft in which nothing is stuck, the graph it is for, and how that was made from the captured one."""

    graph: Graph
    draft: Draft
    substitutions: tuple[Substitution, ...]


def settle_draft(graph: Graph, strategy: Callable[[Facts], Draft]) -> Settled:
    """What a strategy decides, after what it would have to gather is expanded or taken apart where it can be."""
    substitutions: tuple[Substitution, ...] = ()
    draft = strategy(study(graph))
    while stuck := {node for flow in draft.flows for node in flow.stuck}:
        fused = {node for node in stuck if not can_expand(node)}
        substitutions += tuple(substitution_of(graph, node) for node in graph.nodes if node in (fused or stuck))
        graph = unfuse(graph, fused) if fused else expand(graph, stuck)
        draft = strategy(study(graph))
    return Settled(graph, draft, substitutions)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A layout for everything in a graph: leaves, what nodes read and make, and outputs by their place."""

    leaves: Mapping[Leaf, Layout]
    choices: Mapping[Node, Choice]
    outputs: Mapping[int, Layout]


def lay_out(settled: Settled) -> LaidOut:
    """The layouts that a settled draft stands for."""
    graph, draft = settled.graph, settled.draft
    return LaidOut(_leaf_layouts(graph, draft), _choices(graph, draft), _output_layouts(graph, draft))


def make_plan_by(captured: Graph, machine: Machine, strategy: Callable[[Facts], Draft]) -> Plan:
    """The plan that a strategy makes, checked."""
    settled = settle_draft(captured, strategy)
    graph, draft, laid_out = settled.graph, settled.draft, lay_out(settled)
    parallel = parallelize(graph, laid_out.leaves, laid_out.choices, laid_out.outputs)
    plan = Plan(
        graph=parallel,
        computes=computation_digest(graph),
        mesh=machine.mesh,
        model=model_mark(captured),
        machine=Mark(machine.name, machine.fingerprint()),
        strategy=str(draft.request),
        memory=(*draft.memory, *recompute_actions(parallel, asked_segments(parallel))),
        substitutions=settled.substitutions,
    )
    return check_plan(plan)


def substitution_of(graph: Graph, node: Node) -> Substitution:
    """How a node that was expanded or taken apart is told of in a plan."""
    if can_expand(node):
        return Substitution(f"expand-{node.op}", _where(graph, node), _EXPANDED)
    return Substitution(f"unfuse-{node.op}", _where(graph, node), _UNFUSED)


def _where(graph: Graph, node: Node) -> str:
    source = graph.source_of(node)
    return str(source) if source else f"%{graph.numbers[Value(node)]}"


def _choices(graph: Graph, draft: Draft) -> dict[Node, Choice]:
    flows = [(axis, flow) for flow in draft.flows for axis in flow.group.axes]
    stored = _leaf_layouts(graph, draft)
    found = {node: choose({axis: flow.rules[node] for axis, flow in flows}) for node in graph.nodes if flows}
    return found | {node: _as_stored(node, dict(stored[leaf])) for node, leaf in _casts(graph) if flows}


def _casts(graph: Graph) -> Iterator[tuple[Node, Leaf]]:
    """Casts of trained parameters, as mixed precision has them."""
    for node in graph.nodes:
        source = node.inputs[0].owner if node.op == CAST else None
        if isinstance(source, Leaf) and source.trainable and node.types[0].dtype.is_floating_point:
            yield node, source


def _as_stored(node: Node, layout: Mapping[str, Placement]) -> Choice:
    """A call that is made on the pieces of a parameter that are stored: what is gathered then is its result."""
    if not layout:
        return Choice(((),), ((),))
    rules = {rule.operands[0]: rule for rule in rules_for(plain_call(node), 1)}
    return choose({axis: rules[placement] for axis, placement in layout.items()})


def _leaf_layouts(graph: Graph, draft: Draft) -> dict[Leaf, Layout]:
    return {
        leaf: draft.storage[leaf]
        if leaf in draft.storage
        else make_layout((axis, flow.leaves[leaf]) for flow in draft.flows for axis in flow.group.axes)
        for leaf in graph.leaves
    }


def _output_layouts(graph: Graph, draft: Draft) -> dict[int, Layout]:
    kept = [(flow, output_placements(graph, flow)) for flow in draft.flows]
    return {
        i: make_layout((axis, placed[i]) for flow, placed in kept if i in placed for axis in flow.group.axes)
        for i in range(len(graph.outputs))
    }
