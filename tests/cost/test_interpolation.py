"""Interpolation on made-up data: exact on power laws, bounded, and silent where nothing is near."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conjoin.cost.interpolation import BETWEEN, BEYOND, Point, interpolate


def power_law(size: float) -> float:
    return 3e-6 * size**0.8


def point(size: float) -> Point:
    return Point((log2(size),), 1e-6 * size, power_law(size))


@pytest.mark.parametrize("size", [3.0, 8.0, 20.0, 31.0])
def test_a_power_law_is_met_exactly_between_points(size: float) -> None:
    found = interpolate([point(2), point(4), point(16), point(32)], (log2(size),), 1e-6 * size)
    assert found == pytest.approx(power_law(size), rel=1e-6)


def test_the_nearest_points_count_not_the_far_ones() -> None:
    wild = Point((log2(1024.0),), 1e-6 * 1024, 1.0)
    found = interpolate([wild, point(4), point(16)], (3.0,), 8e-6)
    assert found == pytest.approx(power_law(8), rel=1e-6)


def test_a_point_of_the_same_sizes_counts_alone() -> None:
    assert interpolate([Point((3.0,), 1.0, 7.0), Point((4.0,), 2.0, 100.0)], (3.0,), 1.0) == pytest.approx(7.0)


def test_a_little_beyond_the_range_the_ratio_is_kept() -> None:
    known = [Point((4.0,), 1.0, 3.0)]
    assert interpolate(known, (4.0 + BEYOND,), 4.0) == pytest.approx(12.0)
    assert interpolate(known, (4.1 + BEYOND,), 4.0) is None
    assert interpolate([], (4.0,), 1.0) is None


def test_points_that_are_too_far_apart_say_nothing() -> None:
    wide = [Point((0.0,), 1.0, 1.0), Point((2 * BETWEEN + 2,), 1e4, 1e4)]
    assert interpolate(wide, (BETWEEN + 1,), 1e2) is None


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=2, max_size=8),
    st.floats(0, 10),
)
def test_the_ratio_stays_between_those_of_the_points(known: list[tuple[float, float]], place: float) -> None:
    points = [Point((at,), 2.0**at, 2.0**at * ratio) for at, ratio in known]
    found = interpolate(points, (place,), 2.0**place)
    if found is not None:
        ratios = [ratio for _, ratio in known]
        assert min(ratios) * 0.999 <= found / 2.0**place <= max(ratios) * 1.001
