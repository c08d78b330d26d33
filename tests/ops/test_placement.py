"""The four placements, their duals and their text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.ops import At, Copies, Greatest, Invariant, Partial, Placement, Split, dual, parse_placement

FEW = settings(settings.get_profile("ops"))
PLACEMENTS = st.sampled_from([Invariant(), Copies(), Partial()]) | st.integers(0, 99).map(Split)


@FEW
@given(PLACEMENTS)
def test_text_leads_back(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


def test_the_greatest_of_parts_has_its_text_and_no_gradient() -> None:
    assert parse_placement("P(max)") is Greatest()
    assert dual(Greatest()) is Invariant()


@FEW
@given(PLACEMENTS)
def test_the_dual_of_the_dual_is_the_placement(placement: Placement) -> None:
    assert dual(dual(placement)) == placement


def test_the_gradient_of_copies_is_a_partial_sum() -> None:
    assert dual(Copies()) == Partial() and dual(Split(1)) == Split(1) and dual(Invariant()) == Invariant()


@pytest.mark.parametrize("text", ["", "X", "S", "S()", "S(-1)", "S(1", "S(1)x", "S(²)", "S(100)", "I "])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a placement: expected I, B, P, P\(max\), S"):
        parse_placement(text)


def test_a_truth_value_does_not_change_the_placement_of_a_number() -> None:
    assert Split(True) is Split(1) is Split(dim=1) and str(Split(1)) == "S(1)" and type(Split(1).dim) is int
    assert At(False) is At(0) and str(At(0)) == "At(0)"
    assert str(Split(True + 40)) == "S(41)" and type(Split(np.int64(42)).dim) is int


@pytest.mark.parametrize(
    "make", [lambda: Split(1.5), lambda: Split("1"), lambda: Split(), lambda: Split(1, 2), lambda: Invariant(1)]
)
def test_what_is_no_number_of_a_dim_is_refused(make: Callable[[], Placement]) -> None:
    with pytest.raises(TypeError):
        make()
