"""Every law against the definitions of its operators, and against the other laws."""

from __future__ import annotations

import pytest

from conjoin.rules.text import parse_rule
from tests.cases import each_of
from tests.laws.law_checks import (
    LARGEST,
    check_law,
    find_contradiction,
    find_counterexample,
    find_redundant,
    forms_of,
)
from tests.laws.laws import Law, laws, lemmas

EVERY = (*laws(), *lemmas())
TASO = tuple(law for law in laws() if law.source == "taso")
SOME = EVERY[::5]
"""For the default run; `benchmarks/taso_laws.py` and the whole matrix take all."""
ONES = (1, 1, 1, 1)


def law(left: str, right: str, *apart: tuple[str, int | str]) -> Law:
    return Law(parse_rule("", left, right), "", "", apart=apart)


RELU_LINEAR = law("conv[act=relu](x, add(y, z))", "add(conv[act=relu](x, y), conv[act=relu](x, z))")


def holds(one: Law) -> None:
    found = check_law(one)
    assert found.proven, found.reason
    assert found.needs == one.needs


@pytest.mark.parametrize("one", SOME, ids=lambda one: one.name)
def test_laws_follow_from_definitions_and_need_what_they_say(one: Law) -> None:
    holds(one)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_all_laws_follow_from_definitions(one: Law) -> None:
    holds(one)


@each_of(EVERY, lambda one: one.name, at_once=8)
def test_laws_hold_at_small_sizes(one: Law) -> None:
    found = find_counterexample(one, largest=2)
    assert found.counterexample is None
    assert found.obligations > 0


@pytest.mark.parametrize("one", SOME, ids=lambda one: one.name)
def test_laws_hold_at_some_sizes_up_to_4(one: Law) -> None:
    found = find_counterexample(one, LARGEST, every=997)
    assert found.counterexample is None
    assert found.obligations > 0


def test_a_false_law_is_not_proven_and_has_a_counterexample() -> None:
    assert not check_law(RELU_LINEAR).proven
    found = find_counterexample(RELU_LINEAR)
    assert found.counterexample is not None
    assert found.counterexample[1] == {"x": ONES, "y": ONES, "z": ONES}


@pytest.mark.parametrize(
    ("false", "shapes"),
    [
        (law("matmul(x, y)", "matmul(y, x)"), {"x": (1, 2, 2), "y": (1, 2, 2)}),
        (
            law("mean[axis=a](concat[axis=a](x, y))", "add(mean[axis=a](x), mean[axis=a](y))"),
            {"x": (1, 1), "y": (1, 1)},
        ),
        (law("reduce(replicate(x))", "x"), {"x": (1,), "m": (2,)}),
        (law("relu(sum[axis=-1](x))", "sum[axis=-1](relu(x))"), {"x": (1, 2)}),
        (
            law("max_pool[kernel=2, pad=valid](x)", "avg_pool[kernel=2, pad=valid](x)"),
            {"x": (1, 1, 2, 2), "kernel 2": (2,)},
        ),
    ],
    ids=str,
)
def test_false_laws_are_refuted_at_the_smallest_sizes(false: Law, shapes: dict[str, tuple[int, ...]]) -> None:
    found = find_counterexample(false, largest=2)
    assert found.counterexample is not None
    assert found.counterexample[1] == shapes


def test_coefficients_are_exact() -> None:
    twice, thrice = "add(mean[axis=a](x), mean[axis=a](x))", "add(mean[axis=a](x), mean[axis=a](add(x, x)))"
    assert find_counterexample(law("mean[axis=a](add(add(x, x), x))", thrice), largest=3).counterexample is None
    assert find_counterexample(law("mean[axis=a](add(add(x, x), x))", twice), largest=3).counterexample is not None


def test_dims_that_must_be_apart_have_to_be_said() -> None:
    bias = ("partition[axis=a](bias(x, v))", "bias(partition[axis=a](x), replicate(v))")
    assert check_law(law(*bias, ("a", -1))).proven
    assert not check_law(law(*bias)).proven


def test_names_stand_for_each_other_unless_they_are_apart() -> None:
    sides = ("partition[axis=a](softmax[axis=b](x))", "softmax[axis=b](partition[axis=a](x))")
    assert any("axis=b](softmax[axis=b]" in str(form) for form in forms_of(law(*sides)))
    assert not any("axis=b](softmax[axis=b]" in str(form) for form in forms_of(law(*sides, ("a", "b"))))


def test_nothing_false_follows_from_the_laws() -> None:
    assert not find_contradiction(TASO, 1000).proven
    assert not find_contradiction(laws(), 1000).proven


def test_a_contradiction_is_found() -> None:
    found = find_contradiction([*TASO, Law(parse_rule("first", "add(x, y)", "x"), "", "")], 20_000)
    assert found.proven
    assert found.laws == ("add-commutative", "first")


def test_no_law_of_tasos_follows_from_the_others() -> None:
    assert [one.name for one, _ in find_redundant(TASO, 300)] == []


def test_a_redundant_law_is_found() -> None:
    (lemma,) = (one for one in lemmas() if one.name == "matmul-add-left")
    some = [one for one in TASO if one.operators <= {"matmul", "add", "transpose"}]
    assert "matmul-add-left" in [one.name for one, _ in find_redundant([*some, lemma], 5000)]
