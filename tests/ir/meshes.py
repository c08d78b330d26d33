"""What the tests of parallel graphs share: a small mesh, a small model, and its Megatron plan on that mesh."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations, product

from conjoin.ir import Graph, Mark, Plan, choose, parallelize, parse_graph, plain_call, rules_for
from conjoin.machine import Axis, Mesh
from conjoin.ops import Copies, Invariant, Layout, Partial, Placement, ShardingRule, Split, make_layout

TWO_BY_TWO = Mesh((Axis("d", 2, True), Axis("t", 2)))
"""`d` for data, between nodes; `t` for tensors, inside one."""
MLP = """\
graph "mlp" train
input:x f32[8,4]
input:target f32[8,3]
param:fc1.weight f32[6,4] trainable
param:fc1.bias f32[6] trainable
param:fc2.weight f32[3,6] trainable
param:fc2.bias f32[3] trainable
takes [input:x, input:target] in {"kind":"list","keys":[],"children":[{"kind":"tuple","keys":[],"children":[null,null]},{"kind":"dict","keys":[],"children":[]},{"kind":"tuple","keys":[],"children":[]},{"kind":"dict","keys":[],"children":[]}]}
%0: f32[8,6] = linear(input:x, param:fc1.weight, param:fc1.bias)  @ "mlp.py":3 "fc1"
%1: f32[8,6] = relu(%0)  @ "mlp.py":4
%2: f32[8,3] = linear(%1, param:fc2.weight, param:fc2.bias)  @ "mlp.py":5 "fc2"
%3: f32[] = mse_loss(%2, input:target)  @ "mlp.py":6
returns [%3] in null loss 0
"""  # noqa: E501 – as graphs are written


def mlp() -> Graph:
    return parse_graph(MLP)


def rule(graph: Graph, node: int, text: str) -> ShardingRule:
    """The sharding rule of a node that reads so."""
    found = graph.nodes[node]
    return next(r for r in rules_for(plain_call(found), len(found.types)) if str(r) == text)


def megatron() -> Graph:
    """The batch split over d, columns then rows of the weights over t; the second weight stored split over d too."""
    graph = mlp()
    leaf = {str(leaf): leaf for leaf in graph.leaves}
    by_node = (
        {"d": "S(0), B, B -> S(0)", "t": "B, S(0), S(0) -> S(1)"},
        {"d": "S(0) -> S(0)", "t": "S(1) -> S(1)"},
        {"d": "S(0), B, B -> S(0)", "t": "S(1), S(1), P -> P"},
        {"d": "S(0), S(0) -> P", "t": "I, I -> I"},
    )
    choices = {
        node: choose({axis: rule(graph, i, text) for axis, text in by_node[i].items()})
        for i, node in enumerate(graph.nodes)
    }
    leaves: dict[str, Layout] = {
        "input:x": (("d", Split(0)),),
        "input:target": (("d", Split(0)),),
        "param:fc1.weight": (("t", Split(0)),),
        "param:fc1.bias": (("t", Split(0)),),
        "param:fc2.weight": make_layout([("t", Split(1)), ("d", Split(1))]),
    }
    return parallelize(graph, {leaf[name]: layout for name, layout in leaves.items()}, choices)


def megatron_plan() -> Plan:
    return Plan(
        megatron(), TWO_BY_TWO, Mark("mlp", "abc"), Mark("two by two", "def"), "megatron(degree=2)",
        predictions=(("seconds_per_step", 0.25),),
    )  # fmt: skip


def all_layouts(axes: Iterable[str], num_dims: int) -> list[Layout]:
    """Every layout on the axes, in every nesting order."""
    names = tuple(axes)
    options: list[Placement] = [Invariant(), Copies(), Partial(), *map(Split, range(num_dims))]
    found: dict[Layout, None] = {}
    for placements in product(options, repeat=len(names)):
        for order in permutations(zip(names, placements, strict=True)):
            found[make_layout(order)] = None
    return list(found)
