"""What a Python program may import from the package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import conjoin
import conjoin.api
from conjoin.machine import Machine


def test_the_surface_is_frozen() -> None:
    """Adding a name is a decision, not a habit."""
    assert conjoin.__all__ == conjoin.api.__all__
    assert all(getattr(conjoin, name) is getattr(conjoin.api, name) for name in conjoin.__all__)
    assert conjoin.__all__ == [
        "CaptureError", "CapturedModule", "CheckpointError", "ConjoinError", "Explanation", "Graph", "GraphError",
        "Inspection", "Machine", "ParallelModule", "Plan", "PlanError", "Prediction", "RankError", "SearchResult",
        "StrategyError", "UsageError", "Verdict", "Wish", "__version__", "capture", "compare", "diff_plans", "explain",
        "explanation_text", "fingerprint", "full_state_dict", "inspect", "load", "load_checkpoint", "load_graph",
        "load_optimizer_state_dict", "load_plan", "not_understood", "optimizer_state_dict", "parse_graph", "plan",
        "save_checkpoint", "save_graph", "search_plan", "simulate_plan", "strategy_names", "to_module", "verify",
        "verify_plan",
    ]  # fmt: skip


def test_a_machine_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "office"
    Machine("office", 1, 2, "cpu").save(path)
    batch = (torch.ones(8, 4), torch.ones(8, 4))
    made = conjoin.plan(nn.Linear(4, 4), batch, path, loss=nn.functional.mse_loss, strategy="data-parallel")
    assert made.machine.name == "office" and made.mesh.size == 2
