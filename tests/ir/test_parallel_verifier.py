"""The checker of parallel graphs: one edit of a legal graph for every fault it must find, with place and reason."""

from __future__ import annotations

import pytest

from conjoin.ir import find_faults, find_layout_faults, parse_graph
from tests.ir.meshes import TWO_BY_TWO, megatron

TEXT = str(megatron())


def faults_after(*edits: tuple[str, str]) -> list[str]:
    text = TEXT
    for old, new in edits:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    graph = parse_graph(text)
    assert find_faults(graph) == (), "well formed, though not legal"
    return [str(fault) for fault in find_layout_faults(graph, TWO_BY_TWO)]


def test_a_legal_graph_has_no_faults() -> None:
    assert faults_after() == []


def test_a_parameter_stored_as_copies() -> None:
    assert faults_after(("param:fc2.bias f32[3] trainable", "param:fc2.bias f32[3]{d:B} trainable"))[0] == (
        "param:fc2.bias: is stored as B on axis d: its gradient would be a contribution on each device; store it as I "
        "and replicate it for use"
    )


def test_an_input_may_come_as_copies_but_not_as_partial_sums() -> None:
    assert faults_after(("input:x f32[8,4]{d:S(0)}", "input:x f32[8,4]{d:S(0),t:B}")) == [
        '%0 conjoin::replicate at mlp.py:3 (fc1): conjoin::replicate takes I to B on axis t, where the tensor is B'
    ]
    assert faults_after(("input:x f32[8,4]{d:S(0)}", "input:x f32[8,4]{d:S(0),t:P}"))[0] == (
        "input:x: is P on axis t: nobody keeps partial results between steps"
    )


def test_a_loss_that_is_left_in_parts() -> None:
    assert faults_after(("returns [%12]", "returns [%11]")) == [
        "loss: is f32[]{d:P}: it must be the same one value on every device (reduce it)"
    ]


def test_an_output_that_is_left_in_parts() -> None:
    structure = '{"kind":"tuple","keys":[],"children":[null,null]}'
    assert faults_after(("returns [%12] in null", f"returns [%12, %9] in {structure}")) == [
        "output 1: is f32[8,3]{d:S(0),t:P}: partial results cannot be given to the caller (reduce them)"
    ]
    assert faults_after(("returns [%12] in null", f"returns [%12, %3] in {structure}")) == []


def test_a_bias_added_once_for_every_partial_sum() -> None:
    """The classic silent error of a row-split linear layer: the bias as copies on the axis that sums."""
    assert faults_after(
        ("{d:B,t:P} = conjoin::assign(%7", "{d:B,t:B} = conjoin::replicate(%7"),
    ) == [
        "%9 linear at mlp.py:5 (fc2): on axis t S(1), S(1), B -> P is not legal; the nearest legal way is "
        "S(1), S(1), P -> P"
    ]


def test_a_gradient_that_would_not_be_summed() -> None:
    """A weight used for different parts of the batch must be replicated: I would not sum its gradient."""
    assert faults_after(("linear(%0, %1, %2)", "linear(%0, param:fc1.weight, %2)")) == [
        "%3 linear at mlp.py:3 (fc1): on axis d S(0), I, B -> S(0) is not legal; the nearest legal way is "
        "S(0), B, B -> S(0)"
    ]


def test_a_reshard_that_gives_something_else_than_stated() -> None:
    found = faults_after(("%10: f32[8,3]{d:S(0)} = conjoin::reduce", "%10: f32[8,3]{d:S(0),t:B} = conjoin::reduce"))
    assert found[0] == (
        "%10 conjoin::reduce at mlp.py:6: gives f32[8,3]{d:S(0)}, the graph states f32[8,3]{d:S(0),t:B}"
    )


def test_an_axis_that_is_not_there() -> None:
    assert faults_after(("reduce(%11, axes=[\"d\"])", "reduce(%11, axes=[\"w\"])")) == [
        "%12 conjoin::reduce: conjoin::reduce takes P to I on axis w, where the tensor is I"
    ]
    assert "param:fc2.bias: there is no axis w: the mesh is d:2 t:2" in faults_after(
        ("param:fc2.bias f32[3] trainable", "param:fc2.bias f32[3]{w:S(0)} trainable")
    )


def test_an_axis_named_twice() -> None:
    assert faults_after(("reduce(%11, axes=[\"d\"])", "reduce(%11, axes=[\"d\", \"d\"])")) == [
        "%12 conjoin::reduce: conjoin::reduce names an axis twice: d, d"
    ]


def test_all_faults_are_told_not_only_the_first() -> None:
    found = faults_after(
        ("param:fc2.bias f32[3] trainable", "param:fc2.bias f32[3]{d:B} trainable"),
        ("returns [%12]", "returns [%11]"),
        ("%4: f32[8,6]{d:S(0),t:S(1)} = relu", "%4: f32[8,6]{d:S(0),t:S(0)} = relu"),
    )
    assert [fault.partition(":")[0] for fault in found] == [
        "param", "%4 relu at mlp.py", "%7 conjoin", "%9 linear at mlp.py", "loss",
    ]  # fmt: skip


@pytest.mark.parametrize("attribute", ["1", '"d"', "[]", "[1]", "none", '["d", none]'])
def test_any_attribute_of_a_reshard_is_judged(attribute: str) -> None:
    assert len(faults_after(('reduce(%11, axes=["d"])', f"reduce(%11, axes={attribute})"))) == 1
