"""What a rank did in a step: computing and communicating told apart, on one process and on Gloo ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import conjoin
from conjoin.ir import Plan
from conjoin.runtime import Recorded, launch, record


def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), (torch.randn(8, 32), torch.randn(8, 8))


def check(found: list[Recorded]) -> None:
    assert found[0].start == 0 and all(a.start <= b.start for a, b in pairwise(found))
    assert all(entry.duration >= 0 and entry.stream in ("compute", "links") for entry in found)
    assert not any(entry.name.startswith(("aten::", "autograd::engine", "c10d::")) for entry in found)


def test_one_process_only_computes() -> None:
    model, (x, target) = small()
    ran = []

    def step() -> None:
        ran.append(nn.functional.mse_loss(model(x), target))
        ran[-1].backward()  # type: ignore[no-untyped-call]

    found = record(step)
    check(found)
    assert len(ran) == 1, "the step runs once"
    assert {entry.stream for entry in found} == {"compute"}
    names = [entry.name for entry in found]
    assert names.count("linear") == 2 and names.index("linear") < names.index("tanh") < names.index("mse_loss")
    assert any("Backward" in name for name in names), "the backward pass is there"


def _record_rank(rank: int, plan: Plan) -> list[Recorded]:
    model, batch = small()
    step = conjoin.load(plan, model)
    step(*batch).backward()
    return record(lambda: step(*batch).backward())


@pytest.mark.parametrize(
    ("strategy", "collectives"),
    [("data-parallel", ("all_reduce",)), ("fsdp", ("all_gather", "all_to_all"))],  # Gloo scatters sums by all_to_all
)
def test_collectives_of_ranks_are_on_a_stream_of_their_own(strategy: str, collectives: tuple[str, ...]) -> None:
    model, batch = small()
    plan = conjoin.plan(model, batch, "local:2", loss=nn.functional.mse_loss, strategy=strategy)
    for found in launch(2, _record_rank, plan):
        check(found)
        sent = [entry.name for entry in found if entry.stream == "links"]
        assert all(any(kind in name for name in sent) for kind in collectives), sent
        assert any(entry.name == "linear" and entry.stream == "compute" for entry in found)


def test_nothing_done_is_nothing_recorded() -> None:
    assert record(lambda: None) == []
