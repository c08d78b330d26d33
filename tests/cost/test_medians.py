"""The fit recovers known efficiencies from made-up measurements, a third of which are wild."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from conjoin.cost import Measurement, fit_efficiencies, work_of, write_key
from conjoin.cost.roofline import Roofline
from conjoin.machine import DeviceType
from conjoin.ops import BATCH_MOMENTS, Call, TensorType

DEVICE = DeviceType("made-up", "cuda", 2**34, 1e12, (("float32", 1e13), ("bfloat16", 1e14)))
TRUTH = {"contraction": 0.62, "elementwise": 0.85, "elementwise backward": 0.5, "contraction bfloat16": 0.41}
OVERHEAD = 4e-6


def calls(dtype: torch.dtype) -> list[tuple[Call, tuple[int, ...]]]:
    made: list[tuple[Call, tuple[int, ...]]] = []
    for power in range(2, 13):
        x = TensorType((2**power, 2048), dtype)
        made.append((Call("mm", (x, TensorType((2048, 1024), dtype))), (0, 1)))
        made.append((Call("relu", (x,)), (0,)))
        made.append((Call("relu", (TensorType((2**power,), dtype),)), (0,)))
    return made


def measured(rng: Random, wild: float) -> list[Measurement]:
    roofline = Roofline(DEVICE, TRUTH, OVERHEAD)
    found = []
    for call, needs in calls(torch.float32) + calls(torch.bfloat16):
        work = work_of(call, needs)
        seconds = [
            roofline.seconds(part, work.family, work.dtype, backward=backward) * rng.uniform(0.97, 1.03)
            for part, backward in ((work.forward, False), (work.backward, True))
        ]
        if rng.random() < wild:
            seconds = [each * rng.choice((0.05, 20.0)) for each in seconds]
        found.append(Measurement(write_key(call, needs), *seconds, host_forward=7e-6, host_backward=9e-6))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_known_efficiencies_are_recovered_among_wild_measurements(seed: int) -> None:
    fit = fit_efficiencies(measured(Random(seed), wild=0.25), DEVICE)
    found = dict(fit.efficiency)
    assert fit.overhead_seconds == pytest.approx(OVERHEAD, rel=0.25)
    assert found["contraction float32"] == pytest.approx(0.62, rel=0.15)
    assert found["contraction bfloat16"] == pytest.approx(0.41, rel=0.15)
    assert found["elementwise backward"] == pytest.approx(0.5, rel=0.2)
    assert found["elementwise float32"] == pytest.approx(0.85, rel=0.2)
    assert (fit.host_forward, fit.host_backward) == (7e-6, 9e-6)


def test_the_error_says_how_good_the_fit_is() -> None:
    assert fit_efficiencies(measured(Random(0), wild=0.0), DEVICE).error < 0.1
    assert fit_efficiencies(measured(Random(0), wild=1.0), DEVICE).error > 0.5


def test_without_measurements_nothing_is_claimed() -> None:
    fit = fit_efficiencies([], DEVICE)
    assert fit.efficiency == () and fit.error == 0 and fit.overhead_seconds > 0


def test_keys_that_cannot_be_read_are_passed_over() -> None:
    strange = [Measurement("cat #0123", 1.0, 1.0), Measurement("update adamw f32 1 tensors 8 elements", 1.0, 0.0)]
    assert fit_efficiencies(strange, DEVICE).efficiency == ()


def test_operators_of_many_kernels_say_nothing_of_one() -> None:
    x, plain = TensorType((8, 64, 4, 4), torch.float32), measured(Random(0), wild=0.0)
    many = [Measurement(write_key(Call(BATCH_MOMENTS, (x,)), (0,)), 1e-3, 1e-3, host_forward=1e-3)] * 1000
    alone, both = (fit_efficiencies(each, DEVICE) for each in (plain, [*plain, *many]))
    assert replace(both, curves=(), host=()) == replace(alone, curves=(), host=())
    assert set(alone.curves) <= set(both.curves) and set(alone.host) <= set(both.host)
    assert {name.split()[0] for name, _ in set(both.curves) - set(alone.curves)} == {BATCH_MOMENTS}
