"""Machine files: what is written is read back, what is wrong is told, a half-written file is never seen."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import UsageError
from conjoin.machine import Machine
from tests.ir.wording import assert_three_sentences

PROFILE = settings.get_profile("machine")
GOLDEN = """\
format = "conjoin.machine"
version = 1
name = "office"
num_nodes = 2
devices_per_node = 6
device = "cuda"
description = "Two boxes \\"A\\" and \\\\B,\\nunder the desk – 10 Gb/s."
"""
MACHINE = Machine("office", 2, 6, "cuda", 'Two boxes "A" and \\B,\nunder the desk – 10 Gb/s.')


def test_golden_text() -> None:
    assert MACHINE.to_toml() == GOLDEN
    assert Machine.from_toml(GOLDEN) == MACHINE


PRINTABLE = st.text(max_size=50).filter(str.isprintable)


@given(PRINTABLE.filter(lambda name: bool(name.strip())), st.lists(PRINTABLE, max_size=5).map("\n".join))
@settings(PROFILE)
def test_any_machine_round_trips(name: str, description: str) -> None:
    machine = Machine(name, 3, 4, "cpu", description)
    assert Machine.from_toml(machine.to_toml()) == machine


def test_a_file_round_trips(tmp_path: Path) -> None:
    for path in (tmp_path / "a.toml", str(tmp_path / "b.toml")):
        MACHINE.save(path)
        assert Machine.load(path) == MACHINE
    assert (tmp_path / "a.toml").read_bytes() == GOLDEN.encode()


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "hand.toml"
    file.write_bytes(GOLDEN.replace("num_nodes = 2", "# nodes\r\nnum_nodes = 0x2").encode())
    assert Machine.load(file) == MACHINE


BAD: list[tuple[str, str, list[str]]] = [
    ("not TOML", "num_nodes: 4", ["not TOML", "line 1, column 10", "Correct the text there"]),
    ("cut", GOLDEN[:-3], ["not TOML", "Unterminated string"]),
    ("double", GOLDEN + 'name = "b"\n', ["not TOML", "line 8"]),
    ("nested", "a = " + "[" * 100_000, ["not TOML", "recursion"]),
    ("digits", "a = " + "9" * 5000, ["not TOML", "4300 digits"]),
    ("control", 'a = "\x01"', ["not TOML", "line 1"]),
    ("empty", "", ["format is missing", 'Write format = "conjoin.machine" and version = 2']),
    ("graph", 'format = "conjoin.graph"', ["format is 'conjoin.graph'", "right file"]),
    ("format", "format = []", ["format is of type list"]),
    ("no version", 'format = "conjoin.machine"', ["version is missing", "reads versions 1 and 2", "Write version = 2"]),
    ("newer", GOLDEN.replace("version = 1", "version = 3"), ["version is 3", "the release that wrote it"]),
    ("truth", GOLDEN.replace("version = 1", "version = true"), ["version is true"]),
    ("float", GOLDEN.replace("version = 1", "version = 1.0"), ["version is of type float"]),
    ("huge", GOLDEN.replace("version = 1", f"version = 0x{'f' * 9999}"), ["version is a number of more than 15"]),
    ("typo", GOLDEN.replace("num_nodes", "num_node"), ["unknown key 'num_node'", "Did you mean num_nodes?"]),
    ("case", GOLDEN.replace("devices_per", "Devices_per"), ["Did you mean devices_per_node?"]),
    ("far", GOLDEN + "zzz = 1", ["unknown key 'zzz'", "Use one of name, num_nodes, devices_per_node, device, desc"]),
    ("table", GOLDEN + "[links]\nbytes_per_second = 1e9", ["unknown key 'links'"]),
    ("long key", GOLDEN + "k" * 500_000 + " = 1", ["(500,000 characters)"]),
    ("deep", GOLDEN + "a." * 900 + "a = 1", ["unknown key 'a'"]),
    ("missing", GOLDEN.replace("num_nodes = 2\n", ""), ["lacks num_nodes", "num_nodes = 4"]),
    ("all", "\n".join(GOLDEN.splitlines()[:2]), ["lacks name, num_nodes, devices_per_node, device", '"my-cluster"']),
    ("zero", GOLDEN.replace("num_nodes = 2", "num_nodes = 0"), ["num_nodes is 0", "whole number"]),
    ("bool", GOLDEN.replace("num_nodes = 2", "num_nodes = true"), ["num_nodes is true"]),
    ("date", GOLDEN.replace("num_nodes = 2", "num_nodes = 2020-01-01"), ["num_nodes is of type date"]),
    ("product", GOLDEN.replace("= 2", "= 1_000_000"), ["6,000,000 devices, the limit is 1,048,576"]),
    ("device", GOLDEN.replace('"cuda"', '"cdua"'), ["device is 'cdua'", "Did you mean cuda?"]),
    ("name", GOLDEN.replace('"office"', '"of\\u0000fice"'), ["name is 'of\\x00fice'"]),
    ("dots", GOLDEN + "a." * 20_000 + "a = 1", ["20,0", "dots, the limit is 1,000"]),
    ("lines", GOLDEN + "#\n" * 5000, ["5,007 lines, the limit is 5,000"]),
]


@pytest.mark.parametrize(("text", "pieces"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_file_is_told(tmp_path: Path, text: str, pieces: list[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    started = time.process_time()
    with pytest.raises(UsageError) as caught:
        Machine.load(file)
    message = str(caught.value)
    assert time.process_time() - started < 5
    assert_three_sentences(message)
    assert [piece for piece in pieces if piece not in message] == []
    assert message.endswith(f"\n  in {str(file)!r}") and len(message) < 1000


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "bytes.toml"
    file.write_bytes(b"name = \xff\xfe")
    with pytest.raises(UsageError, match=r"The file is not text: byte 7 is not UTF-8\. .*\. Check the path\."):
        Machine.load(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large.toml"
    file.touch()
    os.truncate(file, 2**40)
    with pytest.raises(UsageError, match=r"holds 1,099,511,627,776 bytes, the limit is 1,048,576"):
        Machine.load(file)


def test_an_endless_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match=r"could not be read: it is not a file\. Nothing was loaded\. Check"):
            Machine.load(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("none/a.toml", "No such file or directory"), ("folder", "it is a directory"), ("a\0b", "embedded null byte")],
)
def test_where_nothing_can_be_written(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        MACHINE.save(tmp_path / path)
    assert_three_sentences(caught.value)
    assert f"could not be written to {str(tmp_path / path)!r}: {reason}. Nothing was changed." in str(caught.value)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_stops_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(*_: object) -> None:
        raise error

    file = tmp_path / "machine.toml"
    MACHINE.save(file)
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        Machine("other", 1, 1, "cpu").save(file)
    assert os.listdir(tmp_path) == ["machine.toml"] and Machine.load(file) == MACHINE


def test_a_half_written_file_is_never_seen(tmp_path: Path) -> None:
    file, other = tmp_path / "machine.toml", Machine("other", 1, 1, "cpu", "long " * 200)
    MACHINE.save(file)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            other.save(file)
            MACHINE.save(file)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {Machine.load(file) for _ in range(500)}
    finally:
        stop.set()
        writer.join()
    assert seen <= {MACHINE, other}
    assert os.listdir(tmp_path) == ["machine.toml"]
