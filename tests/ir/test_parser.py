"""The text form, read: every wrong line is told by its number and what is wrong with it."""

from __future__ import annotations

import pytest

from conjoin.errors import GraphError
from conjoin.ir import LEAF, limits, parse_graph, verify
from tests.ir.graphs import GOLDEN
from tests.ir.wording import assert_three_sentences

DEEP = "[" * 9 + "]" * 9


def refuse(text: str) -> str:
    with pytest.raises(GraphError) as told:
        parse_graph(text)
    assert_three_sentences(told.value)
    return str(told.value)


def test_the_golden_graph_is_well_formed() -> None:
    assert verify(parse_graph(GOLDEN)).name == "mlp"


def test_blank_lines_and_indentation_do_not_matter() -> None:
    assert parse_graph(GOLDEN.replace("\n", "\n\n   ")) == parse_graph(GOLDEN)


def test_numbers_need_not_be_in_order() -> None:
    assert parse_graph(GOLDEN.replace("%0", "%77")) == parse_graph(GOLDEN)


def test_a_graph_may_take_nothing() -> None:
    graph = parse_graph('graph "g" eval\nreturns [1] in null')
    assert graph.inputs == () and graph.input_structure == LEAF and graph.outputs == (1,)


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ('graph "mlp" train', 'graph "mlp" test', 1, "expected train or eval, found 'test'"),
        ('graph "mlp" train', "graph mlp train", 1, "nothing readable at column 7"),
        ('graph "mlp" train', 'graph "mlp" train\ngraph "two" eval', 2, "has its name already"),
        ("input:x f32[4,8]", "input:x f32[4,8", 2, "this is not a leaf"),
        ("input:x f32[4,8]", "input:x f99[4,8]", 2, "'f99' is not a dtype"),
        ("input:x f32[4,8]", "input:x f32[4,8] training", 2, "this is not a leaf"),
        ("input:target i64[4]", "input:x i64[4]", 3, "there is a input:x already"),
        ("b64:AACAPw==", "b64:AACAPw", 7, "padding"),
        ("b64:AACAPw==", "b64:AACA", 7, "takes 4 bytes (at most 16,777,216), 3 are given"),
        ("takes [input:x, 2", "takes [input:y, 2", 8, "there is no input:y"),
        ("takes [input:x, 2, input:target]", "takes input:x", 8, "a list is expected"),
        ("takes [input:x, 2", "takes [[input:x], 2", 8, "something other than values"),
        ("takes [input:x, 2", "takes [f32, 2", 8, "something other than values"),
        ("takes [input:x, 2", "takes [input:x, 9223372036854775808", 8, "does not fit 64 bits"),
        ('{"kind":"tuple"', '{"kind":"set"', 8, "is not a structure"),
        ('{"kind":"tuple"', '{"kind:"tuple"', 8, "delimiter"),
        ("%1: f32[4,3] =", "%1: f32[4,3] <-", 10, "this is not a node"),
        ("linear(", "lineer(", 9, "has no operator 'lineer'"),
        ("linear(", "linear.weird(", 9, "has no operator 'linear.weird'"),
        ("linear(", "a::b::c(", 9, "is not an operator"),
        ("param:fc.bias)", "param:fc.bias, 1)", 9, "linear takes 3 arguments, not 4"),
        ("param:fc.bias)", 'bias="b")', 9, "linear cannot take this for 'bias'"),
        ("param:fc.bias)", "weight=param:fc.bias)", 9, "linear takes no 'weight' here"),
        ("param:fc.bias)", "bios=param:fc.bias)", 9, "linear takes no 'bios' here"),
        ("param:fc.bias)", "param:fc.bias", 9, "expected ', '"),
        ("p=0.5, train=true)\n", "p=%0, train=true)\n", 10, "dropout cannot take this for 'p'"),
        ("p=0.5, train=true)\n", "p=[1, [%0]], train=true)\n", 10, "dropout cannot take this for 'p'"),
        ("p=0.5, train=true)\n", f"p={DEEP}, train=true)\n", 10, "lists are nested too deeply"),
        ("dropout(%0, p=0.5, train=true)\n", "dropout(%1, p=0.5, train=true)\n", 10, "%1 is used before it is made"),
        (" #1", "", 11, "the same call stands above"),
        (" #1", " #4294967296", 11, "is not a number from 0 to"),
        (" #1", " # 1", 11, "after the call"),
        ('"mlp.py":13', "mlp.py:13", 11, "after the call"),
        ('"mlp.py":13', '"mlp.py":9999999999', 11, "is not a number from 0 to"),
        ("%2: f32[4,3] = d", "%1: f32[4,3] = d", 11, "%1 is made twice"),
        ("cat([%6, %5]", "cat([%6, 5]", 15, "cat cannot take this for 'tensors'"),
        ("cat([%6, %5]", "cat(%6", 15, "cat cannot take this for 'tensors'"),
        ('update "running mean" = %4', 'update "running mean" = 4', 18, "updated with a value of the graph"),
        ('update "running mean" = %4', 'update "running mean" = %4 or so', 18, "nothing may follow at column 27"),
        ("returns [%9", "returns [%10", 19, "%10 is used before it is made"),
        ("loss 0", "loss first", 19, "nothing readable"),
        ("loss 0", "loss 0 and more", 19, "nothing may follow"),
        ("loss 0\n", "loss 0\nreturns [] in null\n", 20, "there is a line 'returns' already"),
    ],
)
def test_a_wrong_line_is_told(old: str, new: str, line: int, reason: str) -> None:
    assert GOLDEN.count(old) >= 1
    message = refuse(GOLDEN.replace(old, new, 1))
    assert message.startswith(f"Line {line} of the graph cannot be read: ") and reason in message


@pytest.mark.parametrize("missing", ["graph", "returns"])
def test_a_missing_line_is_told(missing: str) -> None:
    lines = [line for line in GOLDEN.splitlines() if not line.startswith(missing)]
    assert f"no line '{missing}'" in refuse("\n".join(lines))


def test_text_that_is_no_graph_is_told() -> None:
    assert "no line 'graph'" in refuse("")
    assert "Line 1" in refuse("hello")


def test_too_long_a_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 100)
    assert "the limit is 100" in refuse(GOLDEN)


def test_too_many_lines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ITEMS", 10)
    assert "19 lines, the limit is 10" in refuse(GOLDEN)
