"""The commands: what they print, their flags, their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import conjoin
from conjoin.cli import app
from conjoin.search import DEFAULT_BUDGET, search_names
from conjoin.search.strategies import STRATEGIES
from tests.cli.conftest import Ran
from tests.cli.processes import Forked
from tests.waiting import HUNG_SECONDS

Run = Callable[..., Ran]


FLAGS = {
    "inspect": ["--batch", "--eval", "--import", "--json", "--length", "--output", "--size", "--train", "-o"],
    "plan": [
        "--at-most",
        "--batch",
        "--budget",
        "--cpu-budget",
        "--fix",
        "--forbid-axis",
        "--fresh",
        "--import",
        "--json",
        "--length",
        "--machine",
        "--memory",
        "--objective",
        "--optimizer",
        "--output",
        "--precision",
        "--rules",
        "--search",
        "--size",
        "--stages",
        "--start",
        "--strategy",
        "-o",
    ],
    "compare": [
        "--batch",
        "--budget",
        "--import",
        "--json",
        "--length",
        "--machine",
        "--memory",
        "--optimizer",
        "--precision",
        "--search",
        "--size",
        "--strategy",
    ],
    "fits": [
        "--batch",
        "--import",
        "--json",
        "--length",
        "--machine",
        "--optimizer",
        "--precision",
        "--size",
        "--strategy",
    ],
    "explain": ["--import", "--json", "--machine", "--optimizer", "--why"],
    "diff": ["--import", "--json"],
    "simulate": ["--import", "--json", "--machine", "--optimizer", "--trace"],
    "run": [
        "--accumulate",
        "--batch",
        "--checkpoint",
        "--clip",
        "--data",
        "--eval-data",
        "--eval-every",
        "--import",
        "--json",
        "--length",
        "--log",
        "--lr",
        "--machine",
        "--optimizer",
        "--output",
        "--resume",
        "--save-every",
        "--schedule",
        "--seed",
        "--size",
        "--steps",
        "--trace",
        "--weight-decay",
        "--weights",
        "-o",
    ],
    "verify": ["--batch", "--import", "--json", "--length", "--ranks", "--size", "--steps"],
    "calibrate": ["--import", "--json", "--machine", "--optimizer", "--output", "--plan", "--seconds", "-o"],
    "doctor": ["--json"],
    "machine": [],  # its commands are in test_machines.py
    "rules": [],  # and in test_rules.py
}
"""Every command, in the order of the help, with its flags: adding one is a decision, not a habit."""


def flags() -> dict[str, list[str]]:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found: dict[str, list[str]] = {}
    for name, command in commands.items():
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        found[name] = sorted(flag for option in options for flag in (*option.opts, *option.secondary_opts))
    return found


def test_the_flags_are_frozen() -> None:
    assert flags() == FLAGS


def test_help_lists_the_commands(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0 and shown.err == ""
    assert re.findall(r"^  ([a-z]+) ", shown.out, re.MULTILINE) == list(FLAGS)
    assert "file.py:function" in run("inspect", "--help").out


def test_help_names_the_searches_and_the_time_they_take(run: Run) -> None:
    shown = " ".join(run("plan", "--help").out.split())
    assert all(name in shown for name in (*search_names(), *STRATEGIES))
    assert f"Without it {DEFAULT_BUDGET:.0f}s" in shown


def test_version(run: Run) -> None:
    assert run("--version") == Ran(0, f"conjoin {conjoin.__version__}\n", "")


def test_no_command_shows_help(run: Run) -> None:
    shown = run()
    assert shown.code == 2 and "inspect" in shown.out + shown.err


def test_inspect_shows_totals_and_operators(run: Run) -> None:
    shown = run("inspect", "lenet:tiny")
    assert shown.code == 0 and shown.err == ""
    lines = [line.rstrip() for line in shown.out.splitlines()]
    assert lines[0] == "ConvNet" and "  mode         train" in lines
    assert "  operators    13 calls of 6 kinds, 0 opaque" in lines
    assert any(line.split()[:2] == ["conv2d", "2"] for line in lines)


def test_inspect_prints_json(run: Run) -> None:
    shown = run("inspect", "lenet:tiny", "--json")
    found = json.loads(shown.out)
    assert shown.code == 0 and (found["model"], found["name"], found["num_nodes"]) == ("lenet:tiny", "ConvNet", 13)
    assert found["opaque"] == [] and found["operators"][0]["op"] == "conv2d"


def test_inspect_takes_batch_and_mode(run: Run) -> None:
    small, large, evaluated = (
        json.loads(run("inspect", "lenet:tiny", "--json", *extra).out)
        for extra in (["--batch", "1"], ["--batch", "6"], ["--batch", "6", "--eval"])
    )
    assert large["forward_flops"] == pytest.approx(6 * small["forward_flops"], rel=0.01)
    assert (small["training"], large["training"], evaluated["training"]) == (True, True, False)
    assert json.loads(run("inspect", "lenet:tiny", "--json", "--train").out)["training"] is True


def test_a_saved_graph_is_inspected_like_its_model(run: Run, folder: Path) -> None:
    first = run("inspect", "lenet:tiny", "--eval", "-o", "graph.json", "--json")
    assert first.code == 0 and sorted(path.name for path in folder.iterdir()) == ["graph.json", "my_models.py"]
    again = run("inspect", "graph.json", "--json")
    assert {**json.loads(again.out), "model": "lenet:tiny"} == json.loads(first.out)
    assert run("inspect", "graph.json", "--eval", "--output", "copy.json").code == 0
    assert conjoin.load_graph("copy.json") == conjoin.load_graph("graph.json")


@pytest.mark.parametrize("place", ["my_models.py", "my_models", "./my_models.py"])
def test_a_model_of_ones_own(run: Run, place: str) -> None:
    found = json.loads(run("inspect", f"{place}:small", "--json", "--batch", "5").out)
    assert (found["num_parameters"], found["input_bytes"]) == (15, 80)
    assert json.loads(run("inspect", f"{place}:with_loss", "--json").out)["operators"][0]["op"] == "linear"


def test_a_file_may_import_what_lies_beside_it_and_be_called_like_a_module(run: Run, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("SIZE = 7\n")
    (folder / "sub" / "json.py").write_text(
        "import torch\nfrom beside import SIZE\n\n"
        "def make():\n    return torch.nn.Linear(SIZE, 1), torch.zeros(1, SIZE)\n"
    )
    before = sys.modules["json"]
    assert json.loads(run("inspect", "sub/json.py:make", "--json").out)["num_parameters"] == 8
    assert sys.modules["json"] is before


def test_names_are_not_taken_for_markup(run: Run, folder: Path) -> None:
    (folder / "odd.py").write_text(
        "import torch\nOdd = type('[bold]Odd[/nope]', (torch.nn.Linear,), {})\n\n"
        "def make():\n    return Odd(2, 1), torch.zeros(1, 2)\n"
    )
    assert run("inspect", "odd.py:make").out.startswith("[bold]Odd[/nope]\n")


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CONJOIN_CACHE", str(folder / "cache"))
    shown = run("doctor")
    assert shown.code == 0 and shown.err == ""
    assert f"torch        {torch.__version__}\n" in shown.out
    assert f"{folder / 'cache'} (not there yet)\n" in shown.out
    facts = json.loads(run("doctor", "--json").out)
    assert facts["conjoin"] == conjoin.__version__ and facts["cache"] == str(folder / "cache")
    assert facts["cache_exists"] is False and not (folder / "cache").exists()
    assert facts["devices"][0]["kind"] == "cpu" and facts["devices"][0]["bytes"] > 2**20


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("inspect", "lenet:tiny", "--batch", "0"), "--batch"),
        (("inspect", "lenet:tiny", "--batch", "-1"), "--batch"),
        (("inspect", "lenet:tiny", "--batch", "many"), "--batch"),
        (("inspect", "lenet:tiny", "--colour"), "--colour"),
        (("inspect",), "MODEL"),
        (("inspect", "lenet:tiny", "-o"), "-o"),
        (("inspect", "lenet:tiny", "mlp:tiny"), "mlp:tiny"),
        (("inspekt", "lenet:tiny"), "inspekt"),
        (("doctor", "--colour"), "--colour"),
    ],
)
def test_a_command_that_is_not_understood(run: Run, folder: Path, arguments: tuple[str, ...], told: str) -> None:
    assert told in run(*arguments).refused()
    assert [path.name for path in folder.iterdir()] == ["my_models.py"]


def test_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("conjoin.cli.models.load_model_graph", interrupt)
    stopped = run("inspect", "lenet:tiny")
    assert stopped == Ran(130, "", "stopped\n")


def test_ctrl_c_in_a_process_of_its_own(fork: Callable[..., Forked], folder: Path) -> None:
    slow = "import time\n\ndef make():\n    print('started', flush=True)\n    time.sleep(60)\n"
    (folder / "slow.py").write_text(slow)
    process = fork("inspect", "slow.py:make", "-o", "graph.json")
    assert process.stderr.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HUNG_SECONDS)
    assert (process.returncode, out, err) == (130, "", "stopped\n")
    assert not (folder / "graph.json").exists()


@pytest.mark.parametrize("buffered", [True, False])
def test_an_answer_that_cannot_be_written(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, buffered: bool
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    with open("/dev/full", "w") as full:
        process = start("--version", out=full.fileno())
        _, err = process.communicate(timeout=HUNG_SECONDS)
    assert "could not be written: No space left on device." in Ran(process.returncode, "", err).refused()


def test_an_answer_in_letters_that_the_locale_lacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding="iso8859-5"))
    assert run("machine", "list") == Ran(0, "", "")
    assert b" 1 node ? 1 laptop-cpu" in sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]


def test_an_answer_that_nobody_reads(start: Callable[..., subprocess.Popen[str]]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("--version", out=writing)
    os.close(writing)
    _, err = process.communicate(timeout=HUNG_SECONDS)
    assert (process.returncode, err) == (1, "")


def test_a_good_run_in_a_process_of_its_own(fork: Callable[..., Forked], folder: Path) -> None:
    process = fork("inspect", "my_models.py:small", "--json", "-o", "graph.json")
    out, err = process.communicate(timeout=HUNG_SECONDS)
    assert (process.returncode, err) == (0, "") and json.loads(out)["num_parameters"] == 15
    assert json.loads((folder / "graph.json").read_text())["format"] == "conjoin.graph"


def test_a_bad_run_in_a_process_of_its_own(fork: Callable[..., Forked], folder: Path) -> None:
    """Here nothing is captured: what torch logs by itself would be seen."""
    process = fork("inspect", "my_models.py:wrong_batch", "-o", "graph.json")
    out, err = process.communicate(timeout=HUNG_SECONDS)
    message = Ran(process.returncode, out, err).refused()
    assert f"{folder}/my_models.py:47: return self.fc(x).relu()" in message
    assert not (folder / "graph.json").exists()


def test_every_command_prints_json() -> None:
    def commands(group: Any) -> Iterator[Any]:
        for command in group.commands.values():
            if hasattr(command, "commands"):
                yield from commands(command)
            else:
                yield command

    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 15
    assert [c.name for c in found if not any("--json" in parameter.opts for parameter in c.params)] == []
