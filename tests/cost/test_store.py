"""The store: many writers, one killed; damaged, locked, foreign and unwritable files."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from conjoin.cost import Absence, Measurement, MeasurementStore
from conjoin.environment import costs_path
from conjoin.errors import UsageError
from tests.cli.processes import Forked
from tests.ir.wording import assert_three_sentences
from tests.waiting import HUNG_SECONDS

RELU = Measurement("relu f32[4]", 1e-6, 2e-6, 3e-6, 4e-6, 0.1)
LOST = Absence("mm f32[9,9] f32[9,9]", "OutOfMemoryError: 3 GiB")

WRITERS = """
import os, sys
from conjoin.cost import Measurement, MeasurementStore

def write(path, name, count):
    with MeasurementStore(path) as store:
        for i in range(count):
            store.add("device", "2.0", [Measurement(f"relu f32[{i}] {name} {half}", float(i), 0.0) for half in "ab"])
            if name == "victim":
                print(i, flush=True)

path, count = sys.argv[1], int(sys.argv[2])
children = {}
for name in ("one", "two", "victim"):
    child = os.fork()
    if child == 0:
        if name == "victim":
            print(os.getpid(), flush=True)
        write(path, name, count if name != "victim" else 100_000)
        os._exit(0)
    children[name] = child
codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
print(codes, file=sys.stderr)
"""
"""Three processes that write at once, forked by one that has imported everything."""


def test_what_is_added_is_found(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.sqlite"
    with MeasurementStore(path) as store:
        store.add("cpu", "2.1", [RELU, LOST])
        assert store.find("cpu", "2.1", RELU.key) == RELU
        assert store.find("cpu", "2.2", RELU.key) is None and store.find("gpu", "2.1", RELU.key) is None
    with MeasurementStore(path) as store:
        assert sorted(store.outcomes("cpu", "2.1"), key=lambda each: each.key) == [LOST, RELU]
        assert store.devices() == (("cpu", "2.1"),)


def test_the_latest_of_a_key_counts(tmp_path: Path) -> None:
    later = Measurement(RELU.key, 5e-6, 2e-6)
    with MeasurementStore(tmp_path / "costs.sqlite") as store:
        store.add("cpu", "2.1", [RELU])
        store.add("cpu", "2.1", [later])
        assert store.outcomes("cpu", "2.1") == [later] == store.outcomes("cpu")


def test_one_bad_outcome_and_none_is_kept(tmp_path: Path) -> None:
    with MeasurementStore(tmp_path / "costs.sqlite") as store:
        with pytest.raises(UsageError) as told:
            store.add("", "2.1", [RELU])
        assert_three_sentences(told.value)
        assert store.devices() == ()
        store.add("cpu", "2.1", [RELU])
        assert store.devices() == (("cpu", "2.1"),)


def test_several_writers_and_one_killed_in_the_midst(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    count = 40
    (tmp_path / "writers.py").write_text(WRITERS)
    writers = Forked(tmp_path, "writers", [str(path), str(count)])
    victim, told = int(writers.stdout.readline()), -1
    while told < 15:
        told = int(writers.stdout.readline())
    os.kill(victim, signal.SIGKILL)
    out, err = writers.communicate(timeout=HUNG_SECONDS)
    told = int(out.split()[-1]) if out else told
    assert err == f"{{'one': 0, 'two': 0, 'victim': {-signal.SIGKILL}}}\n"
    with MeasurementStore(path) as store:
        keys = {outcome.key for outcome in store.outcomes("device", "2.0")}
    for name in ("one", "two"):
        assert {f"relu f32[{i}] {name} {half}" for i in range(count) for half in "ab"} <= keys
    killed = sorted(key for key in keys if "victim" in key)
    assert len(killed) % 2 == 0, "a transaction was torn"
    assert {f"relu f32[{i}] victim {half}" for i in range(told + 1) for half in "ab"} <= set(killed)
    assert len(killed) <= 2 * (told + 2)
    assert not list(tmp_path.glob("*.corrupt-*"))


@pytest.mark.parametrize("damage", ["text", "cut", "scribbled"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.sqlite"
    with MeasurementStore(path) as store:
        store.add("cpu", "2.1", [Measurement(f"relu f32[{i}]", 1.0, 1.0) for i in range(2000)])
    content = path.read_bytes()
    broken = {
        "text": b"not a database at all " * 100,
        "cut": content[: len(content) // 2],
        "scribbled": content[:4096] + b"\xff" * (len(content) - 4096),
    }[damage]
    path.write_bytes(broken)
    with caplog.at_level(logging.WARNING, "conjoin"), MeasurementStore(path) as store:
        assert store.devices() == ()
        store.add("cpu", "2.1", [RELU])
    (aside,) = tmp_path.glob("costs.sqlite.corrupt-*")
    assert aside.read_bytes() == broken
    assert "set aside" in caplog.text
    with MeasurementStore(path) as store:
        assert store.outcomes("cpu", "2.1") == [RELU]


def test_a_locked_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with MeasurementStore(path) as other, MeasurementStore(path, patience_seconds=0.1) as store:
        other._connection.execute("begin immediate")
        with pytest.raises(UsageError, match=r"another process held it for more than 0\.1 seconds") as told:
            store.add("cpu", "2.1", [RELU])
        assert_three_sentences(told.value)
        other._connection.execute("rollback")
        store.add("cpu", "2.1", [RELU])


def test_a_file_that_is_locked_while_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with MeasurementStore(path) as other:
        other._connection.execute("begin exclusive")
        with pytest.raises(UsageError, match="another process held it") as told:
            MeasurementStore(path, patience_seconds=0.1)
        assert_three_sentences(told.value)
        other._connection.execute("rollback")
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_a_file_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with MeasurementStore(path) as store:
        store.add("cpu", "2.1", [RELU])
        store._connection.execute("pragma user_version = 99")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="version is 99") as told:
        MeasurementStore(path)
    assert_three_sentences(told.value)
    assert path.read_bytes() == before


def test_a_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("create table accounts (name text)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match="another program") as told:
        MeasurementStore(path)
    assert_three_sentences(told.value)
    assert path.read_bytes() == before and not list(tmp_path.glob("*.corrupt-*"))


def test_a_file_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.sqlite"
    with MeasurementStore(path) as store:
        store.add("cpu", "2.1", [RELU])
    connect = sqlite3.connect

    def read_only(database: Path, **options: object) -> sqlite3.Connection:
        return connect(f"file:{database}?mode=ro", uri=True, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(sqlite3, "connect", read_only)  # root may write whatever the mode of a file says
    with MeasurementStore(path) as store:
        assert store.outcomes("cpu", "2.1") == [RELU]
        with pytest.raises(UsageError, match="readonly") as told:
            store.add("cpu", "2.1", [LOST])
        assert_three_sentences(told.value)


def test_a_path_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "costs.sqlite", tmp_path):
        with pytest.raises(UsageError) as told:
            MeasurementStore(path)
        assert_three_sentences(told.value)


def test_a_malformed_row_is_told(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    with MeasurementStore(path) as store:
        store.add("cpu", "2.1", [RELU])
        store._connection.execute("update measurements set forward = -1.0")
        with pytest.raises(UsageError, match="malformed") as told:
            store.outcomes("cpu")
        assert_three_sentences(told.value)


def test_where_measurements_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CONJOIN_COSTS", raising=False)
    monkeypatch.setenv("CONJOIN_CACHE", str(tmp_path / "cache"))
    assert costs_path() == tmp_path / "cache" / "costs.sqlite"
    monkeypatch.delenv("CONJOIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert costs_path() == tmp_path / "xdg" / "conjoin" / "costs.sqlite"
    monkeypatch.setenv("CONJOIN_COSTS", str(tmp_path / "mine.sqlite"))
    assert costs_path() == tmp_path / "mine.sqlite"
