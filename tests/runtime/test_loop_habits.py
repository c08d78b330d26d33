"""What people do in their loops around a step: hooks, inner gradients, inputs that learn. Judged by the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.ir import Pipeline, Plan
from conjoin.machine import Machine
from conjoin.runtime import to_module
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_pipeline
from tests.ir.wording import assert_three_sentences
from tests.runtime.hand_plans import by_strategy, captured
from tests.runtime.random_graphs import Sample

Step = Callable[..., Tensor]
Habit = Callable[[nn.Module, Step], list[float]]
STRATEGIES = "fsdp", "megatron", "fsdp+micro=2"


@cache
def sample() -> Sample:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.LayerNorm(3))
    return captured(model, (torch.randn(8, 5), torch.randn(8, 3)), functional.mse_loss)


class Spare(nn.Module):
    """A layer is not used, and what another makes is no part of the loss, as of heads of pretrained models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.cut_off, self.last = (nn.Linear(5, size) for size in (5, 5, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.cut_off(x).detach())


@cache
def with_spare_layers() -> Sample:
    torch.manual_seed(0)
    return captured(Spare(), (torch.randn(8, 5), torch.randn(8, 3)), functional.mse_loss)


@cache
def plan_of(strategy: str, make: Callable[[], Sample] = sample) -> Plan | Pipeline:
    if strategy.startswith("pipeline"):
        return make_pipeline(make().graph, Machine("here", 1, 2, "cpu"), strategy)
    return by_strategy(make(), strategy, 2)


def batches() -> list[tuple[Tensor, ...]]:
    x, y = sample().inputs
    return [(x, y), (x.flip(0) * 1.5, y + 1)]


def on_ranks(strategy: str, habit: Habit, make: Callable[[], Sample] = sample) -> list[list[float]]:
    plan = plan_of(strategy, make)

    def program(ranks: Communicator) -> list[float]:
        store = Store(plan, ranks.rank, torch.device("cpu"))
        store.fill(make().model)
        step = ParallelModule(plan, store, ranks)
        return habit(step, step)

    return run_ranks(plan.mesh, program)


def plainly(habit: Habit, make: Callable[[], Sample] = sample) -> list[float]:
    model = copy.deepcopy(make().model)
    return habit(model, lambda x, y: functional.mse_loss(model(x), y))


def train(module: nn.Module, step: Step, others: tuple[nn.Parameter, ...] = ()) -> list[float]:
    optimizer, losses = torch.optim.SGD([*module.parameters(), *others], lr=0.1, momentum=0.9), []
    for batch in batches():
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def scaled_by_hooks(module: nn.Module, step: Step) -> list[float]:
    """Every gradient is brought to length one as it comes."""
    seen = list[float]()
    for parameter in module.parameters():
        parameter.register_hook(lambda g: seen.append(g.abs().max().item()) or g / (g.norm() + 1e-6))
    return [*train(module, step), *sorted(seen)]


def scaled_when_added(module: nn.Module, step: Step) -> list[float]:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm() + 1e-6)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    return train(module, step)


def by_autograd(module: nn.Module, step: Step) -> list[float]:
    """Gradients by `torch.autograd.grad`, clipped, and looked at before."""
    parameters, found = list(module.parameters()), []
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for batch in batches():
        loss = step(*batch)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            found.append((gradient * gradient).sum().item())
            parameter.grad = gradient
        found.append(nn.utils.clip_grad_norm_(parameters, 0.1).item())
        optimizer.step()
        found.append(loss.item())
    return found


ON_ALL: dict[str, Habit] = {
    "hooks": scaled_by_hooks,
    "hooks when added": scaled_when_added,
    "autograd.grad": by_autograd,
}


@pytest.mark.parametrize("habit", ON_ALL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_pieces_wherever_they_are_seen(strategy: str, habit: str) -> None:
    for found in on_ranks(strategy, ON_ALL[habit]):
        assert found == pytest.approx(plainly(ON_ALL[habit]), rel=1e-9)


def halved_by_hooks(module: nn.Module, step: Step) -> list[float]:
    """Every gradient that there is; a layer that is not used has none, and calls no hook."""
    for name, parameter in module.named_parameters():
        if "cut_off" not in name:
            parameter.register_hook(lambda g: g * 0.5)
    losses = train(module, step)
    assert all(parameter.grad is None for name, parameter in module.named_parameters() if "spare" in name)
    return losses


@pytest.mark.parametrize("strategy", [*STRATEGIES, "data-parallel+micro=2", "pipeline:pp=2,micro=2"])
def test_layers_without_gradients_do_not_stand_in_the_way(strategy: str) -> None:
    for found in on_ranks(strategy, halved_by_hooks, with_spare_layers):
        assert found == pytest.approx(plainly(halved_by_hooks, with_spare_layers), rel=1e-9)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_sees_what_is_there() -> None:
    for strategy in ("fsdp", "data-parallel"):
        found = on_ranks(strategy, train)
        with torch.autograd.detect_anomaly(check_nan=True):
            assert on_ranks(strategy, train) == found


def behind_another_model(module: nn.Module, step: Step) -> list[float]:
    """What makes the input is trained by its gradient, which all ranks need as a whole."""
    before = nn.Parameter(torch.linspace(-1, 1, 25).double().view(5, 5))
    losses = train(module, lambda x, y: step(torch.tanh(x @ before), y), (before,))
    return [*losses, *before.flatten().tolist()]


def of_inputs(module: nn.Module, step: Step) -> list[float]:
    x, y = (each.clone().requires_grad_() for each in sample().inputs)
    step(x, y).backward()
    assert x.grad is not None and y.grad is not None
    return [*x.grad.flatten().tolist(), *y.grad.flatten().tolist()]


@pytest.mark.parametrize("habit", [behind_another_model, of_inputs])
def test_inputs_that_came_whole_have_whole_gradients(habit: Habit) -> None:
    for strategy in ("fsdp", "megatron", "data-parallel"):
        for found in on_ranks(strategy, habit):
            assert found == pytest.approx(plainly(habit), rel=1e-9)
    for strategy in ("fsdp+micro=2", "pipeline:pp=2,micro=2"):
        with pytest.raises(UsageError, match="would never learn") as error:
            on_ranks(strategy, habit)
        assert_three_sentences(error.value)


def penalized(module: nn.Module, step: Step) -> list[float]:
    loss = step(*sample().inputs)
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    (loss + sum((each**2).sum() for each in gradients)).backward()
    return [loss.item()]


def test_gradients_of_gradients_are_refused_and_never_left_out() -> None:
    for strategy in (*STRATEGIES, "data-parallel"):
        with pytest.raises(UsageError, match="gradient of a gradient") as error:
            on_ranks(strategy, penalized)
        assert_three_sentences(error.value)


class Totals(nn.Module):
    """Sums along edges with weights that learn: the gradient that comes to them is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(20, 1))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * self.weight).sum()


def test_operators_of_our_own_are_no_constants_to_a_penalty() -> None:
    made = captured(Totals(), (torch.randn(10, 4), torch.randint(0, 10, (2, 20))))
    assert "conjoin::aggregate" in [node.op for node in made.graph.nodes]
    x, edges = made.inputs[0].requires_grad_(), made.inputs[1]
    loss = to_module(made.graph, made.model)(x, edges)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(UsageError, match="gradient of a gradient"):
        gradient.square().sum().backward()
