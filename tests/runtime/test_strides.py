"""Models that make tensors with gaps, reversed or expanded ones where ranks speak: on threads and on Gloo processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.ir import Plan, calls_as_they_lie, parse_graph
from conjoin.runtime.movement import carriers
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_hand, by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample, differences, on_one_device, on_ranks


class Scored(nn.Module):
    """Two layers whose outputs are seen through a view before something is taken over the whole batch."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.score, self._view = nn.Linear(4, 6), nn.Linear(6, 2), view

    def forward(self, x: Tensor) -> Tensor:
        return self._view(self.score(torch.tanh(self.up(x))))


# What runs along the batch needs all of it; a softmax would not.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda y: torch.cumsum(y[:, 0], 0),
    "every second row": lambda y: torch.cumsum(y, 0)[::2],
    "transposed": lambda y: torch.cumsum(y.t(), 1).t(),
    "expanded": lambda y: torch.cumsum(y[:, :1].expand(-1, 3), 0),
    "the diagonal": lambda y: torch.cumsum((y @ y.t()).diagonal(), 0),
    "complex": lambda y: torch.cumsum(torch.view_as_real(torch.view_as_complex(y).conj() ** 2)[:, 1], 0),
}
STRATEGIES = "data-parallel", "fsdp", "megatron", "reduction"


def loss(y: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(y.reshape(-1)[:4], target)


@cache
def case(view: str) -> Sample:
    torch.manual_seed(1)
    return captured(Scored(VIEWS[view]), (torch.randn(8, 4), torch.randn(4)), loss)


@cache
def images() -> Sample:
    """Convolutions of images whose channels lie last in memory, as those of the weights do."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, groups=2), nn.Flatten())
    batch = torch.randn(8, 3, 7, 7).to(memory_format=torch.channels_last)
    return captured(model.to(memory_format=torch.channels_last), (batch, torch.randn(4)), loss)


@cache
def cases() -> list[tuple[Sample, Plan]]:
    found = [(case(view), strategy) for view in VIEWS for strategy in STRATEGIES]
    found += [(images(), strategy) for strategy in ("data-parallel", "fsdp")]
    return [(sample, by_strategy(sample, strategy, 2)) for sample, strategy in found]


def trained(communicator: Communicator, sample: Sample, plan: Plan) -> tuple[float, float]:
    """The loss and the norm of the gradients."""
    step = module_on(plan, sample, communicator)
    value = step(*sample.inputs)
    value.backward()
    return value.item(), step.clip_grad_norm_(1.0).item()


def program(communicator: Communicator) -> list[tuple[float, float]]:
    return [trained(communicator, sample, plan) for sample, plan in cases()]


def alone(sample: Sample) -> tuple[float, float]:
    model = copy.deepcopy(sample.model)
    value = loss(model(sample.inputs[0]), sample.inputs[1])
    value.backward()
    return value.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_whatever_the_strides_it_trains_as_on_one_device(ranks: str, tmp_path: Path) -> None:
    mesh = cases()[0][1].mesh
    for found in run_ranks(mesh, program) if ranks == "threads" else run_processes(mesh, program, tmp_path):
        for (sample, plan), got in zip(cases(), found, strict=True):
            assert got == pytest.approx(alone(sample), rel=1e-9), str(plan.graph)


class Turned(nn.Module):
    """A convolution whose weight lies as other libraries keep it: whether channels lie last is left open where one
    output is left of two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x.permute(0, 3, 1, 2), self.weight.permute(2, 1, 3, 0), padding=1)


def turned() -> tuple[Sample, Plan]:
    sample = captured(Turned(), (torch.randn(4, 5, 5, 4), torch.randn(4)), loss)
    calls = {node.op: number for number, node in enumerate(sample.graph.nodes)}
    assert sample.graph.nodes[1].op == "permute"
    rules = {1: "x S(2) -> S(0)", calls["conv2d"]: "x B, S(0) -> S(1)"}
    return sample, by_hand(sample.graph, {"weight": "x:S(2)"}, rules)


def last() -> tuple[Sample, Plan]:
    layers = nn.Conv2d(4, 2, (1, 3)), nn.ReLU(), nn.Conv2d(2, 4, (3, 1))
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    batch = torch.randn(4, 5, 5, 4).permute(0, 3, 1, 2), torch.randn(4)
    sample = captured(model, batch, loss)
    return sample, by_strategy(sample, "megatron:tp=2", 4)


@pytest.mark.parametrize("case", [turned, last])
def test_a_piece_of_a_weight_that_may_lie_either_way_is_trained(case: Callable[[], tuple[Sample, Plan]]) -> None:
    torch.manual_seed(1)
    sample, plan = case()
    for got in run_ranks(plan.mesh, lambda c: trained(c, sample, plan)):
        assert got == pytest.approx(alone(sample), rel=1e-9)


def test_channels_that_lie_last_stay_so() -> None:
    """In the pieces of both ranks, in their gradients, and in what the price is of."""
    sample = images()

    def lies(communicator: Communicator) -> list[bool]:
        step = module_on(by_strategy(sample, "data-parallel", 2), sample, communicator)
        step(*sample.inputs).backward()
        windows = [p for p in step.parameters() if p.dim() == 4]
        return [x.is_contiguous(memory_format=torch.channels_last) for p in windows for x in (p, p.grad)]

    plan = by_strategy(sample, "data-parallel", 2)
    assert run_ranks(plan.mesh, lies) == [[True] * 4] * 2
    assert [call.turned for call in calls_as_they_lie(sample.graph).values() if "conv" in call.op] == [True] * 2
    assert str(parse_graph(str(sample.graph))) == str(sample.graph) and "channels-last" in str(sample.graph)


def test_threads_refuse_what_gloo_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent as it is, as `reshape` gives it, is found out in the process already."""
    monkeypatch.setattr(carriers, "to_send", lambda x: x.reshape(-1))
    sample = case("a column")
    plan = by_strategy(sample, "data-parallel", 2)
    with pytest.raises(AssertionError, match="strides"):
        run_ranks(plan.mesh, lambda c: trained(c, sample, plan))


class Rows(nn.Module):
    """Normalized images as rows of channels: their gradient has channels last, and any stride along the samples."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x))
        return normed.contiguous(memory_format=torch.channels_last).flatten(2).mT


class Frozen(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), Frozen(3), nn.InstanceNorm2d(3, affine=True)], ids=str)
def test_of_images_that_are_one_by_one_batch_norm_reads_the_gradient_as_it_lies(norm: nn.Module) -> None:
    torch.manual_seed(0)
    sample = captured(Rows(norm), (torch.randn(2, 3, 4, 5), torch.randint(20, (2, 3))), nn.functional.cross_entropy)
    plan = by_strategy(sample, "data-parallel", 2)
    assert differences(plan, on_ranks(plan, sample), on_one_device(sample)) == []
