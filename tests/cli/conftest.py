"""What the tests of the command line share: a folder with models in it, and a way to run a command there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conjoin.cli import main
from conjoin.machine import COLLECTIVE_KINDS, Machine
from tests.cli.processes import Forked
from tests.ir.wording import assert_three_sentences
from tests.zoo.commands import captured_once

REPOSITORY = Path(__file__).parents[2]
MODELS = """\
import torch
from torch import nn


def small(batch_size=2):
    return nn.Linear(4, 3), torch.zeros(batch_size, 4)


def with_loss():
    return nn.Linear(4, 3), (torch.zeros(2, 4), torch.zeros(2, 3)), nn.functional.mse_loss


def fixed():
    return nn.Linear(4, 3), torch.zeros(2, 4)


def wrong_return():
    return nn.Linear(4, 3)


def wrong_tuple():
    return torch.zeros(2, 4), nn.Linear(4, 3)


def raising():
    return undefined_name


def overflowing():
    return torch.ones(2**64)


def quitting():
    raise SystemExit("the data is not there")


def needing(path):
    return path


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x).relu()


def wrong_batch():
    return Wide(), torch.zeros(2, 5)


def without_tensors():
    return nn.Linear(4, 3), (1, 2)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def branching():
    return Branching(), torch.ones(3)


class Stubborn(nn.Module):
    def train(self, mode=True):
        raise RuntimeError("this model has one mode")


def stubborn():
    return Stubborn(), torch.ones(3)


def sized(batch_size=2, width=4):
    torch.manual_seed(0)
    return nn.Linear(width, 3), (torch.ones(batch_size, width), torch.zeros(batch_size, 3)), nn.functional.mse_loss


NOT_A_FUNCTION = 3
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """The message of a command that could not be done: one message, code 2, nothing else."""
        assert self.code == 2 and self.out == "" and "Traceback" not in self.err, self.err
        assert self.err.startswith("error: ") and self.err.count("error: ") == 1, self.err
        assert_three_sentences(self.err.removeprefix("error: "))
        return self.err


def check_machine(machine: Machine) -> None:
    """What any calibrated machine answers."""
    for axis in machine.mesh.names:
        for kind in COLLECTIVE_KINDS:
            fit = machine.fit_of(kind, (axis,))
            assert fit is not None and fit.latency >= 0 and fit.r_squared <= 1 and fit.seconds(2**20) > 0
    for rank in range(machine.num_devices):
        device = machine.device_type(rank)
        assert device.kind == machine.device and device.memory_bytes > 2**20
        assert device.flops_of("float32") > 1e8 and device.memory_bandwidth > 1e7


@pytest.fixture(autouse=True, scope="session")
def _zoo_captured_once() -> Iterator[None]:
    with captured_once():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in; what commands import from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    (tmp_path / "my_models.py").write_text(MODELS)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command in this process; ranks are processes of their own, so what they print is read where it ends up."""

    def run_here(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(list(arguments))
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run_here


@pytest.fixture
def start(folder: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `python -m conjoin` in a process of its own, first in its group as a shell has it."""

    def start_there(*arguments: str, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "conjoin", *arguments]
        streams = {"stdout": out, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)

    return start_there


@pytest.fixture
def fork(folder: Path) -> Callable[..., Forked]:
    """Start a command as `start` does, or another module, where what is done until it is imported is not asked for."""
    return lambda *arguments, module="conjoin": Forked(folder, module, arguments)
