"""`--import` and `--rules`: what a user's module registers is known to every command, and in every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conjoin.cli import models
from conjoin.machine.presets import OWN
from conjoin.ops import catalog
from conjoin.ops.call_cache import forget_calls
from tests.cli.conftest import Ran
from tests.cli.processes import Forked
from tests.waiting import HUNG_SECONDS

Run = Callable[..., Ran]
EXTENSION = """\
from dataclasses import replace

import torch

import conjoin


@torch.library.custom_op("cli_tests::gated", mutates_args=())
def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


gated.register_fake(lambda x, gate: torch.empty_like(x))


def backward(ctx, gradient):
    x, gate = ctx.saved_tensors
    open_ = torch.sigmoid(gate)
    return gradient * open_, (gradient * x * open_ * (1 - open_)).sum(0)


gated.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
conjoin.register_operator(gated, "b c, c -> b c", terms="x")
conjoin.register_strategy("by-halves", "data-parallel:2")
conjoin.register_machine(replace(conjoin.Machine("two", 1, 2, "cpu"), name="cli-tests-two"))
"""
MODEL = """\
import torch
from cli_tests_extension import gated


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gate = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return gated(self.fc(x), self.gate)


def make(batch_size=8):
    return Gated(), (torch.randn(batch_size, 4), torch.randn(batch_size, 4)), torch.nn.functional.mse_loss
"""
IMPORT = ("--import", "cli_tests_extension")


def test_what_a_module_registers_is_known_to_commands_and_ranks(
    run: Run,
    folder: Path,
    fork: Callable[..., Forked],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(lambda: OWN.pop("cli-tests-two", None))
    (folder / "cli_tests_extension.py").write_text(EXTENSION)
    (folder / "gated.py").write_text(MODEL)
    assert "no strategy named 'by-halves'" in run("compare", "lenet:tiny", "--machine", "local:2", "--strategy",
                                                  "by-halves").refused()  # fmt: skip
    ask = ("plan", "gated.py:make", "--machine", "cli-tests-two", "--strategy", "by-halves", *IMPORT)
    made = run(*ask, "-o", "plan.json", "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out)["strategy"] == "data-parallel:dp=2"
    plan = json.loads((folder / "plan.json").read_text())
    assert [(stated["module"], stated["declared"]) for stated in plan["operators"]] == [("cli_tests_extension",) * 2]
    assert "cli-tests-two" in run("machine", "list", *IMPORT).out
    assert json.loads(run("inspect", "gated.py:make", "--json", *IMPORT).out)["opaque"] == []
    monkeypatch.setattr(catalog, "_OWN", {})  # as in another process, which imports nothing unasked
    forget_calls()
    message = run("explain", "plan.json").refused()
    assert "splits the operator cli_tests::gated" in message and "--import cli_tests_extension" in message
    process = fork("run", "plan.json", "gated.py:make", "--steps", "2", "--json")  # whose file imports what it needs
    out, err = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 0, err
    losses = json.loads(out)["losses"]
    assert len(losses) == 2 and losses[1] < losses[0]


FUNCTION = """
import torch

import conjoin


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


conjoin.register_operator(Halved, "... -> ...", terms="x")
conjoin.register_operator(Doubled, "... -> ...", terms="x")


class Model(torch.nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(Halved.apply(x))).square().mean()


def make():
    return Model(4, 4), torch.randn(8, 4)
"""


@pytest.mark.parametrize("name", ["cli_tests_function", "json"])
def test_an_autograd_function_beside_its_model(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether its file is imported by its name first, or is called like a module in use."""
    (folder / f"{name}.py").write_text(FUNCTION)
    model = f"{name}.py:make"
    assert run("plan", model, "--machine", "local:2", "--strategy", "data-parallel", "-o", "plan.json").code == 0
    if name == "json":
        assert run("verify", "plan.json", model).code == 0
        return
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(models, "_imported", {})
    monkeypatch.setattr(catalog, "_OWN", {})  # as in another process, which imports nothing unasked
    forget_calls()
    assert f"splits the operator {name}::Halved (1 call)," in run("explain", "plan.json").refused()
    verified = run("verify", "plan.json", model, "--import", name)
    assert verified.code == 0, verified.err


def test_rules_of_ones_own_go_with_a_search(run: Run, folder: Path) -> None:
    (folder / "mine.toml").write_text('[[rule]]\nname = "swapped"\nleft = "matmul(a, b)"\nright = "matmul(b, a)"\n')
    ask = ("plan", "lenet:tiny", "--machine", "local:1", "--rules", "mine.toml")
    assert "The rule 'swapped' of mine.toml was to be used. A trial refutes it" in run(*ask).refused()
    assert "what is asked of a search, --rules" in run(*ask, "--strategy", "single").refused()
    assert "could not be read" in run(*ask[:-1], "none.toml").refused()
