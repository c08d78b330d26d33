"""Strategies of a user's own: judged by ours of the same meaning and by one device; what goes wrong in them is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import conjoin
from conjoin.errors import ConjoinError, StrategyError, UsageError
from conjoin.machine import Mesh
from conjoin.ops import Split
from conjoin.search import Draft, Facts, Request, follow, make_groups, make_plan, propagate, split_batch
from conjoin.search.strategies import read_request, registered
from tests.ir.wording import assert_three_sentences


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered, "OWN", {})
    monkeypatch.setattr(registered, "SHORT", {})
    yield


def by_batch(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """The batch over all devices."""
    degrees = {"dp": request.degrees.get("dp", mesh.size)}
    group = make_groups(mesh, degrees)["dp"]
    return Draft(request.filled(degrees), (propagate(facts, group, split_batch(facts.graph, group), follow),))


def case() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, (torch.randn(8, 6), torch.randn(8, 4)), nn.functional.mse_loss


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        ("mine", "data-parallel"),
        ("mine:4", "ddp:4"),
        ("zero1+mine", "zero1"),
        ("fsdp + mine + micro=2", "fsdp+micro=2"),
    ],
)
def test_a_function_makes_the_plans_that_ours_of_the_same_meaning_makes(own: str, ours: str) -> None:
    conjoin.register_strategy("mine", by_batch, degrees=("dp",), joins=("data-parallel", "zero1", "fsdp"))
    model, batch, loss = case()
    graph = conjoin.capture(model, batch, loss)
    made, known = (make_plan(graph, conjoin.Machine("four", 1, 4, "cpu"), name) for name in (own, ours))
    assert made.strategy.startswith("mine:dp=4") and "mine" in conjoin.strategy_names()
    assert replace(made, strategy="") == replace(known, strategy="")
    assert conjoin.verify_plan(made, model, batch, loss=loss, num_steps=2).passed


def test_a_short_name_stands_for_a_request() -> None:
    conjoin.register_strategy("wide", "zero3+megatron:tp=2,sp")
    conjoin.register_strategy("wider", "wide+recompute=full")
    assert str(read_request("wider+micro=4")) == str(read_request("fsdp+megatron:tp=2,sp+recompute=full+micro=4"))
    assert read_request("wide@d1,d0").order == ("d1", "d0")
    with pytest.raises(UsageError, match="short for zero3") as told:
        read_request("wide:tp=4")
    assert_three_sentences(told.value)
    with pytest.raises(UsageError, match=r"The strategies are .*, wide, wider, and those .* Did you mean wider"):
        read_request("widerr")


def nothing(facts: Facts, mesh: Mesh, request: Request) -> Any:
    return None


def failing(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    raise KeyError("no such layer")


def illegal(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """What is stored in a layout that the mesh does not have."""
    made = by_batch(facts, mesh, request)
    return replace(made, storage={facts.parameters()[0]: (("nowhere", Split(0)),)})


def without_batch(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    return Draft(request, ())


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "ours": (lambda: conjoin.register_strategy("fsdp", by_batch), "Conjoin has one of that name"),
    "alias": (lambda: conjoin.register_strategy("ddp", "fsdp"), "Conjoin has one of that name"),
    "name": (lambda: conjoin.register_strategy("My Own", by_batch), "A name is up to 40 small letters"),
    "kind": (lambda: conjoin.register_strategy("mine", 3), "was registered as a int"),  # type: ignore[arg-type]
    "joins": (lambda: conjoin.register_strategy("mine", by_batch, joins=("megatron",)), "to be joined with 'megatron'"),
    "short": (lambda: conjoin.register_strategy("mine", "fsdp", degrees=("dp",)), "takes none"),
    "unknown": (lambda: conjoin.register_strategy("mine", "fsbp"), "no strategy named 'fsbp'"),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_registration_that_makes_no_sense(case: tuple[Callable[[], object], str]) -> None:
    with pytest.raises(UsageError, match=case[1]) as told:
        case[0]()
    assert_three_sentences(told.value)
    assert not registered.OWN and not registered.SHORT


@pytest.mark.parametrize(
    ("draft", "asked", "message"),
    [
        (nothing, "mine", "gave a NoneType instead of a Draft"),
        (failing, "mine", r"failed at .*strategies\.py:\d+ with KeyError: 'no such layer'"),
        (illegal, "mine", "is no legal plan"),
        (without_batch, "fsdp+mine", "It has 0 flows of the role dp"),
        (by_batch, "mine:tp=2", "unknown key 'tp'"),
        (by_batch, "megatron+mine", "megatron and mine split the batch, which only one can"),
        (by_batch, "mime", "Did you mean mine"),
    ],
)
def test_what_goes_wrong_in_a_strategy_is_told_under_its_name(draft: Any, asked: str, message: str) -> None:
    conjoin.register_strategy("mine", draft, degrees=("dp",), joins=("fsdp",))
    model, batch, loss = case()
    kind = UsageError if asked in ("mine:tp=2", "megatron+mine", "mime") else StrategyError
    with pytest.raises(kind, match=message) as told:
        conjoin.plan(model, batch, "local:2", loss=loss, strategy=asked)
    assert isinstance(told.value, ConjoinError) and ("mine" in str(told.value))
