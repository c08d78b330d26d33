"""What is made of parameters alone is made once in a step, and its gradients go back once: as on one device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from conjoin.comm import MadeOnce, find_bundles, find_made_once
from conjoin.frontends import capture
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.report import explain
from conjoin.runtime.program import emission
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_pipeline, make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from zoo import build


class Normed(nn.Module):
    """Layers whose weights are made of others: normed, transposed and tied, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(8, 16))
        self.down, self.scale = nn.Linear(16, 8), nn.Parameter(torch.rand(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        back = nn.functional.linear(self.down(hidden), (self.down.weight * self.scale).T)
        return nn.functional.linear(torch.tanh(back), self.down.weight.softmax(0))


class Widened(nn.Module):
    """Parameters that are cast and then made into something, as decays of state-space models and gains of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.gains = nn.ParameterList(torch.rand(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = torch.tanh(layer(x) * (1 + gain.double().exp()).to(x.dtype))
        return x


class Squashed(nn.Module):
    """Gate and up in one weight, of which another one is made before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(32, 8)), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.gate_up.tanh()).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * up)


@cache
def sample(name: str) -> Sample:
    torch.manual_seed(4)
    kinds: dict[str, type[nn.Module]] = {"normed": Normed, "widened": Widened, "squashed": Squashed}
    if name in kinds:
        model, inputs = kinds[name](), (torch.randn(8, 8), torch.randn(8, 8))
        return Sample(capture(model, inputs, nn.functional.mse_loss), model, inputs)
    made = build(f"{name}:tiny", batch_size=4, seed=1)
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Sample(capture(made.model.train(), made.batch, made.loss), made.model, made.batch)


def plan_for(name: str, strategy: str, ranks: int) -> Plan:
    make = make_pipeline if strategy.startswith("pipeline") else make_plan
    return make(sample(name).graph, parse_machine(f"local:{ranks}"), strategy)


CASES = [
    ("gpt-1.3b", "megatron:tp=2+micro=2", 2), ("gpt-1.3b", "megatron:tp=2,dp=2,sp+micro=2+recompute=full", 4),
    ("normed", "data-parallel+micro=4", 2), ("normed", "fsdp+micro=2", 2), ("normed", "zero1+micro=2", 2),
    ("gpt-1.3b", "pipeline:pp=2,tp=2,micro=2", 4), ("widened", "pipeline:pp=2,dp=2,micro=2", 4),
    ("widened", "fsdp+micro=2", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy", "ranks"), CASES)
def test_training_is_as_on_one_device(name: str, strategy: str, ranks: int) -> None:
    found = sample(name)
    plan = plan_for(name, strategy, ranks)
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed


def sent_in_a_step(plan: Plan, found: Sample) -> int:
    def program(communicator: Communicator) -> int:
        module_on(plan, found, communicator)(*found.inputs).backward()
        return communicator.bytes_sent

    return run_ranks(plan.mesh, program)[0]


def test_a_fused_layer_is_cut_and_its_gradient_sent_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, micro = sample("squashed"), 4
    plan = plan_for("squashed", f"megatron:tp=2+micro={micro}", 2)
    bundled = {entry for bundle in find_bundles(plan) for entry in bundle.entries}
    assert sum(node.op == "split_with_sizes" for node in find_made_once(plan.graph, bundled).nodes) == 1
    sent = sent_in_a_step(plan, found)
    assert sent == explain(plan).bytes_of(0)
    monkeypatch.setattr(emission, "find_made_once", lambda *given: MadeOnce(frozenset(), ()))
    fused = sum(leaf.type.bytes for leaf in plan.graph.leaves if leaf.name == "gate_up")
    assert sent_in_a_step(plan, found) - sent == (micro - 1) * fused // 2  # pieces of gradients, gathered by two ranks
