"""What does not fit gets a plan that runs some of the model again: right, as few segments as are enough, and judged."""

from __future__ import annotations

from functools import cache
from math import inf

import pytest
import torch
from torch import nn
from torch.nn import functional

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, recomputed_segments
from conjoin.machine import parse_machine
from conjoin.runtime import Case, verify_in_process
from conjoin.search import SearchResult, Stopped, Wish, find_plan, make_plan, read_request, searches
from conjoin.search.contest import Contest
from conjoin.search.entries import Outcome
from conjoin.search.relief import crossing_bytes, relieve, segmentations
from conjoin.sim import Prediction, predict, take_graph_apart
from tests.runtime.random_graphs import Sample
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

MACHINE = "p3.8xlarge"
DEPTH = 5
SPARING = "megatron:tp=2,sp,fsdp+micro=2+recompute=full"


@cache
def deep() -> Sample:
    """Narrow between its blocks, wide inside them; activations are most of its memory."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh()) for _ in range(DEPTH)]
    model, batch = nn.Sequential(*blocks).train(), (torch.randn(512, 8), torch.randn(512, 8))
    return Sample(capture(model, batch, functional.mse_loss), model, batch)


def search(**wish: object) -> SearchResult:
    asked = Wish(**{"budget": inf, "steps": 40, "optimizer": "sgd", **wish})  # type: ignore[arg-type]
    return find_plan(deep().graph, parse_machine(MACHINE), CostModel(), asked)


def test_segments_end_where_the_graph_is_narrow() -> None:
    skeleton = take_graph_apart(deep().graph)[0]
    crossing = crossing_bytes(skeleton)
    found = segmentations(skeleton)
    assert any(len(segments) >= DEPTH - 2 for segments in found)
    for segments in found:
        assert all(last < len(skeleton.operators) - 1 for _, last in segments)
    assert {crossing[last] for _, last in min(found, key=len)} == {512 * 8 * 4}
    assert max(crossing) >= 512 * 64 * 4


@cache
def free_peak() -> int:
    """What the plan needs that is found where there is enough memory."""
    found = search(search="named")
    assert not recomputed_segments(found.plan) and found.plan.accumulation is None
    return found.peak_bytes


def test_what_fits_in_micro_batches_is_known_after_the_first_strategies() -> None:
    machine, limit = parse_machine(MACHINE), int(0.4 * free_peak())
    asked = [f"{name}+micro={steps}" for name in ("data-parallel", "zero1", "fsdp") for steps in (2, 4, 8)]
    each = [predict(make_plan(deep().graph, machine, name), machine, CostModel(), "sgd") for name in asked]
    fastest = min(prediction.seconds for prediction in each if prediction.memory.peak <= limit)
    found = search(search="named", memory=limit, steps=14)
    assert found.seconds_per_step <= fastest and found.baseline_seconds_per_step <= fastest
    assert found.peak_bytes <= limit


def test_named_strategies_run_their_blocks_again_where_none_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conjoin.search.searches.Fitting.enter", lambda *_: None)
    machine, limit = parse_machine(MACHINE), int(0.6 * free_peak())
    found = search(search="named", memory=limit)
    assert read_request(found.baseline).recompute in ("selective", "full")
    again = predict(make_plan(deep().graph, machine, found.baseline), machine, CostModel(), "sgd")
    assert again.memory.peak <= limit and again.seconds == found.baseline_seconds_per_step
    assert found.seconds_per_step <= found.baseline_seconds_per_step, "fewer segments may be enough"


def test_what_fits_nowhere_gets_a_plan_by_running_some_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conjoin.search.searches.Fitting.enter", lambda *_: None)
    sample, limit = deep(), int(0.45 * free_peak())
    found = search(memory=limit)
    assert recomputed_segments(found.plan) and found.peak_bytes <= limit
    assert_predicted(found)
    assert predict(found.plan, parse_machine(MACHINE), CostModel(), "sgd").breakdown.recompute > 0
    assert verify_in_process(Case(found.plan, sample.graph, sample.model, sample.inputs), 2).passed
    monkeypatch.setattr("conjoin.search.named_relief.with_blocks_again", lambda *_: None)
    monkeypatch.setattr("conjoin.search.joint.relieve", lambda *_: None)
    monkeypatch.setattr("conjoin.search.searches.relieve", lambda *_: None)
    monkeypatch.setattr("conjoin.search.joint.relieve_front", lambda *_: None)
    monkeypatch.setattr("conjoin.search.searches.relieve_front", lambda *_: None)
    monkeypatch.setattr("conjoin.search.joint.explore_front", lambda *_: None)
    monkeypatch.setattr("conjoin.search.joint.micro_variants", lambda _: iter(()))
    monkeypatch.setattr("conjoin.search.searches.Fitting.spare", lambda *_: None)
    with pytest.raises(StrategyError, match="needs"):
        search(memory=limit, steps=20)


def assert_predicted(found: SearchResult) -> None:
    """A plan by itself is predicted as it was when it was found."""
    predicted = predict(found.plan, parse_machine(MACHINE), CostModel(), "sgd")
    assert predicted.seconds == found.seconds_per_step and predicted.memory.peak == found.peak_bytes
    assert predicted.num_samples == 512


def test_without_time_for_more_the_smallest_micro_batches_are_taken_before_nothing() -> None:
    sample, limit = deep(), int(0.33 * free_peak())
    found = search(memory=limit, steps=1)
    assert found.stopped is not Stopped.CONVERGED and found.peak_bytes <= limit
    assert found.plan.accumulation is not None and found.plan.accumulation.steps > 1
    assert_predicted(found)
    assert verify_in_process(Case(found.plan, sample.graph, sample.model, sample.inputs), 2).passed


def test_where_that_is_not_enough_the_step_is_taken_in_micro_batches() -> None:
    sample = deep()
    found = search(memory=int(0.33 * free_peak()), steps=40)
    assert found.plan.accumulation is not None and found.plan.accumulation.steps > 1
    assert_predicted(found)
    assert verify_in_process(Case(found.plan, sample.graph, sample.model, sample.inputs), 2).passed


@cache
def with_a_sample_for_every_device() -> tuple[Graph, dict[str, Prediction]]:
    """A model, and what strategies on it take: the one in micro-batches, with all run again, is the smallest."""
    config = GptConfig(3, 32, 4, length=128, vocabulary=64, dropout=0.0, by_head=True)
    graph, machine = capture(Gpt(config).train(), gpt_batch(4, config), next_token_loss), parse_machine("p3.8xlarge:1")
    opponents = "fsdp", "fsdp+recompute=full", "megatron:tp=2,sp,fsdp+recompute=full", SPARING
    return graph, {name: predict(make_plan(graph, machine, name), machine, CostModel()) for name in opponents}


@pytest.mark.parametrize("search_name", ["named", "joint"])
def test_what_fits_is_found_first_also_where_micro_batches_leave_no_samples_to_some_devices(search_name: str) -> None:
    """With a sample for every device there are smaller micro-batches only where several devices share samples."""
    (graph, known), machine = with_a_sample_for_every_device(), parse_machine("p3.8xlarge:1")
    limit = known[SPARING].memory.peak
    assert all(one.memory.peak > limit for name, one in known.items() if name != SPARING)
    wish = Wish(search_name, budget=inf, steps=5, memory=limit)
    found, again = (find_plan(graph, machine, CostModel(), wish) for _ in range(2))
    assert found.seconds_per_step <= known[SPARING].seconds and found.peak_bytes <= limit
    assert found.plan == again.plan and found.history[0].name.endswith("+micro=2+recompute=full")


def test_a_search_without_time_relieves_too() -> None:
    found = search(search="named", budget=0.0, memory=int(0.6 * free_peak()), steps=None)
    assert recomputed_segments(found.plan)


def test_ctrl_c_while_relieving_keeps_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(contest: Contest, outcome: Outcome, *_: object) -> None:
        relieve(contest, outcome)
        raise KeyboardInterrupt

    monkeypatch.setattr(searches, "relieve", interrupted)
    found = search(search="named", budget=0.0, memory=int(0.6 * free_peak()), steps=None)
    assert recomputed_segments(found.plan) and found.stopped is Stopped.INTERRUPTED


def test_where_not_even_that_helps_it_is_told() -> None:
    with pytest.raises(StrategyError, match="needs"):
        search(memory=1 << 12, steps=20)
