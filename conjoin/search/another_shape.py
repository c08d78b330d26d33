"""A plan for another shape or mode of the same model: the layouts of the one that was found, where they are legal.

    plan of (batch 32, training)  ×  graph of (batch 5, training)  or  (batch 32, evaluation)   gives   another plan

What is stored between steps lies in both alike, so that one set of weights serves both. Every operator lies as its
counterpart does. Where a dim has become too short to be split over all axes, the innermost ones do the same work
twice; an operator that the first plan has not follows what it reads, by the fewest bytes. Rewrites are done again where
they apply, micro-batches become no larger, and what was run again in backward still is. The checker has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from conjoin.errors import StrategyError
from conjoin.ir import (
    REGATHER,
    Accumulation,
    Choice,
    Graph,
    Leaf,
    LeafKind,
    MemoryAction,
    Node,
    Pipeline,
    Plan,
    Segment,
    Value,
    check_plan,
    choose,
    computation_digest,
    cut_in_micro_batches,
    cut_part_in_micro_batches,
    host_inputs,
    layout_fault,
    make_leaf,
    make_node,
    micro_batched_parts,
    model_mark,
    node_fault,
    norm_by_pieces,
    offload_actions,
    offloaded_states,
    offloaded_tensors,
    operators_of,
    parallelize,
    pieces_of,
    plain_call,
    recompute_actions,
    recomputed_segments,
    rules_for,
    streamable_inputs,
)
from conjoin.machine import Mesh
from conjoin.ops import (
    At,
    Call,
    Invariant,
    Layout,
    ShardingRule,
    Split,
    TensorType,
    make_layout,
    map_tensors,
    placement_on,
    split_axes,
)
from conjoin.search.counterparts import find_counterparts
from conjoin.search.packed_weights import stored_as_in
from conjoin.search.rank_statistics import STATISTICS
from conjoin.search.reshard_bytes import moved_bytes, sum_bytes
from conjoin.search.same_rewrites import rewrite_alike

Planned = TypeVar("Planned", Plan, Pipeline)


@dataclass(frozen=True, slots=True)
class Alike(Generic[Planned]):
    """A plan made after another, and how far it is from it."""

    plan: Planned
    num_operators: int
    shortened: int
    """Operators that are split over fewer axes, as a dim has become too short."""
    fresh: int
    """Operators that the other plan has not."""

    def __str__(self) -> str:
        return (
            f"of {self.num_operators} operators {self.shortened} are split over fewer devices than in the plan and "
            f"{self.fresh} are not in it"
        )


def plan_alike(plan: Plan, captured: Graph) -> Alike[Plan]:
    """The plan of another graph of the same model, after one that was found; what is stored lies in both alike.

    >>> from conjoin.ir import parse_graph
    >>> from conjoin.machine import Machine
    >>> from conjoin.search import make_plan
    >>> text = '''graph "sum" train
    ... param:w f32[4] trainable
    ... input:x f32[SIZE,4]
    ... takes [input:x] in null
    ... %0: f32[SIZE,4] = mul.Tensor(input:x, param:w)
    ... %1: f32[] = sum(%0)
    ... returns [%1] in null loss 0
    ... '''
    >>> large, small = (parse_graph(text.replace("SIZE", size)) for size in ("8", "5"))
    >>> plan = make_plan(large, Machine("two", 1, 2, "cpu"), "data-parallel")
    >>> plan_alike(plan, small).plan.graph == make_plan(small, Machine("two", 1, 2, "cpu"), "data-parallel").graph
    True
    """
    whole, accumulation = _in_micro_batches(plan, captured)
    normed = norm_by_pieces(whole, pieces_of(plan.graph))
    graph, substitutions = rewrite_alike(plan, normed)
    graph = stored_as_in(graph, plan.graph)
    if normed is not whole:
        substitutions = (*(each for each in plan.substitutions if each.name.startswith(STATISTICS)), *substitutions)
    known = find_counterparts(graph, plan.graph)
    work = _Layouts(plan, graph, known)
    parallel = parallelize(graph, work.leaves, work.choices, work.outputs())
    made = replace(
        plan,
        graph=parallel,
        computes=computation_digest(graph, accumulation),
        model=model_mark(captured),
        memory=(
            *_regathered(plan, graph),
            *recompute_actions(parallel, _segments(plan, graph, known)),
            *_offloads(plan, graph, parallel, known),
        ),
        substitutions=substitutions,
        predictions=(),
        accumulation=accumulation,
    )
    return Alike(check_plan(made), len(graph.nodes), work.shortened, len(graph.nodes) - len(known))


def _in_micro_batches(plan: Plan, captured: Graph) -> tuple[Graph, Accumulation | None]:
    """The graph of a micro-batch that is no larger than the plan's; the whole where it cannot be cut."""
    parts = micro_batched_parts(plan.graph)
    if parts and captured.training:
        try:
            return cut_part_in_micro_batches(captured, parts[0].count), None
        except StrategyError:  # as where a batch has no such parts
            return captured, None
    if plan.accumulation is None or not captured.training or captured.loss is None:
        return captured, None
    sizes = {leaf.name: leaf.type.shape[0] for leaf in captured.leaves_of(LeafKind.INPUT) if leaf.type.shape}
    before = {leaf.name: leaf.type.shape[0] for leaf in plan.graph.leaves_of(LeafKind.INPUT) if leaf.type.shape}
    name = next((name for name in plan.accumulation.cut if name in sizes), None)
    if name is None:
        return captured, None
    size = sizes[name]
    fitting = (steps for steps in range(1, size + 1) if size % steps == 0 and size // steps <= before[name])
    steps = next(fitting, 1)
    try:
        return cut_in_micro_batches(captured, steps) if steps > 1 else (captured, None)
    except StrategyError:
        return captured, None


def _regathered(plan: Plan, graph: Graph) -> Iterable[MemoryAction]:
    names = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    return (action for action in plan.memory if action.action == REGATHER and action.tensor in names)


def _offloads(plan: Plan, graph: Graph, parallel: Graph, known: Mapping[Node, Node]) -> tuple[MemoryAction, ...]:
    """What lies on the host: what has a counterpart there."""
    operators, there = operators_of(plan.graph), {*offloaded_tensors(plan)}
    places = {node: place for place, node in enumerate(operators)}
    made = [
        (i, output)
        for i, node in enumerate(graph.nodes)
        for output in range(len(node.types))
        if node in known and (places[known[node]], output) in there
    ]
    names = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    possible = {name for group in streamable_inputs(parallel) for name in group}
    return offload_actions(parallel, made, offloaded_states(plan) & names, host_inputs(plan) & possible)


def _segments(plan: Plan, graph: Graph, known: Mapping[Node, Node]) -> list[Segment]:
    """What is run again: from the first to the last operator whose counterpart is."""
    places = {node: place for place, node in enumerate(operators_of(plan.graph))}
    found: list[Segment] = []
    there = {i: places[known[node]] for i, node in enumerate(graph.nodes) if node in known}
    for segment in recomputed_segments(plan):
        first, last = segment
        inside = [i for i, place in there.items() if first <= place <= last]
        if inside and not (found and inside[0] <= found[-1][1]):
            found.append(Segment(inside[0], inside[-1], kept=(i for i in inside if there[i] in segment.kept)))
    return found


class _Layouts:
    """The layouts of a graph after those of a plan."""

    def __init__(self, plan: Plan, graph: Graph, known: Mapping[Node, Node]) -> None:
        self.plan, self.graph, self.shortened = plan, graph, 0
        stored = {(leaf.kind, leaf.name): leaf.type.layout for leaf in plan.graph.leaves}
        self.leaves = {leaf: self._leaf(leaf, stored.get((leaf.kind, leaf.name), ())) for leaf in graph.leaves}
        self.choices: dict[Node, Choice] = {}
        self._made: dict[Value, Layout] = {Value(leaf): layout for leaf, layout in self.leaves.items()}
        for node in graph.nodes:
            self.choices[node] = choice = self._choice(node, known.get(node))
            self._made.update(zip(node.outputs(), choice.outputs, strict=True))

    def outputs(self) -> dict[int, Layout]:
        """In training as the plan gives them out; in evaluation, and where there is no loss, whole."""
        before, now = self.plan.graph, self.graph
        if not now.training or now.loss is None or len(before.outputs) != len(now.outputs):
            return {}
        found: dict[int, Layout] = {}
        for i, (old, new) in enumerate(zip(before.outputs, now.outputs, strict=True)):
            if isinstance(old, Value) and isinstance(new, Value) and i != now.loss:
                found[i] = _fitted(new.type, old.type.layout, self.plan.mesh)
        return found

    def _leaf(self, leaf: Leaf, layout: Layout) -> Layout:
        if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER):
            return layout
        return _fitted(leaf.type, layout, self.plan.mesh)

    def _choice(self, node: Node, before: Node | None) -> Choice:
        call, mesh = plain_call(node), self.plan.mesh
        if before is None:
            return self._following(node)
        old = Choice(tuple(value.type.layout for value in before.inputs), tuple(t.layout for t in before.types))
        if _is_legal(call, node.types, old, mesh):
            return old
        self.shortened += 1
        found = _shortened(call, node.types, old, mesh)
        return self._following(node) if found is None else found

    def _following(self, node: Node) -> Choice:
        """On every axis the way that moves the fewest bytes, of those for which dims are long enough."""
        call, mesh = plain_call(node), self.plan.mesh
        arriving = tuple(self._made[value] for value in node.inputs)
        places = {axis: place for axis in mesh.names if (place := _one_place(arriving, axis)) is not None}
        rules: dict[str, ShardingRule] = {}
        for axis in mesh.names:
            if axis in places:
                continue
            ways = rules_for(call, len(node.types))
            ranked = sorted(ways, key=lambda rule: _rank(rule, node, arriving, axis, mesh.sizes[axis]))
            fitting = (r for r in ranked if _is_legal(call, node.types, _chosen(node, rules | {axis: r}, {}), mesh))
            rules[axis] = next(fitting, ways[0])
        return _chosen(node, rules, places)


def _chosen(node: Node, rules: Mapping[str, ShardingRule], places: Mapping[str, At]) -> Choice:
    """The choice that follows a rule on some axes and is at one place of others."""
    made = choose(rules) if rules else Choice(((),) * len(node.inputs), ((),) * len(node.types))
    at = tuple(places.items())
    return Choice(
        tuple(make_layout((*layout, *at)) for layout in made.operands),
        tuple(make_layout((*layout, *at)) for layout in made.outputs),
    )


def _one_place(arriving: Iterable[Layout], axis: str) -> At | None:
    """The place at which everything arrives that is not there everywhere."""
    found = {placement_on(layout, axis) for layout in arriving} - {Invariant()}
    place = found.pop() if len(found) == 1 else None
    return place if isinstance(place, At) else None


def _rank(rule: ShardingRule, node: Node, arriving: tuple[Layout, ...], axis: str, degree: int) -> tuple[float, bool]:
    """Bytes that are sent for a rule, here or later; then whether the work is not divided."""
    moved = 0.0
    for value, layout, wanted in zip(node.inputs, arriving, rule.operands, strict=True):
        moved += moved_bytes(placement_on(layout, axis), wanted, float(value.type.bytes), degree)
    for type, placement in zip(node.types, rule.outputs, strict=True):
        moved += sum_bytes(placement, float(type.bytes), degree)
    return moved, rule.index is None


@lru_cache(maxsize=1 << 14)
def _is_legal(call: Call, types: tuple[TensorType, ...], choice: Choice, mesh: Mesh) -> bool:
    """Whether a call may lie so on a mesh; equal calls are asked once."""
    if (len(call.tensors), len(types)) != (len(choice.operands), len(choice.outputs)):
        return False
    numbered = iter(enumerate(choice.operands))

    def operand(type: TensorType) -> Value:
        number, layout = next(numbered)
        return Value(make_leaf(LeafKind.INPUT, f"x{number}", type.laid_out(layout)))

    args = map_tensors(call.op, call.args, operand)
    laid_out = tuple(type.laid_out(layout) for type, layout in zip(types, choice.outputs, strict=True))
    node = make_node(call.op, args, laid_out)
    return not any(layout_fault(value.type, mesh) for value in node.inputs) and node_fault(node, mesh) is None


@lru_cache(maxsize=1 << 14)
def _shortened(call: Call, types: tuple[TensorType, ...], choice: Choice, mesh: Mesh) -> Choice | None:
    """A choice without some of its axes, the innermost first, on which all do the same work; None if none is legal."""
    axes = _outermost_first(choice)
    for count in range(len(axes) - 1, -1, -1):
        kept = frozenset(axes[:count])
        found = Choice(_only(choice.operands, kept), _only(choice.outputs, kept))
        if _is_legal(call, types, found, mesh):
            return found
    return None


def _outermost_first(choice: Choice) -> list[str]:
    """The axes on which a choice says anything; those that split something as they nest, and last of all."""
    layouts = (*choice.outputs, *choice.operands)
    split = [axis for layout in layouts for axis, placement in layout if isinstance(placement, Split)]
    others = [axis for layout in layouts for axis, _ in layout if axis not in split]
    return list(dict.fromkeys((*others, *split)))


def _only(layouts: Iterable[Layout], axes: frozenset[str]) -> tuple[Layout, ...]:
    return tuple(tuple(entry for entry in layout if entry[0] in axes) for layout in layouts)


def _fitted(type: TensorType, layout: Layout, mesh: Mesh) -> Layout:
    """A layout of a tensor that may be shorter now: its innermost splits are left out as long as pieces are empty."""
    plain = type.laid_out(())
    while layout and layout_fault(plain.laid_out(layout), mesh):
        dims = [p.dim for _, p in layout if isinstance(p, Split)]
        short = [d for d in dims if d >= len(type.shape) or layout_fault(plain.laid_out(_of_dim(layout, d)), mesh)]
        inner = split_axes(layout, short[-1])[-1] if short else layout[-1][0]
        layout = tuple(entry for entry in layout if entry[0] != inner)
    return layout


def _of_dim(layout: Layout, dim: int) -> Layout:
    return tuple((axis, placement) for axis, placement in layout if placement == Split(dim))
