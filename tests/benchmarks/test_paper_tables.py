"""Tables beside the papers': placements of whole operators, Megatron with pipelines, orders of strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import autoddl_fig4, autoddl_table3, flexflow_fig3_6, flexflow_fig3_9, flexflow_fig3_14
from benchmarks.placements import Placements, by_depth, in_a_row
from benchmarks.search_table import captured
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.search import make_plan


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    assert data["command"].startswith("python -m benchmarks.") and data["torch"] and data["date"]
    return data


def test_neighbours_go_to_the_same_device() -> None:
    assert list(in_a_row(4, 2)) == [(0, 1, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1)]
    assert list(in_a_row(2, 4)) == [(0, 1)]


class Chain(nn.Module):
    """Layers that wait for each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_chain_on_several_devices_takes_all_its_work_and_the_transfers() -> None:
    with torch.device("meta"):
        graph = capture(Chain(2048).train(), (torch.zeros(4096, 2048),))
    placements = Placements(graph, parse_machine("k80-cluster:1"), CostModel(), "sgd")
    movable = tuple(placements.movable())
    alone = placements.simulate(dict.fromkeys(movable, 0)).seconds
    assert alone >= sum(placements.seconds())
    one_away = {number: int(number >= len(movable) // 2) for number in movable}
    assert placements.simulate(one_away).seconds > 0.9 * alone, "nothing but updates goes on at the same time"
    told = by_depth(graph, parse_machine("k80-cluster:1"), CostModel(), "sgd")
    assert told.fits and told.seconds > 0.9 * alone


def test_the_experts_are_beside_the_named_strategies(tmp_path: Path) -> None:
    output = tmp_path / "flexflow.json"
    asked = ["--models", "rnnlm:tiny", "--clusters", "k80", "--budget", "0", "--output", str(output)]
    assert flexflow_fig3_6.main([*asked, "--gpus", "4"]) == 0
    assert flexflow_fig3_6.main([*asked, "--gpus", "16", "--add"]) == 0
    data = _read(output)
    assert [row["devices"] for row in data["rows"]] == [4, 16] and len(data["earlier"]) == 1
    for row in data["rows"]:
        assert row["expert"]["name"].startswith("layers on devices") and row["expert"]["seconds"] > 0
        assert row["best_named"]["seconds"] <= row["expert"]["seconds"]


def test_layers_of_a_placement_share_matrices() -> None:
    placements = Placements(captured("rnnlm:tiny", 8), parse_machine("k80-cluster:1"), CostModel(), "sgd")
    layers = flexflow_fig3_9.layers_of(placements.skeleton)
    cells = [layers[i] for i, op in enumerate(placements.skeleton.operators) if op.call.op == "lstm_cell"]
    assert cells == cells[:2] * (len(cells) // 2) and len({*cells}) == 2
    _, start, best, bound = flexflow_fig3_9.best_placement(placements, 2)
    assert bound < best.seconds <= start.seconds


def test_what_data_parallelism_sends_is_for_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    graph = capture(model.train(), (torch.zeros(256, 64),), lambda y: y.square().sum())
    machine = parse_machine("p100-cluster:1")
    parameters, other = flexflow_fig3_14.sent_bytes(make_plan(graph, machine, "data-parallel"))
    assert parameters == 2 * 3 * 4 * (64 * 64 + 64 * 32), "2 (n - 1) / n of every gradient from each of four ranks"
    assert other < 100, "the loss"


def test_orders_of_strategies(tmp_path: Path) -> None:
    def row(name: str, measured: float, predicted: float) -> dict[str, Any]:
        return {"strategy": name, "measured_ms": measured, "predicted_ms": predicted}

    found = autoddl_fig4.rank(100.0, [row("c", 30, 31), row("a", 10, 14), row("b", 12, 11)])
    assert found.strategies == ("a", "b", "c") and (found.pairs, found.reversed) == (3, 1)
    assert found.far == pytest.approx(0.2) and found.tau == pytest.approx(1 / 3, abs=1e-4)
    output = tmp_path / "fig4.json"
    assert autoddl_fig4.main(["--output", str(output)]) == 0
    assert [len(row["strategies"]) for row in _read(output)["rows"]] == [8, 16, 8, 16]


def test_megatron_with_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    degrees = list(autoddl_table3.degrees(autoddl_table3.TABLE["wide-64"], 16e9))
    assert degrees == [(1, 32, 2), (2, 16, 2), (4, 8, 2)]
    small = autoddl_table3.Published("gpt-350m:tiny", 4, 8, 1e6, 1, 533, 335)
    monkeypatch.setitem(autoddl_table3.TABLE, "wide-64", small)
    monkeypatch.setattr(autoddl_table3, "STAGES", (1, 2))
    output = tmp_path / "table3.json"
    autoddl_table3.main(["--rows", "wide-64", "--budget", "0.2", "--output", str(output)])
    row = _read(output)["rows"]["wide-64"]
    assert {one["name"].partition(":")[0] for one in row["megatrons"]} <= {"megatron", "pipeline"}
    assert row["megatron"]["seconds"] == min(one["seconds"] for one in row["megatrons"] if one["fits"])
    assert [found["stages"] for found in row["found"]] == [1, None]
    assert row["speedup"] == pytest.approx(row["megatron"]["seconds"] / row["found"][1]["seconds"], abs=1e-3)
