"""Mistakes of a first day: each ends in three sentences and code 2, and nothing that was there is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MODELS = """\
import torch
from torch import nn


def good(batch_size=4, width=4):
    return nn.Linear(width, 3), (torch.ones(batch_size, width), torch.zeros(batch_size, 3)), nn.functional.mse_loss


class Faulty(nn.Module):
    def forward(self, x):
        raise ValueError("a fault of mine")


def faulty():
    return Faulty(), torch.ones(2, 4)


class Classes(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(1)


def classes():
    return Classes(4, 3), torch.ones(2, 4)


def loss_of_classes():
    return nn.Linear(4, 3), torch.ones(2, 4), lambda scores: scores.argmax()


def no_samples():
    return nn.Linear(4, 3), (torch.ones(0, 4), torch.zeros(0, 3)), nn.functional.mse_loss


def endless():
    return endless()


def number_for_loss():
    return nn.Linear(4, 3), torch.ones(2, 4), 3
"""
GOOD = "mine.py:good"


@pytest.fixture
def plan(folder: Path, run: Run) -> Path:
    (folder / "mine.py").write_text(MODELS)
    made = folder / "plan.json"
    assert run("plan", GOOD, "--machine", "local:2", "--strategy", "fsdp", "-o", str(made)).code == 0
    return made


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("faulty", "ValueError: a fault of mine"),
        ("loss_of_classes", "did not return one floating-point number"),
        ("no_samples", "It has 0 samples"),
        ("endless", "RecursionError"),
        ("number_for_loss", "A loss of type int was given"),
        ("god", "god"),
    ],
)
def test_a_model_that_cannot_be_planned_leaves_the_plan_that_was_there(
    plan: Path, run: Run, model: str, why: str
) -> None:
    before = plan.read_bytes()
    asked = run("plan", f"mine.py:{model}", "--machine", "local:2", "--strategy", "fsdp", "-o", str(plan))
    assert why in asked.refused() and plan.read_bytes() == before


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fsdp:dp=3", "nearest degree that fits is dp=2"),
        ("fsdp:dp=", "dp=''"),
        ("fsdp:dp=2,dp=2", "dp twice"),
        ("fsdp+fsdp", "which only one can"),
        ("fsdp+micro=3", "a batch of 4 has no 3 equal parts"),
        ("fsdp+recompute=half", "Did you mean"),
        ("+", "no strategy named ''"),
        ("megatron:tp=2@d9", "as @d0"),
        ("statistics=rank", "names none"),
        ("pipeline:pp=9", "Ask for pp=2 or fewer"),
        ("pipeline:pp=2,schedule=foo", "Did you mean found?"),
    ],
)
def test_a_strategy_that_is_none(plan: Path, run: Run, strategy: str, why: str) -> None:
    assert why in run("plan", GOOD, "--machine", "local:2", "--strategy", strategy).refused()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--machine", "local:0"], "from 1 to"),
        (["--machine", "local:2x"], "not a number of nodes"),
        (["--machine", "dgx-h100:1x9"], "The machine has 1 × 8"),
        (["--machine", "local:2", "--size", "width=1e3"], "a whole number"),
        (["--machine", "local:2", "--size", "hight=3"], "Did you mean width?"),
        (["--machine", "local:2", "--batch", "1"], "It has 1 sample"),
        (["--machine", "local:2", "--precision", "bf17"], "Did you mean bf16?"),
        (["--machine", "local:2", "--import", "nobody_has_this"], "nobody_has_this"),
    ],
)
def test_an_option_that_cannot_be(plan: Path, run: Run, options: list[str], why: str) -> None:
    assert why in run("plan", GOOD, "--strategy", "fsdp", *options).refused()


@pytest.mark.parametrize("keep", ["half", "nothing", "a list", "a table", "no mesh", "another version", "no graph"])
def test_a_plan_that_was_damaged(plan: Path, run: Run, keep: str) -> None:
    text, data = plan.read_text(), json.loads(plan.read_text())
    damaged = {
        "half": text[: len(text) // 2],
        "nothing": "",
        "a list": "[]",
        "a table": '{"a": 1}',
        "no mesh": json.dumps({key: value for key, value in data.items() if key != "mesh"}),
        "another version": json.dumps(data | {"version": 999}),
        "no graph": json.dumps(data | {"graph": []}),
    }
    plan.write_text(damaged[keep])
    for command in (["explain"], ["verify"], ["run"]):
        run(*command, str(plan), *([] if command == ["explain"] else [GOOD])).refused()


def test_a_plan_of_a_model_without_a_loss_does_not_train(plan: Path, run: Run) -> None:
    asked = run("plan", "mine.py:classes", "--machine", "local:2", "--strategy", "fsdp", "-o", "classes.json")
    assert asked.code == 0 and "next" not in asked.out
    assert "has no loss" in run("run", "classes.json", "mine.py:classes").refused()


def test_batches_are_asked_of_a_function_that_makes_one(plan: Path, run: Run) -> None:
    message = run("fits", "mine.py:classes", "--machine", "dgx-h100:1x2").refused()
    assert "takes no batch_size" in message and not message.startswith("error: --batch")


def test_where_every_batch_fits_the_largest_that_was_tried_is_told(plan: Path, run: Run) -> None:
    asked = run("fits", GOOD, "--machine", "dgx-h100:1x2", "--strategy", "fsdp")
    assert asked.code == 0 and "not looked for" in asked.out and "Use more devices" not in asked.out


def test_a_pipeline_is_no_plan_of_one_stage(plan: Path, run: Run) -> None:
    asked = run("fits", GOOD, "--machine", "dgx-h100:1x2", "--strategy", "pipeline")
    assert "A pipeline has several" in asked.refused()
