"""The commands that find, explain and compare plans."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conjoin.errors import UsageError
from conjoin.ir import load_plan
from conjoin.report import explain
from conjoin.search import Stopped, searches
from tests.cli.conftest import Ran
from tests.ir.wording import assert_three_sentences

Run = Callable[..., Ran]
LENET = ("plan", "lenet:tiny", "--machine", "local:4", "--batch", "8")
MLP = ("mlp:tiny", "--machine", "dgx-h100", "--batch", "8")
SEARCH = ("plan", *MLP, "--budget", "0.2s")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where found plans are remembered: a place of the test's own, beside the folder it works in."""
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CONJOIN_CACHE", str(place))
    monkeypatch.delenv("CONJOIN_COSTS", raising=False)
    return place


@pytest.fixture
def saved(run: Run, folder: Path) -> Path:
    """A plan in a file."""
    assert run(*LENET, "--strategy", "data-parallel", "-o", "a.json").code == 0
    return folder / "a.json"


def test_plan_saves_and_tells_what_is_sent(run: Run, folder: Path) -> None:
    shown = run(*LENET, "--strategy", "fsdp:dp=4", "-o", "plan.json")
    assert shown.code == 0 and shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0] == "strategy     fsdp:dp=4" and lines[-2] == "saved        plan.json"
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


def test_plan_searches_and_what_it_saves_is_a_plan(run: Run, folder: Path) -> None:
    shown = run(*SEARCH, "-o", "plan.json")
    assert shown.code == 0 and shown.err == ""
    found = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert list(found)[-8:] == ["predicted", "baseline", "bound", "search", "bf16-mixed", "cache", "saved", "next"]
    assert found["precision"] == "float32, as the model is"
    assert "a step; --precision bf16-mixed searches for that" in found["bf16-mixed"]
    assert "a step, " in found["predicted"] and "times as fast" in found["baseline"]
    assert found["search"].endswith(tuple(stopped.value for stopped in Stopped))
    assert (found["cache"], found["saved"]) == ("MISS", "plan.json")
    plan = load_plan(folder / "plan.json")
    assert plan.mesh.size == 8 and plan.strategy == found["strategy"]
    assert run("explain", "plan.json").out.startswith(f"strategy     {plan.strategy}\n")


WAYS: tuple[tuple[str, ...], ...] = ((), ("--precision", "bf16"))


def test_a_precision_is_planned_saved_and_shown(run: Run, folder: Path) -> None:
    shown = run(*SEARCH, "--precision", "bf16-mixed", "-o", "plan.json")
    assert shown.code == 0 and "\nprecision    bf16-mixed\n" in shown.out and "searches for that" not in shown.out
    plan = load_plan(folder / "plan.json")
    assert plan.precision == "bf16-mixed@cuda"
    assert torch.bfloat16 in {type.dtype for node in plan.graph.nodes for type in node.types}
    assert {leaf.type.dtype for leaf in plan.graph.leaves if leaf.trainable} == {torch.float32}
    assert run("plan", *MLP, "--strategy", "fsdp", "--precision", "bf16", "-o", "narrow.json").code == 0
    narrow = load_plan(folder / "narrow.json")
    assert {leaf.type.dtype for leaf in narrow.graph.leaves if leaf.trainable} == {torch.bfloat16}
    assert run("diff", "plan.json", "narrow.json").out.count("precision") == 1
    rows = [json.loads(run("compare", *MLP, "--search", "named", *flags, "--json").out) for flags in WAYS]
    usual, less = ({row["name"]: row["peak_bytes"] for row in found if "peak_bytes" in row} for found in rows)
    assert usual.keys() == less.keys() and all(less[name] < usual[name] for name in usual)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--machine", "p3.8xlarge", "--precision", "bf16-mixed"), "V100-SXM2-16GB has no rate for bfloat16"),
        (("--machine", "dgx-h100", "--precision", "fp8"), "fp16-mixed, fp8-mixed, on cpu or cuda; mixed keeps"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(run: Run, folder: Path, flags: tuple[str, ...], told: str) -> None:
    shown = run("plan", "mlp:tiny", *flags, "--strategy", "fsdp", "-o", "plan.json")
    assert shown.code == 2 and told in shown.err and not (folder / "plan.json").exists()
    assert_three_sentences(UsageError(shown.err.removeprefix("error: ").strip()))


def test_plan_prints_a_search_as_json_and_remembers_it(run: Run, folder: Path, cache: Path) -> None:
    first, again = (run(*SEARCH, "--json", "-o", "plan.json") for _ in range(2))
    assert first.code == again.code == 0 and first.err == again.err == ""
    found, remembered = json.loads(first.out), json.loads(again.out)
    assert (found["cache"], remembered["cache"]) == ("MISS", "HIT") and found["saved"] == "plan.json"
    assert 0 < found["seconds_per_step"] <= found["baseline_seconds_per_step"] and found["baseline"]
    assert found["ratio"] == found["baseline_seconds_per_step"] / found["seconds_per_step"]
    assert found["search_seconds"] > 0 and found["num_plans"] > 0 and found["peak_bytes"] > 0
    assert found["stopped"] in {stopped.value for stopped in Stopped}
    assert found["history"][-1]["seconds_per_step"] == found["seconds_per_step"]
    same = set(found) - {"cache", "history"}
    assert {name: found[name] for name in same} == {name: remembered[name] for name in same}
    simulated = json.loads(run("simulate", "plan.json", "--machine", "dgx-h100", "--json").out)
    assert simulated["seconds_per_step"] == pytest.approx(found["seconds_per_step"])
    assert len(list(cache.glob("plans/*.json"))) == 1
    for flags in (("--fresh",), ("--optimizer", "sgd"), ("--batch", "16")):
        assert json.loads(run(*SEARCH, "--budget", "0", "--json", *flags).out)["cache"] == "MISS", flags


def test_without_time_the_best_named_strategy_is_saved(run: Run, folder: Path) -> None:
    found = json.loads(run("plan", *MLP, "--budget", "0", "--json", "-o", "plan.json").out)
    assert found["stopped"] == "out of time" and found["strategy"] == found["baseline"] and found["ratio"] == 1
    assert load_plan(folder / "plan.json").strategy == found["strategy"]
    rows = json.loads(run("compare", *MLP, "--search", "named", "--budget", "0", "--json").out)
    assert found["seconds_per_step"] == rows[0]["seconds_per_step"], "none of them is faster"


def test_a_plan_to_start_from_is_not_lost(run: Run, folder: Path, cache: Path) -> None:
    assert run("plan", *MLP, "--strategy", "data-parallel", "-o", "mine.json").code == 0
    found = json.loads(run("plan", *MLP, "--budget", "0", "--start", "mine.json", "--json", "-o", "plan.json").out)
    assert found["strategy"] == "data-parallel:dp=8" and found["cache"] == "MISS", "no named strategy is faster"
    assert load_plan(folder / "plan.json").graph == load_plan(folder / "mine.json").graph
    assert not list(cache.iterdir()), "it would be the answer to another question"


def test_ctrl_c_saves_the_best_so_far(run: Run, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(searches, "search_stages", interrupted)  # the first that is looked for
    found = json.loads(run("plan", *MLP, "--budget", "10m", "--json", "-o", "plan.json").out)
    assert found["stopped"] == "interrupted" and load_plan(folder / "plan.json").strategy == found["baseline"]
    assert len(list(cache.glob("plans/*.json"))) == 1, "the next search goes on from it"


def test_an_interrupted_save_loses_nothing(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("plan", *MLP, "--strategy", "reduction", "-o", "plan.json").code == 0
    before = (folder / "plan.json").read_text()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        refused = run("plan", *MLP, "--strategy", "sbp3d", "-o", "plan.json").refused()
    assert "No space left on device" in refused
    assert (folder / "plan.json").read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == ["my_models.py", "plan.json"]


def test_memory_that_no_plan_keeps_to_is_told(run: Run, folder: Path) -> None:
    told = run(*SEARCH, "--memory", "1KiB", "-o", "plan.json").refused()
    assert "1.00 KiB may be used" in told and not (folder / "plan.json").exists()


def test_compare_puts_strategies_and_searches_side_by_side(run: Run) -> None:
    shown = run("compare", *MLP, "--search", "named", "--budget", "0.2s")
    assert shown.code == 0 and shown.err == ""
    prices, heading, *lines = shown.out.splitlines()
    assert prices.startswith("prices       all estimated from data sheets; published steps on H100 were off by 8%")
    assert " ".join(heading.split()) == "strategy or search step compute exposed waiting hidden memory fits search"
    names = [line.split("  ")[0] for line in lines if not line.partition(": ")[2].endswith(".")]
    assert {"data-parallel", "fsdp", "megatron:tp=2,sp", "search: named"} <= set(names)
    assert any(line.startswith("spatial: The images of Mlp were to be split") for line in lines), "and why not"


def test_compare_takes_the_strategies_that_are_asked_for(run: Run) -> None:
    asked = "hsdp:shard=2,replicate=4", "ddp+micro=2", "megatron:tp=2+fsdp", "ddp+recompute=full"
    rows = json.loads(run("compare", *MLP, *(word for name in asked for word in ("--strategy", name)), "--json").out)
    assert [{row["name"]: "reason" in row for row in rows}[name] for name in asked] == [False, True, False, True]
    reasons = [row["reason"] for row in rows if "reason" in row]
    assert "In each of 2 micro-batches" in reasons[0] and "no list of modules has two members" in reasons[1]
    assert "which only one can" in run("compare", *MLP, "--strategy", "fsdp+ddp").refused()


def test_compare_prints_json_the_fastest_that_fit_first(run: Run) -> None:
    free = json.loads(run("compare", *MLP, "--search", "joint", "--budget", "0.2s", "--json").out)
    made = [row for row in free if "seconds_per_step" in row]
    refused = [row for row in free if set(row) == {"name", "search_seconds", "reason"}]
    assert refused and free == made + refused
    assert [row["seconds_per_step"] for row in made] == sorted(row["seconds_per_step"] for row in made)
    parts = ("forward", "backward", "recompute", "update", "exposed", "waiting")
    for row in made:
        assert row["all_estimated"] and row["published_steps"][0]["gpu"] == "H100" and set(row["busy"]) == {H100}
        assert row["fits"] and sum(row[part] for part in parts) == pytest.approx(row["seconds_per_step"])
    searched = [row for row in made if row["name"] == "search: joint"]
    assert len(searched) == 1 and searched[0]["search_seconds"] > 0
    limit = sorted(row["peak_bytes"] for row in made)[len(made) // 2]
    tight = ("--memory", f"{limit}B", "--search", "named", "--budget", "0.2s", "--json")
    fitting = [row["fits"] for row in json.loads(run("compare", *MLP, *tight).out) if "fits" in row]
    assert True in fitting and False in fitting and fitting == sorted(fitting, reverse=True)


def test_compute_exposed_and_waiting_make_up_the_step(run: Run) -> None:
    """The words are those of `simulate`: waiting is no communication, and what is computed again is computed."""
    ask = ("--machine", "dgx-h100", "--batch", "8", "--strategy", "data-parallel")
    shown = run("compare", "bert-large:tiny", *ask).out
    (row,) = (line for line in shown.splitlines() if line.startswith("data-parallel "))
    step, *parts = (float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (s|ms|µs)\b", row)[:4])
    assert sum(parts) == pytest.approx(step, rel=0.02) and parts[2] > 0


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def test_devices_that_stand_idle_are_told(run: Run, folder: Path) -> None:
    """One device of two has a twentieth of the other's rate, and none for bfloat16."""
    (folder / "mixed.toml").write_text(MIXED)
    (folder / "half.py").write_text(HALF)
    asked = ("half.py:build", "--machine", "mixed.toml", "--budget", "0.2s")
    compared = run("compare", *asked, "--search", "named").out.splitlines()
    prices, rates, alone, heading = compared[:4]
    assert prices.endswith("were off by 8% in the median, 23% at worst; no step on K80-12GB was ever compared")
    assert rates == "rates        K80-12GB has none for bfloat16: reckoned as float32, 4.4 teraflops"
    assert re.match(r"alone        one H100-SXM5-80GB is predicted to take .*, [\d.]+ times as fast as all 2", alone)
    assert " ".join(heading.split()).endswith(f"search busy {H100} busy K80-12GB")
    planned = run("plan", *asked, "-o", "mixed.json").out.splitlines()
    assert planned[:2] == [prices, rates] and planned[2].startswith(f"alone        one {H100}")
    (busy,) = (line for line in planned if line.startswith("busy"))
    share = re.fullmatch(rf"busy         computing of the step: {H100} (\d+)%, K80-12GB (\d+)%", busy)
    assert share is not None and 3 * int(share[1]) < int(share[2]) > 50
    assert busy in run("simulate", "mixed.json", "--machine", "mixed.toml").out.splitlines()
    found = json.loads(run("plan", *asked, "--json").out)
    assert found["alone"]["device"] == H100 and found["alone"]["seconds_per_step"] < found["seconds_per_step"]
    assert found["busy"]["K80-12GB"] > 3 * found["busy"][H100]
    assert found["missing_rates"] == [{"device": "K80-12GB", "dtype": "bfloat16"}]


H100 = "H100-SXM5-80GB"
HALF = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(torch.bfloat16)
    x = torch.zeros(4096, 512, dtype=torch.bfloat16)
    return model, (x, x), nn.functional.mse_loss
"""
MIXED = """
format = "conjoin.machine"
version = 2
name = "mixed"
num_nodes = 1
devices_per_node = 2
device = "cuda"

[[device_type]]
name = "H100-SXM5-80GB"
memory_gigabytes = 80
memory_gigabytes_per_second = 3350
teraflops = { float32 = 67, bfloat16 = 989.5 }

[[device_type]]
name = "K80-12GB"
memory_gigabytes = 12
memory_gigabytes_per_second = 240
teraflops = { float32 = 4.4 }

[[node]]
name = "node"
count = 1
devices = ["H100-SXM5-80GB", "K80-12GB"]
switches = ["host"]
link = [
    { between = ["0", "host"], kind = "PCIe", gigabytes_per_second = 25, latency_microseconds = 1 },
    { between = ["1", "host"], kind = "PCIe", gigabytes_per_second = 25, latency_microseconds = 1 },
]
"""


def test_explain_shows_annotated_code(run: Run, saved: Path) -> None:
    shown = run("explain", "a.json")
    assert shown.code == 0 and shown.err == ""
    assert "# split n over d0 d1; features.0 convnets.py:" in shown.out
    assert "    ~ backward all-reduce of 10 gradients over d0 d1, 13.3 KiB per rank" in shown.out
    data = json.loads(run("explain", "a.json", "--json").out)
    assert data == json.loads(json.dumps(explain(load_plan(saved)).to_json()))


@pytest.mark.parametrize("command", ["explain", "diff", "simulate", "run", "verify", "calibrate", "plan"])
def test_modules_are_imported_where_the_user_says_so(run: Run, saved: Path, folder: Path, command: str) -> None:
    (folder / "registers.py").write_text("print('imported')\nraise ValueError('no operators')", encoding="utf-8")
    machine = ("--machine", "p3.8xlarge")
    arguments = {
        "diff": ("a.json",), "simulate": machine, "run": ("lenet:tiny",), "verify": ("lenet:tiny",),
        "plan": (*machine, "--start", "a.json"), "calibrate": ("--machine", "local:2", "--plan", "a.json"),
    }.get(command, ())  # fmt: skip
    first = {"plan": ("lenet:tiny",), "calibrate": ()}.get(command, ("a.json",))
    told = run(command, *first, *arguments, "--import", "registers")
    assert told.code == 2 and told.out == "" and told.err.startswith("imported\n"), "a user's words are no answer"
    assert "error: The module registers was to be imported for what it registers" in told.err


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
        ((*LENET, "--memory", "40"), "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB. Write 40GiB."),
        ((*LENET, "--memory", "40G"), "The size '40G' was given."),
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


TWO_OUTPUTS = """
import torch

class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y.square().mean(), y

def both():
    return Scores(), torch.randn(8, 8)

def alone():
    return Scores(), torch.randn(8, 8), lambda output: output[0]
"""


def test_a_search_says_why_it_looked_for_no_stages(run: Run, tmp_path: Path) -> None:
    """A pipeline gives the loss alone: what a model gives beside it keeps them out, which nobody would guess."""
    (tmp_path / "two.py").write_text(TWO_OUTPUTS)
    ask = lambda made, *more: run("plan", f"two.py:{made}", "--machine", "dgx-h100:1x2", "--budget", "0.2s", *more)
    told = ask("both")
    assert told.code == 0
    assert "\nstages       none were looked for: the model gives 1 tensor beside its loss" in told.out
    assert "\nstages " not in ask("alone").out
    assert "\nstages " not in ask("both", "--stages", "1").out
    assert "\nstages " not in ask("both", "--search", "named", "--forbid-axis", "d0").out
    bound = "\nstages       none were looked for: a stage has devices and axes of its own, and --f"
    assert bound + "orbid-axis asks" in ask("both", "--machine", "dgx-h100:1x4", "--forbid-axis", "d0").out
    assert bound + "ix asks" in ask("alone", "--fix", "layer.weight={}").out


def test_stages_are_explained_one_by_one_without_a_fingerprint(run: Run) -> None:
    asked = ("plan", *MLP, "--strategy", "pipeline:pp=2,micro=2", "-o", "pipeline.json")
    assert run(*asked).code == 0
    told = run("explain", "pipeline.json").out
    assert "\nmodel        stage 0, train\n" in told and "\nmodel        stage 1, train\n" in told
    assert run("diff", "pipeline.json", "pipeline.json").out == "The plans are the same.\n"
