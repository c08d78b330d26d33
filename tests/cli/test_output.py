"""Where commands may write is looked at before they do anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conjoin.cli.output import check_directory, check_output, print_json
from conjoin.errors import UsageError
from tests.cli.conftest import Ran
from tests.ir.wording import assert_three_sentences


def test_json_has_no_word_for_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"gap": float("inf"), "losses": (1.0, float("nan")), "rows": [{"n": 2}], "name": "inf"})
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data == {"gap": None, "losses": [1.0, None], "rows": [{"n": 2}], "name": "inf"}


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there, old = tmp_path / "old.json", '{"traceEvents": []}'
    there.write_text(old)
    for path in (None, there, Path("new.json"), tmp_path / "new.json"):
        check_output(path, "trace")
    assert os.listdir(tmp_path) == ["old.json"] and there.read_text() == old


def test_a_file_that_may_not_be_written_itself_is_replaced(tmp_path: Path) -> None:
    there = tmp_path / "old.json"
    there.touch(mode=0o400)
    check_output(there, "trace")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (".", "it is a directory"),
        ("missing/x.json", "there is no directory"),
        ("file/x.json", "there is no directory"),
        ("x" * 400, "File name too long"),
        ("/dev/null", "it is not a plain file"),
        ("pipe", "it is not a plain file"),
        ("to_pipe", "it is not a plain file"),
        ("to_nowhere", "there is no directory"),
    ],
)
def test_why_a_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo("pipe")
    Path("to_pipe").symlink_to("pipe")
    Path("to_nowhere").symlink_to("missing/x.json")
    with pytest.raises(UsageError, match=reason) as told:
        check_output(Path(path), "plan")
    assert_three_sentences(told.value)
    assert str(told.value).startswith("The plan could not be written to ")


def test_a_directory_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Any, mode: int) -> bool:
        return not (mode & os.W_OK and Path(path) == tmp_path)

    monkeypatch.setattr(os, "access", forbidden)
    with pytest.raises(UsageError, match="may not be written to") as told:
        check_output(tmp_path / "x.json", "trace")
    assert_three_sentences(told.value)


@pytest.mark.parametrize("path", ["file", "file/state", "link", "x" * 400])
def test_a_directory_that_cannot_be_made(run: Callable[..., Ran], folder: Path, path: str) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    message = run("rules", "generate", "-o", "lib.toml", "--state", path).refused()
    assert f"The state of the enumeration could not be kept in {path}: " in message


def test_directories_that_can_be_made(tmp_path: Path) -> None:
    for path in (None, tmp_path, tmp_path / "a" / "b"):
        check_directory(path, "state")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "module", "work"),
    [
        (("run", "plan.json", "lenet:tiny", "--trace"), "cli.models", "read_plan"),
        (("simulate", "plan.json", "--machine", "dgx-h100", "--trace"), "cli.models", "read_plan"),
        (("plan", "lenet:tiny", "--machine", "local:2", "--strategy", "fsdp", "-o"), "cli.models", "load_model_graph"),
        (("calibrate", "--machine", "local:2", "-o"), "machine", "parse_machine"),
        (("inspect", "lenet:tiny", "-o"), "cli.models", "load_model_graph"),
    ],
)
def test_commands_look_before_they_work(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], module: str, work: str
) -> None:
    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr(f"conjoin.{module}.{work}", worked)
    assert "could not be written to missing/x.toml" in run(*arguments, "missing/x.toml").refused()
    with pytest.raises(AssertionError, match="it has begun"):
        run(*arguments, "x.toml")
