"""Every precision that a CPU has, on every kind of model and strategy: verified in this process, in double precision.

The judge is one device: the captured graph, and for one strategy of each the model itself without any graph. What is
rounded on the way is judged elsewhere (`tests/runtime/test_mixed_precision.py`, `test_eight_bits.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import zoo
from conjoin.api import PlainModel, capture, run_plainly, verify_in_process
from conjoin.errors import UsageError
from conjoin.frontends import PRECISIONS, Precision
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.ops import SCALED_LINEAR
from conjoin.runtime import Case
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.zoo.graphs import captured

MODELS = ("gpt-125m", "llama-7b", "bert-base", "vit-b-16", "resnet-50", "moe-8x7b")
NAMES = (*(name for name in PRECISIONS if name != "tf32"), "bf16-mixed,reduce=bf16", "fp8-mixed,reduce=bf16")
STRATEGIES = ("data-parallel", "zero1", "fsdp", "megatron:tp=2")
BATCH = 4


@cache
def workload(model: str) -> Any:
    return zoo.build(f"{model}:tiny", batch_size=BATCH)


@cache
def graph_in(model: str, name: str) -> Graph:
    """Captured once for precisions that differ by what follows only; in float32 by whoever asked first."""
    if name == "float32":
        return captured(model, BATCH)
    found = workload(model)
    return capture(found.model.train(), found.batch, found.loss, check=False, precision=name)


def graph_of(model: str, asked: Precision) -> Graph:
    name = asked.name.replace("fp8", "bf16")
    return asked.applied(graph_in(model, name))


def check(model: str, name: str, strategies: tuple[str, ...]) -> None:
    """The first strategy against the model itself, too; not where only sums are of another precision than elsewhere."""
    found, asked = workload(model), Precision.parse(name)
    own, batch = asked.converted(found.model, found.batch)
    graph = graph_of(model, asked)
    assert (asked.name == "fp8-mixed") == any(node.op == SCALED_LINEAR for node in graph.nodes)
    for strategy in strategies:
        plan = make_plan(graph, parse_machine("local:2"), strategy)
        is_judged = strategy == strategies[0] and "reduce" not in name
        plain = PlainModel(own, found.loss, run_plainly) if is_judged else None
        verdict = verify_in_process(Case(plan, graph, own, batch, plain), 1)
        assert verdict.passed, (strategy, verdict.differences[:3], verdict.told)
        trained = [leaf for leaf in plan.graph.leaves if leaf.trainable]
        stored = torch.float32 if asked.autocast else asked.dtype
        assert {leaf.type.dtype for leaf in trained} == {stored} and plan.graph.rounding == asked.rounding


CELLS = tuple((model, name) for model in MODELS for name in NAMES if not (model == "resnet-50" and "fp8" in name))
SUMMED, SUMMED_FP8 = NAMES[-2:]
SAMPLE: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("gpt-125m", "float32"): (("float32", "data-parallel"),),
    ("gpt-125m", "bf16-mixed"): (
        ("bf16-mixed", "megatron:tp=2"), ("fp8-mixed", "fsdp"), (SUMMED, "zero1"),
    ),
    ("llama-7b", "bf16-mixed"): (
        ("bf16-mixed", "data-parallel"), ("fp8-mixed", "megatron:tp=2"), (SUMMED, "fsdp"), (SUMMED_FP8, "zero1"),
    ),
    ("bert-base", "bf16-mixed"): (
        ("bf16-mixed", "fsdp"), ("fp8-mixed", "data-parallel"), (SUMMED_FP8, "megatron:tp=2"),
    ),
    ("bert-base", "fp16-mixed"): (("fp16-mixed", "zero1"), ("fp16-mixed", "fsdp")),
    ("vit-b-16", "bf16-mixed"): (
        ("bf16-mixed", "zero1"), (SUMMED, "megatron:tp=2"), (SUMMED_FP8, "data-parallel"),
    ),
    ("vit-b-16", "bf16"): (("bf16", "fsdp"), ("bf16", "data-parallel")),
    ("resnet-50", "bf16-mixed"): (("bf16-mixed", "fsdp"), (SUMMED, "data-parallel")),
    ("resnet-50", "bf16"): (("bf16", "zero1"), ("bf16", "megatron:tp=2")),
    ("moe-8x7b", "bf16-mixed"): (
        ("bf16-mixed", "megatron:tp=2"), ("fp8-mixed", "zero1"), (SUMMED_FP8, "fsdp"),
    ),
    ("moe-8x7b", "fp16-mixed"): (("fp16-mixed", "megatron:tp=2"), ("fp16-mixed", "data-parallel")),
}  # fmt: skip
"""Of a model captured in a precision, in which precisions that follow it is trained by which strategies."""


@pytest.mark.parametrize(("model", "captured_in"), SAMPLE)
def test_a_sample_trains_like_one_device(model: str, captured_in: str) -> None:
    for name, strategy in SAMPLE[model, captured_in]:
        check(model, name, (strategy,))


def test_the_sample_has_every_strategy_in_every_precision_and_of_every_model() -> None:
    cells = [(model, name, strategy) for (model, _), asked in SAMPLE.items() for name, strategy in asked]
    assert {(name, s) for _, name, s in cells if name != "float32"} == {(n, s) for n in NAMES[1:] for s in STRATEGIES}
    assert {(model, strategy) for model, _, strategy in cells} == {(m, s) for m in MODELS for s in STRATEGIES}
    assert {(model, name) for model, name, _ in cells} <= set(CELLS) and NAMES[0] == "float32"


@pytest.mark.whole_matrix
@pytest.mark.parametrize(("model", "name"), CELLS)
def test_everything_trains_like_one_device(model: str, name: str) -> None:
    check(model, name, STRATEGIES)


def test_a_network_of_convolutions_has_no_layer_for_eight_bits() -> None:
    with pytest.raises(UsageError, match="Of its 1 layers that multiply by a weight 0 are") as told:
        graph_of("resnet-50", Precision.parse("fp8-mixed"))
    assert_three_sentences(told.value)
