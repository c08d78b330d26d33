"""From a graph and layouts to a parallel graph and back: graph in, graph out."""

from __future__ import annotations

from conjoin.ir import Choice, LeafKind, choose, find_faults, find_layout_faults, parallelize, parse_graph, sequential
from conjoin.ops import Copies, Partial, ShardingRule, Split, make_layout
from tests.ir.meshes import TWO_BY_TWO, megatron, mlp, rule

MEGATRON = """\
%0: f32[8,4]{d:S(0),t:B} = conjoin::replicate(input:x, axes=["t"])  @ "mlp.py":3 "fc1"
%1: f32[6,4]{t:S(0),d:B} = conjoin::replicate(param:fc1.weight, axes=["d"])  @ "mlp.py":3 "fc1"
%2: f32[6]{t:S(0),d:B} = conjoin::replicate(param:fc1.bias, axes=["d"])  @ "mlp.py":3 "fc1"
%3: f32[8,6]{d:S(0),t:S(1)} = linear(%0, %1, %2)  @ "mlp.py":3 "fc1"
%4: f32[8,6]{d:S(0),t:S(1)} = relu(%3)  @ "mlp.py":4
%5: f32[3,6]{t:S(1)} = conjoin::combine(param:fc2.weight, dim=1, axes=["d"])  @ "mlp.py":5 "fc2"
%6: f32[3,6]{t:S(1),d:B} = conjoin::replicate(%5, axes=["d"])  @ "mlp.py":5 "fc2"
%7: f32[3]{d:B} = conjoin::replicate(param:fc2.bias, axes=["d"])  @ "mlp.py":5 "fc2"
%8: f32[3]{d:B,t:P} = conjoin::assign(%7, axes=["t"])  @ "mlp.py":5 "fc2"
%9: f32[8,3]{d:S(0),t:P} = linear(%4, %6, %8)  @ "mlp.py":5 "fc2"
%10: f32[8,3]{d:S(0)} = conjoin::reduce(%9, axes=["t"])  @ "mlp.py":6
%11: f32[]{d:P} = mse_loss(%10, input:target)  @ "mlp.py":6
%12: f32[] = conjoin::reduce(%11, axes=["d"])
"""


def body(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith("%"))


def test_a_megatron_plan_of_an_mlp() -> None:
    graph = megatron()
    assert body(str(graph)) == MEGATRON
    assert find_faults(graph) == () and find_layout_faults(graph, TWO_BY_TWO) == ()
    assert str(graph).splitlines()[1:7] == [
        "input:x f32[8,4]{d:S(0)}",
        "input:target f32[8,3]{d:S(0)}",
        "param:fc1.weight f32[6,4]{t:S(0)} trainable",
        "param:fc1.bias f32[6]{t:S(0)} trainable",
        "param:fc2.weight f32[3,6]{t:S(1),d:S(1)} trainable",
        "param:fc2.bias f32[3] trainable",
    ]


def test_without_layouts_the_graph_is_the_same() -> None:
    graph = mlp()
    assert parallelize(graph, {}, {}) == graph
    assert sequential(graph) == graph


def test_sequential_takes_everything_parallel_out() -> None:
    assert sequential(megatron()) == mlp()
    assert str(sequential(megatron())) == str(mlp()), "the user's lines stay with their operators"


def test_axes_that_split_one_index_nest_in_the_order_given() -> None:
    split = ShardingRule("n", (Split(0), Copies()), (Split(1),))
    partial = ShardingRule(None, (Partial(), Copies()), (Partial(),))
    assert choose({"y": split, "p": partial, "x": split}) == Choice(
        (
            (("y", Split(0)), ("x", Split(0)), ("p", Partial())),
            (("p", Copies()), ("x", Copies()), ("y", Copies())),
        ),
        ((("y", Split(1)), ("x", Split(1)), ("p", Partial())),),
    )
    assert choose({}) == Choice((), ())


def test_a_reshard_is_shared_by_all_that_read_it() -> None:
    graph = parse_graph("""\
graph "twice" train
input:x f32[4]
takes [input:x] in null
%0: f32[4] = relu(input:x)
%1: f32[4] = neg(input:x)
%2: f32[4] = add.Tensor(%0, %1)
returns [%2] in null
""")
    split = {axis: rule(graph, 0, "S(0) -> S(0)") for axis in ("d",)}
    choices = {node: choose(split) for node in graph.nodes[:2]}
    choices[graph.nodes[2]] = choose({"d": rule(graph, 2, "S(0), S(0) -> S(0)")})
    made = parallelize(graph, {}, choices, {0: (("d", Split(0)),)})
    assert (
        body(str(made))
        == """\
%0: f32[4]{d:S(0)} = conjoin::partition(input:x, dim=0, axes=["d"])
%1: f32[4]{d:S(0)} = relu(%0)
%2: f32[4]{d:S(0)} = neg(%0)
%3: f32[4]{d:S(0)} = add.Tensor(%1, %2)
"""
    )
    assert body(str(parallelize(graph, {}, choices))).endswith(
        '%4: f32[4] = conjoin::combine(%3, dim=0, axes=["d"])\n'
    ), "an output that nobody asked for in a layout is whole"


def test_a_buffer_is_written_back_in_the_layout_it_is_stored_in() -> None:
    graph = parse_graph("""\
graph "count" train
input:x f32[4]
buffer:sum f32[4]
takes [input:x] in null
%0: f32[4] = add.Tensor(buffer:sum, input:x)
update "sum" = %0
returns [%0] in null
""")
    (buffer,) = graph.leaves_of(LeafKind.BUFFER)
    made = parallelize(graph, {buffer: make_layout([("d", Split(0))])}, {})
    assert (
        body(str(made))
        == """\
%0: f32[4] = conjoin::combine(buffer:sum, dim=0, axes=["d"])
%1: f32[4] = add.Tensor(%0, input:x)
%2: f32[4]{d:S(0)} = conjoin::partition(%1, dim=0, axes=["d"])
"""
    )
    assert 'update "sum" = %2' in str(made)
    assert find_faults(made) == () and find_layout_faults(made, TWO_BY_TWO) == ()
    assert sequential(made) == graph
