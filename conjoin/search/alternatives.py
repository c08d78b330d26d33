"""What else was possible: another sharding rule for one operator of a plan, or another layout of one parameter.

All else stays as the plan has it. Axes that the plan uses alike change together. Parameters that the operator alone
reads, and that lie where it uses them, are stored where it would use them then; a cast between the two goes with them.
Every alternative is a plan, checked and simulated like any other. In a pipeline one stage changes, and the step is that
of all stages with what goes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from conjoin.cost import CostModel
from conjoin.errors import PlanError
from conjoin.ir import (
    REGATHER,
    Choice,
    Leaf,
    Pipeline,
    Plan,
    Value,
    check_pipeline,
    check_plan,
    host_inputs,
    offload_actions,
    offloaded_states,
    offloaded_tensors,
    origin,
    plain_call,
    recompute_actions,
    recomputed_segments,
    rules_for,
)
from conjoin.machine import Machine
from conjoin.ops import CAST, Copies, Invariant, Layout, Partial, Placement, Split, make_layout, placement_on
from conjoin.search.packed_weights import sections_alike
from conjoin.search.tensor_names import find_in_stages, find_tensor, operator_line
from conjoin.search.variants import sequential_variant
from conjoin.sim import (
    Layouts,
    PipelinePrediction,
    Prediction,
    Skeleton,
    predict,
    predict_pipeline,
    put_together,
    take_apart,
)

Axes = tuple[str, ...]
_ASKED = "What else was possible was asked of"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way for one operator or parameter on some axes, and the plan it would make; without one, why there is none."""

    axes: Axes
    way: str
    """A sharding rule, `S(0), B -> S(0)`, or how a parameter is stored."""
    index: str | None = None
    """What is split."""
    plan: Plan | Pipeline | None = None
    prediction: Prediction | PipelinePrediction | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Why:
    """An operator or parameter of a plan as it is, and all that was possible."""

    name: str
    """The line of the plan that it is."""
    present: tuple[tuple[Axes, str], ...]
    """Its way on each group of axes."""
    prediction: Prediction | PipelinePrediction
    """Of the plan as it is."""
    alternatives: tuple[Alternative, ...]
    """The fastest first, then those that cannot be."""


def find_alternatives(
    plan: Plan | Pipeline, machine: Machine, costs: CostModel, name: str, optimizer: str = "adam"
) -> Why:
    """What else was possible for what a name means, and what the step would then take; in a pipeline `2: NAME` means
    something in stage 2, where others have that, too."""
    if isinstance(plan, Plan):
        value = origin(find_tensor(plan.graph, name, _ASKED))
        return _found(plan, value, lambda edited: (edited, predict(edited, machine, costs, optimizer)))
    place, value = find_in_stages([stage.plan.graph for stage in plan.stages], name, _ASKED)

    def judge(edited: Plan) -> tuple[Pipeline, PipelinePrediction]:
        stages = (*plan.stages[:place], replace(plan.stages[place], plan=edited), *plan.stages[place + 1 :])
        whole = check_pipeline(replace(plan, stages=stages, predictions=()))
        return whole, predict_pipeline(whole, machine, costs, optimizer)

    found = _found(plan.stages[place].plan, origin(value), judge)
    return replace(found, name=f"stage {place}: {found.name}")


_Judge = Callable[[Plan], tuple[Plan | Pipeline, Prediction | PipelinePrediction]]
"""The whole that a plan belongs to, and what it is predicted to take."""


def _found(plan: Plan, value: Value, judge: _Judge) -> Why:
    """All that was possible for a value of a plan."""
    skeleton, layouts = take_apart(plan)
    work = _Work(plan, skeleton, layouts, _groups(plan, layouts))
    own = work.of_leaf(value.owner) if isinstance(value.owner, Leaf) else work.of_operator(value)
    found = [_judged(plan, judge, way, changed) for way, changed in own]
    found.sort(key=lambda one: (one.prediction is None, one.prediction.seconds if one.prediction else 0.0))
    return Why(work.line(value), work.present(value), judge(plan)[1], tuple(found))


def _judged(plan: Plan, judge: _Judge, way: Alternative, changed: Layouts) -> Alternative:
    try:
        whole, prediction = judge(_edited(plan, changed))
    except PlanError as error:
        return replace(way, reason=str(error).rsplit("\n", 1)[-1].strip())
    return replace(way, plan=whole, prediction=prediction)


def _edited(plan: Plan, layouts: Layouts) -> Plan:
    """The plan in other layouts, checked."""
    variant = sequential_variant(plan)
    skeleton, segments = variant.skeleton, recomputed_segments(plan)
    layouts = sections_alike(skeleton.graph, layouts, plan.mesh)
    graph = put_together(skeleton, layouts)
    regathered = tuple(action for action in plan.memory if action.action == REGATHER)
    offloads = offload_actions(graph, offloaded_tensors(plan), offloaded_states(plan), host_inputs(plan))
    memory = (*regathered, *recompute_actions(graph, segments), *offloads)
    return check_plan(replace(plan, graph=graph, memory=memory, predictions=()))


def _groups(plan: Plan, layouts: Layouts) -> tuple[Axes, ...]:
    """The axes of the mesh, those together on which everything lies alike."""
    every = [*layouts.leaves.values(), *layouts.results]
    every += [layout for choice in layouts.choices for layout in (*choice.operands, *choice.outputs)]
    found: dict[tuple[Placement, ...], list[str]] = {}
    for axis in plan.mesh.names:
        found.setdefault(tuple(placement_on(layout, axis) for layout in every), []).append(axis)
    return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True)
class _Work:
    """A plan taken apart, to be put together otherwise."""

    plan: Plan
    skeleton: Skeleton
    layouts: Layouts
    groups: tuple[Axes, ...]

    def line(self, value: Value) -> str:
        graph = self.plan.graph
        if isinstance(value.owner, Leaf):
            return f"{value.owner} {value.owner.type}"
        return operator_line(graph, value.owner)

    def present(self, value: Value) -> tuple[tuple[Axes, str], ...]:
        """The way on each group of axes."""
        if isinstance(value.owner, Leaf):
            layout = value.owner.type.layout
            return tuple((axes, f"stored {_stored_text(placement_on(layout, axes[0]))}") for axes in self.groups)
        choice = self.layouts.choices[self._position(value)]
        return tuple((axes, _arrow(choice, axes[0])) for axes in self.groups)

    def of_operator(self, value: Value) -> Iterator[tuple[Alternative, Layouts]]:
        """Every other rule on every group of axes."""
        position = self._position(value)
        node, choice = self.skeleton.operators[position].node, self.layouts.choices[position]
        for axes in self.groups:
            for rule in rules_for(plain_call(node), len(node.types)):
                if str(rule) == _arrow(choice, axes[0]):
                    continue
                changed = _Changed(self, axes)
                changed.place(position, rule.operands, rule.outputs)
                for operand, placement in enumerate(rule.operands):
                    changed.follow(position, operand, placement)
                yield Alternative(axes, str(rule), rule.index), changed.layouts()

    def of_leaf(self, leaf: Leaf) -> Iterator[tuple[Alternative, Layouts]]:
        """Stored whole, or split along any dim, on every group of axes."""
        number = next(i for i, other in enumerate(self.plan.graph.leaves) if other is leaf)
        ways: list[Placement] = [Invariant(), *(Split(dim) for dim in range(len(leaf.type.shape)))]
        for axes in self.groups:
            for placement in ways:
                if placement_on(leaf.type.layout, axes[0]) != placement:
                    changed = _Changed(self, axes)
                    changed.store(number, placement)
                    yield Alternative(axes, f"stored {_stored_text(placement)}"), changed.layouts()

    def _position(self, value: Value) -> int:
        return next(i for i, operator in enumerate(self.skeleton.operators) if operator.node is value.owner)


class _Changed:
    """Layouts in which something lies otherwise on some axes."""

    def __init__(self, work: _Work, axes: Axes) -> None:
        self._work, self._axes = work, axes
        self._choices = list(work.layouts.choices)
        self._leaves = dict(work.layouts.leaves)

    def layouts(self) -> Layouts:
        return Layouts(self._leaves, tuple(self._choices), self._work.layouts.results)

    def store(self, leaf: int, placement: Placement) -> None:
        """A leaf in another layout."""
        self._leaves[leaf] = self._moved(self._leaves.get(leaf, ()), placement, self._order((self._leaves[leaf],)))

    def place(self, position: int, operands: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> None:
        """An operator by another rule; axes that split one index nest in one order in all its tensors."""
        choice = self._choices[position]
        order = self._order((*choice.operands, *choice.outputs))
        self._choices[position] = Choice(
            tuple(self._moved(layout, p, order) for layout, p in zip(choice.operands, operands, strict=True)),
            tuple(self._moved(layout, p, order) for layout, p in zip(choice.outputs, outputs, strict=True)),
        )

    def follow(self, position: int, operand: int, placement: Placement) -> None:
        """Store a parameter where its one reader uses it, if it lies so now; through a cast as well."""
        skeleton, before = self._work.skeleton, self._work.layouts
        root = skeleton.operators[position].reads[operand]
        used = placement_on(before.choices[position].operands[operand], self._axes[0])
        if len(skeleton.readers[root]) != 1:
            return
        leaf, maker = skeleton.roots[root].leaf, skeleton.roots[root].maker
        wanted = placement if isinstance(placement, Split) else Invariant()
        if leaf is not None:
            if leaf.trainable and placement_on(before.leaves.get(root, ()), self._axes[0]) == _storable(used):
                self.store(root, wanted)
        elif skeleton.operators[maker].node.op == CAST:
            made = placement_on(before.choices[maker].outputs[0], self._axes[0])
            if made == _storable(used):
                self.place(maker, (wanted,), (wanted,))
                self.follow(maker, 0, wanted)

    def _order(self, layouts: tuple[Layout, ...]) -> Axes:
        told = [axis for layout in layouts for axis, _ in layout]
        return tuple(dict.fromkeys((*told, *self._work.plan.mesh.names)))

    def _moved(self, layout: Layout, placement: Placement, order: Axes) -> Layout:
        placed: Mapping[str, Placement] = dict(layout) | dict.fromkeys(self._axes, placement)
        return make_layout((axis, placed[axis]) for axis in order if axis in placed)


def _storable(used: Placement) -> Placement:
    """How a parameter is stored that is used where it lies."""
    return Invariant() if isinstance(used, Copies | Partial) else used


def _stored_text(placement: Placement) -> str:
    return "whole" if isinstance(placement, Invariant) else str(placement)


def _arrow(choice: Choice, axis: str) -> str:
    operands, outputs = (", ".join(str(placement_on(layout, axis)) for layout in side)
                         for side in (choice.operands, choice.outputs))  # fmt: skip
    return f"{operands} -> {outputs}"
