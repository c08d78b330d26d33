"""A graph in double precision: floats and complex numbers become double, everything else stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph, Leaf, LeafKind, Plan, check_plan, make_leaf, make_node, parse_graph, verify, widen
from conjoin.ir.builder import GraphBuilder
from conjoin.machine import Axis, Mesh, parse_machine
from conjoin.ops import TensorType, bind_args, make_layout, parse_placement
from conjoin.runtime import to_module
from conjoin.search import make_plan

TEXT = """\
graph "g" train
input:x f32[4,8]
input:ids i64[4]
input:keep b1[4,8]
param:w bf16[8,8] trainable also "tied.w"
buffer:seen i64[]
buffer:mean f16[8]
takes [input:x, input:ids, input:keep, 3, 0.5] in {"kind":"tuple","keys":[],"children":[null,null,null,null,null]}
%0: bf16[4,8] = _to_copy(input:x, dtype=bf16)
%1: bf16[4,8] = linear(%0, param:w)
%2: f32[4,8] = _to_copy(%1, dtype=f32)
%3: f32[4,8] = where.self(input:keep, %2, input:x)
%4: f32[] = sum(%3)
%5: i64[] = add.Tensor(buffer:seen, 1)
update "seen" = %5
returns [%4, %2, 7] in {"kind":"tuple","keys":[],"children":[null,null,null]} loss 0
"""


class From(nn.Module):
    """A layer, and then what is to be tried."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


def graph_of(function: Callable[[Tensor], Tensor]) -> tuple[Graph, nn.Module]:
    model = From(function)
    return capture(model, torch.ones(4, 4)), model


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "casts": lambda x: x.bfloat16().float() + x.half() + x.to(torch.float64),
    "two casts that become one": lambda x: x.bfloat16() * x.half(),
    "made of nothing": lambda x: torch.cat([x, torch.zeros(4, 2), torch.ones(4, 1), torch.full((4, 1), 2.5)], 1),
    "ranges": lambda x: x * torch.arange(0.0, 1.0, 0.25) * torch.linspace(0, 1, 4) * torch.arange(4),
    "integers divided": lambda x: x * (torch.arange(4) / 3) + (torch.arange(4) * 0.5).sqrt(),
    "numbers chosen": lambda x: x * torch.where(torch.arange(4) > 1, 1.0, 0.5),
    "drawn": lambda x: x + torch.rand(4, 4) + torch.randn_like(x),
    "mask": lambda x: x.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf")).softmax(-1),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(4, 2, 2)) * torch.polar(x[:, :2], x[:, 2:])
    ),
    "integers and booleans": lambda x: x * (x > 0) + x.argmax(-1, keepdim=True) + x.long().int(),
    "dtype of a sum": lambda x: x.sum(-1, dtype=torch.float32) + torch.softmax(x, -1, dtype=torch.float32).sum(-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_widened_graph_is_well_formed_and_computes_in_double(name: str) -> None:
    graph, model = graph_of(FUNCTIONS[name])
    wide = verify(widen(graph))
    assert verify(widen(wide)) == wide, "twice is once"
    narrow = {torch.float32, torch.float16, torch.bfloat16, torch.complex64}
    computed = [node for node in wide.nodes if any(value.type.dtype.is_floating_point for value in node.inputs)]
    assert not {type.dtype for node in computed for type in node.types} & narrow
    torch.manual_seed(1)
    found = to_module(wide, model.double())(torch.ones(4, 4, dtype=torch.float64))
    assert found.dtype == torch.float64
    if name != "drawn":
        plain = to_module(graph, model.float())(torch.ones(4, 4))
        torch.testing.assert_close(found.float(), plain.float(), rtol=0.05, atol=0.05)


def test_what_looks_at_the_bits_of_numbers_looks_at_those_they_have() -> None:
    """Twice as many bits would be other numbers, and twice as many of them."""
    graph, model = graph_of(lambda x: (x.detach().view(torch.int32) & 0x7FFFFFFF).view(torch.float32) * x)
    wide = verify(widen(graph))
    x = torch.linspace(-1, 1, 16).reshape(4, 4).double()
    found, plain = to_module(wide, model.double())(x), to_module(graph, model.float())(x.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), plain, rtol=1e-5, atol=1e-5)


def test_leaves_constants_and_what_is_returned() -> None:
    graph = verify(parse_graph(TEXT))
    wide = verify(widen(graph))
    assert [(str(leaf), str(leaf.type)) for leaf in wide.leaves] == [
        ("input:x", "f64[4,8]"),
        ("input:ids", "i64[4]"),
        ("input:keep", "b1[4,8]"),
        ("param:w", "f64[8,8]"),
        ("buffer:seen", "i64[]"),
        ("buffer:mean", "f64[8]"),
    ]
    weight = wide.leaves[3]
    assert weight.trainable and weight.aliases == ("tied.w",)
    assert str(wide) == str(graph).replace("bf16", "f64").replace("f16", "f64").replace("f32", "f64")
    assert wide.inputs[3:] == (3, 0.5) and wide.outputs[2] == 7 and wide.loss == 0 and wide.training
    assert wide.updates[0][0] == "seen" and wide.input_structure == graph.input_structure


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([1.5, -2.0, float("-inf")]), torch.float64),
        (torch.tensor([1.5, 0.1], dtype=torch.bfloat16), torch.float64),
        (torch.tensor([0.1], dtype=torch.float16), torch.float64),
        (torch.tensor([0.1], dtype=torch.float64), torch.float64),
        (torch.tensor([1 + 2j]), torch.complex128),
        (torch.tensor([[1, 2], [3, 4]]), torch.int64),
        (torch.tensor([True, False]), torch.bool),
        (torch.empty(0), torch.float64),
    ],
    ids=["f32", "bf16", "f16", "f64", "c64", "i64", "b8", "empty"],
)
def test_the_values_of_a_constant_are_kept(values: Tensor, dtype: torch.dtype) -> None:
    data = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
    builder = GraphBuilder()
    value = builder.add_leaf(
        make_leaf(LeafKind.CONSTANT, "c", TensorType(tuple(values.shape), values.dtype), data=data)
    )
    graph = builder.finish("g", training=True, inputs=(), outputs=(value,))
    (leaf,) = widen(graph).leaves
    assert leaf.type == TensorType(tuple(values.shape), dtype) and leaf.data is not None
    assert len(leaf.data) == leaf.type.bytes
    found = torch.frombuffer(bytearray(leaf.data), dtype=dtype) if leaf.data else torch.empty(0, dtype=dtype)
    assert torch.equal(found.reshape(values.shape), values.to(dtype))


def test_a_constant_without_values_stays_so() -> None:
    builder = GraphBuilder()
    value = builder.add_leaf(make_leaf(LeafKind.CONSTANT, "c", TensorType((2,), torch.float32)))
    (leaf,) = widen(builder.finish("g", training=True, inputs=(), outputs=(value,))).leaves
    assert leaf.data is None and leaf.type.dtype == torch.float64


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron", "zero1"])
def test_parallel_nodes_and_layouts_are_kept(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    graph = capture(model, (torch.ones(4, 4), torch.ones(4, 4)), nn.functional.mse_loss)
    plan = make_plan(graph, parse_machine("local:4"), strategy)
    wide = widen(plan.graph)
    assert [node.op for node in wide.nodes] == [node.op for node in plan.graph.nodes]
    assert any(node.op.startswith("conjoin::") for node in wide.nodes)
    for old, new in zip((*plan.graph.leaves, *plan.graph.nodes), (*wide.leaves, *wide.nodes), strict=True):
        before, after = ((x.type,) if isinstance(x, Leaf) else x.types for x in (old, new))
        assert [type.layout for type in before] == [type.layout for type in after]
    assert str(wide) == str(plan.graph).replace("f32", "f64")
    check_plan(type(plan)(wide, plan.mesh, plan.model, plan.machine, plan.strategy))
    assert widen(wide) == wide


def test_integers_divided_on_a_mesh_keep_their_layout() -> None:
    layout = make_layout([("x", parse_placement("S(0)"))])
    builder = GraphBuilder()
    counts = builder.add_leaf(make_leaf(LeafKind.INPUT, "n", TensorType((4,), torch.int64, layout)))
    halves = make_node(
        "div.Tensor", bind_args("div.Tensor", (counts, 2), {}), (TensorType((4,), torch.float32, layout),)
    )
    builder.add_node(halves)
    graph = builder.finish("g", training=True, inputs=(counts,), outputs=tuple(halves.outputs()))
    wide = verify(widen(graph))
    assert [node.op for node in wide.nodes] == ["div.Tensor", "_to_copy"]
    assert str(wide.nodes[1].types[0]) == "f64[4]{x:S(0)}"
    assert widen(wide) == wide
    mark: Any = make_plan(graph_of(torch.relu)[0], parse_machine("local:2"), "data-parallel").model
    check_plan(Plan(wide, Mesh((Axis("x", 2),)), mark, mark, "by hand"))


def test_pinned_nodes_sources_and_occurrences_are_kept() -> None:
    graph, _ = graph_of(lambda x: x.relu() + x.relu())
    wide = widen(graph)
    assert [node.occurrence for node in wide.nodes] == [node.occurrence for node in graph.nodes]
    assert [wide.source_of(node) for node in wide.nodes] == [graph.source_of(node) for node in graph.nodes]
    assert any(wide.source_of(node) for node in wide.nodes)
    assert [node.pinned for node in wide.nodes] == [node.pinned for node in graph.nodes]


def test_calls_that_become_equal_stay_two() -> None:
    """Their gradients add up: merged into one node nothing would be lost, but the plan's nodes would not line up."""
    graph, _ = graph_of(lambda x: x.bfloat16().float() + x.half().float())
    wide = widen(graph)
    assert len(wide.nodes) == len(graph.nodes) and len(set(wide.nodes)) == len(wide.nodes)
