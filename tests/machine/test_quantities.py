"""Numbers with units: exact both ways, refused outside of what any machine has."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import UsageError
from conjoin.machine.quantities import GIGABYTES_PER_SECOND, MICROSECONDS, TERAFLOPS, Quantity
from tests.ir.wording import assert_three_sentences

PROFILE = settings.get_profile("machine")


@given(st.floats(1e6, 1e14), st.sampled_from([GIGABYTES_PER_SECOND, TERAFLOPS]))
@settings(PROFILE, max_examples=60)
def test_what_is_written_is_read_bit_by_bit(value: float, quantity: Quantity) -> None:
    assert quantity.read("it", Decimal(quantity.text(value))) == value


@given(st.floats(0, 1e3))
@settings(PROFILE, max_examples=60)
def test_small_numbers_too(value: float) -> None:
    assert MICROSECONDS.read("it", Decimal(MICROSECONDS.text(value))) == value


@pytest.mark.parametrize("value", [0, -1, Decimal("nan"), Decimal("inf"), Decimal("-1e99999"), Decimal("1e7"), 10**30])
def test_what_is_no_rate(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        GIGABYTES_PER_SECOND.read("node[0].link[2].gigabytes_per_second", value)
    assert_three_sentences(caught.value)
    assert "The node[0].link[2].gigabytes_per_second is " in str(caught.value)
    assert "from 1e-06 to 1e+06 gigabytes per second" in str(caught.value)


@pytest.mark.parametrize("value", [True, "25", None, [], {}, 2.5])
def test_what_is_no_number_of_a_file(value: object) -> None:
    with pytest.raises(UsageError, match="must be a number"):
        GIGABYTES_PER_SECOND.read("it", value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e16, "fast", True, None, 10**400])
def test_what_is_no_rate_in_base_units(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        GIGABYTES_PER_SECOND.check("bandwidth", value)
    assert_three_sentences(caught.value)


def test_the_bounds_are_allowed() -> None:
    for value in (1e3, 1e15, 10**15):
        GIGABYTES_PER_SECOND.check("bandwidth", value)
    MICROSECONDS.check("latency", 0)
