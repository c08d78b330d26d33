"""Where rules are found in graphs, where they are not, and why."""

from __future__ import annotations

import time

import pytest

from conjoin.ir import Graph, GraphBuilder, Value
from conjoin.rules.graphs.matching import Index, Match, find_matches
from conjoin.rules.graphs.near_misses import why
from conjoin.rules.graphs.rewriting import apply
from conjoin.rules.graphs.terms import Virtual
from conjoin.rules.patterns import Rule
from conjoin.rules.text import parse_rule
from tests.rules.rewrite_cases import RULES, graph_of, run_graph, same

IMAGES = """
input:x f64[2,4,8,8]
param:a f64[4,4,3,3] trainable
param:b f64[6,4,3,3] trainable
param:c f64[4,1,3,3] trainable
param:d f64[4,4,1,1] trainable
param:e f64[4,2,3,3] trainable
"""
MATRICES = """
input:x f64[4,4]
param:a f64[4,4] trainable
param:b f64[4,4] trainable
param:c f64[4,4] trainable
"""


def found(graph: Graph, rule: Rule | str) -> tuple[Match, ...]:
    return find_matches(graph, RULES[rule] if isinstance(rule, str) else rule)


def reasons(graph: Graph, rule: Rule | str) -> list[str]:
    return [str(miss) for miss in why(graph, RULES[rule] if isinstance(rule, str) else rule)]


def images(calls: str, returns: str) -> Graph:
    return graph_of(IMAGES + calls, returns)


def matrices(calls: str, returns: str) -> Graph:
    return graph_of(MATRICES + calls, returns)


def names(match: Match) -> dict[str, str]:
    """The leaves that inputs are bound to."""
    return {name: getattr(getattr(term, "owner", None), "name", "") for name, term in match.inputs}


# What fits.


def test_an_input_stands_for_one_tensor() -> None:
    rule = parse_rule("square", "mul(x, x)", "square(x)")
    graph = matrices("%0: f64[4,4] = mul.Tensor(input:x, input:x)\n%1: f64[4,4] = mul.Tensor(%0, input:x)", "%1")
    (match,) = found(graph, rule)
    assert match.outputs == (Value(graph.nodes[0]),)


def test_operands_of_an_addition_are_tried_in_both_orders() -> None:
    graph = matrices("%0: f64[4,4] = relu(input:x)\n%1: f64[4,4] = add.Tensor(%0, param:a)", "%1")
    rule = parse_rule("r", "add(y, relu(x))", "add(relu(x), y)")
    assert [names(match) for match in found(graph, rule)] == [{"y": "a", "x": "x"}]


def test_layers_that_share_their_input_are_found_once() -> None:
    calls = "\n".join(f"%{i}: f64[4,4] = matmul(input:x, param:{name})" for i, name in enumerate("abc"))
    matches = found(matrices(calls, "%0, %1, %2"), "matmul-merge")
    assert [(names(m)["b"], names(m)["c"]) for m in matches] == [("a", "b"), ("a", "c"), ("b", "c")]


def test_layers_with_a_bias_are_found_inside_of_their_calls() -> None:
    leaves = "input:x f64[3,4]\nparam:a f64[5,4]\nparam:b f64[6,4]\nparam:p f64[5]\nparam:q f64[6]\n"
    calls = "%0: f64[3,5] = linear(input:x, param:a, param:p)\n%1: f64[3,6] = linear(input:x, param:b, param:q)"
    graph = graph_of(leaves + calls, "%0, %1")
    (match,) = found(graph, "linear-merge")
    assert all(isinstance(output, Virtual) for output in match.outputs)
    assert {host.value for _, hosts in match.hosts for host in hosts} == set(graph.outputs)
    (match,) = found(graph, "linear-bias-merge")
    assert match.outputs == graph.outputs


def test_two_of_many_concatenated_tensors_are_found() -> None:
    calls = """
    %0: f64[4,4] = relu(param:a)
    %1: f64[4,4] = relu(param:b)
    %2: f64[16,4] = cat([input:x, %0, %1, param:c])
    """
    (match,) = found(matrices(calls, "%2"), "relu-concat")
    assert names(match) == {"x": "a", "y": "b"} and dict(match.params) == {"a": 0}


def test_parameters_with_a_name_are_bound() -> None:
    calls = """
    %0: f64[2,4,4,4] = conv2d(input:x, param:a, stride=[2, 2], padding=[1, 1])
    %1: f64[2,6,4,4] = conv2d(input:x, param:b, stride=[2, 2], padding=[1, 1])
    %2: f64[2,4,8,8] = conv2d(input:x, param:d)
    """
    (match,) = found(images(calls, "%0, %1, %2"), "conv-merge")
    assert dict(match.params)["s"] == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_kernel_by_name_has_the_size_that_the_right_side_needs(order: tuple[int, int]) -> None:
    """Both outputs are alike on the left side, and only one of them is enlarged: it is found wherever it stands."""
    layers = ["conv2d(input:x, param:d)", "conv2d(input:x, param:a, padding=[1, 1])"]
    calls = "\n".join(f"%{i}: f64[2,4,8,8] = {layers[which]}" for i, which in enumerate(order))
    (match,) = found(images(calls, "%0, %1"), "conv-merge-enlarged")
    assert names(match) == {"x": "x", "y": "d", "z": "a"} and dict(match.params)["k"] == 3


def test_dims_by_name_are_the_same_in_tensors_of_other_rank() -> None:
    rule = parse_rule("r", "concat[axis=b](mean[axis=a](x), mean[axis=a](y))", "mean[axis=a](concat[axis=b](x, y))")
    leaves = "input:x f64[2,3,4]\ninput:y f64[2,3,5]\n"
    calls = """%0: f64[2,4] = mean.dim(input:x, dim=[1])
    %1: f64[2,5] = mean.dim(input:y, dim=[1])
    %2: f64[2,9] = cat([%0, %1], dim=1)"""
    (match,) = found(graph_of(leaves + calls, "%2"), rule)
    assert match.sizes.shapes[rule.right[0].args[0]] == (2, 3, 9)  # type: ignore[union-attr]
    assert match.sizes.dims == {rule.right[0]: 1, rule.right[0].args[0]: 2}  # type: ignore[union-attr]


def test_what_the_left_side_leaves_open_is_given() -> None:
    rule = parse_rule("r", "relu(x)", "combine[axis=a](relu(partition[axis=a](x)))")
    graph = matrices("%0: f64[4,4] = relu(input:x)", "%0")
    assert found(graph, rule) == ()
    (match,) = find_matches(graph, rule, {"a": 1, "m": ("d",)})
    assert set(match.sizes.dims.values()) == {1}
    assert reasons(graph, rule) == ["%0 relu: which dim 'a' is stands on the right side only: say it"]


def test_a_bare_input_is_matched_at_a_value_only() -> None:
    rule = parse_rule("r", "x", "transpose(transpose(x))")
    graph = matrices("%0: f64[4,4] = relu(input:x)", "%0")
    assert found(graph, rule) == ()
    (match,) = find_matches(graph, rule, at=Value(graph.nodes[0]))
    assert match.outputs == graph.outputs
    assert reasons(graph, rule) == ["the rule: its left side is a bare input: say at which value it is to be applied"]


# What does not fit.


def cut(at: int) -> Graph:
    """Two tensors of 2 and 3 columns joined, cut, and the parts exchanged."""
    return graph_of(
        f"""
        input:x f64[4,2]
        input:y f64[4,3]
        %0: f64[4,5] = cat([input:x, input:y], dim=1)
        %1: f64[4,{at}], %2: f64[4,{5 - at}] = split_with_sizes(%0, split_sizes=[{at}, {5 - at}], dim=1)
        %3: f64[4,5] = cat([%2, %1], dim=1)
        """,
        "%3",
    )


def test_a_split_elsewhere_than_the_concatenation_does_not_undo_it() -> None:
    """The shapes of both sides are the same, the values are not."""
    assert len(found(cut(2), "split-swap")) == 1
    assert found(cut(3), "split-swap") == ()
    assert any("where 2 is needed" in reason for reason in reasons(cut(3), "split-swap"))


def test_two_names_are_two_dims() -> None:
    calls = "%0: f64[8,4] = cat([input:x, param:a])\n%1: f64[8,4] = softmax.int(%0, dim={})"
    assert len(found(matrices(calls.format(1), "%1"), "softmax-concat")) == 1
    along = matrices(calls.format(0), "%1")
    assert found(along, "softmax-concat") == ()
    assert reasons(along, "softmax-concat") == ["%1 softmax.int: its dims lie elsewhere in one tensor than in another"]


COUNTED = [
    ("%0: f64[2,3,5] = linear(input:x, param:w)\n%1: f64[{}] = mean.dim(%0, dim=[{}])",
     "mean[axis=a](linear(x, y))", "linear(mean[axis=a](x), y)", [(1, "2,5")], [(-1, "2,3"), (2, "2,3")]),
    ("%0: f64[2,4,3] = transpose.int(input:x, dim0=-2, dim1=-1)\n%1: f64[{1}] = softmax.int(%0, dim={0})",
     "softmax[axis=a](transpose(x))", "transpose(softmax[axis=a](x))", [(0, "2,4,3")], [(-1, "2,4,3"), (1, "2,4,3")]),
    ("%0: f64[2,3,4] = mul.Tensor(input:x, param:g)\n%1: f64[{}] = sum.dim_IntList(%0, dim=[{}])",
     "sum[axis=a](gain(x, y))", "gain(sum[axis=a](x), y)", [(0, "3,4"), (1, "2,4")], [(2, "2,3")]),
    ("%0: f64[2,3,4] = add.Tensor(input:x, param:g)\n%1: f64[{}] = narrow(%0, dim={}, start=0, length=1)",
     "split[axis=a, part=0](bias(x, y))", "bias(split[axis=a, part=0](x), y)",
     [(0, "1,3,4"), (1, "2,1,4")], [(2, "2,3,1")]),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "left", "right", "other", "counted"), COUNTED, ids=[case[1] for case in COUNTED])
def test_a_dim_by_name_is_none_that_the_rule_counts(
    calls: str, left: str, right: str, other: list[tuple[int, str]], counted: list[tuple[int, str]]
) -> None:
    leaves = "input:x f64[2,3,4]\nparam:w f64[5,4]\nparam:g f64[4]\n"
    rule, order = parse_rule("r", left, right), slice(None, None, 1 if "[{1}]" in calls else -1)
    for dim, shape in other:
        graph = graph_of(leaves + calls.format(*(dim, shape)[order]), "%1")
        (match,) = found(graph, rule)
        assert same(run_graph(graph), run_graph(apply(graph, rule, match)))
    for dim, shape in counted:
        graph = graph_of(leaves + calls.format(*(dim, shape)[order]), "%1")
        assert found(graph, rule) == () and any("counts from the end" in reason for reason in reasons(graph, rule))


def test_a_dim_that_is_given_is_none_that_the_rule_counts() -> None:
    rule = parse_rule("r", "linear(x, y)", "combine[axis=a](linear(partition[axis=a](x), replicate(y)))")
    graph = matrices("%0: f64[4,4] = linear(input:x, param:a)", "%0")
    assert len(find_matches(graph, rule, {"a": 0, "m": ("d",)})) == 1
    assert all(find_matches(graph, rule, {"a": dim, "m": ("d",)}) == () for dim in (1, 2, -1))


def test_a_dim_by_number_is_one_that_the_tensor_has() -> None:
    """Dim 1 of a vector is not its dim 0."""
    graph = graph_of("input:x f64[4]\n%0: f64[4] = relu(input:x)\n%1: f64[4] = softmax.int(%0, dim=0)", "%1")
    assert found(graph, parse_rule("r", "softmax[axis=1](relu(x))", "softmax[axis=1](relu(relu(x)))")) == ()


def test_a_rule_that_was_proven_for_one_group_is_not_used_for_more() -> None:
    calls = """
    %0: f64[2,4,8,8] = conv2d(input:x, param:{0}, padding=[1, 1], groups={1})
    %1: f64[2,4,8,8] = conv2d(input:x, param:{0}, padding=[1, 1], groups={1}) #1
    %2: f64[2,8,8,8] = cat([%0, %1], dim=1)
    """
    assert len(found(images(calls.format("a", 1), "%2"), "conv-concat")) == 1
    grouped = images(calls.format("e", 2), "%2")
    assert found(grouped, "conv-concat") == ()
    assert reasons(grouped, "conv-concat") == ["%2 cat: %0 conv2d has groups 2 and the rule is for groups 1"]


WHY = [
    ("%0: f64[2,4,8,8] = conv2d(input:x, param:c, padding=[1, 1], groups=4)\n"
     "%1: f64[2,4,8,8] = add.Tensor(input:x, %0)",
     "identity-conv", "%1 add.Tensor: %0 conv2d has groups 4 and the rule is for groups 1"),
    ("%0: f64[2,4,8,8] = relu(input:x)\n%1: f64[2,4,8,8] = relu(%0)",
     "conv-relu", "%1 relu: %0 relu stands where the rule has conv"),
    ("%0: f64[2,4,4,4] = conv2d(input:x, param:a, dilation=[2, 2])\n%1: f64[2,4,4,4] = relu(%0)",
     "conv-relu", "%1 relu: %0 conv2d has dilation 2×2 and rules are for dilation 1"),
    ("%0: f64[2,4,4,4] = conv2d(input:x, param:a, dilation=[2, 2])\n%1: f64[2,4,4,4] = relu(%0)",
     "conv-enlarge", "%0 conv2d: %0 conv2d has dilation 2×2 and rules are for dilation 1"),
    ("%0: f64[2,4,6,6] = conv2d(input:x, param:a)\n%1: f64[2,4,6,6] = relu(%0)",
     "conv-enlarge", "%0 conv2d: %0 conv2d has pad 0 or valid and the rule is for pad same"),
    ("%0: f64[2,4,8,8] = conv2d(input:x, param:a, padding=[1, 1])\n%1: f64[2,4,8,8] = relu(%0)",
     "conv-merge", "%0 conv2d: no other call shares its inputs as the rule asks"),
    ("%0: f64[2,4,4,4] = avg_pool2d(input:x, kernel_size=[2, 2])\n%1: f64[2,4,4,4] = relu(%0)",
     "pool-is-conv", "%0 avg_pool2d: %0 avg_pool2d has pad 0 or valid and the rule is for pad same"),
    ("%0: f64[2,4,8,8] = tanh(input:x)\n%1: f64[2,4,8,8] = relu(%0)",
     "matmul-merge", "the graph: nothing in it reads as matmul"),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "rule", "reason"), WHY, ids=[f"{rule}: {reason}" for _, rule, reason in WHY])
def test_why_a_rule_does_not_apply(calls: str, rule: str, reason: str) -> None:
    graph = images(calls, "%1")
    assert found(graph, rule) == () and reason in reasons(graph, rule)


def test_where_a_rule_applies_there_is_nothing_to_explain() -> None:
    graph = images("%0: f64[2,4,8,8] = conv2d(input:x, param:a, padding=[1, 1])\n%1: f64[2,4,8,8] = relu(%0)", "%1")
    assert len(found(graph, "conv-relu")) == 1 and why(graph, RULES["conv-relu"]) == []


def test_a_cycle_is_a_reason() -> None:
    calls = "%0: f64[4,4] = matmul(input:x, param:a)\n%1: f64[4,4] = relu(%0)\n%2: f64[4,4] = matmul(input:x, %1)"
    assert any("would need itself" in reason for reason in reasons(matrices(calls, "%2"), "matmul-merge"))


PAIR = "input:x {0}[4,4]\ninput:y {1}[4,4]\ninput:z {1}[4,4]\n"
SUMS = "%0: {1}[4,4] = add.Tensor(input:y, input:z)\n%1: {2}[4,4] = add.Tensor(input:x, %0)"
MASKS = (
    "%0: {0}[4,4] = mul.Tensor(input:x, input:y)\n%1: {0}[4,4] = mul.Tensor(input:z, input:x)\n"
    "%2: {0}[4,4] = add.Tensor(%0, %1)"
)
DTYPES = [
    ("add-associates", SUMS, "f32 bf16 f32", "mixes bfloat16 and float32"),
    ("add-associates", SUMS, "f32 i64 f32", "mixes float32 and int64"),
    ("add-associates", SUMS, "b1 b1 b1", "computes with bool"),
    ("add-associates", SUMS, "i32 i32 i32", "computes with int32"),
    ("add-associates", SUMS, "c64 c64 c64", "computes with complex64"),
    ("add-associates", SUMS, "bf16 bf16 bf16", ""),
    ("mul-collects", MASKS, "f32 b1", "mixes bool and float32"),
    ("mul-collects", MASKS, "f16 f16", ""),
    ("relu-concat", "%0: {0}[4,4] = relu(input:x)\n%1: {0}[4,4] = relu(input:y)\n%2: {0}[8,4] = cat([%0, %1])",
     "i64 i64", "computes with int64"),
    ("mul-collects", "%0: i64[4,4] = mul.Tensor(input:x, input:y)\n%1: i64[4,4] = mul.Tensor(input:z, input:y)\n"
     "%2: i64[4,4] = add.Tensor(%0, %1)", "i64 i64", "computes with int64"),
    ("transpose-twice", "%0: b1[4,4] = t(input:x)\n%1: b1[4,4] = t(%0)", "b1 b1", ""),
    ("split-concat", "%0: i8[8,4] = cat([input:x, input:y])\n%1: i8[4,4] = narrow(%0, dim=0, start=0, length=4)",
     "i8 i8", ""),
    ("split-concat", "%0: f32[8,4] = cat([input:x, input:y])\n%1: f32[4,4] = narrow(%0, dim=0, start=0, length=4)",
     "f32 f16", "different rank or dtype"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "calls", "dtypes", "reason"), DTYPES, ids=[f"{rule}: {dtypes}" for rule, _, dtypes, _ in DTYPES]
)
def test_a_rule_that_computes_is_for_real_numbers_of_one_dtype(rule: str, calls: str, dtypes: str, reason: str) -> None:
    """Sums of bools are no sums, integers wrap; elements may be moved whatever they are."""
    last = calls.rpartition("%")[0].count("\n")
    graph = graph_of((PAIR + calls).format(*dtypes.split()), f"%{last}")
    if reason:
        assert found(graph, rule) == () and any(reason in why for why in reasons(graph, rule))
    else:
        assert found(graph, rule)


def test_rows_are_whole_numbers_whatever_the_table_is() -> None:
    leaves = "input:i i32[3]\nparam:a bf16[5,2]\nparam:b bf16[5,4]\n"
    calls = "%0: bf16[3,2] = embedding(param:a, input:i)\n%1: bf16[3,4] = embedding(param:b, input:i)"
    graph = graph_of(leaves + calls + "\n%2: bf16[3,6] = cat([%0, %1], dim=1)", "%2")
    assert len(found(graph, "embedding-concat")) == 1


def test_a_slice_may_begin_before_the_first_element() -> None:
    graph = graph_of(
        "input:x f64[5]\n%0: f64[3] = slice.Tensor(input:x, dim=0, start=-9, end=3, step=1)\n%1: f64[3] = relu(%0)",
        "%1",
    )
    rule = parse_rule("r", "relu(split[axis=a, part=0](x))", "split[axis=a, part=0](relu(x))")
    (match,) = found(graph, rule)
    assert same(run_graph(graph), run_graph(apply(graph, rule, match)))


def test_a_match_does_not_reach_into_another_autocast_region() -> None:
    calls = "%0: f64[4,4] = add.Tensor(param:a, param:b){}\n%1: f64[4,4] = add.Tensor(input:x, %0)"
    assert len(found(matrices(calls.format(""), "%1"), "add-associates")) == 2
    mixed = matrices(calls.format(" pinned"), "%1")
    assert found(mixed, "add-associates") == ()
    assert any("autocast" in reason for reason in reasons(mixed, "add-associates"))


def test_mesh_axes_of_two_names_are_two_axes() -> None:
    rule = parse_rule("r", "relu(x)", "combine[axis=0, mesh=m](relu(partition[axis=0, mesh=n](x)))")
    graph = matrices("%0: f64[4,4] = relu(input:x)", "%0")
    assert find_matches(graph, rule, {"m": ("d",), "n": ("d",)}) == ()


def test_many_rules_on_a_large_graph_take_little_time() -> None:
    """Seconds of this process, so that a busy machine does not count; measured 0.1 on a quiet one."""
    builder = GraphBuilder()
    small = matrices("%0: f64[4,4] = relu(input:x)", "%0")
    values = [builder.add_leaf(leaf) for leaf in small.leaves]
    x, weights = values[0], values[1:]
    for i in range(200):
        one, other = (Value(builder.add_call("matmul", (x, weights[(i + j) % 3]), (x.type,))) for j in range(2))
        total = Value(builder.add_call("add.Tensor", (one, other, 1), (x.type,)))
        x = Value(builder.add_call("relu", (total,), (x.type,)))
    graph = builder.finish("g", training=True, inputs=small.inputs, outputs=(x,), input_structure=small.input_structure)
    start = time.process_time()
    index = Index(graph)
    counts = {name: len(find_matches(index, rule)) for name, rule in RULES.items()}
    assert counts["matmul-merge"] == 200 and counts["matmul-collects"] == 400
    assert time.process_time() - start < 5
