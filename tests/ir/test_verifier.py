"""The verifier: one graph for every fault it must find, each told with its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conjoin.errors import GraphError
from conjoin.ir import (
    LEAF,
    Fault,
    Graph,
    LeafKind,
    Node,
    Source,
    Structure,
    Value,
    find_faults,
    make_leaf,
    make_node,
    parse_graph,
    verify,
)
from conjoin.ops import TensorType
from tests.ir import opaque
from tests.ir.graphs import GOLDEN
from tests.ir.wording import assert_three_sentences

F32, F64 = (TensorType((4, 3), dtype) for dtype in (torch.float32, torch.float64))
X = Value(make_leaf(LeafKind.INPUT, "x", F32))


def with_nodes(*nodes: Node) -> Graph:
    """A graph of one input and these nodes."""
    outputs = (Value(nodes[-1]),)
    return Graph("g", True, (X.owner,), nodes, (X,), outputs, sources=(Source("m.py", 7, "fc"),))  # type: ignore[arg-type]


def faults_of(graph: Graph) -> list[str]:
    found = list(map(str, find_faults(graph)))
    if found:
        with pytest.raises(GraphError) as told:
            verify(graph)
        assert_three_sentences(told.value)
        assert all(line in str(told.value) for line in found[:8])
    else:
        assert verify(graph) is graph
    return found


def edited(old: str, new: str) -> list[str]:
    assert GOLDEN.count(old) == 1
    return faults_of(parse_graph(GOLDEN.replace(old, new)))


def test_a_well_formed_graph_has_no_faults() -> None:
    assert faults_of(parse_graph(GOLDEN)) == []


def test_a_value_used_before_it_is_made() -> None:
    first = make_node("relu", (X,), (F32,))
    second = make_node("neg", (Value(first),), (F32,))
    assert faults_of(with_nodes(first, second)) == []
    assert faults_of(with_nodes(second, first)) == [
        "%0 neg at m.py:7 (fc): reads 1 value(s) that are not made before it"
    ]


def test_a_leaf_that_is_not_in_the_graph() -> None:
    other = Value(make_leaf(LeafKind.INPUT, "y", F32))
    graph = with_nodes(make_node("add.Tensor", (X, other, 1), (F32,)))
    assert faults_of(graph) == ["%0 add.Tensor at m.py:7 (fc): reads 1 value(s) that are not made before it"]


def test_an_output_that_a_node_does_not_have() -> None:
    first = make_node("relu", (X,), (F32,))
    found = faults_of(with_nodes(first, make_node("neg", (Value(first, 1),), (F32,))))
    assert found == ["%1 neg: reads 1 value(s) that are not made before it"]
    assert faults_of(replace(with_nodes(first), outputs=(Value(first, 2),))) == ["output 0: is not made by the graph"]


def test_a_node_that_stands_twice() -> None:
    node = make_node("relu", (X,), (F32,))
    assert faults_of(with_nodes(node, node)) == ["%1 relu: stands twice"]


def test_a_node_is_named_as_in_the_text() -> None:
    """Its first output: what stands before may have made several."""
    halves = make_node("split.Tensor", (X, 2, 0), (TensorType((2, 3), torch.float32),) * 2)
    wrong = make_node("relu", (X,), (TensorType((9, 9), torch.float32),))
    graph = with_nodes(halves, wrong)
    assert "\n%2: f32[9,9] = relu(" in str(replace(graph, sources=()))
    assert faults_of(graph) == ["%2 relu: gives f32[4,3], the graph states f32[9,9]"]


def test_a_wrong_type_is_told_with_the_right_one() -> None:
    assert edited("%4: f32[3]", "%4: f64[3]") == [
        "%4 mean.dim: gives f32[3], the graph states f64[3]",
        "update running mean: f64[3] does not fit the buffer's f32[3]",
    ]
    assert faults_of(with_nodes(make_node("relu", (X,), (F32, F32)))) == [
        "%0 relu at m.py:7 (fc): gives f32[4,3], the graph states f32[4,3], f32[4,3]"
    ]


def test_a_wrong_type_of_an_undeclared_operator_is_found() -> None:
    half = TensorType((2, 3), torch.float32)
    assert faults_of(with_nodes(make_node(opaque.NAME, (X,), (half,)))) == []
    found = faults_of(with_nodes(make_node(opaque.NAME, (X,), (F32,))))
    assert found == [f"%0 {opaque.NAME} at m.py:7 (fc): gives f32[2,3], the graph states f32[4,3]"]


def test_outputs_that_differ_from_device_to_device_are_as_declared() -> None:
    """On a CPU this operator leaves its second and third output empty, on the meta device it does not."""
    image, channels, nothing = (TensorType(shape, torch.float32) for shape in ((2, 4, 3), (4,), (0,)))
    x, mean = make_leaf(LeafKind.INPUT, "x", image), make_leaf(LeafKind.BUFFER, "mean", channels)
    args = (Value(x), None, None, Value(mean), Value(mean), 0.1, 1e-5)
    node = make_node("_native_batch_norm_legit_no_training", args, (image, nothing, nothing))
    assert faults_of(Graph("g", False, (x, mean), (node,), (Value(x),), (Value(node),))) == []


def test_a_layout_is_not_judged_as_a_shape() -> None:
    assert edited("%0: f32[4,3] =", "%0: f32[4,3]{x:S(0)} =") == []


@pytest.mark.parametrize(("args", "given"), [((X,), 1), ((X, X, 1, 1), 4)])
def test_a_wrong_number_of_arguments(args: tuple[object, ...], given: int) -> None:
    found = faults_of(with_nodes(make_node("add.Tensor", args, (F32,))))
    assert found == [f"%0 add.Tensor at m.py:7 (fc): takes 3 arguments, {given} are given"]


def test_arguments_of_the_wrong_kind() -> None:
    found = faults_of(with_nodes(make_node("add.Tensor", ("x", X, X), (F32,))))
    where = "%0 add.Tensor at m.py:7 (fc)"
    assert found == [f"{where}: cannot take what is given for {name!r}" for name in ("self", "alpha")]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("mm", (X, X)),
        ("reshape", (X, (5, 7))),
        ("sum.dim_IntList", (X, (2,), False, None)),
        ("transpose.int", (X, 0, 7)),
        ("layer_norm", (X, "all", None, None, 1e-5, True)),
        ("_to_copy", (X, torch.channels_last, *[None] * 5)),
        ("max_pool2d", (X, (0, 0), (0, 0), (0, 0), (1, 1), False)),
    ],
)
def test_operands_that_do_not_fit(op: str, args: tuple[object, ...]) -> None:
    found = faults_of(with_nodes(make_node(op, args, (F32,))))
    assert len(found) == 1 and found[0].startswith(f"%0 {op} at m.py:7 (fc): does not fit its operands: ")


def test_literals_that_differ_in_type_only_are_judged_apart() -> None:
    counts = TensorType((4, 3), torch.int64)
    x = make_leaf(LeafKind.INPUT, "x", counts)
    nodes = tuple(make_node("add.Scalar", (Value(x), literal, 1), (counts,)) for literal in (1, True, 1.0))
    graph = Graph("g", True, (x,), nodes, (Value(x),), (Value(nodes[0]),))
    assert faults_of(graph) == ["%2 add.Scalar: gives f32[4,3], the graph states i64[4,3]"]


def test_what_torch_warns_of_is_no_fault() -> None:
    """In these tests warnings are errors."""
    assert faults_of(with_nodes(make_node(opaque.NOISY, (X,), (F32,)))) == []


def test_verifying_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    drawn = make_node("dropout", (X, 0.5, True), (F32,)), make_node("rand_like", (X, *[None] * 5), (F32,))
    assert faults_of(with_nodes(*drawn)) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operator_that_torch_does_not_have() -> None:
    found = faults_of(with_nodes(make_node("lineer", (X,), (F32,))))
    assert len(found) == 1 and "%0 lineer" in found[0] and "has no operator 'lineer'" in found[0]


@pytest.mark.parametrize("op", ["add_.Tensor", "relu_", "add.out"])
def test_an_operator_that_writes_to_its_inputs(op: str) -> None:
    args = {"add_.Tensor": (X, X, 1), "relu_": (X,), "add.out": (X, X, 1, X)}[op]
    assert faults_of(with_nodes(make_node(op, args, (F32,)))) == [f"%0 {op} at m.py:7 (fc): writes to its inputs"]


def test_an_undeclared_operator_that_reads_no_tensor_is_never_run() -> None:
    found = faults_of(with_nodes(make_node("from_file", ("/etc/passwd", False, 8, *[None] * 4), (F32,))))
    assert len(found) == 1 and "only declared operators may make tensors from nothing" in found[0]


def test_updates() -> None:
    assert edited('update "running mean"', 'update "fc.bias"') == ["update fc.bias: there is no such buffer"]
    assert edited('mean" = %4', 'mean" = %9') == ["update running mean: f32[] does not fit the buffer's f32[3]"]
    graph = parse_graph(GOLDEN)
    stray = make_node("neg", (Value(graph.leaves[4]),), (graph.leaves[4].type,))
    found = faults_of(replace(graph, updates=(("running mean", Value(stray)),)))
    assert found == ["update running mean: the value is not made by the graph"]


def test_leaves() -> None:
    graph = parse_graph(GOLDEN)
    again = make_leaf(LeafKind.INPUT, "x", F64)
    trainable = make_leaf(LeafKind.BUFFER, "b", F32, trainable=True)
    filled = make_leaf(LeafKind.BUFFER, "c", F32, data=b"")
    short = make_leaf(LeafKind.CONSTANT, "d", F32, data=b"1234")
    assert faults_of(replace(graph, leaves=(*graph.leaves, again, trainable, filled, short))) == [
        "input:x: the name is used twice",
        "buffer:b: only parameters are trainable, and inputs that another stage makes",
        "buffer:c: only constants carry data",
        "const:d: 4 bytes of data do not fill f32[4,3]",
        "input:x: is not among the inputs",
    ]


def test_a_name_may_be_used_by_leaves_of_different_kinds() -> None:
    graph = parse_graph(GOLDEN)
    assert faults_of(replace(graph, leaves=(*graph.leaves, make_leaf(LeafKind.BUFFER, "x", F32)))) == []


@pytest.mark.parametrize("loss", [1, 2, 3, 99])
def test_a_loss_that_is_no_number(loss: int) -> None:
    graph = parse_graph(GOLDEN)
    structure = replace(graph.output_structure, keys=("a", "b", "c", "d"), children=(LEAF,) * 4)
    graph = replace(graph, outputs=(*graph.outputs, Value(graph.nodes[0])), output_structure=structure)
    assert faults_of(replace(graph, loss=loss)) == [f"loss: output {loss} is not a floating-point number"]


def test_an_integer_loss() -> None:
    node = make_node("argmax", (X, None, False), (TensorType((), torch.int64),))
    assert faults_of(replace(with_nodes(node), loss=0)) == ["loss: output 0 is not a floating-point number"]


def test_outputs_and_inputs() -> None:
    graph = parse_graph(GOLDEN)
    stray = make_node("neg", (X,), (F32,))
    assert faults_of(replace(graph, outputs=(graph.outputs[0], None, Value(stray)))) == [
        "output 2: is not made by the graph"
    ]
    parameter = Value(graph.leaves[2])
    assert faults_of(replace(graph, inputs=(graph.inputs[0], parameter, graph.inputs[2]))) == [
        "input 1: is not an input leaf of the graph"
    ]
    assert faults_of(replace(graph, inputs=(graph.inputs[0], 2, 3))) == ["input:target: is not among the inputs"]


def test_structures_that_count_otherwise() -> None:
    graph = replace(parse_graph(GOLDEN), input_structure=LEAF, output_structure=Structure("tuple"))
    assert faults_of(graph) == [
        "inputs: 3 are named, the structure has 1",
        "outputs: 3 are named, the structure has 0",
    ]


def test_all_faults_are_told_at_once_and_many_are_counted() -> None:
    wrong = [make_node("relu", (X,), (F64,), occurrence=i) for i in range(20)]
    graph = with_nodes(*wrong)
    found = find_faults(graph)
    assert len(found) == 20 and isinstance(found[0], Fault) and found[0].where == "%0 relu at m.py:7 (fc)"
    with pytest.raises(GraphError, match=r"'g' is not well formed: 20 faults found\.") as told:
        verify(graph)
    assert str(told.value).endswith("%7 relu: gives f32[4,3], the graph states f64[4,3]\n  and 12 more")
