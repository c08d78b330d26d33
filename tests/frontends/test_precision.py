"""A precision that is asked for: whose casts a graph has, what stays in float32, and that it trains like autocast."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.errors import PlanError, UsageError
from conjoin.frontends import PRECISIONS, Precision
from conjoin.ir import Graph, plan_from_json, plan_to_json
from tests.ir.wording import assert_three_sentences

HALF = torch.bfloat16


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x) * self.scale)).softmax(-1)


def workload(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    with torch.device(device):
        return Small().train(), (torch.randn(4, 6), torch.rand(4, 4))


def trained_dtypes(graph: Graph) -> set[torch.dtype]:
    return {leaf.type.dtype for leaf in graph.leaves if leaf.trainable}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "fp8-mixed"])  # too small for eight bits
def test_what_is_stored_and_what_is_computed(name: str, device: str) -> None:
    (model, batch), asked = workload(), Precision(name, device)
    before = copy.deepcopy(model.state_dict())
    graph = conjoin.capture(model, batch, functional.mse_loss, precision=str(asked))
    assert trained_dtypes(graph) == {torch.float32 if "mixed" in name else asked.dtype}
    assert {node.types[0].dtype for node in graph.nodes if node.op == "linear"} == {asked.dtype}
    assert graph.rounding == asked.rounding and graph.rounding.tf32 == (name == "tf32")
    wide = "mixed" in name and device == "cuda"
    softmax = {node.types[0].dtype for node in graph.nodes if node.op.startswith("softmax")}
    assert wide <= (softmax == {torch.float32}), "CUDA's autocast computes a softmax in float32"
    assert all(x.dtype == torch.float32 and torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_a_model_with_values_is_cast_as_one_on_the_gpu_would_be() -> None:
    model, batch = workload()
    mine = conjoin.capture(model, batch, functional.mse_loss, precision="bf16-mixed@cuda")

    class Cast(Small):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", HALF):
                return super().forward(x)

    def cast_too(found: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast("cuda", HALF):
            return functional.mse_loss(found, wanted)

    _, given = workload("meta")
    with torch.device("meta"):
        theirs = conjoin.capture(Cast().train(), given, cast_too)
    assert [node.op for node in mine.nodes] == [node.op for node in theirs.nodes]
    assert [node.types[0].dtype for node in mine.nodes] == [node.types[0].dtype for node in theirs.nodes]


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed", "bf16"])
def test_a_plan_trains_as_the_model_does_in_that_precision(name: str) -> None:
    model, batch = workload()
    plan = conjoin.plan(model, batch, "local:1", loss=functional.mse_loss, strategy="single", precision=name)
    asked = Precision.parse(plan.precision)
    assert asked == Precision(name, "cpu") and conjoin.verify_plan(plan, model, batch, loss=functional.mse_loss).passed
    plain, given = asked.converted(copy.deepcopy(model), batch)
    step = conjoin.load(plan, copy.deepcopy(plain), device="cpu")
    calls = asked.running(lambda: functional.mse_loss(plain(given[0]), given[1])), lambda: step(*given)
    found = []
    for module, call in zip((plain, step), calls, strict=True):
        call().backward()
        found.append([p.grad.as_subclass(Tensor) for p in module.parameters() if p.grad is not None])
    assert len(found[0]) == 6 and all(map(torch.equal, *found))


def test_it_stands_in_the_plan(tmp_path: Path) -> None:
    model, batch = workload()
    plan = conjoin.plan(model, batch, "local:2", loss=functional.mse_loss, strategy="fsdp", precision="bf16-mixed")
    plan.save(tmp_path / "plan.json")
    assert conjoin.load_plan(tmp_path / "plan.json") == plan and plan.precision == "bf16-mixed@cpu"
    as_it_is = conjoin.plan(model, batch, "local:2", loss=functional.mse_loss, strategy="fsdp")
    assert "precision" not in plan_to_json(as_it_is)


@pytest.mark.parametrize(
    ("text", "error"), [(7, PlanError), ("a\nb", PlanError), ("fp4@cpu", UsageError), ("bf16@tpu", UsageError)]
)
def test_a_wrong_one_in_a_file_is_told(text: Any, error: type[Exception]) -> None:
    model, batch = workload()
    plan = conjoin.plan(model, batch, "local:1", loss=functional.mse_loss, strategy="single", precision="bf16-mixed")
    data = json.loads(json.dumps({**plan_to_json(plan), "precision": text}))
    with pytest.raises(error) as told:
        conjoin.verify_plan(plan_from_json(data), model, batch, loss=functional.mse_loss)
    assert_three_sentences(told.value)


@pytest.mark.parametrize("precision", ["fp8", "bfloat16", "", 16])
def test_one_that_nobody_knows_is_refused(precision: Any) -> None:
    model, batch = workload()
    with pytest.raises(UsageError) as told:
        conjoin.plan(model, batch, "local:1", loss=functional.mse_loss, strategy="single", precision=precision)
    assert_three_sentences(told.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bf16-mxed", "Did you mean bf16-mixed?"),
        ("FP16", "Did you mean fp16-mixed?"),
        ("tfloat32", "Did you mean tf32?"),
        ("bf16-mixed,reduce=fp8", "reduce=float32 or reduce=bf16"),
        ("bf16-mixed,sums=bf16", "reduce=float32 or reduce=bf16"),
        ("fp16-mixed,reduce=bf16", "others sum them as parameters are stored"),
        ("float32,reduce=bf16", "others sum them as parameters are stored"),
        ("bf16-mixed,", "reduce=float32 or reduce=bf16"),
        ("bf16@tpu", "on 'tpu'"),
    ],
)
def test_a_wrong_one_is_told_with_the_nearest(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as error:
        Precision.parse(text)
    assert_three_sentences(error.value)


@pytest.mark.parametrize("text", ["tf32@cuda", "bf16-mixed,reduce=bf16@cpu", "fp16-mixed@cuda", "float32@cpu"])
def test_one_is_read_back_as_written(text: str) -> None:
    assert str(Precision.parse(text)) == text
    assert Precision.parse("bf16-mixed,reduce=float32") == Precision.parse("bf16-mixed")


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed"])
def test_complex_parameters_are_not_left_as_they_are_in_silence(precision: str) -> None:
    model, batch = torch.nn.Linear(8, 4, dtype=torch.complex64), (torch.randn(4, 8, dtype=torch.complex64),)
    with pytest.raises(UsageError, match=r"The parameter weight is of torch\.complex64") as told:
        conjoin.plan(model, batch, "local:2", loss=lambda y: y.abs().mean(), strategy="fsdp", precision=precision)
    assert_three_sentences(told.value)


def test_a_plan_edited_to_a_precision_that_there_is_not_is_refused_when_it_is_explained() -> None:
    model, batch = nn.Linear(4, 4), (torch.ones(8, 4),)
    made = conjoin.plan(model, batch, "local:1", loss=torch.sum, strategy="single", precision="bf16")
    edited = plan_from_json({**plan_to_json(made), "precision": "fp4"})
    with pytest.raises(UsageError, match="fp4") as refused:
        conjoin.explain(edited)
    assert_three_sentences(str(refused.value))


def test_a_plan_all_in_half_precision_says_how_to_give_it_the_model() -> None:
    model, batch = nn.Linear(4, 4), (torch.ones(8, 4),)
    made = conjoin.plan(model, batch, "local:1", loss=torch.sum, strategy="single", precision="bf16")
    with pytest.raises(PlanError, match=r"Give it model.to\(torch.bfloat16\)") as refused:
        conjoin.load(made, model, device="cpu")
    assert_three_sentences(str(refused.value))
    wide = batch[0].bfloat16()
    assert torch.equal(conjoin.load(made, model.bfloat16(), device="cpu")(wide), model(wide).sum())
