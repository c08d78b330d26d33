"""What a Python program may import from the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import conjoin
import conjoin.api
from conjoin.machine import Machine
from tests.ir.wording import assert_three_sentences


def test_the_surface_is_frozen() -> None:
    """Adding a name is a decision, not a habit."""
    assert conjoin.__all__ == conjoin.api.__all__
    assert all(getattr(conjoin, name) is getattr(conjoin.api, name) for name in conjoin.__all__)
    assert conjoin.__all__ == [
        "CaptureError", "CapturedModule", "CheckpointError", "ConjoinError", "DeclarationError", "Explanation", "Graph",
        "GraphError", "Inspection", "Loader", "Machine", "ParallelModule", "Pipeline", "PipelinePrediction", "Plan",
        "PlanError", "Prediction", "RankError", "SearchResult", "StrategyError", "UsageError", "Verdict", "Weights",
        "Wish", "__version__", "capture", "compare", "diff_plans", "explain", "explanation_text", "fingerprint",
        "full_state_dict", "inspect", "load", "load_checkpoint", "load_graph", "load_optimizer_state_dict", "load_plan",
        "not_understood", "optimizer_state_dict", "parse_graph", "plan", "prove_rules", "register_machine",
        "register_operator", "register_strategy", "save_checkpoint", "save_graph", "save_weights", "search_plan",
        "simulate_plan", "strategy_names", "to_module", "verify", "verify_plan",
    ]  # fmt: skip


MODEL, BATCH, LOSS = nn.Linear(4, 4), (torch.ones(8, 4), torch.ones(8, 4)), nn.functional.mse_loss
NONE: Any = None
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "devices": (lambda: conjoin.plan(MODEL, BATCH, cast(Any, 4), loss=LOSS), "A int was given instead of a machine"),
    "no machine": (lambda: conjoin.plan(MODEL, BATCH, NONE, loss=LOSS), "A NoneType was given instead of a machine"),
    "wish": (lambda: conjoin.plan(MODEL, BATCH, "laptop", loss=LOSS, wish=cast(Any, {})), "A dict was given instead"),
    "search": (lambda: conjoin.search_plan(graph(), "laptop", cast(Any, 3)), "A int was given instead of a wish"),
    "compare": (lambda: conjoin.compare(graph(), "laptop", cast(Any, "x")), "A str was given instead of a wish"),
    "explain a graph": (lambda: conjoin.explain(cast(Any, graph())), "A Graph was given instead of a plan"),
    "simulate nothing": (lambda: conjoin.simulate_plan(NONE, "laptop"), "A NoneType was given instead of a plan"),
    "diff": (lambda: conjoin.diff_plans("missing.json", "missing.json"), "missing.json could not be read"),
    "load": (lambda: conjoin.load(cast(Any, {}), MODEL), "A dict was given instead of a plan"),
    "no steps": (lambda: conjoin.verify_plan(plan(), MODEL, BATCH, loss=LOSS, num_steps=0), "for 0 steps"),
}


def graph() -> conjoin.Graph:
    return conjoin.capture(MODEL, BATCH, LOSS)


def plan() -> conjoin.Plan:
    return conjoin.plan(MODEL, BATCH, "local:1", loss=LOSS, strategy="single")


@pytest.mark.parametrize(("action", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_three_sentences(action: Callable[[], object], told: str) -> None:
    with pytest.raises(conjoin.ConjoinError, match=told) as caught:
        action()
    assert_three_sentences(caught.value)


def test_a_plan_may_be_a_path(tmp_path: Path) -> None:
    path, made = tmp_path / "plan.json", plan()
    made.save(path)
    assert conjoin.explain(str(path)) == conjoin.explain(path) == conjoin.explain(made)
    assert conjoin.diff_plans(path, made).equal
    assert conjoin.simulate_plan(path, "laptop").seconds == conjoin.simulate_plan(made, "laptop").seconds


def test_an_account_without_a_home_has_measured_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CONJOIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert conjoin.simulate_plan(plan(), "laptop").seconds > 0


def test_a_machine_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "office"
    Machine("office", 1, 2, "cpu").save(path)
    batch = (torch.ones(8, 4), torch.ones(8, 4))
    made = conjoin.plan(nn.Linear(4, 4), batch, path, loss=nn.functional.mse_loss, strategy="data-parallel")
    assert made.machine.name == "office" and made.mesh.size == 2


def sgd(step: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(step.parameters())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda plan, step: conjoin.save_checkpoint(step, "folder"), "comes first, then the module"),
        (lambda plan, step: conjoin.save_weights(step, "file.pt"), "comes first, then the module"),
        (lambda plan, step: conjoin.load_checkpoint("folder", nn.Linear(2, 2)), "Pass that one"),
        (lambda plan, step: conjoin.full_state_dict(nn.Linear(2, 2)), "Pass that one"),
        (lambda plan, step: conjoin.optimizer_state_dict(sgd(step), step), "Pass that one"),
        (lambda plan, step: conjoin.optimizer_state_dict(step, step), "Pass the module, then"),
        (lambda plan, step: conjoin.load_optimizer_state_dict(step, {}, sgd(step)), "Pass the module, then"),
        (lambda plan, step: conjoin.Loader(DataLoader([1]), step), "A DataLoader was given"),
        (lambda plan, step: step.to("meta"), "would lose its weights"),
        (lambda plan, step: plan(strategy=4), "A int was given as the strategy"),
        (lambda plan, step: plan(strategy="single", wish=conjoin.Wish(budget=1)), "together with a wish"),
        (lambda plan, step: conjoin.plan(None, None, "local:1", strategy="rows"), "whose module was imported"),
    ],
)
def test_what_is_given_in_the_wrong_place_is_told(call: Callable[..., Any], said: str) -> None:
    model, batch = nn.Linear(2, 2), (torch.ones(4, 2), torch.ones(4, 2))
    plan = partial(conjoin.plan, model, batch, "local:1", loss=nn.functional.mse_loss)
    step = conjoin.load(plan(strategy="single"), model, device="cpu")
    with pytest.raises(conjoin.UsageError, match=said) as told:
        call(plan, step)
    assert_three_sentences(told.value)
