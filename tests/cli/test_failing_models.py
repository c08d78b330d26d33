"""A model that fails in the middle of a training: its own words and place in three sentences, and what was kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conjoin
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MODELS = """\
import os

import torch
from torch import Tensor, nn


def checked(x):
    if float(x.abs().max()) > 90:
        raise ValueError("the kernel takes nothing above 90.")
    return x * 2


@torch.library.custom_op("failing::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return checked(x)


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("failing::back", mutates_args=())
def back(x: Tensor) -> Tensor:
    return x * 2


back.register_fake(torch.empty_like)
back.register_autograd(lambda ctx, gradient: checked(gradient))


class Calls(nn.Linear):
    def __init__(self, call):
        super().__init__(4, 3)
        self.call = call

    def forward(self, x):
        return self.call(super().forward(x)).sum()


def forward(batch_size=4):
    return Calls(twice), torch.ones(batch_size, 4), lambda y: y


def backward(batch_size=4):
    return Calls(back), torch.ones(batch_size, 4), lambda y: y.square() / 10


def classes(batch_size=4):
    return nn.Linear(4, 3), (torch.ones(batch_size, 4), torch.zeros(batch_size).long()), nn.functional.cross_entropy


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), 1e3 if index == 3 else 1.0)


class Without(Samples):
    def __getitem__(self, index):
        return torch.ones(4, device="meta"), torch.tensor(1, device="meta")


def elsewhere(batch_size=4):
    os.chdir("/")
    return classes(batch_size)


class Labelled(Samples):
    def __getitem__(self, index):
        return torch.ones(4), torch.tensor(7 if index == 3 else 1)
"""


@pytest.fixture
def mine(folder: Path) -> Path:
    (folder / "failing.py").write_text(MODELS)
    return folder


def planned(run: Run, function: str, ranks: int) -> tuple[str, ...]:
    strategy = "single" if ranks == 1 else "data-parallel"
    named = f"failing.py:{function}"
    made = run("plan", named, "--machine", f"local:{ranks}", "--strategy", strategy, "-o", "plan.json")
    assert made.code == 0, made.err
    return ("run", "plan.json", named, "--steps", "8", "--json", "--data")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_label_that_is_no_class_ends_a_training_with_what_was_kept(mine: Path, run: Run, ranks: int) -> None:
    command = planned(run, "classes", ranks)
    keeping = ("--checkpoint", "kept", "--save-every", "1", "--log", "log.jsonl")
    message = run(*command, "failing.py:Labelled", *keeping).refused()
    assert "failed on rank" in message and "with IndexError: Target 7 is out of bounds. The model itself" in message
    assert message.endswith("\n  in cross_entropy_loss\n")
    done = [json.loads(line) for line in (mine / "log.jsonl").read_text().splitlines()]
    kept = [each["step"] for each in done if each["kind"] == "checkpoint"]
    assert (f"kept has what was there after step {kept[-1]}" if kept else "nothing is kept") in message


def test_a_kernel_that_raises_is_told_with_its_line(mine: Path, run: Run) -> None:
    message = run(*planned(run, "forward", 1), "failing.py:Samples").refused()
    assert "ValueError: the kernel takes nothing above 90. The model" in message
    assert message.endswith("failing.py:9\n")


def test_a_kernel_that_raises_in_the_backward_pass(mine: Path, run: Run) -> None:
    message = run(*planned(run, "backward", 1), "failing.py:Samples").refused()
    assert "nothing is kept" in message and message.endswith("failing.py:9\n")


def test_under_torchrun_others_are_told_why_a_rank_ends(
    mine: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = planned(run, "classes", 1)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    assert run(*command, "failing.py:Labelled").code == 2 and sys.last_value is None
    for variable, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("conjoin.cli.trainer.training.train", lambda rank, training: _refuse())
    assert "of mine" in run(*command, "failing.py:Labelled").err
    assert isinstance(sys.last_value, conjoin.UsageError), "as of an error that nobody caught"


def _refuse() -> None:
    raise conjoin.UsageError("A fault of mine.")


def test_samples_without_values(mine: Path, run: Run) -> None:
    assert "on the meta device" in run(*planned(run, "classes", 1), "failing.py:Without").refused()


def test_a_model_that_goes_to_another_folder_takes_no_files_along(mine: Path, run: Run) -> None:
    command = planned(run, "elsewhere", 1)[:-1]
    assert run(*command, "--checkpoint", "kept", "-o", "weights.pt").code == 0
    assert (mine / "kept" / "conjoin.json").exists() and (mine / "weights.pt").exists()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.table(tokens).sum()
        return made


def test_in_a_loop_of_ones_own_an_error_stays_what_it_is_and_says_where() -> None:
    model, tokens = Embedded(), torch.zeros(2, 3, dtype=torch.int64)
    step = conjoin.load(conjoin.plan(model, tokens, "local:1", strategy="single"), model)
    with pytest.raises(IndexError, match="index out of range") as caught:
        step(tokens + 4)
    (note,) = caught.value.__notes__
    assert note.startswith("in embedding at ") and f"{Path(__file__).name}:" in note and "(table)" in note
    assert torch.equal(step(tokens).detach(), model(tokens).detach()), "and nothing is left behind"
