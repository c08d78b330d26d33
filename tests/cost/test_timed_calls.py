"""Measuring on this host's CPU: sane against plain timing, labelled absences, barriers, every declared operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from statistics import median

import pytest
import torch

from conjoin.cost import Absence, Measurement, measure, write_key
from conjoin.cost.clocks import CpuClock, Times
from conjoin.ops import Call, TensorType, all_ops, random_call


def f32(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


BIG = Call("mm", (f32(512, 512), f32(512, 512)))


def seconds_of(call: Call, needs: tuple[int, ...] = (), seconds: float = 0.1) -> Measurement:
    outcome = measure(call, needs, "cpu", seconds=seconds)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def test_a_big_product_takes_what_plain_timing_says() -> None:
    a, b = torch.rand(512, 512), torch.rand(512, 512)
    ratios = []
    for _ in range(3):  # other processes use the same cores: one fair comparison is enough
        times = []
        for _ in range(9):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        ratios.append(seconds_of(BIG).forward / median(times))
        if 0.4 < ratios[-1] < 2.5:
            return
    pytest.fail(f"measured over plainly timed: {ratios}")


def test_backward_is_measured_where_gradients_are_needed() -> None:
    none, both = seconds_of(BIG), seconds_of(BIG, (0, 1))
    assert none.backward == 0 and both.backward > 0.5 * both.forward
    assert (both.host_forward, both.host_backward) == (0, 0)
    assert both.key == write_key(BIG, (0, 1))


def test_more_work_takes_longer() -> None:
    small = seconds_of(Call("mm", (f32(64, 64), f32(64, 64))), (0, 1))
    large = seconds_of(BIG, (0, 1))
    assert large.forward > 5 * small.forward and large.backward > 5 * small.backward


def test_a_call_that_cannot_run_is_a_labelled_absence() -> None:
    outcome = measure(Call("mm", (f32(4, 4), f32(5, 4))), (), "cpu")
    assert isinstance(outcome, Absence) and "shapes cannot be multiplied" in outcome.reason
    assert outcome.key == "mm f32[4,4] f32[5,4]"


def test_a_call_that_does_not_fit_is_a_labelled_absence() -> None:
    huge = f32(10**6, 10**6)
    outcome = measure(Call("mm", (huge, huge)), (0, 1), "cpu")
    assert isinstance(outcome, Absence) and "GiB are needed" in outcome.reason


def test_the_barrier_stands_before_each_timed_block_and_counts_the_same_everywhere() -> None:
    counts = []
    for budget in (0.0, 0.05):
        called: list[int] = []
        outcome = measure(BIG, (0, 1), "cpu", seconds=budget, barrier=lambda called=called: called.append(1))
        assert isinstance(outcome, Measurement)
        counts.append(len(called))
    assert counts[0] == counts[1] > 4


def test_the_slowest_rank_counts() -> None:
    another = [3.0, 5.0]
    outcome = measure(
        BIG, (0, 1), "cpu", barrier=lambda: None, slowest=lambda *mine: list(map(max, mine, another))
    )  # fmt: skip
    assert isinstance(outcome, Measurement) and [outcome.forward, outcome.backward] == another


@pytest.mark.parametrize(("slow", "num_rounds"), [(0.005, 12), (1.0, 1), (1e-9, 100)])
def test_ranks_measure_together_for_long(slow: float, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short call is run again and again, else the rank that begins first would have a shared core for itself."""
    seen: list[int] = []

    def note(clock: CpuClock, barrier: Callable[[], None]) -> Times:
        seen.append(clock.num_rounds)
        return Times(1.0, 1.0)

    monkeypatch.setattr(CpuClock, "time", note)
    measure(BIG, (0, 1), "cpu", barrier=lambda: None, slowest=lambda *mine: [slow] * len(mine))
    assert set(seen) == {num_rounds}


def test_the_random_state_and_the_grad_mode_of_the_caller_stay() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        found = seconds_of(Call("dropout", (f32(64, 64), 0.5, True)), (0,), 0.01)
        assert not torch.is_grad_enabled()
    assert found.backward > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_norm_runs_by_the_operator_that_users_call() -> None:
    channel = f32(8)
    args = (f32(4, 8, 16, 16), channel, channel, channel, channel, True, 0.1, 1e-5)
    found = seconds_of(Call("_native_batch_norm_legit_functional", args), (0, 1, 2), 0.01)
    assert found.forward > 0 and found.backward > 0


def test_a_call_without_operands_and_one_without_gradient() -> None:
    assert seconds_of(Call("zeros", ((64, 64), None, None, None, None)), (), 0.01).forward > 0
    index = TensorType((16,), torch.int64)
    assert seconds_of(Call("embedding", (f32(32, 4), index, -1, False, False)), (0,), 0.01).backward > 0
    assert seconds_of(Call("gt.Scalar", (f32(8), 0)), (0,), 0.01).backward == 0


@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore")
def test_every_declared_operator_can_be_measured(part: int) -> None:
    for spec in all_ops()[part::4]:
        call = random_call(spec, Random(1))
        floating = [t.dtype.is_floating_point or t.dtype.is_complex for t in call.tensors]
        names = zip(call.operand_names, floating, strict=True)
        needs = tuple(i for i, (name, real) in enumerate(names) if spec.smooth and real and name not in spec.constants)
        outcome = measure(call, needs, "cpu", seconds=0.0)
        assert isinstance(outcome, Measurement), outcome
        assert outcome.forward > 0
