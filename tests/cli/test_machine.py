"""`conjoin machine`: what is known, what is in it, and whether a description is good."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main

from conjoin.cli import app
from conjoin.machine import CollectiveFit, Machine, preset_names, registered_names
from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.fixture
def machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of machine files that names are looked up in: a good one and a bad one."""
    directory = folder / "machines"
    directory.mkdir()
    Machine("any", 2, 3, "cuda").save(directory / "office.toml")
    (directory / "broken.toml").write_text("name =")
    monkeypatch.setenv("CONJOIN_MACHINES", str(directory))
    return directory


def test_the_flags_are_frozen() -> None:
    group = typer.main.get_command(app).commands["machine"]  # type: ignore[attr-defined]
    found = {name: sorted(o for p in command.params for o in p.opts) for name, command in group.commands.items()}
    assert found == {
        "list": ["--import", "--json"], "show": ["--import", "--json", "--toml", "name"], "check": ["--json", "file"]
    }  # fmt: skip


def test_list_names_presets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONJOIN_MACHINES", raising=False)
    shown = run("machine", "list")
    assert shown.code == 0 and shown.err == ""
    names = [line.split()[0] for line in shown.out.split("\n\n")[0].splitlines()]
    assert names == [*registered_names(), *preset_names()]
    assert "summit         1 node × 6 V100-SXM2-16GB" in shown.out


def test_list_names_files_of_your_own(run: Run, machines: Path) -> None:
    found = {entry["name"]: entry for entry in json.loads(run("machine", "list", "--json").out)}
    assert found["office"] == {
        "name": "office",
        "source": str(machines / "office.toml"),
        "summary": "2 nodes × 3 cuda, speeds not known",
    }
    assert "conjoin machine check" in found["broken"]["summary"] and found["summit"]["source"] == "preset"


def test_show_prints_devices_links_and_sources(run: Run) -> None:
    shown = run("machine", "show", "summit:4")
    assert shown.code == 0 and shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0] == "summit: 4 nodes × 6 cuda, axes n0:2 n1:2 d0:2 d1:3" and "Source: Unity" in lines[1]
    assert "node kind summit: nodes 0 to 3" in lines and "  devices 0 to 5: V100-SXM2-16GB" in lines
    rows = [line.split() for line in lines]
    assert ["cpu0", "–", "cpu1", "X-Bus", "32", "GB/s", "0.5", "µs"] in rows
    assert any(row[:3] == ["V100-SXM2-16GB", "16.9", "GB"] and "125" in row for row in rows)


def test_show_tells_what_was_measured(run: Run, folder: Path) -> None:
    fit = CollectiveFit("all-gather", ("d0",), 2e-5, 1e-9, 0.99)
    replace(Machine.preset("p100-cluster"), fits=(fit,)).save(folder / "measured.toml")
    shown = run("machine", "show", "measured.toml")
    assert ["all-gather", "d0", "20", "µs", "1", "GB/s", "0.990"] in [line.split() for line in shown.out.splitlines()]


def test_show_tells_when_speeds_are_not_known(run: Run, machines: Path) -> None:
    assert "conjoin calibrate" in run("machine", "show", "local:4").out
    assert run("machine", "show", "office:5").out.startswith("any: 5 nodes × 3 cuda")


def test_show_prints_files_and_data(run: Run) -> None:
    machine = Machine.preset("k80-cluster", nodes=2)
    assert Machine.from_toml(run("machine", "show", "k80-cluster:2", "--toml").out) == machine
    found = json.loads(run("machine", "show", "k80-cluster:2", "--json").out)
    assert (found["num_nodes"], found["fingerprint"]) == (2, machine.fingerprint())
    assert [axis["name"] for axis in found["axes"]] == ["n0", "d0", "d1"]
    assert found["nodes"][0]["links"][0]["bandwidth"] == 16e9 and found["device_types"][0]["name"] == "K80-12GB"


def test_show_refuses_what_is_no_machine(run: Run, machines: Path) -> None:
    assert "Did you mean summit?" in run("machine", "show", "sumit").refused()
    assert "not TOML" in run("machine", "show", "broken").refused()


def test_check_says_ok(run: Run, folder: Path) -> None:
    Machine.preset("dgx-h100", nodes=2).save(folder / "good.toml")
    shown = run("machine", "check", "good.toml")
    assert (shown.code, shown.err) == (0, "") and shown.out.startswith("OK: dgx-h100: 2 nodes × 8 cuda")
    assert json.loads(run("machine", "check", "good.toml", "--json").out) == {
        "file": "good.toml", "ok": True, "problems": [],
    }  # fmt: skip


def test_check_lists_every_problem(run: Run, folder: Path) -> None:
    text = Machine.preset("dgx-h100", nodes=2).to_toml()
    text = text.replace("gigabytes_per_second = 450.0", "gigabytes_per_second = -450.0", 1)
    (folder / "bad.toml").write_text(text.replace("float64 = 67.0", "float64 = inf"))
    shown = run("machine", "check", "bad.toml")
    assert shown.code == 2 and shown.out.startswith("bad.toml: 2 problems\n") and "Traceback" not in shown.err
    assert "node[0].link[0].gigabytes_per_second is -450" in shown.out and "teraflops.float64 is Inf" in shown.out
    found = json.loads(run("machine", "check", "bad.toml", "--json").out)
    assert found["ok"] is False and len(found["problems"]) == 2
    missing = run("machine", "check", "missing.toml")
    assert missing.code == 2 and "could not be read" in missing.out


def test_a_plan_may_name_a_machine_of_your_own(run: Run, machines: Path) -> None:
    shown = run("plan", "mlp:tiny", "--machine", "office", "--strategy", "data-parallel", "--batch", "6", "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)
