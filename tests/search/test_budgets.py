"""A search ends when its time is over, however long each of its steps takes: with a clock that runs by the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from time import process_time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import Wish, best_plan, certificate, contest, find_plan
from conjoin.search.stages.ways import LaidOut
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

SECONDS = 1.0
"""What a simulation takes by the clock of the tests."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Time that passes only in simulations, of plans and of stages."""
    now = [0.0]

    def slowly(simulate: Callable[..., Any]) -> Callable[..., Any]:
        def simulated(*given: Any) -> Any:
            now[0] += SECONDS
            return simulate(*given)

        return simulated

    begin = contest.Contest.__post_init__

    def started(self: contest.Contest) -> None:
        begin(self)
        self.started = now[0]

    for module in (contest, best_plan):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(contest.Contest, "__post_init__", started)
    for simulates in (contest.Contest, LaidOut):
        monkeypatch.setattr(simulates, "simulate", slowly(simulates.simulate))
    yield now


@cache
def deep(width: int = 64, rows: int = 1024) -> Graph:
    """Layers whose activations take more memory than their parameters."""
    with torch.device("meta"):
        layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
        batch = torch.randn(rows, width), torch.randn(rows, width)
    return capture(nn.Sequential(*layers).train(), batch, functional.mse_loss)


@pytest.mark.parametrize("budget", [3.0, 20.0])
@pytest.mark.parametrize("memory", [None, 1_500_000], ids=["all fit", "none fits before segments are run again"])
def test_no_more_than_a_tenth_and_two_seconds_over(clock: list[float], budget: float, memory: int | None) -> None:
    wish = Wish(budget=budget, memory=memory)
    result = find_plan(deep(), Machine.preset("dgx-h100"), CostModel(), wish)
    assert result.peak_bytes <= (memory or 2**40)
    assert result.search_seconds == clock[0] <= 1.1 * budget + 2 * SECONDS


def test_what_cannot_fit_by_its_parameters_is_not_looked_at(clock: list[float]) -> None:
    """Parameters of 16 MiB, which with gradients and Adam's state need 64 where they are whole."""
    batch = torch.randn(8, 2048), torch.randn(8, 2048)
    graph = capture(nn.Linear(2048, 2048).train(), batch, functional.mse_loss)
    wish = Wish(search="named", memory=30 * 2**20)
    assert find_plan(graph, Machine.preset("dgx-h100"), CostModel(), wish).peak_bytes <= 30 * 2**20
    assert clock[0] < 15 * SECONDS


def test_an_answer_that_hangs_on_the_budget_says_so(clock: list[float]) -> None:
    with pytest.raises(StrategyError, match="a budget of more than 2 s"):
        find_plan(deep(), Machine.preset("dgx-h100"), CostModel(), Wish(budget=2, memory=100_000))


def test_no_second_bound_where_the_first_took_long(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    bound = certificate._bound

    def slowly(*given: Any) -> Any:
        clock[0] += 30 * SECONDS
        return bound(*given)

    monkeypatch.setattr(certificate, "_bound", slowly)
    found = find_plan(deep(2048, 8192), parse_machine("p3.8xlarge:1"), CostModel(), Wish(budget=60))
    assert found.certificate is not None and "time would be too large" in str(found.certificate)
    assert found.search_seconds <= 1.1 * 60 + 30 * SECONDS


def test_uneven_pieces_on_many_devices_take_no_longer() -> None:
    """Of 2,160 samples on 1,920 devices 240 have two: one look at each device took more than this for one strategy."""
    config = GptConfig(1, 64, 2, length=16, vocabulary=60, dropout=0.0, by_head=True)
    with torch.device("meta"):
        model, batch = Gpt(config).train(), gpt_batch(2160, config)
    graph, machine = capture(model, batch, next_token_loss), Machine.preset("dgx-a100", 240)
    started = process_time()
    result = find_plan(graph, machine, CostModel(), Wish(budget=100, cpu_budget=3))
    assert result.steps > 1
    assert process_time() - started <= 1.1 * 3 + 2
