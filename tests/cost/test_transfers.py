"""Optimizer steps measured on this host."""

from __future__ import annotations

from math import log2
from pathlib import Path
from statistics import median

import pytest
import torch

from conjoin.cost import OPTIMIZERS, CostModel, Measurement, MeasurementStore, Source, measure_update, shipped_profiles
from conjoin.cost.transfers import read_update
from conjoin.machine import Machine
from conjoin.ops import Call, TensorType


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_measured(name: str) -> None:
    found = measure_update(name, torch.float32, 3, 1000, "cpu")
    assert found.key == f"update {name} f32 3 tensors 1000 elements"
    assert found.forward > 0


def test_more_elements_take_longer() -> None:
    small, large = (measure_update("adamw", torch.float32, 1, count, "cpu").forward for count in (2**8, 2**22))
    assert large > 3 * small


H200 = Machine.preset("dgx-h200").device_type(0)
DAMAGED = (
    "update adamw f32 x tensors y elements", "update adamw q99 2 tensors 4 elements", "update adamw f32 2 tensors",
    f"update adamw f32 2 tensors {10**400} elements", "copy zz bytes", f"copy {10**400} bytes", "copy -1 bytes", "copy",
    "relu f32[64,1024] | grads 7,9", "linear f32[8,8] f32[8,8] | grads 7,9", "linear f32[8] f32[8,8] | grads 0,1",
)  # fmt: skip


def test_damaged_keys_of_a_store_change_no_price(tmp_path: Path) -> None:
    x, w = TensorType((64, 1024), torch.float32), TensorType((1024, 1024), torch.float32)
    with MeasurementStore(tmp_path / "costs.sqlite") as store:
        store.add(H200.name, torch.__version__, [Measurement(key, 1.0, 1.0, 1.0, 1.0, 0.0) for key in DAMAGED])
        found, plain = CostModel(stores=[store]), CostModel()
        for call, needs in ((Call("relu", (x,)), (0,)), (Call("linear", (x, w, None)), (0, 1))):
            assert found.operator(call, needs, H200) == plain.operator(call, needs, H200)
        assert found.update([w, w], "adamw", H200) == plain.update([w, w], "adamw", H200)
        assert found.copy(1000, H200) == plain.copy(1000, H200)


def test_an_estimated_step_takes_what_the_host_takes() -> None:
    """Against every step measured on an H200, by a model that knows none of them."""
    bare, known = CostModel(profiles=()), next(p for p in shipped_profiles() if p.device == H200.name)
    off = []
    for outcome in known.outcomes:
        step = read_update(outcome.key)
        if step is not None and isinstance(outcome, Measurement):
            piece = TensorType((step.num_elements // step.num_tensors,), step.dtype)
            found = bare.update([piece] * step.num_tensors, step.optimizer, H200)
            assert found.source is Source.ESTIMATED
            off.append(abs(log2(found.value / outcome.forward)))
    assert len(off) > 100 and median(off) < 0.4 and max(off) < 1.3, "in doublings"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_that_somebody_measured_is_not_far_behind_slower_ones_that_nobody_did(
    optimizer: str, dtype: torch.dtype
) -> None:
    slow, costs = Machine.preset("p3.8xlarge").device_type(0), CostModel()
    for num_tensors, num_elements in ((10, 10**5), (161, 25_600_000), (400, 10**8), (400, 10**9)):
        step = [TensorType((num_elements // num_tensors,), dtype)] * num_tensors
        assert costs.update(step, optimizer, H200).value < 2.2 * costs.update(step, optimizer, slow).value
