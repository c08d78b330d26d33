"""What a prediction says: throughput, utilization, whether it fits; and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from conjoin.cost import CostModel
from conjoin.errors import PlanError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import Machine
from conjoin.search import make_plan
from conjoin.sim import Prediction, predict
from tests.ir.wording import assert_three_sentences

WIDTH, ROWS = 8192, 16384
MACHINE = Machine.preset("dgx-h100")
ESTIMATES = CostModel(profiles=())


def plan_of_a_product(machine: Machine, strategy: str = "data-parallel", width: int = WIDTH) -> Plan:
    """One large layer, too large to be built."""
    with torch.device("meta"):
        model = nn.Linear(width, width, bias=False)
        batch = torch.zeros(ROWS, width), torch.zeros(ROWS, width)
    return make_plan(capture(model, batch, nn.functional.mse_loss), machine, strategy)


def with_memory(machine: Machine, num_bytes: int) -> Machine:
    (kind,) = machine.nodes
    devices = tuple(replace(device, memory_bytes=num_bytes) for device in kind.devices)
    return replace(machine, nodes=(replace(kind, devices=devices),))


@pytest.fixture(scope="module")
def found() -> Prediction:
    return predict(plan_of_a_product(MACHINE), MACHINE, ESTIMATES)


def test_utilization_is_work_over_what_the_devices_could_do(found: Prediction) -> None:
    product = 2.0 * ROWS * WIDTH * WIDTH
    assert found.step_flops == pytest.approx(2 * product, rel=0.01), "forward, and the gradient of the weight"
    assert found.peak_flops == pytest.approx(8 * MACHINE.device_type(0).flops_of("float32"))
    assert found.model_flops_utilization == pytest.approx(found.step_flops / found.peak_flops / found.seconds)
    assert 0.1 < found.model_flops_utilization < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_peak_is_that_of_the_dtype_of_the_work(dtype: torch.dtype) -> None:
    model, x = nn.Linear(512, 512, dtype=dtype), torch.zeros(64, 512, dtype=dtype)
    found = predict(make_plan(capture(model, x, torch.sum), MACHINE, "data-parallel"), MACHINE, CostModel())
    rates = dict(MACHINE.device_type(0).peak_flops)
    assert found.peak_flops == pytest.approx(8 * rates[str(dtype).removeprefix("torch.")])


class Recurrent(nn.Module):
    """A recurrent layer between two of another family."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.layer, self.out = nn.Linear(512, 1024), nn.LSTM(1024, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.inward(x))[0])


@cache
def in_float32(kind: str) -> Graph:
    """Layers of one kind, without values."""
    with torch.device("meta"):
        layers = [nn.Conv2d(512, 512, 3, padding=1) for _ in range(3)]
        model = Recurrent() if kind == "recurrent" else nn.Sequential(*layers)
        x = torch.zeros(16, 4096, 512) if kind == "recurrent" else torch.zeros(256, 512, 28, 28)
    return capture(model, x, torch.sum)


@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-a100", "p3.8xlarge"])
@pytest.mark.parametrize("kind", ["convolution", "recurrent"])
def test_no_more_than_the_peak_goes_into_a_model_in_float32(kind: str, machine: str) -> None:
    """Convolutions and recurrent layers in float32 are priced at the rate of tensor cores, and counted at it."""
    where = Machine.preset(machine)
    found = predict(make_plan(in_float32(kind), where, "data-parallel"), where, CostModel())
    assert 0.01 < found.model_flops_utilization < 1
    device = where.device_type(0)
    assert found.peak_flops <= 8 * device.flops_of("tfloat32") * (1 + 1e-9)
    if kind == "convolution":
        assert found.peak_flops == pytest.approx(where.num_devices * device.flops_of("tfloat32"), rel=0.01)


def test_throughput_counts_the_samples_of_the_batch(found: Prediction) -> None:
    assert found.num_samples == ROWS
    assert found.samples_per_second == pytest.approx(ROWS / found.seconds)


def test_a_step_is_no_shorter_than_its_work_and_its_parts_make_it_up(found: Prediction) -> None:
    assert found.seconds >= found.step_flops / found.peak_flops
    assert found.breakdown.step == pytest.approx(found.seconds, rel=1e-12)


def test_what_fits_depends_on_the_smallest_device(found: Prediction) -> None:
    weight, rows = 4 * WIDTH * WIDTH, 2 * 4 * ROWS * WIDTH // 8
    assert found.memory.parameters == weight and found.memory.optimizer_state == 2 * weight
    assert found.memory.inputs == rows and found.fits
    assert found.memory.peak >= 4 * weight + rows, "also the gradient"
    plan = plan_of_a_product(MACHINE)
    large = next(
        n
        for n in itertools.count(found.memory.peak, 2**20)
        if with_memory(MACHINE, n).usable_bytes >= found.memory.peak
    )
    exact, small = (with_memory(MACHINE, num_bytes) for num_bytes in (large, found.memory.peak))
    assert predict(plan, exact, ESTIMATES).fits and not predict(plan, small, ESTIMATES).fits, "some is left free"


def test_pieces_take_less_memory_than_copies(found: Prediction) -> None:
    pieces = predict(plan_of_a_product(MACHINE, "fsdp"), MACHINE, ESTIMATES)
    assert pieces.memory.parameters * 8 == found.memory.parameters
    assert pieces.memory.peak < found.memory.peak


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 0), ("sgd-momentum", 1), ("adamw", 2), ("adam-fused", 2)])
def test_an_optimizer_remembers_and_takes_time(optimizer: str, copies: int, tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan("mlp", "p3.8xlarge", "data-parallel")
    here = predict(plan, Machine.preset("p3.8xlarge"), ESTIMATES, optimizer)
    assert here.memory.optimizer_state == copies * here.memory.parameters and here.breakdown.update > 0


def test_all_devices_told_apart_give_the_same(tiny_plan: Callable[..., Plan]) -> None:
    plan, machine = tiny_plan("bert-base", "p3.8xlarge", "megatron:tp=2"), Machine.preset("p3.8xlarge")
    folded, unfolded = (predict(plan, machine, ESTIMATES, unfold=way) for way in (False, True))
    assert (folded.seconds, folded.memory) == (unfolded.seconds, unfolded.memory)
    assert folded.simulation.num_tasks == unfolded.simulation.num_tasks


def test_a_model_that_takes_no_batch_has_no_throughput() -> None:
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            return (self.weight @ self.weight * scale).sum()

    machine = Machine.preset("laptop")
    plan = make_plan(capture(Free(), torch.tensor(2.0), lambda x: x), machine, "single")
    alone = predict(plan, machine, ESTIMATES)
    assert alone.num_samples is None and alone.samples_per_second is None and alone.seconds > 0


def test_another_mesh_and_unknown_optimizers_are_refused(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan("mlp", "local:4", "data-parallel")
    with pytest.raises(PlanError, match=r"The plan is for 4 devices .* dgx-h100 has 8") as other:
        predict(plan, MACHINE, ESTIMATES)
    with pytest.raises(UsageError, match="The optimizer 'lion' was asked for") as unknown:
        predict(plan, Machine.preset("p3.8xlarge"), ESTIMATES, "lion")
    with pytest.raises(UsageError, match="conjoin calibrate") as slow:
        predict(plan, Machine("local", 1, 4, "cpu"), ESTIMATES)
    for error in (other, unknown, slow):
        assert_three_sentences(error.value)


@pytest.mark.parametrize("unfold", [False, True])
def test_a_machine_that_is_too_slow_to_be_timed_is_refused(unfold: bool) -> None:
    """One million operations a second and a thousand bytes are within what a machine file may say."""
    (kind,) = MACHINE.nodes
    slow = tuple(replace(device, memory_bandwidth=1e3, peak_flops=(("float32", 1e6),)) for device in kind.devices)
    machine = replace(MACHINE, nodes=(replace(kind, devices=slow),))
    with pytest.raises(UsageError, match="The time of a training step was asked for") as told:
        predict(plan_of_a_product(machine, width=4 * WIDTH), machine, ESTIMATES, unfold=unfold)
    assert_three_sentences(told.value)
