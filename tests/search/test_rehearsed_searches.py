"""No search returns a plan with a substitution that is false, wherever the library has it from; and it says so."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.rules import Entry, Library, make_entry, parse_rule
from conjoin.runtime import Case, verify_in_process
from conjoin.search import SearchResult, Wish, find_plan
from conjoin.search import rewrites as searched

FEW = tuple(entry for entry in Library.shipped().entries if entry.root in ("relu", "linear"))[::3]
FALSE = make_entry(parse_rule("relus-are-nothing", "relu(linear(x, y))", "linear(x, y)"), (), "definitions")


class Model(nn.Module):
    """Layers whose functions would better not be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@cache
def case() -> tuple[nn.Module, tuple[Tensor, ...], Graph]:
    torch.manual_seed(0)
    model, batch = Model(), (torch.randn(8, 24),)
    return model, batch, capture(model, batch)


def search(name: str, num_devices: int) -> SearchResult:
    machine = parse_machine(f"dgx-h100:1x{num_devices}")
    return find_plan(case()[2], machine, CostModel([]), Wish(name, budget=600, steps=40))


def with_library(monkeypatch: pytest.MonkeyPatch, *more: Entry) -> None:
    monkeypatch.setattr(Library, "shipped", staticmethod(lambda: Library((*FEW, *more))))


def names(result: SearchResult) -> set[str]:
    return {substitution.name for substitution in result.plan.substitutions}


@pytest.mark.parametrize(
    ("name", "num_devices"), [("joint", 1), ("joint", 2), ("unity", 2), ("sequential", 2), ("taso-then-flexflow", 2)]
)
def test_a_false_rule_is_dropped_and_the_search_goes_on(
    name: str, num_devices: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_library(monkeypatch)
    without = search(name, num_devices)
    with_library(monkeypatch, FALSE)
    result = search(name, num_devices)
    model, batch, graph = case()
    assert FALSE.name not in names(result) and "result is off by" in result.dropped[FALSE.name]
    assert FALSE.name in caplog.text and without.dropped == {}
    assert result.seconds_per_step <= without.seconds_per_step
    assert verify_in_process(Case(result.plan, graph, model, batch), 1).passed
    assert search_again(result).dropped == result.dropped, "a search that goes on knows it"


def search_again(result: SearchResult) -> SearchResult:
    machine = parse_machine(f"dgx-h100:1x{result.num_devices}")
    return find_plan(case()[2], machine, CostModel([]), Wish(budget=600, steps=45), start=result)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_without_a_rehearsal_it_would_be_used(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made then, and refused only since the shipped library has no rule of that stamp."""
    with_library(monkeypatch, FALSE)
    monkeypatch.setattr(searched, "rehearse", lambda change: "")
    with pytest.raises(PlanError, match=FALSE.name):
        search("joint", num_devices)
