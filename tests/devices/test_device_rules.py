"""Rules over devices, proven from what operators are, and layouts say the same.

A rule such as `add(combine(x), combine(y)) => combine(add(x, y))` moves work between devices. Searches know no such
rules: they give every tensor a layout, and reshards stand where two layouts meet. Here every rule is seen to be two
layouts of one and the same graph, both legal, so that a search over layouts has both of its sides. The rules were
generated and are proven without knowing of layouts, and layouts were declared without knowing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from random import Random

import pytest
import torch

from conjoin.ir import (
    LEAF,
    Choice,
    Graph,
    LayoutError,
    LeafKind,
    Structure,
    Value,
    find_layout_faults,
    is_parallel,
    make_leaf,
    parallelize,
    sequential,
)
from conjoin.machine import Axis, Mesh
from conjoin.ops import Copies, Layout, Partial, Placement, Split, TensorType, make_layout
from conjoin.rules import Apply, Expr, Input, Match, Refused, Rule, inputs_of, load_rules, parse_rule, prove
from conjoin.rules.graphs.right_side import Emitter
from conjoin.rules.graphs.sizes import Sizes
from conjoin.rules.patterns import walk
from conjoin.rules.trials.evaluation import evaluate
from conjoin.rules.trials.instances import Instance, Sampler
from tests.cases import each_of
from tests.devices.device_rules import RULES, is_over_devices

WRITTEN = load_rules(RULES).rules
MESH = Mesh((Axis("m", 2), Axis("n", 2)))
NO_LAYOUT = {
    "gain-reduce-to-reduce-replicate": "copies are added up: as many times the value as there are devices",
    "mean-combine-to-mean": "copies are joined: as many times the tensor as there are devices",
    "reduce-mean-to-mean-reduce-2": "copies are added up",
    "reduce-replicate-to-add": "copies are added up",
    "sum-combine-to-sum-reduce": "pieces are added up as if they were partial sums; layouts reduce after the sum",
    "partition-combine-to-replicate-combine": "two tensors are joined so that each device has one of them",
    "partition-concat-to-partition-concat": "two tensors are joined so that each device has one of them",
    "partition-reduce-to-replicate-reduce": "two tensors are joined so that each device has one of them",
    "reduce-partition-to-add": "two tensors are joined so that each device has one of them",
    "reduce-mul-to-mul-reduce": "operands change places, as a rule of the library says",
    "combine-to-split-combine": "two tensors are joined and taken apart again, as a rule of the library says",
    "partition-to-split-partition": "two tensors are joined and taken apart again, as a rule of the library says",
    "reduce-to-split-reduce": "two tensors are joined and taken apart again, as a rule of the library says",
    "replicate-to-split-replicate": "two tensors are joined and taken apart again, as a rule of the library says",
}
"""What is more than a change of layouts. The first compute a value anew that is there already: no plan has them."""


@each_of(WRITTEN, lambda written: written.rule.name)
def test_it_is_proven(written: object) -> None:
    rule, when = written.rule, written.when  # type: ignore[attr-defined]
    found = prove(rule)
    assert is_over_devices(rule) and found.proven and set(found.conditions) == set(when)


def test_there_are_many() -> None:
    assert len(WRITTEN) > 150 and NO_LAYOUT.keys() < {written.rule.name for written in WRITTEN}


@each_of([written.rule for written in WRITTEN], lambda rule: rule.name)
def test_both_sides_are_layouts_of_one_graph(rule: Rule) -> None:
    found = next(layouts_of(rule), None)
    if rule.name in NO_LAYOUT:
        assert found is None
        return
    assert found is not None
    left, right = found
    assert [v.type for v in left.outputs] == [v.type for v in right.outputs]  # type: ignore[union-attr]
    plain = sequential(left)
    assert plain == sequential(right)
    for side in (left, right) if plain.nodes else ():  # else reshards alone, from one layout to another
        assert laid_out_as(plain, side) == side, "the same graph with other layouts is the other side"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("relu(reduce(x))", "reduce(relu(x))"),
        ("softmax[axis=-1](combine[axis=-1](x))", "combine[axis=-1](softmax[axis=-1](x))"),
        ("matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), partition[axis=-2](y)))"),
        ("add(x, reduce(y))", "reduce(add(replicate(x), y))"),
    ],
)
def test_what_is_false_has_no_layouts(left: str, right: str) -> None:
    rule = parse_rule("false", left, right)
    assert not prove(rule).proven and next(layouts_of(rule), None) is None


# Both sides as graphs.


def layouts_of(rule: Rule) -> Iterator[tuple[Graph, Graph]]:
    """Both sides at some sizes, for each way to lay out the inputs in which they are legal graphs of one type."""
    for instance in instances(rule):
        for layouts in input_layouts(rule, instance):
            try:
                sides = [graph_of(rule, side, instance, layouts) for side in (rule.left, rule.right)]
            except (Refused, LayoutError):
                continue
            if any(faults_in(side) for side in sides):
                continue
            if sequential(sides[0]) == sequential(sides[1]):
                yield sides[0], sides[1]


def instances(rule: Rule, count: int = 12) -> Iterator[Instance]:
    """With one device along each axis: shapes are then those of whole tensors."""
    sampler, random = Sampler(rule), Random(0)
    drawn = (sampler.draw(random, 4) for _ in range(20 * count))
    fitting = (one for one in drawn if one is not None and one.rule == rule)
    yield from islice((one for one in fitting if all(n == 1 for n in one.setting.meshes.values())), count)


def input_layouts(rule: Rule, instance: Instance) -> Iterator[dict[str, Layout]]:
    """Every way to hold the inputs that differ between devices: pieces, copies or partial sums."""
    names, ways = inputs_of(*rule.outputs), []
    for name in names:
        value = instance.inputs[name]
        kinds: tuple[Placement, ...] = (*map(Split, range(len(value.shape))), Copies(), Partial())
        each = product(kinds, repeat=len(value.axes))
        ways.append([make_layout(zip(value.axes, placements, strict=True)) for placements in each])
    for chosen in product(*ways):
        yield dict(zip(names, chosen, strict=True))


def graph_of(rule: Rule, side: tuple[Expr, ...], instance: Instance, layouts: Mapping[str, Layout]) -> Graph:
    """One side as a graph."""
    exprs, setting = tuple(walk(*rule.outputs)), instance.setting
    values = zip(exprs, evaluate(exprs, instance.inputs, setting), strict=True)
    shapes = {expr: tuple(value.shape) for expr, value in values}
    tables = [e for e in exprs if isinstance(e, Apply) and e.op in ("embedding", "embedding_bag")]
    rows = {name for expr in tables for name in inputs_of(expr.args[1])}
    plain = {
        name: TensorType(shapes[Input(name)], torch.int64 if name in rows else torch.float64) for name in layouts
    }
    leaves = tuple(make_leaf(LeafKind.INPUT, name, type.laid_out(layouts[name])) for name, type in plain.items())
    along = [e for e in exprs if isinstance(e, Apply) and e.param("axis") != ""]
    dims = {e: int(setting.places.get(e, e.param("axis"))) % max(len(shapes[e.args[0]]), 1) for e in along}
    params = {**setting.numbers, **setting.functions, "m": ("m",), "n": ("n",)}
    form = Rule("side", side, side)
    inputs = tuple(zip(layouts, map(Value, leaves), strict=True))
    match = Match(form, form, (), inputs, tuple(params.items()), (), Sizes(shapes, dims, setting.numbers))
    emitter = Emitter(match)
    outputs = tuple(emitter.value(emitter.emit(expr)) for expr in side)
    return Graph(
        "sides", True, leaves, tuple(emitter.nodes), tuple(map(Value, leaves)), outputs,
        input_structure=Structure("tuple", (), (LEAF,) * len(leaves)),
        output_structure=Structure("tuple", (), (LEAF,) * len(outputs)),
    )  # fmt: skip


def faults_in(graph: Graph) -> list[str]:
    """All faults but those of inputs, which stand for tensors inside of a graph: nobody keeps them between steps."""
    return [str(fault) for fault in find_layout_faults(graph, MESH) if not str(fault).startswith("input:")]


def laid_out_as(plain: Graph, parallel: Graph) -> Graph:
    """A graph without layouts in the layouts of one with them."""
    leaves = dict(zip(plain.leaves, (leaf.type.layout for leaf in parallel.leaves), strict=True))
    nodes = [node for node in parallel.nodes if not is_parallel(node)]
    choices = [Choice(tuple(v.type.layout for v in node.inputs), tuple(t.layout for t in node.types)) for node in nodes]
    outputs = {i: value.type.layout for i, value in enumerate(parallel.outputs) if isinstance(value, Value)}
    return parallelize(plain, leaves, dict(zip(plain.nodes, choices, strict=True)), outputs)
