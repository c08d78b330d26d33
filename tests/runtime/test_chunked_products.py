"""Products beside their collectives in chunks: the same training, the same bytes, more and smaller collectives."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conjoin.comm import ROWS, ChunkPlaces, is_product
from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Plan, origin, plan_from_json, plan_to_json
from conjoin.machine import parse_machine
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_pipeline, make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from zoo import build
from zoo.tokens import next_token_loss


@cache
def sample(name: str, batch_size: int) -> Sample:
    made = build(f"{name}:tiny", batch_size=batch_size, seed=1)
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Sample(capture(made.model.train(), made.batch, made.loss), made.model, made.batch)


def plan_for(found: Sample, strategy: str, ranks: int) -> Plan:
    """As a strategy makes it, read from its file's text."""
    return plan_from_json(plan_to_json(make_plan(found.graph, parse_machine(f"local:{ranks}"), strategy)))


CASES = [
    ("llama-8b", 4, "megatron:tp=2,chunks=2", 2), ("llama-8b", 4, "megatron:tp=2,sp,chunks=3", 2),
    ("llama-8b", 1, "megatron:tp=2,sp+chunks=2", 2), ("gpt-1.3b", 4, "megatron:tp=4,sp,chunks=4", 4),
    ("gpt-1.3b", 4, "fsdp+megatron:tp=2,dp=2,sp+chunks=2+recompute=full", 4),
    ("llama-8b", 4, "megatron:tp=2,chunks=2+micro=2+recompute=selective", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "batch_size", "strategy", "ranks"), CASES)
def test_training_is_as_on_one_device(name: str, batch_size: int, strategy: str, ranks: int) -> None:
    found = sample(name, batch_size)
    assert verify_in_process(Case(plan_for(found, strategy, ranks), found.graph, found.model, found.inputs), 2).passed


@pytest.mark.parametrize("flags", ["", ",sp"])
def test_the_same_is_sent_in_more_collectives(flags: str) -> None:
    found = sample("llama-8b", 4)
    whole, cut = (plan_for(found, f"megatron:tp=2{flags},chunks={count}", 2) for count in (2, 4))

    def program(communicator: Communicator) -> tuple[int, int, Tensor, list[Tensor]]:
        module = module_on(plan, found, communicator)
        loss = module(*found.inputs)
        loss.backward()
        return communicator.bytes_sent, communicator.num_started, loss, [p.grad for p in module.parameters()]

    results = []
    for plan in (replace(whole, chunks=1), whole, cut):
        results.append(run_ranks(plan.mesh, program)[0])
    (sent, started, *wanted), *others = results
    for count, (bytes_sent, num_started, *got) in zip((2, 4), others, strict=True):
        assert bytes_sent == sent
        products = 18 if flags else 9  # sums forward and of gradients backward; with sp each has a gather too
        assert num_started == started + (count - 1) * products
        torch.testing.assert_close(got, wanted)


def test_processes_train_as_the_plain_model(tmp_path: Path) -> None:
    found = sample("llama-8b", 4)
    plan = plan_for(found, "megatron:tp=2,sp,chunks=4", 2)

    def program(communicator: Communicator) -> list[float]:
        module = module_on(plan, found, communicator)
        optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(*found.inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = copy.deepcopy(found.model)
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = next_token_loss(model(found.inputs[0]), found.inputs[1])
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for losses in run_processes(plan.mesh, program, tmp_path):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_what_cannot_go_in_chunks_is_told() -> None:
    found = sample("llama-8b", 4)
    with pytest.raises(StrategyError, match="None of its 15 products reads rows"):
        plan_for(found, "data-parallel+chunks=2", 2)
    with pytest.raises(UsageError, match="number of chunks from 1 to 64"):
        plan_for(found, "megatron:tp=2,chunks=65", 2)
    data = plan_to_json(plan_for(found, "megatron:tp=2,chunks=2", 2))
    assert data["chunks"] == 2
    with pytest.raises(PlanError, match="products in 0 chunks are none"):
        plan_from_json({**data, "chunks": 0})
    for strategy in ("pipeline:pp=2,tp=2,chunks=2,schedule=zero-bubble", "pipeline:pp=2,chunks=2"):
        with pytest.raises(UsageError, match="strategy pipeline was given chunks=2") as error:
            make_pipeline(found.graph, parse_machine("local:4"), strategy)
        assert_three_sentences(error.value)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_of_pipelines_train_as_one_device(schedule: str) -> None:
    found = sample("llama-8b", 4)
    pipeline = make_pipeline(
        found.graph, parse_machine("local:4"), f"pipeline:pp=2,tp=2,sp,micro=2,chunks=2,schedule={schedule}"
    )
    assert {stage.plan.chunks for stage in pipeline.stages} == {2}
    products = [stage.plan for stage in pipeline.stages if has_chunks(stage.plan)]
    assert products, "some products do go in chunks"
    assert verify_in_process(Case(pipeline, found.graph, found.model, found.inputs), 2).passed


def has_chunks(plan: Plan) -> bool:
    places = ChunkPlaces(plan.graph, plan.mesh, plan.chunks, ())
    products = (node for node in plan.graph.nodes if is_product(node))
    return any(places.find(node, origin(node.inputs[ROWS[node.op]]).type.layout) is not None for node in products)
