"""Tensors and optimizer state that lie on the host: the same numbers to the last bit, and less on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from conjoin.comm import offloads, updated_together
from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import (
    OFFLOAD,
    Graph,
    LeafKind,
    MemoryAction,
    Plan,
    check_plan,
    offload_actions,
    offloaded_states,
    offloaded_tensors,
    operators_of,
    plan_from_json,
    plan_to_json,
    recomputed_segments,
)
from conjoin.machine import parse_machine
from conjoin.report import diff_plans, explain, explanation_text
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state import offloaded_state
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_pipeline, make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from tests.runtime.test_recompute import sample
from zoo.gnn import DeepGcn, GnnConfig


@pytest.fixture(autouse=True)
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors leave as large ones do."""
    monkeypatch.setattr(offloads, "AHEAD_BYTES", 0)


def offloading(graph: Graph, strategy: str, ranks: int = 4) -> tuple[Plan, Plan]:
    """A plan, and the same with all that may lie on the host there, read from its file's text."""
    plan = make_plan(graph, parse_machine(f"local:{ranks}"), strategy)
    segments = recomputed_segments(plan)
    again = {place for first, last in segments for place in range(first, last)}
    made = [
        (place, i)
        for place, node in enumerate(operators_of(plan.graph))
        for i, _ in enumerate(node.outputs())
        if place not in again
    ]
    moved = replace(plan, memory=(*plan.memory, *offload_actions(plan.graph, made)))
    return plan, check_plan(plan_from_json(plan_to_json(moved)))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("transformer", "megatron:tp=2,sp+micro=2"),
        ("two layers", "fsdp+recompute=full"),
        ("convolutions", "spatial"),
    ],
)
def test_training_is_as_on_one_device(name: str, strategy: str) -> None:
    found = sample(name)
    _, moved = offloading(found.graph, strategy)
    assert verify_in_process(Case(moved, found.graph, found.model, found.inputs), 2).passed


@pytest.mark.parametrize("strategy", ["single", "vertex-parallel:parts=3"])
def test_a_graph_network_trains_as_on_one_device(strategy: str) -> None:
    torch.manual_seed(0)
    model = DeepGcn(GnnConfig(features=4, classes=3, degree=2, hidden=8, layers=3)).double()
    edges, weight = torch.randint(12, (2, 30)), torch.rand(30, dtype=torch.float64)
    batch = (torch.randn(12, 4, dtype=torch.float64), edges, weight, torch.randint(3, (12,)))
    graph = capture(model, batch, torch.nn.functional.cross_entropy)
    _, moved = offloading(graph, strategy, 1 if strategy == "single" else 3)
    assert any(action.action == "offload" for action in moved.memory)
    assert verify_in_process(Case(moved, graph, model, batch), 2).passed


def test_stages_train_as_one_device() -> None:
    found = sample("transformer")
    strategy = "pipeline:pp=2,schedule=zero-bubble+micro=2+offload=both"
    pipeline = make_pipeline(found.graph, parse_machine("local:2"), strategy)
    assert all(offloaded_tensors(stage.plan) and offloaded_states(stage.plan) for stage in pipeline.stages)
    assert verify_in_process(Case(pipeline, found.graph, found.model, found.inputs), 2).passed


def gradients_of(plan: Plan, found: Sample, *, retains: bool = False) -> list[Tensor]:
    """Gradients of two steps on one device, whose draws follow from the seed."""

    def program(communicator: Communicator) -> list[Tensor]:
        module = module_on(plan, found, communicator)
        for _ in range(2):
            loss = module(*found.inputs)
            loss.backward(retain_graph=retains)
            if retains:
                loss.backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    torch.manual_seed(11)
    return run_ranks(plan.mesh, program)[0]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("transformer", "single"),
        ("two layers", "single+recompute=full"),
        ("two layers", "single+recompute=selective+micro=2"),
        ("convolutions", "single"),
    ],
)
def test_gradients_are_the_same_to_the_last_bit(name: str, strategy: str) -> None:
    """Where all is on the host that may be there; and where it is what is kept, as a strategy has it."""
    found = sample(name)
    plan, moved = offloading(found.graph, strategy, ranks=1)
    expected = gradients_of(plan, found)
    named = make_plan(found.graph, parse_machine("local:1"), f"{strategy}+offload=activations")
    assert 0 < len(offloaded_tensors(named)) < len(offloaded_tensors(moved))
    torch.testing.assert_close(gradients_of(named, found), expected, rtol=0, atol=0)
    assert expected
    torch.testing.assert_close(gradients_of(moved, found), expected, rtol=0, atol=0)


def test_a_graph_that_is_retained_brings_tensors_again() -> None:
    found = sample("transformer")
    plan, moved = offloading(found.graph, "single", ranks=1)
    expected = gradients_of(plan, found, retains=True)
    torch.testing.assert_close(gradients_of(moved, found, retains=True), expected, rtol=0, atol=0)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adam in groups": lambda ps: torch.optim.Adam([{"params": ps[:3]}, {"params": ps[3:], "amsgrad": True}]),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
}


def trained(plan: Plan, found: Sample, name: str, restores: bool = False) -> tuple[list[Tensor], int]:
    """The weights after three steps on one device, and how many tensors of the optimizer's state lie on the host."""

    def program(communicator: Communicator) -> tuple[list[Tensor], int]:
        module = module_on(plan, found, communicator)
        optimizer = OPTIMIZERS[name](list(module.parameters()))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

        def loss() -> Tensor:
            optimizer.zero_grad()
            found_loss: Tensor = module(*found.inputs)
            found_loss.backward()
            return found_loss

        for step in range(3):
            loss()
            optimizer.step(loss) if name == "lbfgs" else optimizer.step()
            scheduler.step()
            if restores and step == 1:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = OPTIMIZERS[name](list(module.parameters()))
                optimizer.load_state_dict(state)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        home = offloaded_state._homes.get(optimizer)
        hosts = [] if home is None else list(home._hosts.values())
        held = [x for kept in optimizer.state.values() for x in kept.values() if any(x is host for host in hosts)]
        return [p.detach().clone() for p in module.parameters()], len(held)

    torch.manual_seed(11)
    return run_ranks(plan.mesh, program)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_the_same_where_state_lies_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_state, "updated_together", partial(updated_together, limit=1000))
    found = sample("transformer")
    plan = make_plan(found.graph, parse_machine("local:1"), "single")
    names = [leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)]
    moved = check_plan(replace(plan, memory=offload_actions(plan.graph, (), names[1:])))
    assert offloaded_states(plan_from_json(plan_to_json(moved))) == {*names[1:]}
    expected, none = trained(plan, found, name)
    weights, held = trained(moved, found, name)
    again, _ = trained(moved, found, name, restores=name != "lbfgs")
    assert none == 0 and held == {"adamw": 2, "adam in groups": 2, "sgd": 1, "lbfgs": 0}[name] * len(names[1:]) + (
        len(names[3:]) if name == "adam in groups" else 0
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    if name in ("adamw", "sgd"):
        plain, _ = trained(plan, found, name, restores=True)
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


@pytest.mark.parametrize("failing", [0, -1])
def test_a_step_that_fails_leaves_the_optimizer_whole(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups have all parameters, and the next step is that of an optimizer that has all state on the device."""
    monkeypatch.setattr(offloaded_state, "updated_together", partial(updated_together, limit=1))

    def train(offloads: bool) -> list[Tensor]:
        torch.manual_seed(1)
        weights = [nn.Parameter(torch.randn(3, 4)) for _ in range(4)]
        if offloads:
            offloaded_state.offload_states(weights[1:])
        optimizer = torch.optim.Adam(weights, lr=0.1)
        kept = optimizer.state_dict()
        before = list[Tensor]()
        for step in range(4):
            for i, weight in enumerate(weights):
                weight.grad = torch.full_like(weight, i + step)
            if step == 2:
                weights[failing].grad = torch.eye(3, 4).to_sparse()
                with pytest.raises(RuntimeError, match="sparse"):
                    optimizer.step()
                assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], weights, strict=True))
                optimizer.load_state_dict(copy.deepcopy(kept))
            else:
                optimizer.step()
            kept = copy.deepcopy(optimizer.state_dict())
            now = [weight.detach().clone() for weight in weights]
            if step == 1:
                before = now
            elif step == 2:
                for weight, value in zip(weights, before, strict=True):
                    weight.data.copy_(value)
        return now

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_what_lies_on_the_host_is_told() -> None:
    graph = sample("transformer").graph
    plain, moved = (make_plan(graph, parse_machine("local:1"), f"single{more}") for more in ("", "+offload=both"))
    tensors, states = len(offloaded_tensors(moved)), len(offloaded_states(moved))
    text = explanation_text(explain(moved))
    assert f"{tensors} tensors on the host between forward and backward" in text
    assert f"optimizer state of {states} parameters on the host between updates" in text
    told = diff_plans(plain, moved)
    assert len(told.memory) > states and not told.operators
    assert diff_plans(moved, moved).equal


def test_what_is_made_again_is_not_kept_anywhere() -> None:
    found = sample("two layers")
    plan = make_plan(found.graph, parse_machine("local:1"), "single+recompute=full")
    first = recomputed_segments(plan)[0][0]
    with pytest.raises(PlanError, match="the backward pass makes it again: nobody keeps it"):
        check_plan(replace(plan, memory=(*plan.memory, *offload_actions(plan.graph, [(first, 0)]))))


@pytest.mark.parametrize("name", ["%999999", "head.weight", "%1..%2"])
def test_a_wrong_edit_is_told(name: str) -> None:
    plan, _ = offloading(sample("transformer").graph, "single", ranks=1)
    with pytest.raises(PlanError, match="names no tensor that an operator makes") as caught:
        plan_from_json({**plan_to_json(plan), "memory": [{"action": OFFLOAD, "tensor": name}]})
    assert str(caught.value).count(". ") == 2
    with pytest.raises(PlanError):
        check_plan(replace(plan, memory=(MemoryAction(OFFLOAD, name),)))
