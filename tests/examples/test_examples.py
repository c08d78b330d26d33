"""The examples do what they say: they run, and many processes train like one."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import conjoin
from conjoin.ir import model_mark
from conjoin.runtime import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_parallel.py"
MAX_LINES = 30
Figures = list[tuple[float, float]]


def figures_in(printed: str, folder: Path) -> Figures:
    """The loss and the gradient norm of each step that the example printed; its checkpoint is there."""
    assert (folder / "checkpoint" / "conjoin.json").exists()
    lines = re.findall(r"^step \d+ +loss ([\d.]+) +gradient norm ([\d.]+)$", printed, re.MULTILINE)
    assert len(lines) == len(printed.splitlines()), "one rank prints, and only its steps"
    return [(float(loss), float(norm)) for loss, norm in lines]


def run_on_two(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Figures:
    """On two ranks, as a script; that ranks find each other under torchrun is seen in `tests/cli/test_run.py`."""
    monkeypatch.chdir(folder)
    launch(2, _be_script)
    printed = capfd.readouterr()
    assert printed.err == ""
    return figures_in(printed.out, folder)


def _be_script(rank: int) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")


def run_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Figures:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(folder)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capfd.readouterr()
    assert printed.err == ""
    return figures_in(printed.out, folder)


def test_training_on_many_processes_prints_what_one_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in ("two", "alone"):
        (tmp_path / folder).mkdir()
    together = run_on_two(tmp_path / "two", monkeypatch, capfd)
    alone = run_alone(tmp_path / "alone", monkeypatch, capfd)
    assert len(alone) == 5 and alone[-1][0] < 0.5 * alone[0][0], "it learns"
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-6)


def _be_graph_script(rank: int) -> None:
    runpy.run_path(str(EXAMPLES / "train_gnn.py"), run_name="__main__")


def test_a_graph_trains_on_two_processes_as_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    launch(2, _be_graph_script)
    together = capfd.readouterr()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with torch.random.fork_rng(devices=[]):
        _be_graph_script(0)
    alone = capfd.readouterr()
    assert together.err == alone.err == ""
    ours, plain = (_told_of_epochs(run.out) for run in (together, alone))
    assert list(plain) == [10, 20, 30] and plain[30][0] < 0.5 * plain[10][0], "it learns"
    # Epochs in which parts move are told as well, and are up to the clock.
    assert {epoch: ours[epoch] for epoch in plain} == plain


def _told_of_epochs(out: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch."""
    found = re.findall(r"epoch (\d+)   loss (\S+)   accuracy (\S+)", out)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def test_a_training_loop_is_short() -> None:
    text = SCRIPT.read_text()
    documentation = ast.parse(text).body[0]
    lines = text.splitlines()[documentation.end_lineno :]
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= MAX_LINES


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demonstration as a module; its classes are found there."""
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", found)
    spec.loader.exec_module(found)
    return found


def test_the_demonstration_tells_predicted_and_measured_side_by_side(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = conjoin.Machine.preset("p3.8xlarge")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch, loss = (torch.zeros(8, 8), torch.zeros(8, 4)), nn.functional.mse_loss
    contestants = []
    for name, seconds in (("data-parallel", 0.001), ("fsdp", 0.004)):
        plan = conjoin.plan(model, batch, machine, loss=loss, strategy=name)
        sent = [conjoin.explain(plan).bytes_of(rank) for rank in range(4)]
        contestants.append(demo.Contestant(name, plan, [demo.Training((2.0, 1.0), (seconds,) * 5, n) for n in sent]))
    demo.show_figures(contestants, machine)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("data", "fsdp"))]
    for row, each in zip(rows, contestants, strict=True):
        predicted = conjoin.simulate_plan(each.plan, machine, optimizer="adamw").seconds
        measured, sent = each.ranks[0].usual, f"{each.ranks[0].sent:,}"
        assert row[3:8] == [f"{1e3 * measured:.1f}", "ms", f"{predicted / measured:.2f}", sent, sent]
    assert demo.agrees(contestants[0], demo.Training((2.0, 1.0)))
    assert not demo.agrees(contestants[0], demo.Training((2.0, 1.001))), "a loss differs"
    wrong = [replace(done, sent=done.sent + 1) for done in contestants[0].ranks]
    assert not demo.agrees(replace(contestants[0], ranks=wrong), demo.Training((2.0, 1.0))), "bytes differ"


@pytest.mark.parametrize(
    ("said", "seen", "verdict"),
    [
        (1.5, (1.4, 1.2, 1.6, 1.3, 0.9), "the faster one, as was said"),
        (0.8, (0.7, 0.9, 0.8, 0.6, 1.1), "the slower one, as was said"),
        (1.5, (0.9, 1.2, 0.8, 1.3, 1.0), "cannot be told apart"),
        (1.5, (0.9, 0.8, 0.7, 0.9, 1.1), "WRONG"),
        (0.8, (1.2, 1.3, 1.4, 1.2, 0.9), "WRONG"),
    ],
)
def test_the_demonstration_judges_its_own_claim(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    said: float, seen: tuple[float, ...], verdict: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(demo, "predicted", lambda plan, machine: {"searched": 1.0, "named": said}[plan])
    searched = demo.Contestant("the search", "searched", [demo.Training((), (1.0,) * 5)])
    demo.show_claim(searched, demo.Contestant("data-parallel", "named", [demo.Training((), seen)]), None)
    told = capsys.readouterr().out
    assert verdict in told and f"said to be {said:.2f} times as fast as data-parallel" in told


def test_the_demonstration_plans_its_model_by_the_command(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CONJOIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SEARCH_SECONDS", 0)
    monkeypatch.setattr(sys, "path", list(sys.path))
    conjoin.Machine.preset("p3.8xlarge").save(tmp_path / "here.toml")
    plan = demo.search(tmp_path / "here.toml", tmp_path / "plan.json")
    assert plan.mesh.size == 4 and "\nbaseline " in capsys.readouterr().out
    model, batch, loss = demo.small_llama()
    assert plan.model == model_mark(conjoin.capture(model, batch, loss))
