"""The table of laws: what it holds, and what it refuses."""

from __future__ import annotations

import pytest

from conjoin.errors import UsageError
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any, names_in
from conjoin.rules.patterns import inputs_of
from conjoin.rules.text import parse_expressions
from tests.cases import each_of
from tests.ir.wording import assert_three_sentences
from tests.laws.laws import Law, laws, lemmas, read_laws

GOOD = """
[[law]]
name = "add-commutative"
source = "taso"
left = "add(x, y)"
right = "add(y, x)"
comment = "order"
"""


def law_named(name: str) -> Law:
    (found,) = (law for law in (*laws(), *lemmas()) if law.name == name)
    return found


def test_the_table_has_all_properties_of_tasos() -> None:
    assert sum(law.source == "taso" for law in laws()) == 43


def test_there_are_more_laws_over_devices_than_unitys_33() -> None:
    assert sum(law.source == "parallel" for law in laws()) > 33
    assert {"partition", "combine", "replicate", "reduce"} <= {op for law in laws() for op in law.operators}


FROM_DEFINITIONS_ALONE = {"aggregate", "aggregate_mean", "aggregate_weighted", "flatten", "gain", "swap", "unflatten"}
"""Operators of no paper's table: rules about them are proven from what they are, and no law is needed."""


def test_every_operator_of_the_papers_has_a_law() -> None:
    assert {op for law in laws() for op in law.operators} == set(BY_NAME) - FROM_DEFINITIONS_ALONE


@pytest.mark.parametrize("name", ["concat-conv-features", "concat-conv-channels"])
def test_what_is_false_for_grouped_convolutions_is_said_of_one_group(name: str) -> None:
    assert str(law_named(name)).count("groups=1") == 3


@each_of([*laws(), *lemmas()], lambda law: law.name)
def test_a_law_reads_back_and_bounds_what_it_says(law: Law) -> None:
    assert parse_expressions(str(law.left)) == law.rule.left
    assert parse_expressions(str(law.right)) == law.rule.right
    assert law.comment
    assert set(inputs_of(*law.rule.right)) <= set(inputs_of(*law.rule.left))
    mentioned = {name for pair in law.apart for name in pair if isinstance(name, str)}
    assert mentioned <= names_in(*law.rule.outputs).keys()


def test_the_lemmas_are_no_laws() -> None:
    assert not {str(lemma) for lemma in lemmas()} & {str(law) for law in laws()}


def test_a_law_for_several_operators_is_one_for_each() -> None:
    text = GOOD.replace('"add(', '"f(').replace("comment", 'each = ["add", "mul"]\ncomment')
    assert [str(law) for law in read_laws(text)] == ["add(x, y) = add(y, x)", "mul(x, y) = mul(y, x)"]
    assert [law.name for law in read_laws(text)] == ["add-commutative:add", "add-commutative:mul"]


def test_numbers_that_are_apart_are_numbers() -> None:
    assert law_named("partition-bias").apart == (("a", -1),)


@pytest.mark.parametrize(
    ("kind", "value", "any_value"), [("act", "c", True), ("act", "relu", False), ("axis", -1, False)]
)
def test_names_stand_for_any_value_and_words_do_not(kind: str, value: int | str, any_value: bool) -> None:
    assert is_any(kind, value) is any_value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD + GOOD, "Another law has that name"),
        (GOOD.replace("comment", "remark"), "'remark'"),
        (GOOD.replace('comment = "order"', ""), "lacks the key 'comment'"),
        (GOOD.replace("taso", "tosa"), "'tosa'"),
        (GOOD.replace('"add(x, y)"', '"add(x, y); x"').replace('"add(y, x)"', '"add(y, x); x"'), "2 outputs"),
        (GOOD.replace('right = "add(y, x)"', 'right = "add(y, z)"'), "'z'"),
    ],
)
def test_malformed_laws_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        read_laws(text)
    assert_three_sentences(str(caught.value))
