"""From flows to a plan: the layouts of all groups put together, checked, and told with what they were made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from conjoin.comm import ROWS, ChunkPlaces, is_product, recomputed
from conjoin.errors import StrategyError
from conjoin.ir import (
    Choice,
    Graph,
    Leaf,
    Mark,
    MemoryAction,
    Node,
    Plan,
    Segment,
    Substitution,
    can_expand,
    check_plan,
    choose,
    computation_digest,
    cut_in_micro_batches,
    cut_part_in_micro_batches,
    has_parts,
    micro_batched_parts,
    model_mark,
    operators_of,
    origin,
    parallelize,
    plain_call,
    recompute_actions,
    rules_for,
    stored_alike,
)
from conjoin.machine import Machine, Mesh
from conjoin.ops import CAST, Layout, Placement, call_cache, make_layout
from conjoin.search.blocks import segments_for
from conjoin.search.bundle_size import choose_bundle_bytes
from conjoin.search.facts import Facts, expands, study, where_in
from conjoin.search.features_once import with_features_once
from conjoin.search.fused_layers import unfuse
from conjoin.search.heads_apart import find_parted, part_dims
from conjoin.search.kept_parameters import without_kept
from conjoin.search.offloads import with_offloads
from conjoin.search.packed_weights import find_packed, store_in_sections
from conjoin.search.propagation import Flow, output_placements
from conjoin.search.rank_statistics import check_rank_statistics, with_rank_statistics
from conjoin.search.rehearsed import expand_rehearsed
from conjoin.search.request import Request
from conjoin.search.rings import with_rings
from conjoin.search.routes import with_routes
from conjoin.search.unflattened_tokens import find_flattened, unflatten

_EXPANDED = "expansion checked against the operator, forward and backward"
_UNFLATTENED = "a loss adds up over tokens, in whatever dims they stand"
_PARTED = "dims that are put together and parted again are those that they were"
_PACKED = "what is cut out of a weight is a weight by itself"
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


Strategy = Callable[[Facts], Draft]


def draft_in_full(graph: Graph, strategy: Strategy) -> Draft:
    """What a strategy decides, node by node."""
    return strategy(study(graph))


def settle_draft(
    graph: Graph,
    strategy: Strategy,
    drafted: Callable[[Graph, Strategy], Draft] = draft_in_full,
    shared: frozenset[str] = frozenset(),
) -> Settled:
    """What a strategy decides, after what it would have to gather is expanded or taken apart where it can be; weights
    that other stages use too, by name, are stored as they are."""
    substitutions: tuple[Substitution, ...] = ()
    draft = drafted(graph, strategy)
    if "ring" in draft.request.flags:
        graph, substitutions = with_rings(graph, draft.flows)
        draft = drafted(graph, strategy)
    if "once" in draft.request.flags:
        graph, told = with_features_once(graph)
        substitutions += told
        draft = drafted(graph, strategy)
    if draft.request.degrees.get("ep", 1) > 1:
        graph, told = with_routes(graph, draft.request)
        substitutions += told
        draft = drafted(graph, strategy) if told else draft
    if draft.request.statistics == "rank":
        graph, told = with_rank_statistics(graph, draft.request)
        substitutions += told
        draft = drafted(graph, strategy)
        check_rank_statistics(graph, draft.flows)
    while stuck := {node for flow in draft.flows for node in flow.stuck if not _is_cut_of(graph, node, shared)}:
        taken, graph = open_up(graph, frozenset(stuck))
        substitutions += taken
        draft = drafted(graph, strategy)
    return Settled(graph, draft, substitutions)


def _is_cut_of(graph: Graph, node: Node, shared: frozenset[str]) -> bool:
    packed = find_packed(graph, node) if shared else None
    return packed is not None and packed.names[0] in shared


@call_cache(16)
def open_up(graph: Graph, stuck: frozenset[Node]) -> tuple[tuple[Substitution, ...], Graph]:
    """The graph with nodes that are stuck replaced by what is not, those of one kind at a time, and what was done."""
    flattened = {node for node in stuck if find_flattened(graph, node) is not None}
    calls = {node: plain_call(node) for node in stuck}
    by_parts = {node for node in stuck if expands(calls[node], parts=True) and not expands(calls[node], parts=False)}
    merged = {node for node in stuck if find_parted(graph, node)} - flattened
    packed = {node for node in stuck if find_packed(graph, node) is not None}
    fused = {node for node in stuck if not can_expand(node)} - by_parts - flattened - merged - packed
    taken = flattened or merged or packed or fused or set(stuck) - by_parts or by_parts
    told = tuple(substitution_of(graph, node) for node in graph.nodes if node in taken)
    if taken is flattened:
        return told, unflatten(graph, flattened)
    if taken is merged:
        return told, part_dims(graph, merged)
    if taken is packed:
        return told, store_in_sections(graph, packed)
    if fused:
        return told, unfuse(graph, fused)
    return told, expand_rehearsed(graph, taken, parts=taken is by_parts)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A layout for everything in a graph: leaves, what nodes read and make, and outputs by their place."""

    leaves: Mapping[Leaf, Layout]
    choices: Mapping[Node, Choice]
    outputs: Mapping[int, Layout]


def lay_out(settled: Settled, *, is_stage: bool = False) -> LaidOut:
    """The layouts that a settled draft stands for; what a stage makes for others is left as it is made."""
    graph, draft = settled.graph, settled.draft
    return LaidOut(_leaf_layouts(graph, draft), _choices(graph, draft), _output_layouts(graph, draft, is_stage))


def make_plan_by(
    captured: Graph, machine: Machine, strategy: Callable[[Facts], Draft], micro: int = 1, *, part: int = 1
) -> Plan:
    """The plan that a strategy makes for a step of some micro-batches, or of which a part runs in some, checked."""
    whole, accumulation = cut_in_micro_batches(captured, micro) if micro > 1 else (captured, None)
    if part > 1:
        whole = cut_part_in_micro_batches(whole, part)
    settled = settle_draft(whole, strategy)
    graph, draft, laid_out = settled.graph, settled.draft, lay_out(settled)
    parallel = parallelize(graph, laid_out.leaves, laid_out.choices, laid_out.outputs)
    plan = Plan(
        graph=parallel,
        computes=computation_digest(graph, accumulation),
        mesh=machine.mesh,
        model=model_mark(captured),
        machine=Mark(machine.name, machine.fingerprint()),
        strategy=str(draft.request),
        memory=(
            *without_kept(draft.memory, draft.request.keep, graph),
            *recompute_actions(parallel, _run_again(draft.request.recompute, graph)),
        ),
        substitutions=settled.substitutions,
        accumulation=accumulation,
        bundle_bytes=choose_bundle_bytes(captured, machine),
        chunks=draft.request.chunks,
    )
    return with_offloads(_check_chunks(check_plan(plan)), draft.request.offload, machine.device)


def _check_chunks(plan: Plan) -> Plan:
    """The plan itself; StrategyError where chunks were asked for and no product can go in any."""
    places = ChunkPlaces(plan.graph, plan.mesh, plan.chunks, recomputed(plan))
    products = [node for node in plan.graph.nodes if is_product(node)]
    owns = [origin(node.inputs[ROWS[node.op]]).type.layout for node in products]
    if plan.chunks == 1 or any(places.find(node, own) is not None for node, own in zip(products, owns, strict=True)):
        return plan
    raise StrategyError(
        f"The products of {plan.model.name} were to go in {plan.chunks} chunks beside the collectives next to them. "
        f"None of its {len(products)} products reads rows that are gathered in even pieces, or makes some that are "
        f"summed up, on these {plan.mesh.size} devices. Leave chunks out, or have layers split by megatron:tp=2,sp."
    )


def _run_again(mode: str, graph: Graph) -> list[Segment]:
    """The segments that are run again; what runs in micro-batches is in any case."""
    inside = {node for part in micro_batched_parts(graph) for node in part.nodes}
    operators = operators_of(graph)
    return [s for s in segments_for(mode, graph) if inside.isdisjoint(operators[s[0] : s[1] + 1])]


def substitution_of(graph: Graph, node: Node) -> Substitution:
    """How a node that was expanded or taken apart is told of in a plan."""
    if can_expand(node) or has_parts(node):
        return Substitution(f"expand-{node.op}", where_in(graph, node), _EXPANDED)
    if find_flattened(graph, node) is not None:
        return Substitution(f"unflatten-{node.op}", where_in(graph, node), _UNFLATTENED)
    if find_parted(graph, node):
        return Substitution(f"part-{node.op}", where_in(graph, node), _PARTED)
    if find_packed(graph, node) is not None:
        return Substitution(f"part-{node.op}", where_in(graph, node), _PACKED)
    return Substitution(f"unfuse-{node.op}", where_in(graph, node), _UNFUSED)


def _choices(graph: Graph, draft: Draft) -> dict[Node, Choice]:
    flows = [(axis, flow) for flow in draft.flows for axis in flow.group.axes]
    stored = _leaf_layouts(graph, draft)
    made: dict[tuple[int, ...], Choice] = {}
    """By the identity of the rules: those of equal calls are the same."""
    found: dict[Node, Choice] = {}
    for node in graph.nodes if flows else ():
        key = tuple(id(flow.rules[node]) for flow in draft.flows)
        if key not in made:
            made[key] = choose({axis: flow.rules[node] for axis, flow in flows})
        found[node] = made[key]
    return found | {node: _as_stored(node, dict(stored[leaf])) for node, leaf in _casts(graph) if flows}


def _casts(graph: Graph) -> Iterator[tuple[Node, Leaf]]:
    """Casts of trained parameters, as mixed precision has them."""
    for node in graph.nodes:
        source = node.inputs[0].owner if node.op == CAST else None
        if isinstance(source, Leaf) and source.is_trained and node.types[0].dtype.is_floating_point:
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


def with_sections_alike(graph: Graph, draft: Draft, mesh: Mesh) -> Draft:
    """The draft with all sections of a packed weight stored alike."""
    packed = {leaf: layout for leaf, layout in _leaf_layouts(graph, draft).items() if leaf.section is not None}
    alike = stored_alike(packed, mesh)
    return draft if alike is packed else replace(draft, storage={**draft.storage, **alike})


def _output_layouts(graph: Graph, draft: Draft, is_stage: bool) -> dict[int, Layout]:
    kept = [(flow, output_placements(graph, flow, is_stage=is_stage)) for flow in draft.flows]
    return {
        i: make_layout((axis, placed[i]) for flow, placed in kept if i in placed for axis in flow.group.axes)
        for i in range(len(graph.outputs))
    }
