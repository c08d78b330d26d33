"""The commands that make, explain and compare plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conjoin.ir import load_plan
from conjoin.report import explain
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
LENET = ("plan", "lenet:tiny", "--machine", "local:4", "--batch", "8")


@pytest.fixture
def saved(run: Run, folder: Path) -> Path:
    """A plan in a file."""
    assert run(*LENET, "--strategy", "data-parallel", "-o", "a.json").code == 0
    return folder / "a.json"


def test_plan_saves_and_tells_what_is_sent(run: Run, folder: Path) -> None:
    shown = run(*LENET, "--strategy", "fsdp:dp=4", "-o", "plan.json")
    assert shown.code == 0 and shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0] == "strategy     fsdp:dp=4" and lines[-1] == "saved        plan.json"
    assert any(line.startswith("  all-gather ") for line in lines)
    assert load_plan(folder / "plan.json").mesh.size == 4


def test_plan_prints_json_and_need_not_save(run: Run, folder: Path) -> None:
    shown = run(*LENET, "--strategy", "megatron:tp=2", "--json")
    found = json.loads(shown.out)
    assert shown.code == 0 and found["saved"] is None and found["strategy"].startswith("megatron:tp=2")
    assert found["num_devices"] == 4 and found["bytes_sent"]["largest"] > 0 and found["training"] is True
    assert [path.name for path in folder.iterdir()] == ["my_models.py"]
    assert run(*LENET, "--strategy", "data-parallel").out.endswith("saved        no; -o plan.json saves the plan\n")


def test_a_model_of_ones_own_and_a_saved_graph(run: Run) -> None:
    of_file = ("plan", "my_models.py:with_loss", "--machine", "local:2", "--strategy", "data-parallel", "--json")
    assert json.loads(run(*of_file).out)["bytes_sent"]["largest"] > 0
    assert run("inspect", "lenet:tiny", "-o", "graph.json").code == 0
    again = run("plan", "graph.json", "--machine", "local:2", "--strategy", "zero1", "--json")
    assert json.loads(again.out)["model"]["name"] == "ConvNet"


def test_explain_shows_annotated_code(run: Run, saved: Path) -> None:
    shown = run("explain", "a.json")
    assert shown.code == 0 and shown.err == ""
    assert "# split n over d0 d1; features.0 convnets.py:" in shown.out
    assert "    ~ backward all-reduce of 10 gradients over d0 d1, 13.3 KiB per rank" in shown.out
    data = json.loads(run("explain", "a.json", "--json").out)
    assert data == json.loads(json.dumps(explain(load_plan(saved)).to_json()))


def test_diff_tells_by_its_exit_code(run: Run, saved: Path) -> None:
    assert run(*LENET, "--strategy", "zero1", "-o", "b.json").code == 0
    same = run("diff", "a.json", "a.json")
    assert (same.code, same.out, same.err) == (0, "The plans are the same.\n", "")
    other = run("diff", "a.json", "b.json")
    assert other.code == 1 and other.err == "" and "strategy: data-parallel:dp=4 -> zero1:dp=4" in other.out
    data = run("diff", "a.json", "b.json", "--json")
    assert data.code == 1 and json.loads(data.out)["equal"] is False
    assert json.loads(run("diff", "a.json", "a.json", "--json").out)["equal"] is True


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (LENET, "Measure them with `conjoin calibrate`"),
        ((*LENET, "--budget", "soon"), "Write 60s, or 5m."),
        ((*LENET, "--memory", "0GiB"), "Write 40GiB."),
        ((*LENET[:3], "dgx-h100", "--search", "magic"), "Known are joint"),
        ((*LENET, "--strategy", "megatorn"), "Did you mean megatron?"),
        ((*LENET, "--strategy", "fsdp:tp=2"), "unknown key 'tp'"),
        ((*LENET, "--strategy", "fsdp:dp=3"), "dp=3"),
        ((*LENET, "--strategy", "single"), "on 4 devices"),
        ((*LENET, "--strategy", ""), "no strategy named ''"),
        (("plan", "lenet:tiny", "--machine", "local", "--strategy", "fsdp"), "local was named without a number"),
        (("plan", "lenet:tiny", "--machine", "sumit", "--strategy", "fsdp"), "Did you mean summit?"),
        (("plan", "lenet:tiny", "--machine", "no.toml", "--strategy", "fsdp"), "no.toml"),
        (("plan", "lenett:tiny", "--machine", "local:2", "--strategy", "fsdp"), "no model named 'lenett:tiny'"),
        (("plan", "lenet:tiny", "--strategy", "fsdp"), "--machine"),
        ((*LENET, "--strategy", "fsdp", "-o", "missing/plan.json"), "could not be written"),
        ((*LENET[:-1], "2", "--strategy", "data-parallel"), "It has 2 samples"),
        (("explain", "missing.json"), "missing.json could not be read"),
        (("explain", "my_models.py"), "my_models.py is not JSON"),
        (("explain",), "PLAN"),
        (("diff", "missing.json", "missing.json"), "missing.json could not be read"),
        (("diff", "missing.json"), "B"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_message(
    run: Run, folder: Path, arguments: tuple[str, ...], told: str
) -> None:
    assert told in run(*arguments).refused()
    assert [path.name for path in folder.iterdir()] == ["my_models.py"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data | {"version": 9}, "another format version"),
        (lambda data: data | {"graph": data["graph"][:-1]}, "cannot be read"),
        (lambda data: data | {"mesh": []}, "is not legal"),
        (lambda data: data | {"format": "conjoin.graph"}, "is not a plan"),
        (lambda data: [data], "is not a plan"),
    ],
)
def test_a_plan_that_is_damaged(run: Run, saved: Path, change: Callable[[object], object], told: str) -> None:
    bad = saved.with_name("bad.json")
    bad.write_text(json.dumps(change(json.loads(saved.read_text()))))
    assert told in run("explain", "bad.json").refused()
    assert told in run("diff", "a.json", "bad.json").refused()
