"""The four placements, their duals and their text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.ops import Copies, Invariant, Partial, Placement, Split, dual, parse_placement

FEW = settings(settings.get_profile("ops"))
PLACEMENTS = st.sampled_from([Invariant(), Copies(), Partial()]) | st.integers(0, 99).map(Split)


@FEW
@given(PLACEMENTS)
def test_text_leads_back(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@FEW
@given(PLACEMENTS)
def test_the_dual_of_the_dual_is_the_placement(placement: Placement) -> None:
    assert dual(dual(placement)) == placement


def test_the_gradient_of_copies_is_a_partial_sum() -> None:
    assert dual(Copies()) == Partial() and dual(Split(1)) == Split(1) and dual(Invariant()) == Invariant()


@pytest.mark.parametrize("text", ["", "X", "S", "S()", "S(-1)", "S(1", "S(1)x", "S(²)", "S(100)", "I "])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a placement: expected I, B, P, S"):
        parse_placement(text)
