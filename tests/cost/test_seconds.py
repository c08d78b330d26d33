"""Seconds add up, and a sum is as weak as its weakest part."""

from __future__ import annotations

import itertools

from conjoin.cost import NO_SECONDS, Seconds, Source, weakest

ORDER = (Source.MEASURED, Source.INTERPOLATED, Source.ESTIMATED)


def test_a_sum_is_as_weak_as_its_weakest_part() -> None:
    for (i, first), (j, second) in itertools.product(enumerate(ORDER), repeat=2):
        assert Seconds(1.0, first) + Seconds(2.0, second) == Seconds(3.0, ORDER[max(i, j)])


def test_nothing_takes_no_time_and_weakens_nothing() -> None:
    for source in ORDER:
        assert Seconds(1.5, source) + NO_SECONDS == Seconds(1.5, source)
    assert weakest() is Source.MEASURED
