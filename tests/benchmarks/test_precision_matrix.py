"""A diagonal of the benchmark: kinds of models in precisions that a CPU has, by strategies, on four ranks.

Layouts are judged in float64, in which a plan in any precision gives what one device gives; what is rounded by the
benchmark's own bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from benchmarks import precision_matrix
from benchmarks.precision_matrix import (
    MODELS,
    PRECISIONS,
    STRATEGIES,
    Cell,
    cells,
    compared,
    gradients_of,
    judged,
    told,
    workload,
)
from conjoin.api import verify_in_process
from conjoin.machine import parse_machine
from conjoin.runtime import Case
from conjoin.search import make_plan
from tests.zoo.graphs import shared

CASES = [
    ("gpt-125m", "bf16-mixed", "megatron:tp=2,dp=2,sp"),
    ("gpt-125m", "fp8-mixed", "megatron:tp=2,dp=2+recompute=selective+micro=2"),
    ("gpt-125m", "bf16-mixed", "pipeline:pp=2,dp=2,micro=2"),
    ("llama-8b", "bf16-mixed", "context:cp=4,ring"), ("llama-8b", "bf16-mixed", "megatron:tp=2,dp=2,sp,fsdp"),
    ("bert-base", "bf16-mixed", "fsdp+recompute=full"),
    ("vit-b-16", "bf16-mixed", "megatron:tp=4"), ("vit-b-16", "bf16", "hsdp:shard=2,replicate=2"),
    ("resnet-50", "bf16-mixed", "fsdp"),
    ("moe-8x7b", "fp16-mixed", "expert:ep=2+megatron:tp=2"),
]  # fmt: skip
IN_DOUBLE = {name: (precision, strategy) for name, precision, strategy in reversed(CASES)}
"""The first of each model."""


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    make = precision_matrix.graph_of
    found = cache(lambda name, precision: shared(f"{name}-{precision}-8", lambda: make(name, precision)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(precision_matrix, "graph_of", found)
        yield


@pytest.mark.parametrize(("name", "precision", "strategy"), CASES)
def test_training_follows_one_device_and_layouts_are_exact(name: str, precision: str, strategy: str) -> None:
    cell = compared(name, precision, strategy)
    assert cell.verdict == "follows" and cell.plan > 1e-4, "it is rounded, and no more than on one device"
    if IN_DOUBLE[name] == (precision, strategy):
        made, graph = workload(name), precision_matrix.graph_of(name, precision)
        plan = make_plan(graph, parse_machine("local:4"), strategy)
        assert verify_in_process(Case(plan, graph, made.model, made.batch), 1).passed


def test_the_diagonal_has_every_model_and_cells_are_named_in_the_benchmark() -> None:
    assert {name for name, _, _ in CASES} == set(MODELS) and set(CASES) <= set(cells())
    assert len(cells()) == len(MODELS) * len(PRECISIONS) * len(STRATEGIES)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_drawn_so_that_float32_is_next_to_float64(name: str) -> None:
    exact, plain = gradients_of(name, "float64"), gradients_of(name, "float32")
    assert judged(exact, plain, plain, torch.float32).one_device < 1e-4


def test_what_is_off_is_seen() -> None:
    exact, plain = gradients_of("gpt-125m", "float64"), gradients_of("gpt-125m", "float32")
    rounded = gradients_of("gpt-125m", "bf16-mixed")
    assert judged(exact, plain, plain, torch.float32).verdict == "follows"
    assert judged(exact, plain, rounded, torch.float32).verdict == "off", "bfloat16 where float32 was asked for"
    name, largest = max(rounded.items(), key=lambda item: item[1].norm().item())
    assert judged(exact, rounded, {**rounded, name: largest * 1.1}, torch.bfloat16).verdict == "off", "one too large"


def test_cells_that_are_known_are_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str, str]] = []

    def noted(*cell: str) -> Cell:
        done.append((cell[0], cell[1], cell[2]))
        return Cell(0.1, 0.1, 0.2)

    monkeypatch.setattr("benchmarks.precision_matrix.compared", noted)
    asked = [("a", "bf16", "fsdp"), ("b", "bf16", "fsdp")]
    found = dict(told(asked, {"a bf16 fsdp": {}}, 60.0))
    assert done == asked[1:] and found == {
        "b bf16 fsdp": {"plan": 0.1, "one_device": 0.1, "bound": 0.2, "verdict": "follows"}
    }
    assert not dict(told(asked, {}, -1.0)), "when the time is over"
