"""A part of a model in micro-batches, the rest on the whole batch: the plain model on one device is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import conjoin
import zoo
from conjoin.cost import CostModel
from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Plan, check_plan, micro_batched_parts, plan_from_json, plan_to_json
from conjoin.machine import parse_machine
from conjoin.ops import BATCH, PIPELINE
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_pipeline, make_plan
from conjoin.sim import predict
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample


class Contrastive(nn.Module):
    """Two towers, and a loss in which every sample meets every other one."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(rate), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        left = functional.normalize(self.left(self.words(tokens)).mean(1), dim=-1)
        right = functional.normalize(self.right(image), dim=-1)
        scores = left @ right.T * self.scale.exp()
        pairs = torch.arange(len(tokens))
        return (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2


def itself(loss: Tensor) -> Tensor:
    return loss


def batch_of(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(11, (rows, 3)), torch.randn(rows, 5).double()


def made_for(
    strategy: str, ranks: int, rate: float = 0.0, machine: str = "local", rows: int = 8
) -> tuple[Plan, nn.Module, Any]:
    """A plan as its file has it, the model and its graph."""
    torch.manual_seed(0)
    model = Contrastive(rate).double().train()
    graph = capture(model, batch_of(rows), itself)
    plan = make_plan(graph, parse_machine(f"{machine}:{ranks}"), strategy)
    return plan_from_json(plan_to_json(plan)), model, graph


def on_ranks(plan: Plan, model: nn.Module, rows: int = 8) -> list[list[Tensor]]:
    """Loss and gradients on every rank that holds its parameters whole."""
    batch = batch_of(rows)

    def program(communicator: Communicator) -> list[Tensor]:
        module = module_on(plan, Sample(plan.graph, model, batch), communicator)
        loss = module(*batch)
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.parameters())]

    return run_ranks(plan.mesh, program)


@pytest.mark.parametrize(
    ("strategy", "ranks", "rows"),
    [
        ("data-parallel+part=4", 1, 8),
        ("data-parallel+part=2", 2, 8),
        ("data-parallel+part=4", 2, 8),
        ("data-parallel+part=2", 2, 6),  # of three samples in a micro-batch one device has two
    ],
)
def test_a_loss_over_all_pairs_is_that_of_the_whole_batch(strategy: str, ranks: int, rows: int) -> None:
    plan, model, _ = made_for(strategy, ranks, rows=rows)
    wanted = model(*batch_of(rows))
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    for loss, *found in on_ranks(plan, model, rows):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, list(gradients), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "ranks", "rate"),
    [("fsdp+part=4", 2, 0.0), ("megatron:tp=2+part=4", 2, 0.0), ("megatron:tp=2,dp=2+part=2", 4, 0.3)],
)
def test_training_is_as_on_one_device(strategy: str, ranks: int, rate: float) -> None:
    plan, model, graph = made_for(strategy, ranks, rate)
    assert verify_in_process(Case(plan, graph, model, batch_of()), 2).passed


def test_two_processes_train_as_one_device(tmp_path: Path) -> None:
    plan, model, graph = made_for("fsdp+part=2", 2)
    batch = batch_of()
    wanted = model(*batch).detach()

    def program(communicator: Communicator) -> Tensor:
        return module_on(plan, Sample(graph, model, batch), communicator)(*batch).detach()

    for loss in run_processes(plan.mesh, program, tmp_path):
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["data-parallel+part=2", "megatron:tp=2+part=4", "fsdp+part=4"])
def test_what_is_sent_is_told(strategy: str) -> None:
    plan, model, graph = made_for(strategy, 2)
    batch = batch_of()

    def program(communicator: Communicator) -> int:
        module_on(plan, Sample(graph, model, batch), communicator)(*batch).backward()
        return communicator.bytes_sent

    told = explain(plan)
    assert run_ranks(plan.mesh, program) == [told.bytes_of(rank) for rank in range(2)]


class Elements(TorchDispatchMode):
    """The most elements that a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dim() == 3:
            self.most = max(self.most, made.numel())
        return made


def test_a_micro_batch_is_as_small_as_it_is_priced() -> None:
    """What towers make is half as large, and gone before the loss: less memory, for running them again."""
    sizes, peaks, seconds = [], [], []
    machine = parse_machine("k80-cluster:1")
    for strategy in ("data-parallel", "data-parallel+part=2"):
        plan, model, _ = made_for(strategy, 1, machine="k80-cluster", rows=256)
        with Elements() as counted:
            on_ranks(plan, model, 256)
        sizes.append(counted.most)
        told = predict(plan, machine, CostModel(), "sgd")
        peaks.append(told.memory.peak)
        seconds.append(told.simulation.seconds)
    assert sizes[0] == 2 * sizes[1]
    assert peaks[1] < peaks[0] and seconds[1] > seconds[0]


def test_a_plan_may_be_edited_and_a_wrong_edit_is_refused() -> None:
    plan, model, _ = made_for("data-parallel+part=4", 1)
    assert [part.count for part in micro_batched_parts(plan.graph)] == [4]
    text = {**plan_to_json(plan), "computes": None}
    lines = text["graph"]
    assert any(f"{PIPELINE}(input:tokens" in line for line in lines)
    places = [i for i, line in enumerate(lines) if BATCH in line]
    without = [line.replace("count=4", "count=2") if i == places[0] else line for i, line in enumerate(lines)]
    with pytest.raises(PlanError, match="is not legal"):
        check_plan(plan_from_json({**text, "graph": without}))
    wanted = model(*batch_of()).detach()
    (found,) = on_ranks(plan_from_json(text), model)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "strategy", "precision"),
    [("bert-base", "megatron:tp=2", None), ("alexnet", "fsdp", "bf16-mixed"), ("gcn", "data-parallel", "bf16-mixed")],
)
def test_parts_of_models_of_the_zoo(name: str, strategy: str, precision: str | None) -> None:
    """Sums that are asked for late, behind another part; parameters that are cast before any micro-batch."""
    work = zoo.build(f"{name}:tiny", batch_size=16)
    plan = conjoin.plan(
        work.model, work.batch, "local:4", loss=work.loss, strategy=f"{strategy}+part=2", precision=precision
    )
    assert any(part.count == 2 for part in micro_batched_parts(plan.graph))
    assert conjoin.verify_plan(plan, work.model, work.batch, loss=work.loss, num_steps=2).passed


def test_nothing_to_cut_is_said() -> None:
    model = nn.Sequential(nn.Flatten(0), nn.Linear(40, 3))
    graph = capture(model.double().train(), (torch.randn(8, 5).double(),), lambda output: output.square().mean())
    with pytest.raises(StrategyError, match="works on samples apart"):
        make_plan(graph, parse_machine("local:1"), "data-parallel+part=4")
    with pytest.raises(UsageError, match="part"):
        make_plan(graph, parse_machine("local:1"), "data-parallel+part=2+part=4")
    with pytest.raises(UsageError, match="Leave one of them out"):
        make_plan(graph, parse_machine("local:1"), "data-parallel+part=2+micro=4")
    with pytest.raises(UsageError, match="none has the batch as a whole"):
        make_pipeline(graph, parse_machine("local:2"), "pipeline:pp=2+part=2")
    with pytest.raises(StrategyError, match="5 micro-batches"):
        made_for("data-parallel+part=5", 1)
