"""`simulate`: the price of a plan as text, as data and as a trace; mistakes leave one message and nothing else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conjoin
from conjoin.machine import Machine
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
NETS = """\
import torch
from torch import nn


def mlp():
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
    return model, (torch.zeros(8, 64), torch.zeros(8, 32)), nn.functional.mse_loss
"""
MACHINE = "p3.8xlarge"


@pytest.fixture(autouse=True)
def _files(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for four devices; what was measured on this host before takes no part."""
    monkeypatch.setenv("CONJOIN_COSTS", str(folder / "costs.sqlite"))
    (folder / "nets.py").write_text(NETS)
    made = run("plan", "nets.py:mlp", "--machine", MACHINE, "--strategy", "fsdp", "-o", "plan.json")
    assert made.code == 0, made.err


def fields(text: str) -> dict[str, str]:
    """What stands behind each word at the beginning of a line."""
    return {line[:12].strip(): line[13:] for line in text.splitlines() if line[:1].strip()}


def parts(text: str) -> list[str]:
    return [line[2:28].strip() for line in text.splitlines() if line.startswith("  ")]


def test_the_text_says_how_long_where_and_how_much(run: Run) -> None:
    shown = run("simulate", "plan.json", "--machine", MACHINE)
    assert (shown.code, shown.err) == (0, "")
    found = fields(shown.out)
    assert found["plan"] == "fsdp:dp=4 plan of Sequential for 4 ranks (d0:2 d1:2)"
    assert found["precision"] == "float32, as the model is"
    assert found["machine"] == "p3.8xlarge: 1 node × 4 cuda, axes d0:2 d1:2"
    assert re.fullmatch(r".+ [µm]s ± \d+%", found["step"]) and "MFU" in found["throughput"]
    assert found["memory"].endswith("of 13.9 GiB on the fullest device") and "sources" in found
    assert parts(shown.out) == [
        "forward", "backward", "update", "communication, exposed", "waiting",
        "parameters", "optimizer state", "buffers", "inputs", "activations and gradients", "kept free",
    ]  # fmt: skip
    assert "all-gather over d0 d1: 2," in shown.out and "reduce-scatter over d0 d1: 1," in shown.out


def test_data_for_programs(run: Run) -> None:
    shown = run("simulate", "plan.json", "--machine", MACHINE, "--json")
    assert (shown.code, shown.err) == (0, "")
    found = json.loads(shown.out)
    assert set(found) == {
        "plan", "precision", "model", "machine", "devices", "seconds_per_step", "expected_error", "seconds",
        "samples_per_second",
        "model_flops_utilization", "memory", "collectives", "sources", "tasks", "trace", "all_estimated",
        "published_steps", "missing_rates", "busy",
    }  # fmt: skip
    assert (found["plan"], found["machine"], found["devices"]) == ("fsdp:dp=4", MACHINE, 4)
    assert found["trace"] is None and found["memory"]["fits"] is True
    hidden = found["seconds"].pop("communication, hidden")
    assert hidden >= 0 and sum(found["seconds"].values()) == pytest.approx(found["seconds_per_step"], rel=1e-9)
    assert found["samples_per_second"] == pytest.approx(8 / found["seconds_per_step"])
    assert set(found["sources"]) == {"measured", "interpolated", "estimated"}


def test_it_is_what_python_predicts(run: Run) -> None:
    shown = json.loads(run("simulate", "plan.json", "--machine", MACHINE, "--json", "--optimizer", "sgd").out)
    found = conjoin.simulate_plan(conjoin.load_plan("plan.json"), MACHINE, optimizer="sgd")
    assert shown["seconds_per_step"] == found.seconds
    assert shown["memory"]["optimizer state"] == 0
    assert shown["memory"]["peak"] == found.memory.peak


def names_in(trace: dict[str, Any], what: str) -> list[str]:
    return [entry["args"]["name"] for entry in trace["traceEvents"] if (entry["ph"], entry["name"]) == ("M", what)]


def test_a_trace_ends_when_the_step_does(run: Run) -> None:
    shown = run("simulate", "plan.json", "--machine", MACHINE, "--trace", "trace.json")
    assert shown.code == 0 and fields(shown.out)["trace"].startswith("trace.json;")
    trace = json.loads(Path("trace.json").read_text())
    assert names_in(trace, "process_name") == ["predicted: rank 0 and those like it"]
    assert names_in(trace, "thread_name") == ["compute", "links inside the node"]
    events = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert all(entry["ts"] >= 0 and entry["dur"] > 0 for entry in events)
    seconds = conjoin.simulate_plan(conjoin.load_plan("plan.json"), MACHINE).seconds
    assert max(entry["ts"] + entry["dur"] for entry in events) == pytest.approx(1e6 * seconds, rel=1e-9)
    linear = [entry["args"] for entry in events if entry["name"] == "linear"]
    assert linear[0] == {"phase": "forward", "source": "estimated"} and linear[-1]["phase"] == "backward"
    gathers = [entry["args"] for entry in events if entry["name"] == "all-gather"]
    assert gathers and all(gather["axes"] == "d0 d1" and gather["bytes sent"] > 0 for gather in gathers)


def test_with_a_trace_data_names_it(run: Run) -> None:
    shown = run("simulate", "plan.json", "--machine", MACHINE, "--trace", "t.json", "--json")
    assert json.loads(shown.out)["trace"] == "t.json" and Path("t.json").exists()


def test_a_machine_of_ones_own(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine").mkdir()
    Machine.preset(MACHINE).save(folder / "mine" / "office.toml")
    wanted = json.loads(run("simulate", "plan.json", "--machine", MACHINE, "--json").out)
    for word in ("mine/office.toml", "office"):
        monkeypatch.setenv("CONJOIN_MACHINES", "mine")
        shown = run("simulate", "plan.json", "--machine", word, "--json")
        assert shown.code == 0, shown.err
        assert json.loads(shown.out)["seconds_per_step"] == wanted["seconds_per_step"]
    assert conjoin.simulate_plan(conjoin.load_plan("plan.json"), "office").seconds == wanted["seconds_per_step"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("missing.json", "--machine", MACHINE), "missing.json could not be read"),
        (("nets.py", "--machine", MACHINE), "nets.py is not JSON"),
        (("plan.json", "--machine", "dgx-h100"), "The plan is for 4 devices (d0:2 d1:2)"),
        (("plan.json", "--machine", "local:4"), "Measure them with `conjoin calibrate`"),
        (("plan.json", "--machine", "nowhere"), "nowhere"),
        (("plan.json", "--machine", MACHINE, "--optimizer", "lion"), "The optimizer 'lion' was asked for"),
        (("plan.json", "--machine", MACHINE, "--trace", "missing/trace.json"), "there is no directory"),
        (("plan.json", "--machine", MACHINE, "--trace", "."), "The trace could not be written"),
        (("plan.json",), "--machine"),
    ],
)
def test_what_cannot_be_done_is_told_and_leaves_nothing(
    run: Run, folder: Path, arguments: tuple[str, ...], told: str
) -> None:
    before = sorted(os.listdir(folder))
    assert told in run("simulate", *arguments).refused()
    assert sorted(os.listdir(folder)) == before
