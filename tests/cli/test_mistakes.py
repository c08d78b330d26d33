"""Mistakes of a first day: each ends in three sentences and code 2, and nothing that was there is lost."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from conjoin.cli.trainer import stop_request
from conjoin.cli.trainer.folder_hold import FolderHold
from conjoin.cli.trainer.stop_request import StopRequest
from conjoin.runtime.ranks import rank_processes
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MODELS = """\
import os
import signal

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


def frozen():
    return nn.Linear(4, 3).requires_grad_(False), (torch.ones(2, 4), torch.ones(2, 3)), nn.functional.mse_loss


def loss_of_classes():
    return nn.Linear(4, 3), torch.ones(2, 4), lambda scores: scores.argmax()


def no_module():
    return lambda x: x, torch.ones(2, 4)


def of_numpy():
    return nn.Linear(4, 3), torch.ones(2, 4).numpy()


def lazy():
    return nn.LazyLinear(3), torch.ones(2, 4)


def leaves():
    raise SystemExit(3)


def two_dtypes():
    return nn.Linear(4, 3).half(), torch.ones(2, 4)


def targets_of_others():
    return nn.Linear(4, 3), (torch.ones(2, 4), torch.zeros(3, dtype=torch.long)), nn.functional.cross_entropy


def no_samples():
    return nn.Linear(4, 3), (torch.ones(0, 4), torch.zeros(0, 3)), nn.functional.mse_loss


def endless():
    return endless()


def number_for_loss():
    return nn.Linear(4, 3), torch.ones(2, 4), 3


def loss_of_one():
    return nn.Linear(4, 3), (torch.ones(2, 4), torch.ones(2, 3)), lambda scores: scores.mean()


def by_name():
    return nn.Linear(4, 3), {"x": torch.ones(2, 4)}


def counting():
    return Classes(4, 3), (torch.ones(4, 4), torch.zeros(4)), lambda y, target: (y - target).square().mean()


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def branching():
    return Branching(4, 3), torch.ones(2, 4), lambda y: y.mean()


class Interrupting(nn.Linear):
    def forward(self, x):
        signal.raise_signal(signal.SIGINT)
        return super().forward(x)


def interrupting():
    return Interrupting(4, 3), (torch.ones(4, 4), torch.zeros(4, 3)), nn.functional.mse_loss


def interrupted():
    signal.raise_signal(signal.SIGINT)


class Spare(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.spare = nn.Parameter(torch.full((4,), 7.0))


def spare():
    return Spare(), (torch.ones(4, 4), torch.zeros(4, 3)), nn.functional.mse_loss


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(4), torch.zeros(3)


class Other(Samples):
    def __getitem__(self, index):
        return torch.ones(5), torch.zeros(3)


class Torn(Samples):
    def __getitem__(self, index):
        return torch.ones(4 + (index == 5)), torch.zeros(3)


class Nothing(Samples):
    def __getitem__(self, index):
        return None


class Triples(Samples):
    def __getitem__(self, index):
        return torch.ones(4), torch.zeros(3), torch.zeros(1)


class Broken(Samples):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("sample 5 is broken")
        return super().__getitem__(index)


class Negative(Samples):
    def __len__(self):
        return -1


class Endless(Samples):
    def __len__(self):
        return 10**15


class Deadly(Samples):
    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read == 5 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stopping(Samples):
    def __getitem__(self, index):
        signal.raise_signal(signal.SIGINT)


class Holed(Samples):
    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        return torch.full((4,), float("nan") if self.num_read > 9 else 1.0), torch.zeros(3)


def steep():
    model, (x, y), _ = good()
    return model, (x, y), lambda out, y: nn.functional.mse_loss(out, y) + (0 * out.sum()).sqrt()


def rows():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    return nn.Embedding(256, 256), (tokens, tokens), lambda out, y: nn.functional.cross_entropy(out.mT, y)


class Ending(Samples):
    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read == 3 and os.environ.get("RANK", "1") == "1":
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # once more at once: that of a scheduler, and of whoever started it
        return super().__getitem__(index)
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
        ("no_module", "function first, which is no nn.Module"),
        ("of_numpy", "torch.from_numpy"),
        ("lazy", "without a shape"),
        ("leaves", "SystemExit: 3"),
        ("two_dtypes", "convert one to the other"),
        ("loss_of_one", "called as Linear(float32 [2, 4]) and loss(output, float32 [2, 3])"),
        ("by_name", "called as Linear(x=float32 [2, 4])"),
        ("targets_of_others", "batch_size (2) to match target batch_size (3)"),
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
        ("FSDP", "Did you mean fsdp?"),
        ("fsdp+recompute", "recompute=''"),
        ("megatron:tp=2@d9", "as @d0"),
        ("statistics=rank", "names none"),
        ("pipeline:pp=9", "Ask for pp=2 or fewer"),
        ("pipeline:pp=2,schedule=foo", "Did you mean found?"),
    ],
)
def test_a_strategy_that_is_none(plan: Path, run: Run, strategy: str, why: str) -> None:
    assert why in run("plan", GOOD, "--machine", "local:2", "--strategy", strategy).refused()


def test_a_slip_in_a_strategy_is_told_before_the_model_is_built(plan: Path, run: Run) -> None:
    asked = run("plan", "mine.py:leaves", "--machine", "local:2", "--strategy", "fsdp:dp=99999999")
    assert "from 1, of at most 7 digits" in asked.refused()


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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-o", "nowhere/weights.safetensors"], "There is no folder"),
        (["-o", "mine.py/weights"], "There is no folder"),
        (["--clip", "0"], "clipped to a norm of 0"),
    ],
)
def test_what_could_not_be_kept_or_learned_is_told_before_the_first_step(
    single: str, run: Run, options: list[str], why: str
) -> None:
    asked = run("run", single, GOOD, "--steps", "2", *options)
    assert why in asked.refused() and "step" not in asked.out


@pytest.mark.parametrize(
    "command",
    [
        ["plan", GOOD, "--machine", "local:2", "--strategy", "fsdp", "-o"],
        ["inspect", GOOD, "-o"],
        ["simulate", "plan.json", "--machine", "laptop", "--trace"],
        ["run", "plan.json", GOOD, "--trace"],
        ["run", "plan.json", GOOD, "--log"],
        ["rules", "prove", "mine.toml", "-o"],
    ],
    ids=" ".join,
)
def test_a_file_of_another_kind_is_not_written_over(plan: Path, run: Run, folder: Path, command: list[str]) -> None:
    assert "would be lost" in run(*command, "mine.py").refused()
    assert (folder / "mine.py").read_text() == MODELS


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
        assert "plan.json" in run(*command, str(plan), *([] if command == ["explain"] else [GOOD])).refused()


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


def test_a_model_of_one_layer_has_no_stages(plan: Path, run: Run) -> None:
    asked = run("fits", GOOD, "--machine", "dgx-h100:1x2", "--strategy", "pipeline")
    assert asked.code == 0 and "no batch" in asked.out and "at most pp=1" in asked.out


def test_a_plan_that_was_edited_into_an_illegal_one_is_named(plan: Path, run: Run) -> None:
    plan.write_text(plan.read_text().replace("{d0:S(0)}", "", 1))
    for command in (["explain"], ["verify"], ["run"]):
        message = run(*command, str(plan), *([] if command == ["explain"] else [GOOD])).refused()
        assert "is not legal" in message and message.rstrip().endswith(f"in {plan}")


@pytest.mark.parametrize("there", ["a folder", "a graph", "bytes", "nothing"])
def test_what_is_no_plan(plan: Path, run: Run, folder: Path, there: str) -> None:
    (folder / "bytes.json").write_bytes(bytes(range(256)))
    assert run("inspect", GOOD, "-o", "graph.json").code == 0
    name = {"a folder": ".", "a graph": "graph.json", "bytes": "bytes.json", "nothing": "none.json"}[there]
    assert name in run("run", name, GOOD).refused()


def test_control_flow_on_values_is_told_with_its_line(plan: Path, run: Run) -> None:
    message = run("plan", "mine.py:branching", "--machine", "local:2", "--strategy", "fsdp").refused()
    assert "mine.py" in message and "x.sum() > 0" in message


def test_an_empty_batch_is_refused_on_one_device_too(plan: Path, run: Run) -> None:
    message = run("plan", "mine.py:no_samples", "--machine", "local:1", "--strategy", "single").refused()
    assert "0 samples" in message


def test_what_was_verified_of_integers_is_said(plan: Path, run: Run) -> None:
    run("plan", "mine.py:classes", "--machine", "local:2", "--strategy", "fsdp", "-o", "classes.json")
    shown = run("verify", "classes.json", "mine.py:classes", "--steps", "2")
    assert shown.code == 0 and "plan trains" not in shown.out and "has no loss: compared was" in shown.out
    assert "verified: the plan computes exactly like one device" in shown.out


def test_a_loss_without_a_gradient_is_not_said_to_train(plan: Path, run: Run) -> None:
    asked = run("plan", "mine.py:counting", "--machine", "local:2", "--strategy", "fsdp", "-o", "counting.json")
    assert asked.code == 0 and "next" not in asked.out
    assert "No parameter reaches its loss with a gradient" in run("run", "counting.json", "mine.py:counting").refused()
    shown = run("verify", "counting.json", "mine.py:counting", "--steps", "2")
    assert shown.code == 0 and "plan trains" not in shown.out


def test_what_has_nothing_to_train_is_not_said_to_train(plan: Path, run: Run) -> None:
    run("plan", "mine.py:frozen", "--machine", "local:2", "--strategy", "data-parallel", "-o", "frozen.json")
    shown = run("verify", "frozen.json", "mine.py:frozen", "--steps", "2")
    assert shown.code == 0 and "no weights to train" in shown.out and "plan trains" not in shown.out


def test_a_parameter_that_nobody_uses_stays_as_it_is(plan: Path, run: Run) -> None:
    run("plan", "mine.py:spare", "--machine", "local:2", "--strategy", "fsdp", "-o", "spare.json")
    assert run("verify", "spare.json", "mine.py:spare", "--steps", "2").code == 0
    shown = run("run", "spare.json", "mine.py:spare", "--steps", "2", "-o", "spare.pt")
    assert shown.code == 0 and torch.equal(torch.load("spare.pt")["spare"], torch.full((4,), 7.0))


# What happens to a training.


@pytest.fixture
def single(plan: Path, run: Run) -> str:
    assert run("plan", GOOD, "--machine", "local:1", "--strategy", "single", "-o", "single.json").code == 0
    return "single.json"


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As on a disk that has so much room left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_plan_that_was_there(plan: Path, run: Run) -> None:
    before = plan.read_bytes()
    with largest_file(len(before) // 2):
        message = run("plan", GOOD, "--machine", "local:2", "--strategy", "data-parallel", "-o", str(plan)).refused()
    assert "plan.json" in message and plan.read_bytes() == before


def test_a_full_disk_leaves_the_checkpoint_that_was_there(single: str, run: Run, folder: Path) -> None:
    command = ("run", single, GOOD, "--checkpoint", "kept", "--resume", "--json")
    assert len(json.loads(run(*command, "--steps", "2").out)["losses"]) == 2
    before = {path.name: path.read_bytes() for path in (folder / "kept").iterdir()}
    with largest_file(600):
        message = run(*command, "--steps", "4").refused()
    assert "kept" in message and {path.name: path.read_bytes() for path in (folder / "kept").iterdir()} == before
    assert len(json.loads(run(*command, "--steps", "4").out)["losses"]) == 2
    assert sorted(path.name for path in folder.iterdir() if "kept" in path.name) == ["kept"], "nothing is left over"


@pytest.mark.parametrize("width", [400, 4000], ids=["closing", "writing"])
@pytest.mark.parametrize("target", ["w.safetensors", "folder", "w.pt"])
def test_a_full_disk_leaves_the_weights_that_were_there(
    plan: Path, run: Run, folder: Path, target: str, width: int
) -> None:
    command, wide = ("run", "wide.json", GOOD, "--steps", "1", "--json", "-o", target), ("--size", f"width={width}")
    run("plan", GOOD, "--machine", "local:1", "--strategy", "single", *wide, "-o", "wide.json")
    assert run(*command, *wide).code == 0
    kept = folder / "folder" / "model.safetensors" if target == "folder" else folder / target
    before, there = kept.read_bytes(), {*folder.rglob("*")}
    with largest_file(600):
        message = run(*command, *wide).refused()
    assert "Weights were to be saved" in message and "as it was" in message
    assert kept.read_bytes() == before and {*folder.rglob("*")} == there, "nothing is left over"


def test_a_log_on_a_full_disk(single: str, run: Run, folder: Path) -> None:
    with largest_file(600):
        message = run("run", single, GOOD, "--log", "log.jsonl", "--json").refused()
    assert "The log log.jsonl could not be written: File too large" in message
    (folder / "full").symlink_to("/dev/full")
    assert "not a plain file" in run("run", single, GOOD, "--log", "full").refused()


@pytest.mark.parametrize("damage", ["a bit", "the index", "a file that is gone", "another model", "another optimizer"])
def test_a_checkpoint_that_cannot_be_gone_on_from(single: str, run: Run, folder: Path, damage: str) -> None:
    command = ["run", single, GOOD, "--checkpoint", "kept", "--resume", "--json"]
    assert run(*command, "--steps", "1").code == 0
    (data,) = (folder / "kept").glob("*.distcp")
    content = bytearray(data.read_bytes())
    match damage:
        case "a bit":
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        case "the index":
            (folder / "kept" / "conjoin.json").write_text('{"version": 1')
        case "a file that is gone":
            data.unlink()
        case "another model":
            run("plan", GOOD, "--machine", "local:1", "--strategy", "single", "--size", "width=8", "-o", "wide.json")
            command = ["run", "wide.json", GOOD, "--size", "width=8", *command[3:]]
        case "another optimizer":
            command += ["--optimizer", "sgd-momentum"]
    before = {path.name: path.read_bytes() for path in (folder / "kept").iterdir()}
    assert "kept" in run(*command, "--steps", "2").refused()
    assert {path.name: path.read_bytes() for path in (folder / "kept").iterdir()} == before


def test_a_rank_that_is_killed_is_named_and_training_goes_on(
    plan: Path, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_GRACE_SECONDS", 1.0)  # the other one waits for it
    command = ("run", str(plan), GOOD, "--steps", "4", "--checkpoint", "kept", "--save-every", "1", "--resume")
    killed = run(*command, "--data", "mine.py:Deadly", "--json").refused()
    assert "Rank 1" in killed and "Start again from the last checkpoint" in killed
    rest = run(*command, "--data", "mine.py:Samples", "--json")
    assert rest.code == 0 and len(json.loads(rest.out)["losses"]) == 2


def test_a_second_training_into_a_folder_is_refused_while_the_first_one_runs(
    single: str, run: Run, folder: Path
) -> None:
    command = ["run", single, GOOD, "--checkpoint", "kept", "--resume", "--json", "--steps", "1"]
    first = FolderHold(str(folder / "kept"))
    assert first.take() is None and FolderHold(str(folder / "kept")).take()
    assert "Another one that is running" in run(*command).refused()
    first.let_go()
    assert run(*command).code == 0
    assert sorted(path.name for path in folder.iterdir() if "kept" in path.name) == ["kept"], "nothing is left over"


def test_a_place_that_takes_no_files_is_told_before_the_first_step(single: str, run: Run) -> None:
    refused = run("run", single, GOOD, "--steps", "1", "--checkpoint", "k" * 252)
    assert "No file can be made beside it" in refused.refused() and "step" not in refused.out


def test_a_folder_that_is_none_or_empty(single: str, run: Run, folder: Path) -> None:
    command = ("run", single, GOOD, "--json", "--steps", "1", "--checkpoint")
    (folder / "file").write_text("mine")
    (folder / "full").mkdir()
    (folder / "full" / "photo.jpg").write_text("mine")
    for name, option in itertools.product(("file", "full"), ((), ("--resume",))):
        assert "is not a checkpoint, or holds other files" in run(*command, name, *option).refused()
    assert (folder / "file").read_text() == (folder / "full" / "photo.jpg").read_text() == "mine"
    for option in ((), ("--resume",)):
        (folder / f"empty{len(option)}").mkdir()
        assert run(*command, f"empty{len(option)}", *option).code == 0
        assert (folder / f"empty{len(option)}" / "conjoin.json").exists()


def test_a_folder_that_may_not_be_written_to(single: str, run: Run) -> None:
    for option in (["--checkpoint", "/proc/kept"], ["-o", "/proc/weights"], ["--log", "/proc/log"]):
        assert "/proc" in run("run", single, GOOD, "--json", *option).refused()


def test_a_loss_that_is_no_number_ends_a_training_at_once(single: str, run: Run, folder: Path) -> None:
    command = ("run", single, GOOD, "--steps", "4", "--json", "--checkpoint", "kept", "--save-every", "1", "--resume")
    message = run(*command, "--data", "mine.py:Holed").refused()
    assert "The loss of step 3 is nan" in message and "kept has what was there after step 2" in message
    rest = json.loads(run(*command, "--data", "mine.py:Samples").out)["losses"]
    assert len(rest) == 2 and all(loss == loss for loss in rest)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("Torn", "do not go together"),
        ("Nothing", "do not go together"),
        ("Triples", "list of 3 Tensor"),
        ("Negative", "length of mine.py:Negative"),
        ("Endless", "1,000,000,000,000,000 samples"),
    ],
)
def test_data_that_are_none(single: str, run: Run, data: str, why: str) -> None:
    assert why in run("run", single, GOOD, "--json", "--data", f"mine.py:{data}").refused()


@pytest.mark.parametrize(("name", "why"), [("odd.bin", "not a multiple of the data-type size. D"), ("no.txt", "empty")])
def test_tokens_that_are_cut_short_or_none(plan: Path, run: Run, folder: Path, name: str, why: str) -> None:
    run("plan", "mine.py:rows", "--machine", "local:1", "--strategy", "single", "-o", "rows.json")
    (folder / name).write_bytes(b"abc" if name == "odd.bin" else b"")
    assert why in run("run", "rows.json", "mine.py:rows", "--json", "--data", name).refused()


@pytest.mark.parametrize("damage", ["cut", "gone", "elsewhere", "no header"])
def test_pretrained_weights_that_cannot_be_read(single: str, run: Run, folder: Path, damage: str) -> None:
    (weights := folder / "given").mkdir()
    data = save({"weight": torch.ones(3, 4), "bias": torch.ones(3)})
    shard = "../model.safetensors" if damage == "elsewhere" else "model.safetensors"
    if damage != "gone":
        content = {"cut": data[:-8], "no header": b"\xff" * 8 + data[8:]}.get(damage, data)
        (weights / shard).write_bytes(content)
    told = {"weight_map": {"weight": shard, "bias": shard}}
    (weights / "model.safetensors.index.json").write_text(json.dumps(told))
    asked = run("run", single, GOOD, "--steps", "1", "--weights", "given", "-o", "trained.pt")
    assert "cannot be read" in asked.refused() and not (folder / "trained.pt").exists()


def test_an_evaluation_that_cannot_be_costs_no_training(single: str, run: Run, folder: Path) -> None:
    command = ("run", single, GOOD, "--json", "--steps", "2", "--checkpoint", "kept", "-o", "weights.pt", "--eval-data")
    assert "of shape (4, 5)" in run(*command, "mine.py:Other").refused()
    assert not (folder / "kept").exists(), "told before the first step"
    assert "sample 5 is broken" in run(*command, "mine.py:Broken").refused()
    assert (folder / "kept" / "conjoin.json").exists() and (folder / "weights.pt").exists()


def test_weights_that_are_no_numbers_are_not_kept(plan: Path, run: Run, folder: Path) -> None:
    run("plan", "mine.py:steep", "--machine", "local:1", "--strategy", "single", "-o", "steep.json")
    command = ("run", "steep.json", "mine.py:steep", "--steps", "1", "--json")
    for option in (["--checkpoint", "kept"], ["-o", "weights.pt"]):
        assert "weights after step 1 are not all numbers" in run(*command, *option).refused()
        assert not (folder / option[1]).exists()
    assert "norm of the gradients of step 1 is nan" in run(*command, "--clip", "1.0").refused()


def test_another_training_than_the_one_that_was_kept(plan: Path, run: Run, folder: Path) -> None:
    run("plan", "mine.py:rows", "--machine", "local:1", "--strategy", "single", "-o", "rows.json")
    (folder / "book.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    command = ("run", "rows.json", "mine.py:rows", "--data", "book.txt", "--json", "--checkpoint", "kept", "--resume")
    assert run(*command, "--steps", "3").code == 0
    again = run(*command, "--steps", "3")
    assert again.code == 0 and json.loads(again.out)["losses"] == [], "a job that was done is done"
    assert "has done 3 steps already, and 2 were asked for" in run(*command, "--steps", "2").refused()
    assert "began with --seed 0, and 1 was" in run(*command, "--steps", "4", "--seed", "1").refused()
    (folder / "book.txt").write_text("abcdefghijklmnopqrstuvwxyZ")
    assert "The tokens in book.txt are not those" in run(*command, "--steps", "4").refused()
    (folder / "book.txt").write_text("abcdefghijklmn")
    assert "began with 6 samples, and book.txt has 3" in run(*command, "--steps", "4").refused()


# SIGTERM.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_is_told_to_end_keeps_what_it_did(
    plan: Path, single: str, run: Run, folder: Path, ranks: int
) -> None:
    command = ("run", single if ranks == 1 else str(plan), GOOD, "--steps", "4", "--json", "--data")
    before, whole = signal.getsignal(signal.SIGTERM), json.loads(run(*command, "mine.py:Samples").out)["losses"]
    keeping = ("--checkpoint", "kept", "--resume", "--log", "log.jsonl")
    ended = run(*command, "mine.py:Ending", *keeping)
    done = json.loads(ended.out)["losses"]
    said = f"stopped after step {len(done)} of 4, kept in kept; the same command goes on\n"
    assert (ended.code, ended.err) == (143, said) and 1 <= len(done) < 4
    kinds = [json.loads(line)["kind"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert kinds[-2:] == ["checkpoint", "stopped"] and signal.getsignal(signal.SIGTERM) == before
    rest = run(*command, "mine.py:Samples", *keeping)
    assert rest.code == 0 and done + json.loads(rest.out)["losses"] == pytest.approx(whole, rel=1e-6)


def test_a_training_that_keeps_nothing_says_so(single: str, run: Run) -> None:
    ended = run("run", single, GOOD, "--steps", "4", "--data", "mine.py:Ending", "--json")
    assert (ended.code, ended.err) == (
        143, "stopped after step 1 of 4; nothing is kept, for want of --checkpoint FOLDER\n"
    )  # fmt: skip


def test_a_second_request_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_made and not sent
        monkeypatch.setattr(stop_request, "_SAME_SECONDS", -1.0)
        signal.raise_signal(signal.SIGTERM)
        assert sent == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# Ctrl-C.


@pytest.mark.parametrize("model", ["interrupting", "interrupted"])
@pytest.mark.parametrize("command", ["plan", "verify", "run"])
def test_ctrl_c_while_a_model_is_made_or_called(single: str, run: Run, command: str, model: str) -> None:
    before, named = Path(single).read_bytes(), [f"mine.py:{model}"]
    words = [*named, "--machine", "local:1", "--strategy", "single", "-o"] if command == "plan" else []
    stopped = run(command, *words, single, *([] if words else named))
    assert (stopped.code, stopped.out, stopped.err) == (130, "", "stopped\n")
    assert Path(single).read_bytes() == before


def test_ctrl_c_in_the_middle_of_a_training_keeps_the_checkpoint(single: str, run: Run, folder: Path) -> None:
    command = ("run", single, GOOD, "--checkpoint", "kept", "--resume", "--json", "--data")
    assert run(*command, "mine.py:Samples", "--steps", "2").code == 0
    assert run(*command, "mine.py:Stopping", "--steps", "4").code == 130
    assert len(json.loads(run(*command, "mine.py:Samples", "--steps", "4").out)["losses"]) == 2


@pytest.mark.parametrize(
    "moment",
    [
        "signal.raise_signal(signal.SIGINT)",
        "exec('signal.raise_signal(signal.SIGINT)')",  # after which Python would end by the signal
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise AttributeError('lost')",
    ],
)
def test_ctrl_c_while_the_command_is_loaded(folder: Path, moment: str) -> None:
    (folder / "typer.py").write_text(f"import signal\n\n{moment}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
    begin = (  # a shell's background jobs ignore it
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)",
        "runpy.run_module('conjoin', run_name='__main__')",
    )
    words = [sys.executable, "-c", "; ".join(begin)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
