"""The tables of searches: every script fills its file row by row, and a case that fails costs one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    autoddl_fig9_10,
    core_scale,
    flexflow_fig3_6,
    search_scale,
    search_table,
    unity_fig14,
    unity_joint,
    unity_table2,
)
from benchmarks.search_table import Case, Row, Table, line, search_apart
from conjoin.machine import parse_machine

BUDGET = ("--budget", "0")
"""Still the best named strategy."""


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    assert data["command"].startswith("python -m benchmarks.") and data["torch"] and data["date"]
    return data


def _check_row(row: dict[str, Any]) -> None:
    assert not row["error"]
    assert 0 < row["seconds"] <= row["best_named"]["seconds"], "a search is never worse than what it starts from"
    assert row["speedup"] == row["best_named"]["seconds"] / row["seconds"]
    assert row["search_cpu_seconds"] > 0 and row["stopped"] in ("converged", "out of time")


def test_unity(tmp_path: Path) -> None:
    output = tmp_path / "unity.json"
    assert unity_fig14.main(["--models", "candle-uno:tiny", "--gpus", "6", *BUDGET, "--output", str(output)]) == 0
    (row,) = _read(output)["rows"]
    _check_row(row)
    assert (row["machine"], row["devices"], row["batch_size"], row["paper"]) == ("summit:1", 6, 6 * 256, "up to 1.6")
    assert row["data_parallel"]["seconds"] >= row["seconds"]
    assert output.with_suffix(".svg").read_text().startswith("<svg")


def test_joint_and_sequential(tmp_path: Path) -> None:
    output = tmp_path / "joint.json"
    asked = ["--models", "candle-uno:tiny", "--gpus", "6", *BUDGET, "--workers", "2", "--output", str(output)]
    assert unity_joint.main(asked) == 0
    data = _read(output)
    assert [row["search"] for row in data["rows"]] == ["joint", "sequential", "taso-then-flexflow"]
    joint, *others = (row["seconds"] for row in data["rows"])
    found = [data["joint_over"][other]["candle-uno:tiny"] for other in ("sequential", "taso-then-flexflow")]
    assert found == pytest.approx([other / joint for other in others], rel=1e-3)


def test_switches_change_the_time_and_not_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unity_table2, "MODEL", "candle-uno")
    monkeypatch.setattr(unity_table2, "captured", lambda model, batch: search_table.captured("mlp:tiny", 6))
    output = tmp_path / "table2.json"
    assert unity_table2.main(["--gpus", "6", "--limit", "60", "--output", str(output)]) == 0
    rows = {row["switched"]: row for row in _read(output)["rows"]}
    assert list(rows) == list(unity_table2.SWITCHES)
    assert rows["all"]["least_sum"] == pytest.approx(rows["no elimination"]["least_sum"], rel=1e-9)


def test_the_core_grows_with_operators_less_than_in_proportion(tmp_path: Path) -> None:
    output = tmp_path / "core.json"
    assert core_scale.main(["--layers", "1", "3", "--devices", "8", "--output", str(output)]) == 0
    one, three, other = _read(output)["rows"]
    assert three["operators"] > 2 * one["operators"] and three["cpu_seconds"] < 3 * one["cpu_seconds"]
    assert other["cuts"] < one["cuts"] and output.with_suffix(".svg").read_text().startswith("<svg")


def test_what_does_not_end_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(gpus: int) -> float:
        while True:
            pass

    monkeypatch.setitem(unity_table2.SWITCHES, "all", spin)
    assert unity_table2.measure(6, "all", 1).cpu_seconds is None


def test_flexflow(tmp_path: Path) -> None:
    output = tmp_path / "flexflow.json"
    asked = ["--models", "alexnet:tiny", "--clusters", "p100", "--gpus", "4", *BUDGET, "--output", str(output)]
    assert flexflow_fig3_6.main(asked) == 0
    (row,) = _read(output)["rows"]
    _check_row(row)
    assert (row["machine"], row["batch_size"], row["paper"]) == ("p100-cluster:1", 4 * 256, "1.3-3.3")


def test_autoddl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "autoddl.json"
    monkeypatch.setattr(autoddl_fig9_10, "megatrons", lambda devices: ("megatron:tp=2",))
    asked = ["--models", "gpt-350m:tiny", "--figures", "10", *BUDGET, "--output", str(output)]
    assert autoddl_fig9_10.main(asked) == 0
    (row,) = _read(output)["rows"]
    _check_row(row)
    assert (row["machine"], row["devices"], row["paper"]) == ("a100-2x16", 32, "1.00")


def test_smaller_servers_keep_their_wiring() -> None:
    small, whole = autoddl_fig9_10.smaller_servers(4), parse_machine("a100-2x16")
    assert (small.num_nodes, small.num_devices) == (2, 8)
    assert autoddl_fig9_10.smaller_servers(16).nodes == whole.nodes
    assert small.topology.path(0, 4)[-1].bandwidth == whole.topology.path(0, 16)[-1].bandwidth


def test_every_degree_of_megatron() -> None:
    assert autoddl_fig9_10.megatrons(4) == (
        "megatron:tp=2", "megatron:tp=2,sp", "megatron:tp=4", "megatron:tp=4,sp",
    )  # fmt: skip


def test_scale(tmp_path: Path) -> None:
    output = tmp_path / "scale.json"
    asked = ["--models", "layers", "--layers", "1", *BUDGET, "--output", str(output)]
    assert search_scale.main(asked) == 0
    (row,) = _read(output)["rows"]
    _check_row(row)
    assert (row["model"], row["devices"]) == ("gpt-1-layers", 64)
    assert "layers, 64 devices" in output.with_suffix(".svg").read_text()


def test_a_slow_search_is_called_slow() -> None:
    row = Row("llama-8b", "dgx-h100:8", 64, "", devices=64, search_cpu_seconds=14.0)
    assert search_scale.is_quick(row)
    assert not search_scale.is_quick(Row("llama-8b", "dgx-h100:8", 64, "", devices=64, search_cpu_seconds=16.0))
    assert not search_scale.is_quick(Row("gpt-2-layers", "dgx-h100:8", 64, "", error="no plan"))


def test_a_case_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no machine named" in search_apart(Case("mlp:tiny", "nowhere:2", 4), 0.5).error

    def fail(case: Case, budget: float) -> Row:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(search_table, "search", fail)
    table = Table(tmp_path / "table.json", "python -m benchmarks.none", 0.5)
    table.fill([Case("mlp:tiny", "summit:1", 4)])
    assert table.status == 1
    assert _read(table.output)["rows"][0]["error"] == "ZeroDivisionError: of our own"
    assert "of our own" in line(table.rows[0])
