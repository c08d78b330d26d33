"""The cost model: which source a number has, that estimates grow with size, and that answers are quick."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conjoin.cost import (
    CostModel,
    Fit,
    Measurement,
    MeasurementStore,
    OperatorCost,
    Profile,
    Seconds,
    Source,
    copy_key,
    read_key,
    shipped_profiles,
    update_key,
    write_key,
)
from conjoin.cost.device_costs import DeviceCosts
from conjoin.errors import UsageError
from conjoin.machine import DeviceType, parse_machine
from conjoin.ops import LINEAR_RELU, Call, TensorType
from tests.ir.wording import assert_three_sentences

CPU = DeviceType("one core", "cpu", 2**34, 1e10, (("float32", 1e11),))
GPU = DeviceType("one gpu", "cuda", 2**34, 1e12, (("float32", 1e13), ("bfloat16", 1e14)))
FIT = Fit((("contraction", 0.5),), 1e-6, 6e-6, 7e-6, 0.1)


def f32(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def linear(batch: int, *, bias: bool = False) -> Call:
    return Call("linear", (f32(batch, 256), f32(512, 256), f32(512) if bias else None))


def profile(device: DeviceType, *known: Measurement, fit: Fit = FIT) -> Profile:
    return Profile(device.name, "2.0", "today", "by hand", fit, known)


def timed(call: Call, needs: tuple[int, ...], forward: float, backward: float = 0.0) -> Measurement:
    return Measurement(write_key(call, needs), forward, backward, 5e-6, 8e-6)


def test_a_measured_call_is_what_was_measured() -> None:
    model = CostModel(profiles=[profile(GPU, timed(linear(64), (0, 1), 1e-3, 2e-3))])
    assert model.operator(linear(64), (0, 1), GPU) == OperatorCost(
        Seconds(1e-3, Source.MEASURED), Seconds(2e-3, Source.MEASURED), 5e-6, 8e-6
    )


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_fused_layer_costs_what_its_parts_do_and_less_on_a_gpu(device: DeviceType) -> None:
    layer, needs = linear(64, bias=True), (0, 1, 2)
    model = CostModel(profiles=[profile(device, timed(layer, needs, 1e-3, 2e-3))])
    fused = model.operator(Call(LINEAR_RELU, layer.args), needs, device)
    product = model.operator(layer, needs, device)
    function = model.operator(Call("relu", (f32(64, 512),)), (0,), device)
    assert fused.backward.value == product.backward.value + function.backward.value
    assert fused.backward.source is Source.ESTIMATED, "as weak as the weaker part"
    alone = 0.0 if device is GPU else function.forward.value
    assert fused.forward.value == product.forward.value + alone and function.forward.value > 0
    assert fused.host_backward >= product.host_backward + function.host_backward


def test_between_measured_calls_it_is_interpolated() -> None:
    known = [timed(linear(n), (0, 1), 1e-6 * n, 3e-6 * n) for n in (1024, 4096)]
    cost = CostModel(profiles=[profile(GPU, *known)]).operator(linear(2048), (0, 1), GPU)
    assert cost.forward.source is cost.backward.source is Source.INTERPOLATED
    assert cost.forward.value == pytest.approx(2048e-6, rel=0.05)
    assert cost.backward.value == pytest.approx(3 * 2048e-6, rel=0.05)
    assert (cost.host_forward, cost.host_backward) == (6e-6, 7e-6)


def test_other_gradients_of_a_measured_call_are_interpolated_too() -> None:
    model = CostModel(profiles=[profile(GPU, timed(linear(4096), (0, 1), 1e-3, 2e-3))])
    cost = model.operator(linear(4096), (1,), GPU)
    assert cost.forward.source is Source.INTERPOLATED and cost.forward.value == pytest.approx(1e-3)
    assert cost.backward.value == pytest.approx(1e-3, rel=0.1)  # one of two products


@pytest.mark.parametrize(
    "other",
    [
        Call("linear", (TensorType((64, 256), torch.bfloat16), TensorType((512, 256), torch.bfloat16), None)),
        linear(64, bias=True),
        linear(2**20),
    ],
    ids=["other dtype", "other operands", "far away"],
)
def test_what_is_not_of_the_kind_or_not_near_is_estimated(other: Call) -> None:
    model = CostModel(profiles=[profile(GPU, timed(linear(64), (0, 1), 5.0, 5.0))])
    cost = model.operator(other, (0, 1), GPU)
    assert cost.forward.source is cost.backward.source is Source.ESTIMATED
    assert cost.forward.value < 0.1


def test_rows_are_rows_in_however_many_dims() -> None:
    model = CostModel(profiles=[profile(GPU, timed(linear(64), (0, 1), 5.0, 5.0))])
    cost = model.operator(Call("linear", (f32(8, 8, 256), f32(512, 256), None)), (0, 1), GPU)
    assert cost.forward.value == cost.backward.value == pytest.approx(5.0)
    assert cost.forward.source is cost.backward.source is Source.INTERPOLATED


def test_attributes_that_are_not_sizes_tell_kinds_apart() -> None:
    def conv(stride: int, groups: int = 1) -> Call:
        weight = f32(32, 16 // groups, 3, 3)
        return Call("conv2d", (f32(8, 16, 32, 32), weight, None, (stride,) * 2, (1, 1), (1, 1), groups))

    model = CostModel(profiles=[profile(GPU, timed(conv(1), (), 5.0))])
    assert model.operator(conv(2), (), GPU).forward.source is Source.ESTIMATED
    assert model.operator(conv(1), (), GPU).forward.source is Source.MEASURED


def test_an_estimate_is_the_roofline() -> None:
    model = CostModel(profiles=[profile(GPU)])
    cost = model.operator(linear(4096), (0, 1), GPU)
    ideal = 2 * 4096 * 256 * 512 / 1e13
    assert cost.forward == Seconds(pytest.approx(ideal / 0.5 + 1e-6), Source.ESTIMATED)
    assert cost.backward.value == pytest.approx(2 * ideal / 0.5 + 1e-6)
    assert (cost.host_forward, cost.host_backward) == (6e-6, 7e-6)


def test_a_calibrated_device_type_knows_better_than_a_profile() -> None:
    calibrated = replace(GPU, efficiency=(("contraction", 0.25),), overhead_seconds=9e-6)
    cost = CostModel(profiles=[profile(GPU)]).operator(linear(4096), (), calibrated)
    assert cost.forward.value == pytest.approx(2 * 4096 * 256 * 512 / 1e13 / 0.25 + 9e-6)


def test_without_gradients_there_is_no_backward() -> None:
    for model in (CostModel(profiles=()), CostModel(profiles=[profile(GPU, timed(linear(64), (), 1e-3))])):
        cost = model.operator(linear(64), (), GPU)
        assert cost.backward.value == 0 == cost.host_backward or cost.backward.value == 0


def test_views_cost_nothing_on_the_device_but_the_launch() -> None:
    view = Call("view", (f32(64, 64), (4096,)))
    model = CostModel(profiles=())
    on_gpu, on_cpu = model.operator(view, (0,), GPU), model.operator(view, (0,), CPU)
    assert on_gpu.forward.value == on_gpu.backward.value == 0 and on_gpu.host_forward > 0
    assert 0 < on_cpu.forward.value < 1e-5 and on_cpu.host_forward == 0


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_estimates_grow_with_size(device: DeviceType) -> None:
    model = CostModel(profiles=())
    families = {
        "linear": lambda n: linear(n, bias=True),
        "relu": lambda n: Call("relu", (f32(n, 64),)),
        "softmax": lambda n: Call("_softmax", (f32(n, 64), 1, False)),
        "conv": lambda n: Call("conv2d", (f32(n, 3, 16, 16), f32(8, 3, 3, 3), None, (1, 1), (1, 1), (1, 1), 1)),
        "embedding": lambda n: Call("embedding", (f32(1000, 64), TensorType((n,), torch.int64), -1, False, False)),
        "nonzero": lambda n: Call("nonzero", (f32(n),)),
    }
    for name, make in families.items():
        costs = [model.operator(make(2**power), (0,), device) for power in range(12)]
        for values in ([c.forward.value for c in costs], [c.backward.value for c in costs]):
            assert values == sorted(values), name
        assert costs[-1].forward.value > costs[0].forward.value


def test_a_store_counts_for_more_than_a_profile_and_this_torch_more_than_others(tmp_path: Path) -> None:
    call, needs = linear(64), (0, 1)
    with MeasurementStore(tmp_path / "costs.sqlite") as store:
        store.add(GPU.name, "0.1", [timed(call, needs, 2e-3)])
        shipped = [profile(GPU, timed(call, needs, 1e-3))]
        assert CostModel([store], shipped).operator(call, needs, GPU).forward.value == 2e-3
        store.add(GPU.name, torch.__version__, [timed(call, needs, 3e-3)])
        store.add(GPU.name, "0.2", [timed(call, needs, 4e-3)])
        assert CostModel([store], shipped).operator(call, needs, GPU).forward.value == 3e-3
        assert CostModel([store], shipped).operator(call, needs, CPU).forward.source is Source.ESTIMATED


def test_a_store_of_many_measurements_gives_efficiencies(tmp_path: Path) -> None:
    known = [timed(linear(2**power, bias=True), (), 2 * 2**power * 256 * 512 / 1e13 / 0.2) for power in range(11, 17)]
    known += [timed(Call("relu", (f32(8, size),)), (), 1e-6) for size in range(1, 40)]
    with MeasurementStore(tmp_path / "costs.sqlite") as store:
        store.add(GPU.name, torch.__version__, known)
        cost = CostModel([store], ()).operator(Call("mm", (f32(4096, 4096), f32(4096, 4096))), (), GPU)
    assert cost.forward.source is Source.ESTIMATED
    assert cost.forward.value == pytest.approx(2 * 4096**3 / 1e13 / 0.2, rel=0.2)


def test_answers_are_quick() -> None:
    model = CostModel(profiles=())
    fresh = [linear(batch, bias=True) for batch in range(1, 401)]
    start = time.process_time()
    for call in fresh:
        model.operator(call, (0, 1, 2), GPU)
    first = (time.process_time() - start) / len(fresh)
    start = time.process_time()
    for _ in range(50):
        for call in fresh:
            model.operator(call, (0, 1, 2), GPU)
    again = (time.process_time() - start) / len(fresh) / 50
    assert first < 1e-3 and again < 1e-5  # some 200 µs and 1 µs on a quiet core


def test_an_optimizer_step() -> None:
    parameters = [f32(1024, 1024)] * 16
    estimated = CostModel(profiles=()).update(parameters, "adamw", GPU)
    assert estimated.source is Source.ESTIMATED
    assert estimated.value == pytest.approx(20 * 4 * 2**24 / 1e12 / 0.8, rel=0.1)
    known = [
        Measurement(update_key("adamw", torch.float32, 16, elements), 1e-9 * elements, 0.0)
        for elements in (2**22, 2**24, 2**26)
    ]
    model = CostModel(profiles=[profile(GPU, *known)])
    assert model.update(parameters, "adamw", GPU) == Seconds(1e-9 * 2**24, Source.MEASURED)
    between = model.update(parameters * 2, "adamw", GPU)
    assert between.source is Source.INTERPOLATED and between.value == pytest.approx(1e-9 * 2**25, rel=0.1)
    assert model.update([], "adamw", GPU).value == 0
    with pytest.raises(UsageError) as told:
        model.update(parameters, "lion", GPU)
    assert_three_sentences(told.value)


def test_fewer_passes_over_memory_are_faster() -> None:
    model = CostModel(profiles=())
    names = ("sgd", "sgd-momentum", "adamw-fused", "adam", "adamw")
    values = [model.update([f32(4096, 4096)], name, GPU).value for name in names]
    assert values[0] < values[2] < values[1] < values[3] < values[4]


def test_copies() -> None:
    model = CostModel(profiles=[profile(GPU, *(Measurement(copy_key(2**p), 2.0**p / 1e10, 0.0) for p in (20, 24)))])
    assert model.copy(2**24, GPU) == Seconds(2**24 / 1e10, Source.MEASURED)
    assert model.copy(2**22, GPU).source is Source.INTERPOLATED
    assert model.copy(2**22, GPU).value == pytest.approx(2**22 / 1e10, rel=0.2)
    assert model.copy(2**40, GPU).source is Source.ESTIMATED
    assert model.copy(2**40, CPU).value == 0


H200 = parse_machine("dgx-h200").device_type(0)


def held_back(start: str) -> list[tuple[float, float, Measurement]]:
    """Of every measured key of an operator what is estimated where none of them is known, and what was measured."""
    (profile,) = [each for each in shipped_profiles() if each.device == H200.name]
    held = [each for each in profile.outcomes if each.key.startswith(start) and isinstance(each, Measurement)]
    known = replace(profile, outcomes=tuple(each for each in profile.outcomes if each not in held))
    costs, found = CostModel(profiles=(known,)), []
    for each in held:
        asked = read_key(each.key)
        assert asked is not None
        cost = costs.operator(*asked, H200)
        found.append((cost.forward.value / each.forward, cost.backward.value / each.backward, each))
    return found


def test_products_in_eight_bits_are_estimated_with_their_casts() -> None:
    found = held_back("conjoin::scaled_linear ")
    assert len(found) == 15
    assert all(abs(ratio - 1) < 0.2 for forward, backward, _ in found for ratio in (forward, backward)), found


@pytest.mark.parametrize(
    ("key", "forward", "backward"),
    [
        ("conv2d f32[16,256,32,32] f32[256,256,3,3] none [1, 1] [2, 2] [2, 2] 1 | grads 0,1", 1.117e-4, 2.365e-4),
        ("conv2d f32[16,512,32,32] f32[512,512,3,3] none [1, 1] [2, 2] [2, 2] 1 | grads 0,1", 2.890e-4, 8.067e-4),
        ("conv2d f32[16,512,32,32] f32[512,512,3,3] none [1, 1] [4, 4] [4, 4] 1 | grads 0,1", 2.891e-4, 8.231e-4),
    ],
)
def test_convolutions_with_gaps_that_were_never_measured(key: str, forward: float, backward: float) -> None:
    """The judge is an H200 (2026-11-18); the profile does not hold these calls."""
    cost = CostModel().operator(*read_key(key), H200)  # type: ignore[misc]
    assert cost.forward.source is not Source.MEASURED
    assert 0.5 < cost.forward.value / forward < 2
    assert 0.5 < (cost.forward.value + cost.backward.value) / (forward + backward) < 2


def test_images_made_large_are_not_priced_as_many_small_ones() -> None:
    """A thread makes a pixel of all images, so that few pixels are slow. These took an H200 0.14 ms (2026-11-18)."""
    key = "upsample_bilinear2d.vec f32[16,21,32,32] [256, 256] false | grads 0"
    cost = CostModel().operator(*read_key(key), H200)  # type: ignore[misc]
    assert cost.forward.value < 2 * 1.407e-4


def test_convolutions_of_images_whose_channels_lie_last_have_prices_of_their_own() -> None:
    """A depthwise one in bfloat16 takes the H200 half as long as where they lie first."""
    x, w = TensorType((64, 96, 56, 56), torch.bfloat16), TensorType((96, 1, 7, 7), torch.bfloat16)
    call = Call("conv2d", (x, w, None, (1, 1), (3, 3), (1, 1), 96))
    first, last = (CostModel().operator(each, (0, 1), H200) for each in (call, replace(call, turned=True)))
    assert last.forward.value + last.backward.value < 0.7 * (first.forward.value + first.backward.value)


def test_of_measured_calls_only_those_of_a_kind_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "conv2d f32[16,256,32,32] f32[256,256,3,3] none [1, 1] [2, 2] [2, 2] 1 | grads 0,1"
    asked, estimates = [], DeviceCosts._estimates

    def noted(self: DeviceCosts, call: Call, needs: tuple[int, ...]) -> tuple[float, float]:
        asked.append(call)
        return estimates(self, call, needs)

    monkeypatch.setattr(DeviceCosts, "_estimates", noted)
    fresh = CostModel(profiles=list(shipped_profiles()))  # that shares nothing with other models
    fresh.operator(*read_key(key), H200)  # type: ignore[misc]
    (profile,) = (profile for profile in shipped_profiles() if profile.device == H200.name)
    of_convolutions = sum(outcome.key.startswith("conv2d ") for outcome in profile.outcomes)
    assert 0 < len(asked) < of_convolutions / 10


def test_what_one_model_has_priced_another_of_the_process_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an equal device that is another object; a model with profiles of its own asks for itself."""
    call, device = Call("relu", (TensorType((7, 11, 13), torch.float32),)), replace(H200, memory_bytes=2**33)
    known = CostModel().operator(call, (0,), device)
    monkeypatch.setattr(DeviceCosts, "find", lambda *_: None)
    assert CostModel().operator(call, (0,), replace(device)) is known
    assert CostModel(profiles=()).operator(call, (0,), device) is None
