"""Plans by a rule that the library no longer has are found out when they are read, whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.cost import CostModel
from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import Graph, Mark, Plan, library_digest, model_mark
from conjoin.machine import Mesh, parse_machine
from conjoin.rules import Index, Library
from conjoin.search import Remembered, SearchResult, Wish, find_plan
from conjoin.search.entries import make_variant
from conjoin.search.rewrites import rewritten, ways_of
from tests.cli.conftest import Ran
from tests.ir.wording import assert_three_sentences

MACHINE = parse_machine("laptop")
BATCH = torch.ones(8, 6), torch.ones(8, 4)
STAMPS = import_module("conjoin.ir.library_stamps")


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)  # type: ignore[no-any-return]


def sums() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return Sums(), BATCH, nn.functional.mse_loss


def captured() -> Graph:
    return capture(Sums(), BATCH, nn.functional.mse_loss)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The model's plan for one device, its two layers made one by a rule of the library."""
    graph = captured()
    ways = ways_of(Library.shipped())
    made = (rewritten(make_variant(graph), way, Index(graph)) for way in ways)
    variants = (one.variant for one in made if one is not None)
    variant = next(one for one in variants if str(one.graph).count("= linear(") == 1)
    machine = Mark(MACHINE.name, MACHINE.fingerprint())
    return Plan(variant.graph, Mesh(()), model_mark(graph), machine, "by hand", substitutions=variant.substitutions)


@pytest.fixture
def forget(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Ships another library than the one the plan was made by: without its rule."""

    def ship() -> None:
        whole = Library.shipped().entries
        left = tuple(entry for entry in whole if f"{entry.method}:{entry.stamp}" != plan.substitutions[0].proof)
        assert len(left) == len(whole) - 1
        Library(left).save(tmp_path / "smaller.toml")
        monkeypatch.setattr(STAMPS, "LIBRARY", tmp_path / "smaller.toml")
        STAMPS.library_stamps.cache_clear()

    yield ship
    monkeypatch.undo()
    STAMPS.library_stamps.cache_clear()


READERS: dict[str, Callable[[Path, Plan], object]] = {
    "load_plan": lambda path, plan: conjoin.load_plan(path),
    "load a file": lambda path, plan: conjoin.load(path, Sums()),
    "load": lambda path, plan: conjoin.load(plan, Sums()),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_plan_by_a_rule_that_is_gone_is_refused(
    tmp_path: Path, plan: Plan, forget: Callable[[], None], reader: str
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    READERS[reader](path, plan)
    forget()
    with pytest.raises(PlanError) as told:
        READERS[reader](path, plan)
    assert_three_sentences(told.value)
    (applied,) = plan.substitutions
    assert f"by the rule {applied.name!r} with the proof {applied.proof}" in str(told.value)
    assert "The library has no rule with that stamp any more: it was refuted" in str(told.value)


@pytest.mark.parametrize(
    "command",
    [
        "explain plan.json",
        "diff plan.json plan.json",
        "simulate plan.json --machine laptop",
        "verify plan.json module:sums",
        "run plan.json module:sums --steps 1",
        "plan module:sums --machine laptop --start plan.json -o other.json",
    ],
)
def test_no_command_takes_it(run: Callable[..., Ran], plan: Plan, forget: Callable[[], None], command: str) -> None:
    plan.save("plan.json")
    forget()
    assert "was made by the rule" in run(*command.replace("module", __name__).split()).refused()


def test_an_edited_stamp_is_as_a_rule_that_is_gone(tmp_path: Path, plan: Plan) -> None:
    (applied,) = plan.substitutions
    forged = replace(applied, proof="definitions:0123456789abcdef")
    replace(plan, substitutions=(applied, forged)).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"with the proof definitions:0123456789abcdef\. The library"):
        conjoin.load_plan(tmp_path / "plan.json")


def test_strategies_rewrite_without_the_library(tmp_path: Path, forget: Callable[[], None]) -> None:
    """What they expand is no rule: its reason is a sentence, and their plans are read as ever."""
    batch, loss = (torch.ones(8, 6), torch.zeros(8).long()), nn.functional.cross_entropy
    made = conjoin.plan(nn.Linear(6, 4), batch, "local:2", loss=loss, strategy="fsdp")
    made.save(tmp_path / "plan.json")
    forget()
    assert made.substitutions and conjoin.load_plan(tmp_path / "plan.json") == made


def found_with(plan: Plan) -> SearchResult:
    found = find_plan(captured(), MACHINE, CostModel(), Wish(budget=inf, search="named"))
    return replace(found, plan=plan)


def test_what_is_remembered_is_not_found_with_another_library(
    tmp_path: Path, plan: Plan, forget: Callable[[], None]
) -> None:
    memory, wish, before = Remembered(tmp_path / "plans"), Wish(search="named"), library_digest()
    memory.keep(captured(), MACHINE, wish, "", found_with(plan))
    assert memory.find(captured(), MACHINE, wish, "") is not None
    (kept,) = (tmp_path / "plans").iterdir()
    forget()
    assert library_digest() != before and memory.find(captured(), MACHINE, wish, "") is None
    kept.rename(memory._path(captured(), MACHINE, wish, ""))  # as if the library were no part of the question
    assert memory.find(captured(), MACHINE, wish, "") is None
