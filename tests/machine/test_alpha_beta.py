"""Lines through timed sizes: exact on exact data, unmoved by strays, never negative, with a break only where one is."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from conjoin.machine import CollectiveFit, fit_collective, fit_line, reduce_repeats

SIZES = [256 * 4**i for i in range(9)]
LATENCY, SLOPE = 1.5e-4, 8e-10


def times(sizes: list[int], latency: float = LATENCY, slope: float = SLOPE) -> list[float]:
    return [latency + slope * size for size in sizes]


def relative(found: float, expected: float) -> float:
    return abs(found / expected - 1)


@pytest.mark.parametrize("latency", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("slope", [1e-12, 1e-10, 1e-8])
def test_exact_data_gives_the_exact_line(latency: float, slope: float) -> None:
    fit = fit_line(SIZES, times(SIZES, latency, slope))
    assert fit.latency == pytest.approx(latency, rel=1e-6)
    assert fit.seconds_per_byte == pytest.approx(slope, rel=1e-6)
    assert fit.r_squared == pytest.approx(1) and fit.worst_error < 1e-9 and len(fit.errors) == len(SIZES)


def test_the_errors_are_fitted_over_measured_in_ascending_order() -> None:
    measured = times(SIZES)
    measured[3] *= 2
    fit = fit_line(SIZES[::-1], measured[::-1])
    assert fit.errors[3] == pytest.approx(-0.5, abs=0.01) and fit.worst_error == -fit.errors[3]
    assert all(abs(error) < 0.01 for i, error in enumerate(fit.errors) if i != 3)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_few_percent_moves_the_line_a_few_percent(seed: int) -> None:
    noise = random.Random(seed)
    fit = fit_line(SIZES, [y * noise.gauss(1, 0.03) for y in times(SIZES)])
    assert relative(fit.latency, LATENCY) < 0.1 and relative(fit.seconds_per_byte, SLOPE) < 0.1
    assert fit.r_squared > 0.99 and fit.worst_error < 0.15


@pytest.mark.parametrize("stray", range(len(SIZES)))
@pytest.mark.parametrize("factor", [3.0, 50.0])
def test_one_stray_size_does_not_move_the_line(stray: int, factor: float) -> None:
    noise = random.Random(stray)
    measured = [y * noise.gauss(1, 0.01) for y in times(SIZES)]
    measured[stray] *= factor
    fit = fit_line(SIZES, measured)
    assert relative(fit.latency, LATENCY) < 0.1 and relative(fit.seconds_per_byte, SLOPE) < 0.1
    assert fit.worst_error > 0.5, "the stray point is told, not hidden"


def test_a_stolen_core_in_some_repeats_is_not_seen() -> None:
    noise = random.Random(0)
    sizes = SIZES * 8
    measured = [y * noise.gauss(1, 0.02) * (10 if noise.random() < 0.3 else 1) for y in times(sizes)]
    fit = fit_line(sizes, measured)
    assert relative(fit.latency, LATENCY) < 0.1 and relative(fit.seconds_per_byte, SLOPE) < 0.1
    assert len(fit.errors) == len(SIZES) and fit.worst_error < 0.1
    by_mean = [fmean(y for x, y in zip(sizes, measured, strict=True) if x == size) for size in SIZES]
    assert relative(fit_line(SIZES, by_mean).latency, LATENCY) > 0.5, "the strays were strong enough to matter"


@pytest.mark.parametrize(("repeats", "middle"), [(1, 3.0), (2, 2.0), (3, 3.0), (4, 2.5)])
def test_repeats_are_reduced_to_their_median(repeats: int, middle: float) -> None:
    points = [*[(8, 3.0), (8, 1.0), (8, 4.0), (8, 2.0)][:repeats], (4, 7.0)]
    assert reduce_repeats(points) == ((4, 7.0), (8, middle))
    assert reduce_repeats([(1, float(y)) for y in range(9)]) == ((1, 4.0),)


def test_alpha_and_beta_are_never_negative() -> None:
    falling = fit_line([100, 200, 300], [3e-3, 2e-3, 1e-3])
    assert falling.seconds_per_byte == 0 and 1e-3 <= falling.latency <= 3e-3
    bent = fit_line([100, 200, 300], [1e-6, 1e-3, 2e-3])
    assert bent.latency == 0 and bent.seconds_per_byte > 0


def test_what_hardly_varies_is_latency() -> None:
    flat = fit_line(SIZES, [1e-3] * len(SIZES))
    assert flat.latency == pytest.approx(1e-3) and flat.seconds_per_byte < 1e-15 and flat.r_squared == 1
    alone = fit_line([4096], [1e-3])
    assert alone.latency + 4096 * alone.seconds_per_byte == pytest.approx(1e-3) and alone.r_squared == 1


def test_r_squared_is_low_where_the_line_explains_little() -> None:
    noise = random.Random(1)
    fit = fit_line(SIZES, [noise.uniform(1e-3, 5e-3) for _ in SIZES])
    assert 0 <= fit.r_squared < 0.7


# Two protocols.


def two_protocols(noise: random.Random | None = None) -> list[tuple[float, float]]:
    """Small messages at once, larger ones after a handshake and by a faster path."""
    exact = [(x, 2e-5 + 4e-9 * x) if x < 65536 else (x, 1.2e-3 + 5e-10 * x) for x in SIZES]
    return exact if noise is None else [(x, y * noise.gauss(1, 0.03)) for x, y in exact]


def test_a_switch_of_protocols_gets_two_lines() -> None:
    fit = fit_collective("all-reduce", ("d0",), two_protocols())
    assert (fit.kind, fit.axes, fit.break_bytes) == ("all-reduce", ("d0",), 65536)
    assert (fit.latency, fit.seconds_per_byte) == (pytest.approx(1.2e-3), pytest.approx(5e-10))
    assert (fit.small_latency, fit.small_seconds_per_byte) == (pytest.approx(2e-5), pytest.approx(4e-9))
    assert fit.r_squared == pytest.approx(1)
    for size, seconds in two_protocols():
        assert fit.seconds(size) == pytest.approx(seconds)


@pytest.mark.parametrize("seed", range(10))
def test_the_break_is_found_under_noise(seed: int) -> None:
    fit = fit_collective("all-gather", ("n0",), two_protocols(random.Random(seed)))
    assert fit.break_bytes == 65536
    assert all(relative(fit.seconds(x), y) < 0.15 for x, y in two_protocols())


@pytest.mark.parametrize("seed", range(30))
def test_one_protocol_gets_one_line_even_with_strays(seed: int) -> None:
    noise = random.Random(seed)
    points = [(x, y * noise.gauss(1, 0.03)) for x, y in zip(SIZES, times(SIZES), strict=True)]
    assert fit_collective("exchange", ("d0",), points).break_bytes == 0
    stray = noise.randrange(len(points) - 1)  # the largest size could as well be the first of a slower kind
    points[stray] = points[stray][0], 3 * points[stray][1]
    fit = fit_collective("exchange", ("d0",), points)
    assert relative(fit.seconds(SIZES[-1] * 4), LATENCY + SLOPE * SIZES[-1] * 4) < 0.5


def test_a_break_near_the_largest_size_is_seen() -> None:
    """Memory that is asked of the system anew for every large message: half the rate from there on."""
    points = [(x, 2e-4 + x * (1e-9 if x < 2**22 else 2.2e-9)) for x in SIZES]
    fit = fit_collective("all-gather", ("d0",), points)
    assert fit.break_bytes == 2**22 and fit.seconds(2**26) == pytest.approx(2e-4 + 2**26 * 2.2e-9)


def test_too_few_sizes_stay_on_one_line() -> None:
    fit = fit_collective("all-to-all", ("d0",), two_protocols()[2:6])
    assert fit.break_bytes == 0 and fit.seconds_per_byte > 0


def test_a_fit_is_a_value() -> None:
    fit = CollectiveFit("all-reduce", ("d0",), 1e-4, 1e-9, 1.0)
    assert fit == CollectiveFit("all-reduce", ("d0",), 1e-4, 1e-9, 1.0) and len({fit, fit}) == 1
    assert fit.seconds(0) == 1e-4
