"""How rule operators are found in calls and made of calls."""

from __future__ import annotations

import pytest
import torch

from conjoin.ir import Node, Value
from conjoin.rules.graphs.bindings import BINDING_OF, BINDINGS, make, readings_of
from conjoin.rules.graphs.matching import Index, find_matches
from conjoin.rules.graphs.rewriting import apply
from conjoin.rules.graphs.terms import Literal, Term, Virtual
from conjoin.rules.operators import OPS
from conjoin.rules.text import parse_rule
from tests.rules.rewrite_cases import body_of, graph_of, run_graph, same

LEAVES = """
input:x f64[4,6]
input:y f64[4,6]
input:b f64[6]
input:s f64[]
input:m f64[6,5]
input:w f64[5,6]
input:v f64[5]
input:t f64[2,4,6]
input:u f64[2,6,3]
input:i f64[2,4,8,8]
input:k f64[6,4,3,3]
input:g f64[6,2,1,3]
input:c f64[6]
input:n i64[4,2]
"""


def text_of(term: Term) -> str:
    """A term as a rule would write it, every virtual one by its first reading."""
    if isinstance(term, Literal):
        return f"{'1/' if term.inverse else ''}{term.number}"
    if isinstance(term, Value):
        return getattr(term.owner, "name", "%")
    inner = f"{term.op}({', '.join(map(text_of, term.args))})"
    return inner if term.op not in ("concat", "range") else shown(term)[0]


def shown(term: Term) -> list[str]:
    """Every reading of a term."""
    found = []
    for readings in readings_of(term).by_op.values():
        for reading in readings:
            params = [f"{k}={'|'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in reading.params]
            listed = f"[{', '.join(params)}]" if params else ""
            args = f"({', '.join(map(text_of, reading.args))})" if reading.args else ""
            found.append(f"{reading.op}{listed}{args}")
    return found


def call(line: str) -> Node:
    graph = graph_of(f"{LEAVES}{line}", "%0")
    return graph.nodes[-1]


READ = [
    ("f64[4,6] = add.Tensor(input:x, input:y)", ["add(x, y)", "add(y, x)"]),
    ("f64[4,6] = add.Tensor(input:x, input:x)", ["add(x, x)"]),
    ("f64[4,6] = add.Tensor(input:b, input:x)", ["bias[act=none](x, b)"]),
    ("f64[2,4,6] = add.Tensor(input:t, input:x)", ["add(t, broadcast(x))", "add(broadcast(x), t)"]),
    ("f64[4,6] = sub.Tensor(input:x, input:y)", ["sub(x, y)"]),
    ("f64[4,6] = mul.Tensor(input:x, input:y)", ["mul(x, y)", "mul(y, x)"]),
    ("f64[4,6] = mul.Tensor(input:x, 3)", ["scale(x, 3)"]),
    ("f64[4,6] = mul.Scalar(input:x, other=3)", ["scale(x, 3)"]),
    ("f64[4,6] = div.Tensor(input:x, 8.0)", ["scale(x, 1/8.0)"]),
    ("f64[4,6] = div.Tensor(input:x, input:y)", ["div(x, y)"]),
    ("f64[4,6] = mul.Tensor(input:s, input:x)",
     ["mul(broadcast(s), x)", "mul(x, broadcast(s))", "scale(x, s)"]),
    ("f64[4,6] = pow.Tensor_Scalar(input:x, exponent=2)", ["square(x)"]),
    ("f64[4,6] = gelu(input:x)", ["gelu(x)"]),
    ("f64[4,5] = mm(input:x, input:m)", ["matmul(x, m)"]),
    ("f64[2,4,3] = bmm(input:t, input:u)", ["matmul(t, u)"]),
    ("f64[2,4,5] = matmul(input:t, input:m)", ["linear(t, transpose(m))"]),
    ("f64[4,5] = linear(input:x, input:w)", ["linear(x, w)"]),
    ("f64[4,5] = linear(input:x, input:w, input:v)", ["bias[act=none](linear(x, w), v)"]),
    ("f64[4,5] = addmm(input:v, input:x, input:m)", ["bias[act=none](matmul(x, m), v)"]),
    ("f64[4,5] = conjoin::linear_relu(input:x, input:w, input:v)", ["bias[act=relu](linear(x, w), v)"]),
    ("f64[6,4] = t(input:x)", ["transpose(x)"]),
    ("f64[2,6,4] = permute(input:t, dims=[0, 2, 1])", ["transpose(t)"]),
    ("f64[2,6,4] = transpose.int(input:t, dim0=-1, dim1=1)", ["transpose(t)"]),
    ("f64[4,2,6] = permute(input:t, dims=[1, 0, 2])", ["swap(t)"]),
    ("f64[4,6,2] = permute(input:t, dims=[1, 2, 0])", ["transpose(swap(t))"]),
    ("f64[6,2,4] = permute(input:t, dims=[2, 0, 1])", ["swap(transpose(t))"]),
    ("f64[6,4,2] = permute(input:t, dims=[2, 1, 0])", ["transpose(swap(transpose(t)))", "swap(transpose(swap(t)))"]),
    ("f64[2,24] = reshape(input:t, [2, 24])", ["flatten(t)"]),
    ("f64[4,2,3] = reshape(input:x, [4, 2, 3])", ["unflatten[parts=2](x)"]),
    ("f64[4,6] = mul.Tensor(input:b, input:x)", ["gain(x, b)"]),
    ("f64[2,6,8,8] = conv2d(input:i, input:k, padding=[1, 1])",
     ["conv[stride=1, pad=same|1, groups=1, act=none](i, k)"]),
    ("f64[2,6,3,3] = conv2d(input:i, input:k, stride=[2, 2])",
     ["conv[stride=2, pad=0|valid, groups=1, act=none](i, k)"]),
    ("f64[2,6,8,8] = conv2d(input:i, input:g, padding=[0, 1], groups=2)",
     ["conv[stride=1, pad=same, groups=2, act=none](i, g)"]),
    ('f64[2,6,8,8] = conv2d.padding(input:i, input:k, padding="same")',
     ["conv[stride=1, pad=same|1, groups=1, act=none](i, k)"]),
    ("f64[2,6,8,8] = conv2d(input:i, input:k, input:c, padding=[1, 1])",
     ["add(conv(i, k), broadcast(column(c)))", "add(broadcast(column(c)), conv(i, k))"]),
    ("f64[6,4,5,5] = constant_pad_nd(input:k, pad=[1, 1, 1, 1])", ["enlarge[kernel=5](k)"]),
    ("f64[2,4,4,4] = avg_pool2d(input:i, kernel_size=[2])", ["avg_pool[kernel=2, stride=2, pad=0|valid](i)"]),
    ("f64[2,4,8,8] = max_pool2d(input:i, kernel_size=[3, 3], stride=[1, 1], padding=[1, 1])",
     ["max_pool[kernel=3, stride=1, pad=same|1](i)"]),
    ("f64[8,6] = cat([input:x, input:y])", ["concat[axis=0](x, y)"]),
    ("f64[4,18] = cat([input:x, input:y, input:x], dim=-1)",
     ["concat[axis=1](x, concat[axis=1](y, x))", "concat[axis=1](concat[axis=1](x, y), x)"]),
    ("f64[4,2], %1: f64[4,4] = split_with_sizes(input:x, split_sizes=[2, 4], dim=1)", ["split[axis=1, part=0](x)"]),
    ("f64[4,2], %1: f64[4,2], %2: f64[4,2] = chunk(input:x, chunks=3, dim=1)",
     ["split[axis=1, part=0](split[axis=1, part=0](x))", "split[axis=1, part=0](x)"]),
    ("f64[2,6] = slice.Tensor(input:x, start=-2)", ["split[axis=0, part=1](x)"]),
    ("f64[2,6] = narrow(input:x, dim=0, start=1, length=2)",
     ["split[axis=0, part=1](split[axis=0, part=0](x))", "split[axis=0, part=0](split[axis=0, part=1](x))"]),
    ("f64[4] = sum.dim_IntList(input:x, dim=[-1])", ["sum[axis=1](x)"]),
    ("f64[4] = mean.dim(input:t, dim=[0, 2])", ["mean[axis=0](mean(t))"]),
    ("f64[4,6] = softmax.int(input:x, dim=-1)", ["softmax[axis=1](x)"]),
    ("f64[4,2,6] = embedding(input:w, input:n)", ["embedding(w, n)"]),
    ('f64[4,6] = conjoin::embedding_bag(input:w, input:n, none, mode="sum", padding_idx=none)',
     ["embedding_bag(w, n)"]),
    ("f64[3,3] = full(size=[3, 3], fill_value=1.0, dtype=f64)", ["ones"]),
    ("f64[3,3] = eye(n=3, dtype=f64)", ["identity"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), READ, ids=[line.partition("= ")[2] for line, _ in READ])
def test_a_call_reads_as_rule_operators(line: str, expected: list[str]) -> None:
    assert shown(Value(call(f"%0: {line}"))) == expected


MISSED = [
    ("f64[2,6,4,4] = conv2d(input:i, input:k, dilation=[2, 2])",
     "conv", "has dilation 2×2 and rules are for dilation 1"),
    ("f64[2,6,6,3] = conv2d(input:i, input:k, stride=[1, 2])",
     "conv", "has strides 1 and 2 and rules are for equal ones"),
    ("f64[2,6,8,6] = conv2d(input:i, input:k, padding=[1, 0])", "conv", "has padding (1, 0) around a kernel of 3×3"),
    ('f64[4,6] = gelu(input:x, approximate="tanh")', "gelu", "is approximated by tanh and rules are for the exact one"),
    ("f64[4,6] = add.Tensor(input:x, input:y, alpha=2)", "add", "has alpha 2 and rules are for alpha 1"),
    ("f64[4,1] = sum.dim_IntList(input:x, dim=[1], keepdim=true)",
     "sum", "keeps the dims it reduces and rules drop them"),
    ("f64[4,2,8,8] = permute(input:i, dims=[1, 0, 2, 3])",
     "transpose", "orders the dims [1, 0, 2, 3] and rules order the last three"),
    ("f64[8,6] = reshape(input:t, [8, 6])", "flatten", "makes [8, 6] of [2, 4, 6] and rules are for the last two dims"),
    ("f64[4,3] = slice.Tensor(input:x, dim=1, step=2)", "split", "takes every 2 positions"),
    ("f64[2,4,8,8] = avg_pool2d(input:i, kernel_size=[3, 3], stride=[1, 1], padding=[1, 1], count_include_pad=false)",
     "avg_pool", "does not count the padding, or divides by another number"),
    ("f64[4,2,6] = embedding(input:w, input:n, padding_idx=1)", "embedding",
     "has padding_idx 1 or scaled gradients and rules are for plain ones"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "op", "reason"), MISSED, ids=[reason for *_, reason in MISSED])
def test_a_form_that_rules_do_not_cover_says_why(line: str, op: str, reason: str) -> None:
    readings = readings_of(Value(call(f"%0: {line}")))
    assert op not in readings.by_op and readings.misses[op] == reason


def test_every_rule_operator_is_bound_once() -> None:
    assert sorted(binding.op for binding in BINDINGS) == sorted(op.name for op in OPS)


class Recorder:
    """Makes nothing and writes down the calls."""

    dtype = torch.float64

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, op: str, *args: object, output: int = 0) -> Value:
        self.calls.append(op)
        return VALUE

    def said(self, op: str, attribute: str) -> None:
        return None

    def value(self, term: Term) -> Value:
        return term if isinstance(term, Value) else VALUE


VALUE = Value(call("%0: f64[2,4,8,8] = relu(input:i)"))
ARGUMENTS = {"axis": 1, "part": 0, "kernel": 3, "stride": 1, "pad": "same", "act": "none", "groups": 1, "mesh": ("d",)}
ARGUMENTS |= {"parts": 2, "vertices": 4}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_rule_operator_can_be_made(op: object) -> None:
    recorder = Recorder()
    params = {name: ARGUMENTS[name] for name, _ in op.params}  # type: ignore[attr-defined]
    make(recorder, op.name, params, (VALUE,) * op.num_args, (2, 2, 8, 8))  # type: ignore[attr-defined]
    assert recorder.calls


@pytest.mark.parametrize(
    ("line", "returns", "left", "right", "expected"),
    [
        ("%0: f64[4,5] = linear(input:x, input:w, input:v)", "%0", "bias(linear(x, w), b)", "bias(linear(x, w), b)",
         ["linear"]),
        ("%0: f64[12,6] = cat([input:x, input:y, input:x])", "%0",
         "concat[axis=a](x, concat[axis=a](y, z))", "concat[axis=a](concat[axis=a](x, y), z)", ["cat"]),
        ("%0: f64[2,4,5] = matmul(input:t, input:m)", "%0", "linear(x, w)", "linear(x, w)", ["matmul"]),
        ("%0: f64[2,4,6] = add.Tensor(input:t, input:x)", "%0", "add(x, y)", "add(y, x)", ["add.Tensor"]),
        ("%0: f64[2,6,8,8] = conv2d(input:i, input:k, input:c, padding=[1, 1])", "%0", "add(x, y)", "add(x, y)",
         ["conv2d", "reshape", "add.Tensor"]),
        ("%0: f64[4,6] = div.Tensor(input:x, 8.0)", "%0", "scale(x, y)", "scale(x, y)", ["div.Tensor"]),
        ("%0: f64[4,5] = linear(input:x, input:w, input:v)\n%1: f64[4,5] = relu(%0)", "%1", "relu(bias(x, y))",
         "bias[act=relu](x, y)", ["conjoin::linear_relu"]),
        ("%0: f64[4,5] = conjoin::linear_relu(input:x, input:w, input:v)", "%0", "bias[act=relu](x, y)",
         "relu(bias(x, y))", ["linear", "relu"]),
        ("%0: f64[4,6] = add.Tensor(input:x, input:b)\n%1: f64[4,6] = relu(%0)", "%1", "relu(bias(x, y))",
         "bias[act=relu](x, y)", ["add.Tensor", "relu"]),
    ],
)  # fmt: skip
def test_what_was_one_call_is_one_call_again(
    line: str, returns: str, left: str, right: str, expected: list[str]
) -> None:
    graph = graph_of(f"{LEAVES}{line}", returns)
    rule = parse_rule("r", left, right)
    results = [apply(graph, rule, match) for match in find_matches(graph, rule)]
    assert expected in [[node.op for node in result.nodes] for result in results]
    assert all(same(run_graph(graph), run_graph(result)) for result in results)


def test_a_concatenation_of_many_is_read_from_its_ends() -> None:
    parts = ", ".join(["input:x"] * 12)
    value = Value(call(f"%0: f64[48,6] = cat([{parts}])"))
    assert len(readings_of(value).by_op["concat"]) == 2


def test_the_index_holds_what_is_inside_of_calls() -> None:
    graph = graph_of(f"{LEAVES}%0: f64[4,5] = linear(input:x, input:w, input:v)", "%0")
    index = Index(graph)
    (inner,) = index.by_op["linear"]
    assert isinstance(inner, Virtual) and [host.value for host in index.hosts(inner)] == [graph.outputs[0]]
    assert index.name(inner) == "linear in %0 linear" and "linear" in BINDING_OF
    assert body_of(graph).startswith("%0: f64[4,5] = linear(")
