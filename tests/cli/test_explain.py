"""`explain --why`: what another rule for one operator would take is what `simulate` says of the edited plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import conjoin
from conjoin.ir import load_plan, rules_for
from conjoin.search import find_alternatives
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MACHINE = "dgx-h100:1x4"
SIMULATE = ("--machine", MACHINE, "--json")
PLAN = ("plan", "gpt-125m:tiny", "--batch", "8", "--machine", MACHINE, "--strategy", "megatron:tp=2,dp=2", "-o")


def seconds_and_bytes(run: Run, path: str) -> tuple[float, int]:
    found = json.loads(run("simulate", path, *SIMULATE).out)
    return found["seconds_per_step"], found["memory"]["peak"]


@pytest.mark.parametrize("name", ["blocks.0.feed_forward.up", "blocks.0.feed_forward.up.weight"])
def test_changes_are_the_differences_of_two_simulations(run: Run, folder: Path, name: str) -> None:
    assert run(*PLAN, "plan.json").code == 0
    shown = run("explain", "plan.json", "--why", name, "--json")
    assert shown.code == 0, shown.err
    told, plan = json.loads(shown.out), load_plan("plan.json")
    before = seconds_and_bytes(run, "plan.json")
    assert (told["seconds_per_step"], told["peak_bytes"]) == before
    found = find_alternatives(plan, conjoin.machine.parse_machine(MACHINE), conjoin.api.known_costs(), name)
    assert len(found.alternatives) == len(told["alternatives"]) > 3
    for one, facts in zip(found.alternatives, told["alternatives"], strict=True):
        assert one.plan is not None and (list(one.axes), one.way) == (facts["axes"], facts["way"])
        assert one.plan != plan and one.plan.computes == plan.computes
        one.plan.save("edited.json")  # and read again, by which it is checked
        after = seconds_and_bytes(run, "edited.json")
        assert facts["change_of_seconds"] == after[0] - before[0]
        assert facts["change_of_peak_bytes"] == after[1] - before[1]


def test_every_rule_of_an_operator_is_there_or_told_why_not(run: Run, folder: Path) -> None:
    """Both axes are used alike, and change together; three features are not split four ways."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 8)), (torch.randn(8, 6), torch.randn(8, 8))
    plan = conjoin.plan(model, batch, MACHINE, loss=nn.functional.mse_loss, strategy="data-parallel")
    node = next(node for node in plan.graph.nodes if node.op == "linear")
    name = f"%{plan.graph.numbers[conjoin.ir.Value(node)]}"
    found = find_alternatives(plan, conjoin.machine.parse_machine(MACHINE), conjoin.api.known_costs(), name)
    every = {str(rule) for rule in rules_for(conjoin.ir.plain_call(node), 1)}
    assert found.present == ((("d0", "d1"), "S(0), B, B -> S(0)"),)
    assert {one.way for one in found.alternatives} == every - {"S(0), B, B -> S(0)"}
    impossible = {one.way: one.reason for one in found.alternatives if one.plan is None}
    assert list(impossible) == ["B, S(0), S(0) -> S(1)"] and "cannot be split 4 ways" in next(iter(impossible.values()))
    other = next(one.plan for one in found.alternatives if one.way == "S(1), S(1), P -> P")
    assert other is not None
    assert conjoin.verify_plan(other, model, batch, loss=nn.functional.mse_loss, num_steps=2).passed


def test_parameters_follow_the_operator_that_uses_them(run: Run, folder: Path) -> None:
    model, batch = nn.Linear(8, 8), (torch.randn(8, 8), torch.randn(8, 8))
    ask = {"loss": nn.functional.mse_loss, "strategy": "data-parallel", "precision": "bf16-mixed"}
    plan = conjoin.plan(model, batch, MACHINE, **ask)  # type: ignore[arg-type]
    (name,) = (f"%{plan.graph.numbers[conjoin.ir.Value(n)]}" for n in plan.graph.nodes if n.op == "linear")
    found = find_alternatives(plan, conjoin.machine.parse_machine(MACHINE), conjoin.api.known_costs(), name)
    split = next(one for one in found.alternatives if one.way == "B, S(0), S(0) -> S(1)")
    assert split.plan is not None
    stored = {str(leaf): str(leaf.type) for leaf in split.plan.graph.leaves if leaf.trainable}
    assert set(stored.values()) == {"f32[8,8]{d0:S(0),d1:S(0)}", "f32[8]{d0:S(0),d1:S(0)}"}, "through their casts"


def test_for_people_and_for_names_that_are_none(run: Run, folder: Path) -> None:
    assert run(*PLAN, "plan.json").code == 0
    lines = run("explain", "plan.json", "--why", "%45").out.splitlines()
    assert lines[0].startswith("%45 linear at ") and "now: " in lines[1] and any(" (+" in line for line in lines)
    told = run("explain", "plan.json", "--why", "blocks.0.fed_forward.up").refused()
    assert "What else was possible was asked of 'blocks.0.fed_forward.up'." in told
    assert "Did you mean blocks.0.feed_forward.up?" in told
    assert "make %0 to %" in run("explain", "plan.json", "--why", "%999").refused()
    named = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**named, "machine": {"name": "elsewhere", "fingerprint": "0"}}))
    assert "Name it with --machine" in run("explain", "plan.json", "--why", "%45").refused()


def test_operators_are_found_by_kind_and_line_or_listed(run: Run, folder: Path) -> None:
    Path("net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)\n\n    def forward(self, x):\n"
        "        x = torch.relu(self.one(x))\n        return torch.tanh(torch.relu(self.two(x)))\n\n\n"
        "def make(batch_size=8):\n    batch = torch.zeros(batch_size, 4), torch.zeros(batch_size, 4)\n"
        "    return Net(), batch, nn.functional.mse_loss\n"
    )
    assert run("plan", "net.py:make", "--machine", MACHINE, "--strategy", "data-parallel", "-o", "plan.json").code == 0
    numbers = {node.op: f"%{number}" for value, number in load_plan("plan.json").graph.numbers.items()
               if isinstance(node := value.owner, conjoin.ir.Node)}  # fmt: skip
    one = run("explain", "plan.json", "--why", "tanh")
    assert one.code == 0 and one.out == run("explain", "plan.json", "--why", numbers["tanh"]).out
    several = run("explain", "plan.json", "--why", "relu")
    assert several.code == 2 and "2 operators of that kind or place. Name one by its number:" in several.err
    assert [line.split()[1:3] for line in several.err.splitlines()[1:3]] == [["relu", "at"]] * 2
    assert f"{numbers['relu']} relu at" in several.err and "net.py:12" in several.err
    in_line = run("explain", "plan.json", "--why", "net.py:11").err
    assert " linear at" in in_line and " relu at" in in_line and "net.py:12" not in in_line
    assert "kind of operator or line of that name" in run("explain", "plan.json", "--why", "nowhere.py:11").err


def test_in_a_pipeline_one_stage_changes_and_the_step_is_that_of_all(run: Run, folder: Path) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.randn(8, 8), torch.randn(8, 8))
    ask = {"loss": nn.functional.mse_loss, "strategy": "pipeline:pp=2,micro=2"}
    conjoin.plan(model, batch, MACHINE, **ask).save("pipeline.json")  # type: ignore[arg-type]
    plan, machine = load_plan("pipeline.json"), conjoin.machine.parse_machine(MACHINE)
    before = seconds_and_bytes(run, "pipeline.json")
    found = find_alternatives(plan, machine, conjoin.api.known_costs(), "3.weight")
    assert found.name.startswith("stage 1: param:3.weight") and found.prediction.seconds == before[0]
    for one in found.alternatives:
        assert isinstance(one.plan, conjoin.Pipeline) and one.prediction is not None
        one.plan.save("edited.json")
        assert seconds_and_bytes(run, "edited.json") == (one.prediction.seconds, one.prediction.memory.peak)
    shown = run("explain", "pipeline.json", "--why", "1:3.weight").out.splitlines()
    assert len(shown) == 2 + len(found.alternatives) and shown[0] == found.name
    assert "Stages 0, 1 of the pipeline have that. Say in which" in run(
        "explain", "pipeline.json", "--why", "linear"
    ).refused()
    assert "The pipeline has stages 0 to 1." in run("explain", "pipeline.json", "--why", "2:%0").refused()
    assert "No stage of the pipeline has" in run("explain", "pipeline.json", "--why", "9.weight").refused()
