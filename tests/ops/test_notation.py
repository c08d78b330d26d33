"""Index notation: what parses, what it binds to, and what it says when it does not fit."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.ops import Call, NotationError, TensorType, find_spec, space_of
from conjoin.ops.notation import (
    Access,
    Factors,
    Spread,
    Window,
    bind_sizes,
    broadcast_names,
    broadcast_shape,
    expand_dots,
    output_shapes,
    parse_notation,
)

FEW = settings(settings.get_profile("ops"))


def test_marks_say_what_is_whole_and_what_is_averaged() -> None:
    notation = parse_notation("b k! t~ -> b k!")
    assert notation.whole == {"k"} and notation.averaged == {"t"}
    assert notation.indices() == ("b", "k", "t") and notation.summed() == {"t"}


def test_every_form_of_a_dim_parses() -> None:
    notation = parse_notation("n (g c) y*2+r*1-1 (x-q*3+2)/4 1, i@v -> n")
    assert notation.operands[0].dims == (
        Factors(("n",)),
        Factors(("g", "c")),
        Window("y", stride=2, kernel="r", dilation=1, padding=1),
        Spread("x", stride=4, kernel="q", dilation=3, padding=2),
        Factors(()),
    )
    assert notation.operands[1] == Access((Factors(("i",)),), addresses="v")
    assert notation.whole == {"r", "q"}, "positions inside a window cannot be split"


def test_dots_are_aligned_at_the_right_and_broadcast() -> None:
    notation = expand_dots(parse_notation("..., ... -> ..."), [(2, 1, 4), (3, 1)])
    assert notation.operands[0].dims == (Factors(("d0",)), Factors(()), Factors(("d2",)))
    assert notation.operands[1].dims == (Factors(("d1",)), Factors(()))
    assert output_shapes(notation, bind_sizes(notation, [(2, 1, 4), (3, 1)], {})) == ((2, 3, 4),)


def test_nothing_before_the_arrow_is_no_operand_or_one_without_dims() -> None:
    assert expand_dots(parse_notation("-> k"), []).operands == ()
    assert expand_dots(parse_notation("-> 1"), [()]).operands == (Access(()),)


def test_sizes_follow_in_whatever_order_they_can() -> None:
    notation = parse_notation("(a b), (b c), c -> a")
    assert bind_sizes(notation, [(6,), (15,), (5,)], {}) == {"c": 5, "b": 3, "a": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a b", "no '->'"),
        ("a ? b -> a", "cannot read '? b'"),
        ("a -> a -> a", "cannot read"),
        ("(a (b)) -> a", "cannot read"),
        ("i i -> i", "i stands twice in 'i i'"),
        ("... ... -> ...", "stands twice"),
        ("k@ -> k", "cannot read '@'"),
    ],
)
def test_what_does_not_parse_is_named(text: str, says: str) -> None:
    with pytest.raises(NotationError) as error:
        parse_notation(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("op", "shapes", "says"),
    [
        (
            "mm",
            [(2, 3), (4, 5)],
            "'m k, k n -> m n' does not fit the shapes (2, 3), (4, 5): a dim of size 4 is not k=3",
        ),
        ("mm", [(2, 3, 4), (4, 5)], "an operand of shape (2, 3, 4) has not the 2 dims"),
        ("add.Tensor", [(2, 3), (4, 3)], "sizes 2 and 4 do not broadcast"),
        ("linear", [(2, 3), (5, 3), (4,)], "a dim of size 4 is not n=5"),
    ],
)
def test_errors_quote_pattern_and_shapes(op: str, shapes: list[tuple[int, ...]], says: str) -> None:
    spec = find_spec(op)
    assert spec is not None
    tensors = tuple(TensorType(shape, torch.float32) for shape in shapes)
    args = (*tensors, 1) if op == "add.Tensor" else tensors
    with pytest.raises(NotationError) as error:
        space_of(spec, Call(op, args))
    assert says in str(error.value) and all(str(shape) in str(error.value) for shape in shapes)


def test_a_call_that_the_declaration_does_not_cover_says_why() -> None:
    def refused(op: str, *args: object) -> str:
        spec = find_spec(op)
        assert spec is not None
        with pytest.raises(NotationError) as error:
            space_of(spec, Call(op, args))
        return str(error.value)

    x, mask, integers = (TensorType((4,), dtype) for dtype in (torch.float32, torch.bool, torch.int64))
    assert "depends on the mask" in refused("index.Tensor", x, (mask,))
    assert "depends on its values" in refused("one_hot", integers, -1)
    assert "stands twice" in refused("einsum", "ii->i", (TensorType((3, 3), torch.float32),), None)
    assert "called without dim" in refused("take_along_dim", x, integers, None)


@settings(FEW, max_examples=120)
@given(st.text(alphabet="ab1.!~@*+-/(),> 23", max_size=24) | st.text(max_size=12))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        notation = parse_notation(text)
    except NotationError:
        return
    assert notation.outputs and notation.summed() <= set(notation.indices())


@settings(FEW, max_examples=100)
@given(st.lists(st.lists(st.integers(1, 3), max_size=4).map(tuple), min_size=1, max_size=3))
def test_broadcasting_is_that_of_torch(shapes: list[tuple[int, ...]]) -> None:
    try:
        want = reduce(add, (torch.zeros(shape) for shape in shapes)).shape
    except RuntimeError:
        with pytest.raises(NotationError):
            broadcast_shape(shapes)
    else:
        assert broadcast_shape(shapes) == tuple(want)


def test_broadcast_names_refuses_more_dims_than_there_are() -> None:
    with pytest.raises(NotationError, match="does not broadcast"):
        broadcast_names(["a"], (2, 3), (3,))


@settings(FEW, max_examples=80)
@given(*(st.integers(low, high) for low, high in ((1, 3), (1, 4), (1, 3), (0, 3), (4, 20))))
def test_a_window_reaches_exactly_what_its_positions_read(
    stride: int, kernel: int, dilation: int, padding: int, size: int
) -> None:
    window = Window("y", stride, "r", dilation, padding)
    count = window.size_of_out(size, kernel)
    read = [y * stride + r * dilation - padding for y in range(count) for r in range(kernel)]
    if count > 0:
        assert window.reach(0, count, kernel) == (min(read), max(read) + 1)


@settings(FEW, max_examples=80)
@given(*(st.integers(low, high) for low, high in ((1, 3), (1, 4), (1, 3), (0, 3), (0, 9), (1, 6))))
def test_a_spread_reaches_all_that_writes_to_its_positions(
    stride: int, kernel: int, dilation: int, padding: int, lo: int, length: int
) -> None:
    start, stop = Spread("y", stride, "r", dilation, padding).reach(lo, lo + length, kernel)
    for x in range(-20, 40):
        touched = {x * stride + r * dilation - padding for r in range(kernel)}
        assert start <= x < stop or not touched & set(range(lo, lo + length))
