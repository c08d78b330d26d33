"""What random calls draw goes to the same elements after a rewrite, whatever that does to the order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conjoin.ir import Graph, Value, add_strides, drawn_strides, strides_in
from conjoin.ops import execute, map_tensors
from conjoin.rules import Index, Library, Refused, apply, apply_all, find_matches, operators_in
from conjoin.rules.text import parse_rule
from conjoin.search.rewrites import ways_of
from tests.rules.rewrite_cases import graph_of, same

LEAVES = """
input:x f64[3,5,4]
input:i f64[2,3,4,4]
param:w f64[6,4] trainable
param:k f64[3,3,1,1] trainable
"""
TURNED = "%0: f64[5,3,4] = transpose.int(input:x, dim0=0, dim1=1)\n%1: f64[5,3,6] = linear(%0, param:w)\n"
DRAWING = {
    "dropout": TURNED + "%2: f64[5,3,6] = dropout(%1, p=0.5, train=true)",
    "behind other calls": TURNED + "%2: f64[5,3,6] = relu(%1)\n%3: f64[5,3,6] = mul.Tensor(%2, 2)\n"
    "%4: f64[3,5,6] = transpose.int(%3, dim0=0, dim1=1)\n%5: f64[3,5,6] = dropout(%4, p=0.5, train=true)",
    "numbers like it": TURNED + "%2: f64[5,3,6] = rand_like(%1)\n%3: f64[5,3,6] = mul.Tensor(%1, %2)",
    "chances": TURNED
    + "%2: f64[5,3,6] = sigmoid(%1)\n%3: f64[5,3,6] = bernoulli(%2)\n%4: f64[5,3,6] = mul.Tensor(%1, %3)",
    "a copy with its order": TURNED + "%2: f64[5,3,6] = clone(%1)\n%3: f64[5,3,6] = dropout(%2, p=0.5, train=true)",
    "images": "%0: f64[2,3,4,4] = conv2d(input:i, param:k)\n%1: f64[2,3,4,4] = relu(%0)\n"
    "%2: f64[2,3,4,4] = add.Tensor(%1, input:i)\n%3: f64[2,3,4,4] = dropout(%2, p=0.5, train=true)",
    "parts": "%0: f64[3,5,4] = relu(input:x)\n"
    "%1: f64[3,2,4], %2: f64[3,3,4] = split_with_sizes(%0, split_sizes=[2, 3], dim=1)\n"
    "%3: f64[3,3,4] = dropout(%2, p=0.5, train=true)\n%4: f64[3,2,4] = dropout(%1, p=0.5, train=true)\n"
    "%5: f64[3,5,4] = cat([%4, %3], dim=1)",
}
RULES = [way.rule for way in ways_of(Library.shipped())]


def graph(calls: str) -> Graph:
    last = [line for line in calls.splitlines()][-1].split(":")[0]
    return graph_of(LEAVES + calls, last)


def run(graph: Graph, *, channels_last: bool = False) -> tuple[list[Tensor], dict[Value, Tensor]]:
    """Outputs and gradients, and all values, of a graph whose images lie as asked for."""
    generator = torch.Generator().manual_seed(1)
    values: dict[Value, Tensor] = {}
    for leaf in graph.leaves:
        tensor = torch.randn(leaf.type.shape, generator=generator, dtype=leaf.type.dtype)
        if channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        values[Value(leaf)] = tensor.requires_grad_()
    torch.manual_seed(2)
    for node in graph.nodes:
        made = execute(node.op, *map_tensors(node.op, node.args, values.__getitem__))
        values.update(zip(node.outputs(), made if isinstance(made, tuple) else (made,), strict=True))
    outputs = [values[value] for value in graph.outputs if isinstance(value, Value)]
    sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    gradients = [values[Value(leaf)].grad for leaf in graph.leaves]
    return [*(o.detach() for o in outputs), *(g for g in gradients if g is not None)], values


@pytest.mark.parametrize("name", DRAWING)
def test_every_rule_leaves_draws_where_they_were(name: str) -> None:
    before = graph(DRAWING[name])
    index, refused, applied = Index(before), 0, 0
    for rule in (rule for rule in RULES if all(part.op in index.by_op for part in operators_in(*rule.left))):
        for match in find_matches(index, rule, apart=True)[:2]:
            try:
                after = apply(before, rule, match)
            except Refused as error:
                refused += "in another order" in str(error)
                continue
            applied += 1
            for last in (False, True):
                assert same(run(before, channels_last=last)[0], run(after, channels_last=last)[0]), rule
    assert refused or applied > 2


SWAPPED = parse_rule("linear-swap", "linear(swap(x), y)", "swap(linear(x, y))")


def test_what_lies_as_usual_again_before_a_draw_may_be_rewritten() -> None:
    """A linear layer gives its results in the usual order, however its operand lies."""
    calls = (
        TURNED
        + "%2: f64[5,3,6] = relu(%1)\n%3: f64[5,3,6] = contiguous(%2)\n%4: f64[5,3,6] = dropout(%3, p=0.5, train=true)"
    )
    before = graph(calls)
    (match,) = find_matches(before, SWAPPED)
    after = apply(before, SWAPPED, match)
    assert after != before and same(run(before)[0], run(after)[0])


def test_without_draws_any_order_will_do() -> None:
    before = graph(TURNED + "%2: f64[5,3,6] = relu(%1)")
    (match,) = find_matches(before, SWAPPED)
    assert [node.op for node in apply(before, SWAPPED, match).nodes] == ["linear", "transpose.int", "relu"]


def test_of_many_matches_those_are_left_out_that_would_move_a_draw() -> None:
    calls = TURNED + "%2: f64[5,3,6] = dropout(%1, p=0.5, train=true)\n"
    calls += "%3: f64[5,3,4] = permute(input:x, dims=[1, 0, 2])\n%4: f64[5,3,6] = linear(%3, param:w)\n"
    before = graph(calls + "%5: f64[5,3,6] = add.Tensor(%2, %4)")
    after, matches = apply_all(before, SWAPPED, find_matches(before, SWAPPED))
    assert len(matches) == 1 and same(run(before)[0], run(after)[0])


def test_an_opaque_call_may_look_at_the_order() -> None:
    calls = TURNED + "%2: f64[5,3] = as_strided(%1, size=[5, 3], stride=[18, 6])"
    before = graph(calls)
    (match,) = find_matches(before, SWAPPED)
    with pytest.raises(Refused, match="in another order"):
        apply(before, SWAPPED, match)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", DRAWING)
def test_strides_are_those_that_torch_gives(name: str, channels_last: bool) -> None:
    """On this device; the judge is a run with data."""
    made = graph(DRAWING[name])
    found, values = strides_in(made, channels_last), run(made, channels_last=channels_last)[1]
    drawn = drawn_strides(made)
    for value, tensor in values.items():
        large = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        assert [found[value][dim] for dim in large] == [tensor.stride(dim) for dim in large], value
        assert channels_last or value not in drawn or drawn[value] == torch.empty_like(tensor).stride()
    again = {Value(leaf): found[Value(leaf)] for leaf in made.leaves}
    add_strides(again, made.nodes)
    assert again == found
