"""What may be asked of `plan` on the command line: constraints, objectives, budgets, going on; and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from conjoin.ir import load_plan
from conjoin.search import searches
from conjoin.search.contest import Contest
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MODELS = """\
import torch
from torch import nn


def two(batch_size=8):
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return layers, (torch.zeros(batch_size, 16), torch.zeros(batch_size, 16)), nn.functional.mse_loss


def odd():
    return two(7)
"""
PLAN = ("plan", "two.py:two", "--machine", "p3.8xlarge")


@pytest.fixture(autouse=True)
def cache(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where found plans are remembered, and a model in the folder."""
    (folder / "two.py").write_text(MODELS)
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CONJOIN_CACHE", str(place))
    monkeypatch.delenv("CONJOIN_COSTS", raising=False)
    return place


def found(ran: Ran) -> dict[str, object]:
    assert ran.code == 0 and ran.err == "", ran.err
    return dict(json.loads(ran.out))


def test_constraints_are_in_the_plan_that_is_saved(run: Run, folder: Path) -> None:
    asked = ("--fix", "0.weight=d0:S(0)", "--fix", "2 = {d0:S(1)}", "--forbid-axis", "d1", "--budget", "0")
    answer = found(run(*PLAN, *asked, "--json", "-o", "plan.json"))
    text = str(load_plan(folder / "plan.json").graph)
    assert "param:0.weight f32[32,16]{d0:S(0)} trainable" in text and "d1:" not in text
    assert "f32[8,16]{d0:S(1)} = linear(" in text and answer["baseline"] == ""
    shown = run(*PLAN, *asked).out
    assert "baseline     none: no named strategy fits the model, the machine and what was asked\n" in shown
    assert "cache        HIT" in shown


def test_the_cheapest_plan_says_how_many_devices_it_takes(run: Run, folder: Path) -> None:
    answer = found(run(*PLAN, "--objective", "cost", "--budget", "0.2s", "--json", "-o", "plan.json"))
    assert (answer["objective"], answer["num_devices"], answer["machine"]) == ("cost", 1, "p3.8xlarge:1x1")
    assert load_plan(folder / "plan.json").mesh.size == 1
    assert run("simulate", "plan.json", "--machine", "p3.8xlarge:1x1").code == 0
    told = run("run", "plan.json", "two.py:two", "--steps", "1").out
    assert told.partition("\n")[0].endswith(" plan of Sequential for one device")
    shown = run(*PLAN, "--objective", "cost", "--budget", "0.2s").out
    assert "\ndevices      1, " in shown and "times as cheap" in shown


def test_a_search_goes_on_with_a_larger_budget_and_after_ctrl_c(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, calls = Contest.check, 0

    def interrupted(self: Contest, doing: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        check(self, doing)

    with monkeypatch.context() as patch:
        patch.setattr(Contest, "check", interrupted)
        first = found(run(*PLAN, "--budget", "10m", "--json"))
    assert (first["stopped"], first["cache"]) == ("interrupted", "MISS")
    shown = run(*PLAN, "--budget", "10m")
    assert "\ncache        RESUMED: after " in shown.out and shown.code == 0
    last = found(run(*PLAN, "--budget", "10m", "--json"))
    assert (last["stopped"], last["cache"]) == ("converged", "HIT")
    assert last["num_plans"] > first["num_plans"]  # type: ignore[operator]
    assert len(list(cache.glob("plans/*.json"))) == 1
    assert found(run(*PLAN, "--budget", "0", "--json", "--fresh"))["cache"] == "MISS"


def test_cpu_seconds_are_a_budget_of_their_own(run: Run) -> None:
    answer = found(run(*PLAN, "--cpu-budget", "0", "--json"))
    assert answer["stopped"] == "out of time" and answer["strategy"] == answer["baseline"]
    assert answer["cpu_seconds"] > 0  # type: ignore[operator]


def test_a_bound_is_told(run: Run) -> None:
    answer = found(run(*PLAN, "--budget", "20s", "--json"))
    bound = answer["bound"]
    assert isinstance(bound, dict) and bound["seconds"] >= bound["least"] > 0 and 0 <= bound["gap"] < 10
    assert "\nbound        the sum of seconds is within " in run(*PLAN, "--budget", "20s").out


@pytest.mark.parametrize(
    ("machine", "model"),
    [
        ("dgx-h100:1x7", "two.py:two"),
        ("laptop", "two.py:two"),
        ("p3.8xlarge", "two.py:odd"),
        ("dgx-h100:1x7", "two.py:odd"),
    ],
    ids=["seven devices", "one device", "seven samples on four", "seven on seven"],
)
def test_odd_machines_and_batches(run: Run, folder: Path, machine: str, model: str) -> None:
    for budget in ("0", "0.2s"):
        answer = found(run("plan", model, "--machine", machine, "--budget", budget, "--json", "-o", "plan.json"))
        assert answer["ratio"] >= 1  # type: ignore[operator]
        assert load_plan(folder / "plan.json").mesh.size == answer["num_devices"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--fix", "0.wieght=d0:S(0)"), "Did you mean 0.weight?"),
        (("--fix", "%77=d0:S(0)"), "counted in the graph as it is there"),
        (("--fix", "0.weight"), "Write fc.weight=d0:S(0)"),
        (("--fix", "=d0:S(0)"), "Write fc.weight=d0:S(0)"),
        (("--fix", "0.weight=d0:Q"), "is not a placement"),
        (("--fix", "0.weight=d0:S(0)", "--fix", "0.weight={}"), "was given two layouts"),
        (("--fix", "0.weight=d7:S(0)"), "there is no axis d7"),
        (("--fix", "0.weight=d0:S(5)"), "splits dim 5 of 2"),
        (("--forbid-axis", "n0"), "The mesh is d0:2 d1:2"),
        (("--forbid-axis", "d0", "--forbid-axis", "d1"), "all axes of the mesh"),
        (("--objective", "money"), "Known are time, cost"),
        (("--at-most", "soon"), "Write 60s, or 5m."),
        (("--cpu-budget", "much"), "Write 60s, or 5m."),
        (("--budget", "0", "--at-most", "0.001ms"), "the fastest plan found ("),
        (("--budget", "0", "--at-most", "0.001ms", "--objective", "cost"), "or a part of it was to take"),
        (("--budget", "0", "--memory", "1KiB"), "1.00 KiB may be used"),
        (("--budget", "0", "--memory", "1KiB", "--objective", "cost"), "1.00 KiB may be used"),
        (("--strategy", "fsdp", "--forbid-axis", "d0"), "Leave out --strategy"),
        (("--budget", "0", "--search", "named", "--forbid-axis", "d0"), "Without nothing split over d0"),
    ],
)
def test_what_cannot_be_had_is_told_and_nothing_is_written(
    run: Run, folder: Path, arguments: tuple[str, ...], told: str
) -> None:
    assert told in run(*PLAN, *arguments, "-o", "plan.json").refused()
    assert sorted(path.name for path in folder.iterdir()) == ["my_models.py", "two.py"]


def test_a_plan_for_another_machine_is_no_start(run: Run, folder: Path) -> None:
    assert run(*PLAN[:3], "local:2", "--strategy", "fsdp", "-o", "mine.json").code == 0
    assert "was given to start from" in run(*PLAN, "--start", "mine.json", "-o", "plan.json").refused()
    assert not (folder / "plan.json").exists()


def test_compare_has_all_strategies_and_searches_with_where_the_time_goes(run: Run) -> None:
    rows = json.loads(run("compare", *PLAN[1:], "--budget", "0.2s", "--json").out)
    names = {row["name"] for row in rows}
    searches = {"joint", "unity", "taso-then-flexflow", "mcmc", "coordinate", "exhaustive", "random"}
    assert {f"search: {name}" for name in searches} <= names and {"fsdp", "megatron:tp=4"} <= names
    parts = {"seconds_per_step", "forward", "backward", "update", "exposed", "hidden", "peak_bytes", "search_seconds"}
    assert all(parts <= row.keys() for row in rows if "reason" not in row)


def test_a_strategy_takes_nothing_that_is_asked_of_a_search(run: Run, folder: Path) -> None:
    asked = ("plan", "two.py:two", "--machine", "p3.8xlarge", "--strategy", "fsdp", "-o", "plan.json")
    searched = ("--memory 1KiB", "--search joint", "--optimizer sgd", "--budget 3s", "--fresh")
    for extra in map(str.split, searched):
        assert f"of a search, {extra[0]}. A strategy decides" in run(*asked, *extra).refused()
    assert not (folder / "plan.json").exists()


def test_names_of_searches_are_read_before_any_work(run: Run) -> None:
    for command in ("plan", "compare"):
        message = run(command, "no_such_file.py:two", "--machine", "p3.8xlarge", "--search", "nosuch").refused()
        assert "The search 'nosuch' was asked for" in message


def test_a_cache_that_cannot_be_written_costs_no_plan(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CONJOIN_CACHE", str(folder / "two.py"))
    shown = run("plan", "two.py:two", "--machine", "p3.8xlarge", "--budget", "0.2s", "-o", "plan.json")
    assert shown.code == 0 and "not remembered" in caplog.text and (folder / "plan.json").exists()


def test_ctrl_c_ends_a_comparison_and_shows_what_there_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(contest: Contest, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(searches.SEARCHES, "joint", interrupted)
    shown = run("compare", "two.py:two", "--machine", "p3.8xlarge", "--search", "joint", "--search", "mcmc")
    assert shown.code == 0 and re.search(r"search: joint .* s, interrupted", shown.out)
    assert "search: mcmc: Ctrl-C came before it was tried." in shown.out


def test_one_device_is_called_so(run: Run) -> None:
    message = run("plan", "two.py:two", "--machine", "laptop", "--forbid-axis", "d0").refused()
    assert "The mesh is one device." in message
