"""State of optimizers: it moves between plans, with groups and settings; what cannot is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from conjoin.errors import CheckpointError
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.state.checkpoint import save_checkpoint
from conjoin.runtime.state.checkpoint_index import decode, encode
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.runtime.state.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from conjoin.runtime.state.pieces import full_state_dict
from tests.ir.wording import assert_three_sentences
from tests.runtime.checkpoint_cases import STEPS, TOLERANCE, adam, alone, joined, make_model, on_threads, train

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "adamw": adam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_moves_between_plans(kind: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    model = make_model(0)
    wanted = train(model, make(model.parameters()), 2 * STEPS)[STEPS:]

    def begin(step: ParallelModule) -> Any:
        optimizer = make(step.parameters())
        train(step, optimizer)
        return full_state_dict(step, everywhere=True), optimizer_state_dict(step, optimizer)

    states = on_threads("fsdp", 3, begin)
    optims = [optim for _, optim in states]
    state = {
        name: {key: joined([optim["state"][name][key] for optim in optims]) for key in entries}
        for name, entries in optims[0]["state"].items()
    }
    whole = {"state": state, "param_groups": optims[0]["param_groups"]}

    def resume(step: ParallelModule) -> list[float]:
        step.load_state_dict(states[0][0])
        optimizer = make(step.parameters())
        load_optimizer_state_dict(step, optimizer, copy.deepcopy(whole))
        return train(step, optimizer)

    for losses in on_threads("megatron", 2, resume, seed=5):
        assert losses == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    step = alone()
    step.load_state_dict(states[0][0])
    optimizer = make(step.parameters())
    load_optimizer_state_dict(step, optimizer, copy.deepcopy(whole))
    save_checkpoint(tmp_path / kind, step, optimizer)
    step, optimizer = alone(5), None
    optimizer = make(step.parameters())
    load_checkpoint(tmp_path / kind, step, optimizer)
    assert train(step, optimizer) == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_shows_what_it_will_keep(kind: str) -> None:
    def program(step: ParallelModule) -> None:
        optimizer = OPTIMIZERS[kind](step.parameters())
        begins_empty = not optimizer.state
        before = copy.deepcopy([optimizer.state_dict(), list(step.parameters())])
        fresh = optimizer_state_dict(step, optimizer)
        assert str([optimizer.state_dict(), list(step.parameters())]) == str(before)
        assert all(parameter.grad is None for parameter in step.parameters())
        train(step, optimizer, 1)
        stepped = optimizer_state_dict(step, optimizer)
        assert fresh["param_groups"] == stepped["param_groups"]
        if begins_empty:
            assert shapes(fresh["state"]) == shapes(stepped["state"])

    on_threads("fsdp", 2, program)


def shapes(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    def form(value: Any) -> Any:
        return (type(value), tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)

    return {name: {key: form(value) for key, value in entries.items()} for name, entries in state.items()}


def test_state_that_is_not_elementwise_is_refused() -> None:
    def program(step: ParallelModule) -> None:
        optimizer = adam(step.parameters())
        train(step, optimizer, 1)
        for parameter in step.parameters():
            if parameter.requires_grad:
                optimizer.state[parameter]["rows"] = torch.zeros(2, 2, 2)
        with pytest.raises(CheckpointError, match="element by element") as caught:
            optimizer_state_dict(step, optimizer)
        assert_three_sentences(caught.value)

    on_threads("fsdp", 2, program)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    def program(step: ParallelModule) -> str:
        optimizer = adam(step.parameters())
        train(step, optimizer, 1)
        state = optimizer_state_dict(step, optimizer)
        state["param_groups"][0]["params"] = ["stranger", *state["param_groups"][0]["params"][1:]]
        state["state"]["stranger"] = {}
        state["state"]["up.weight"] = {"exp_avg": torch.zeros(3, 3)}
        before = str(optimizer.state_dict())
        with pytest.raises(CheckpointError) as caught:
            load_optimizer_state_dict(step, optimizer, state)
        assert_three_sentences(caught.value)
        with pytest.raises(CheckpointError, match="does not have 'state'"):
            load_optimizer_state_dict(step, optimizer, {})
        assert str(optimizer.state_dict()) == before
        return str(caught.value)

    for message in on_threads("fsdp", 2, program):
        for part in ("group 0 has stranger", "group 0 does not have frozen", "state of stranger", "(3, 3)"):
            assert part in message


def test_an_optimizer_of_another_module_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not have, the first of") as caught:
        optimizer_state_dict(alone(), adam(make_model(0).parameters()))
    assert_three_sentences(caught.value)


def test_groups_and_settings_come_back(tmp_path: Path) -> None:
    step = alone()
    names = dict(step.named_parameters())
    weights = [p for n, p in names.items() if n.endswith("weight")]
    rest = [p for n, p in names.items() if not n.endswith("weight")]

    def make(rate: float) -> Optimizer:
        return torch.optim.AdamW([{"params": weights, "lr": torch.tensor(rate)}, {"params": rest}], lr=rate)

    optimizer = make(0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(step, optimizer, 1)
    save_checkpoint(tmp_path / "checkpoint", step, optimizer)
    fresh = make(9.0)
    load_checkpoint(tmp_path / "checkpoint", step, fresh)
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999) and fresh.param_groups[1]["initial_lr"] == 0.25


def test_an_optimizer_that_has_not_stepped_stays_so(tmp_path: Path) -> None:
    step = alone()
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    save_checkpoint(tmp_path / "checkpoint", step, optimizer)
    train(step, optimizer, 1)
    load_checkpoint(tmp_path / "checkpoint", step, optimizer)
    assert not optimizer.state
    with pytest.raises(CheckpointError, match="it has the state of SGD, the optimizer is AdamW"):
        load_checkpoint(tmp_path / "checkpoint", step, adam(step.parameters()))


@pytest.mark.parametrize("value", [None, True, 3, 0.1, "x", (0.9, [1, {"a": 2}]), torch.tensor(0.3), torch.ones(1, 1)])
def test_settings_survive_json(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert type(again) is type(value) and (torch.equal(again, value) if isinstance(value, Tensor) else again == value)
