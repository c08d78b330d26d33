"""A machine in one word: local processes, a preset, or a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conjoin.errors import UsageError
from conjoin.machine import Machine, find_machine_files, parse_machine, preset_names
from tests.ir.wording import assert_three_sentences

PROFILE = settings.get_profile("machine")


def test_local_processes() -> None:
    machine = parse_machine("local:4")
    assert (machine.name, machine.num_nodes, machine.devices_per_node, machine.device) == ("local", 1, 4, "cpu")


@pytest.mark.parametrize("name", preset_names())
def test_presets(name: str) -> None:
    assert parse_machine(name) == Machine.preset(name)


def test_a_preset_with_nodes() -> None:
    assert parse_machine("summit:4") == Machine.preset("summit", nodes=4)


@pytest.mark.parametrize("name", ["a.toml", "odd:name.toml"])
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = Machine("office", 3, 2, "cuda")
    machine.save(tmp_path / name)
    (tmp_path / "no_suffix").write_text(machine.to_toml())
    monkeypatch.chdir(tmp_path)
    assert machine == parse_machine(name) == parse_machine(str(tmp_path / name)) == parse_machine("./no_suffix")


def test_a_directory_of_machines(tmp_path: Path) -> None:
    office, summit = Machine("anything", 3, 2, "cuda"), Machine("my summit", 1, 6, "cuda")
    office.save(tmp_path / "office.toml")
    summit.save(tmp_path / "summit.toml")
    assert parse_machine("office", tmp_path) == office
    assert parse_machine("office:5", tmp_path) == Machine("anything", 5, 2, "cuda")
    assert parse_machine("summit", tmp_path) == summit != parse_machine("summit")
    assert parse_machine("laptop", tmp_path) == Machine.preset("laptop")
    assert list(find_machine_files(tmp_path)) == ["office", "summit"]
    assert parse_machine("laptop", tmp_path / "none") == Machine.preset("laptop")
    (tmp_path / "office.toml").write_text("name = ")
    with pytest.raises(UsageError, match=r"not TOML.*\n  in .*office.toml"):
        parse_machine("office", tmp_path)
    with pytest.raises(UsageError, match="no machine named 'ofice'"):
        parse_machine("ofice", tmp_path)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("local", ["local was named without a number", "Write local:4"]),
        ("local:", ["'local:'", "'' is not a number"]),
        ("local:four", ["'four' is not a number", "whole number"]),
        ("local:-1", ["'-1' is not a number"]),
        ("local:٤", ["is not a number"]),
        ("local:0", ["devices_per_node is 0"]),
        ("local:1048577", ["devices_per_node is 1048577", "1,048,576"]),
        ("summit:" + "9" * 10_000, ["is not a number", "at most nine digits"]),
        ("summit:4:4", ["'4:4' is not a number"]),
        ("", ["no machine named ''"]),
        ("sumit:4", ["Did you mean summit?"]),
        ("laptop:4", ["always has 1"]),
        ("missing.toml", ["could not be read: No such file or directory", "in 'missing.toml'"]),
        ("a\x00b.toml", ["could not be read: embedded null byte"]),
        ("x" * 5000 + ".toml", ["could not be read: File name too long"]),
    ],
)
def test_what_is_no_machine(text: str, pieces: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_machine(text)
    assert_three_sentences(caught.value)
    assert [piece for piece in pieces if piece not in str(caught.value)] == []


WORDS = st.sampled_from(["local", "summit", "laptop", "a100-2x16", ":", "4", "0", "-", "/", ".toml", "\x00", "\udc80"])


@given(st.text() | st.lists(WORDS | st.text(max_size=2), max_size=5).map("".join))
@example("/")
@example(".")
@example("~/.toml")
@settings(PROFILE, max_examples=100)
def test_any_text(text: str) -> None:
    try:
        machine = parse_machine(text)
    except UsageError as error:
        assert_three_sentences(error)
        return
    assert Machine.from_toml(machine.to_toml()) == machine
