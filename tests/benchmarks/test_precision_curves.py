"""Thirty steps on text of the benchmark's grammar: plans of two ranks within the noise of seeds of one device."""

from __future__ import annotations

import pytest

from benchmarks import precision_curves as curves
from conjoin.api import capture
from conjoin.machine import parse_machine
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from zoo.gpt import Gpt, GptConfig
from zoo.tokens import next_token_loss

STEPS, PARTS, SEEDS = 30, 3, 5


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> curves.Task:
    for name, value in {"LENGTH": 8, "BATCH": 8}.items():
        monkeypatch.setattr(curves, name, value)
    config = GptConfig(layers=1, width=16, heads=1, length=8, vocabulary=len(curves.LETTERS), dropout=0.0)
    return curves.Task(lambda: Gpt(config), curves.continued, next_token_loss)


_on_one_device: list[list[float]] = []


@pytest.fixture
def own(task: curves.Task) -> list[list[float]]:
    """The curves of one device, which are the same beside every plan."""
    if not _on_one_device:
        _on_one_device.extend(curves.alone(task, seed, STEPS) for seed in range(SEEDS))
    return _on_one_device


@pytest.mark.parametrize(("precision", "strategy"), [("bf16-mixed", "fsdp"), ("fp8-mixed", "data-parallel")])
def test_a_plan_trains_within_the_noise_of_seeds(
    task: curves.Task, own: list[list[float]], precision: str, strategy: str
) -> None:
    model, given = task.model(0), task.batches(STEPS, 0)
    graph = capture(model, given[0], next_token_loss, check=False, precision=precision)
    plan = make_plan(graph, parse_machine("local:2"), strategy)

    def program(communicator: Communicator) -> list[float]:
        module = module_on(plan, Sample(graph, model, given[0]), communicator)
        return curves.trained(module, module.parameters(), given)

    one, other = run_ranks(plan.mesh, program)
    found = curves.compared(own, [one], PARTS)
    assert one == other and found["within noise"], found
    assert found["curve"][-1] < 0.95 * found["curve"][0], "it learns"


def test_a_curve_that_is_off_is_told() -> None:
    own = [[3.0 + 0.01 * seed - 0.01 * step for step in range(STEPS)] for seed in range(SEEDS)]
    assert curves.compared(own, own[:1], PARTS)["within noise"]
    assert not curves.compared(own, [[loss + 0.1 for loss in own[0]]], PARTS)["within noise"]


@pytest.mark.parametrize("name", curves.TASKS)
def test_what_a_model_learns_is_there_to_be_learnt(name: str) -> None:
    """The loss of one device falls; and every precision is met by two strategies."""
    task = curves.TASKS[name]
    losses = curves.alone(task, 0, 12)
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3]), losses
    assert {precision for precision, _ in task.plans()} == set(curves.PRECISIONS)
    assert {strategy for _, strategy in task.plans()} == set(task.strategies) and len(set(task.plans())) == 10
