"""Before the first collective: what the ranks compare, and what is said when they do not agree."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from conjoin.errors import PlanError, RankError
from conjoin.runtime import Session, launch, load
from conjoin.runtime.ranks.rendezvous import agree, check_world, compare, digest, share_values
from conjoin.runtime.torch_private import default_store
from tests.ir.wording import assert_three_sentences
from tests.runtime.models import mlp, plan_of


class Notes:
    """A store in one process, in which the others have already written."""

    def __init__(self, **said: str) -> None:
        self.said = {key.replace("_", "/"): value for key, value in said.items()}

    def set(self, key: str, value: str, /) -> None:
        self.said[key] = value

    def get(self, key: str, /) -> bytes:
        return self.said[key].encode()

    def add(self, key: str, amount: int, /) -> int:
        raise NotImplementedError

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def check(self, keys: list[str], /) -> bool:
        return set(keys) <= set(self.said)


def test_ranks_that_agree() -> None:
    agree(Notes(plan_1="a", plan_2="a"), "plan", "a", 0, 3)
    assert compare(Notes(plan_0="a", plan_2="ü"), "plan", "b", 1, 3) == {0: "a", 1: "b", 2: "ü"}


def test_those_that_differ_from_the_first_are_named() -> None:
    with pytest.raises(RankError, match="do not agree on the plan: rank 1, 2 has another than rank 0") as told:
        agree(Notes(plan_1="b", plan_2="c"), "plan", "a", 0, 3)
    assert_three_sentences(told.value)
    many = {f"plan_{rank}": "b" for rank in range(1, 20)}
    with pytest.raises(RankError, match=r"rank 1, 2, 3, 4, 5, 6, 7, 8 … has another"):
        agree(Notes(**many), "plan", "a", 0, 20)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RankError, match="Rank 1, 3 did not come to compare the plan within 60 s") as told:
        compare(Notes(plan_2="a"), "plan", "a", 0, 4)
    assert_three_sentences(told.value)


def _load_on_one(rank: int, plan: Any, model: Any) -> str:
    if rank == 1:
        time.sleep(2)
        return ""
    try:
        load(plan, model, session=Session(patience_seconds=1))
    except RankError as error:
        return str(error)
    return "loaded"


def test_a_rank_that_never_loads_is_named_by_the_one_that_does() -> None:
    model, batch = mlp()
    said = launch(2, _load_on_one, plan_of(model, batch, 2), model)
    assert said[0].startswith("Rank 1 did not come to compare the plan within 1 s.")


def test_the_number_of_ranks() -> None:
    check_world(4, 4, "Mlp")
    with pytest.raises(PlanError, match="is for 8 ranks and 4 are running") as told:
        check_world(4, 8, "Mlp")
    assert_three_sentences(told.value)


class Mixed(nn.Module):
    """Values of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.small = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.randint(100, (3,)))
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def mixed(seed: int) -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mixed()


def test_a_digest_tells_initialisations_apart() -> None:
    assert digest(mixed(0)) == digest(mixed(0)) != digest(mixed(1))
    for change in ("small", "mask", "count", "wave", "turned", "scratch"):
        model = mixed(0)
        with torch.no_grad():
            held = getattr(model, change)
            held.copy_(~held if held.dtype == torch.bool else held + 1)
        assert digest(model) != digest(mixed(0)), change


def test_every_rank_takes_the_values_of_the_first() -> None:
    def program(rank: int) -> dict[str, Any]:
        model = mixed(rank)
        share_values(default_store("test"), model, rank, 2, torch.device("cpu"))
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    want = {**dict(mixed(0).named_parameters()), **dict(mixed(0).named_buffers())}
    for found in launch(2, program):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())
