"""Profiles: written and read back, bounded, and refused in three sentences where they are damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from conjoin.cost import Absence, Fit, Measurement, Profile, load_profile, save_profile, shipped_profiles
from conjoin.cost import profile as profile_module
from conjoin.cost.medians import HostTime
from conjoin.errors import UsageError
from tests.ir.wording import assert_three_sentences

FIT = Fit(
    (("contraction", 0.7), ("contraction backward", 0.6)), 2e-6, 7e-6, 9e-6, 0.15,
    (("contraction", ((-20.0, 1.5), (-18.0, -0.25))),), (HostTime("linear", 2, 3e-5, 1e-4),),
)  # fmt: skip
OUTCOMES = (Measurement("relu f32[4]", 1.25e-6, 2e-6, 3e-6, 4e-6, 0.1), Absence("mm f32[9,9] f32[9,9]", "too large"))
PROFILE = Profile("H200", "2.11.0", "2026-11-15", "python benchmarks/operator_profile.py", FIT, OUTCOMES)
HEADER = {
    "format": "conjoin.profile", "version": 2, "device": "x", "torch": "2", "date": "d", "command": "c",
    "fit": {"efficiency": [], "overhead_seconds": 0, "host_forward": 0, "host_backward": 0, "error": 0, "curves": [],
            "host": []},
}  # fmt: skip


def test_a_profile_is_read_back_as_written(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "p.jsonl.gz")
    assert load_profile(tmp_path / "p.jsonl.gz") == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl.gz"]


def test_equal_profiles_are_equal_files(tmp_path: Path) -> None:
    for name in "ab":
        save_profile(PROFILE, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    return path


def test_the_smallest_profile(tmp_path: Path) -> None:
    assert load_profile(write(tmp_path / "p", HEADER, ["relu f32[4]", 1, 0, 0, 0, 0])).outcomes == (
        Measurement("relu f32[4]", 1.0, 0.0),
    )


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ([],),
        ({**HEADER, "version": 2.0},),
        ({**HEADER, "version": True},),
        ({**HEADER, "format": "other"},),
        ({**HEADER, "fit": {}},),
        ({**HEADER, "fit": {**HEADER["fit"], "efficiency": [["x", 0]]}},),  # type: ignore[dict-item]
        ({**HEADER, "fit": {**HEADER["fit"], "efficiency": [["x"]]}},),  # type: ignore[dict-item]
        *(
            ({**HEADER, "fit": {**HEADER["fit"], name: value}},)  # type: ignore[dict-item]
            for name, value in [
                ("curves", 3), ("curves", [["x", []]]), ("curves", [["x", [[1, 1], [0, 1]]]]), ("host", [["x"]]),
                ("curves", [["x", [[1, 1e6]]]]), ("curves", [["x", [[1]]]]), ("host", [["x", 1, 1]]),
                ("curves", [[3, [[1, 1]]]]), ("host", [["x", 1, "long", 0]]), ("curves", [["x", [[1, float("nan")]]]]),
                ("efficiency", [1, 2]), ("efficiency", [None]), ("efficiency", [["x", 10**400]]),
                ("efficiency", [[["x"], 1]]), ("curves", [["x", [1, 2]]]), ("curves", [["x", [[1, 2, 3]]]]),
                ("curves", [["x", [[1, 39.9]]]]), ("curves", [["x", [[1e9, 1]]]]), ("curves", [["x", [[10**400, 1]]]]),
                ("overhead_seconds", -1), ("overhead_seconds", 10**400), ("overhead_seconds", 60), ("error", -1),
                ("host_forward", -1e-6), ("host_backward", 1e300), ("host", [["x", 1, -1.0, 0]]),
                ("host", [["x", 1, 1e300, 0]]), ("host", [["x", True, 0, 0]]), ("host", [["x", -1, 0, 0]]),
            ]
        ),
        (HEADER, ["relu f32[4]", 1]),
        (HEADER, ["relu f32[4]", -1, 0, 0, 0, 0]),
        (HEADER, ["relu f32[4]", True, 0, 0, 0, 0]),
        (HEADER, ["relu f32[4]", 1e400, 0, 0, 0, 0]),
        (HEADER, ["x" * 5000, 1, 0, 0, 0, 0]),
        (HEADER, {"key": 1}),
        (HEADER, ["relu f32[4]", 10**400, 0, 0, 0, 0]),
        (HEADER, ["update adamw f32 x tensors y elements", 1, 0, 0, 0, 0]),
        (HEADER, ["update adamw q99 2 tensors 4 elements", 1, 0, 0, 0, 0]),
        (HEADER, ["update adamw f32 2 tensors -4 elements", 1, 0, 0, 0, 0]),
        (HEADER, ["copy zz bytes", 1, 0, 0, 0, 0]),
        (HEADER, [f"copy {10**400} bytes", 1, 0, 0, 0, 0]),
    ],
)
def test_a_malformed_profile_is_refused(tmp_path: Path, lines: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError) as told:
        load_profile(write(tmp_path / "p", *lines))
    assert_three_sentences(told.value)


@pytest.mark.parametrize("version", [1, 3])
def test_a_profile_of_another_version_is_refused_by_its_version(tmp_path: Path, version: int) -> None:
    with pytest.raises(UsageError, match=rf"of version {version}, and this release of conjoin reads version 2") as told:
        load_profile(write(tmp_path / "p", {**HEADER, "version": version}))
    assert_three_sentences(told.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"text", gzip.compress(b"x" * 100)[:20], gzip.compress(b"\xff\xfe")],
    ids=["empty", "text", "cut", "bytes"],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(UsageError) as told:
        load_profile(tmp_path / "p")
    assert_three_sentences(told.value)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError):
            load_profile(path)
    with pytest.raises(UsageError) as told:
        save_profile(PROFILE, tmp_path / "none" / "p")
    assert_three_sentences(told.value)


def test_sizes_are_bounded_before_and_after_decompression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "p", HEADER, *[["relu f32[4]", 1, 0, 0, 0, 0]] * 1000)
    load_profile(path)
    for name, limit in (("MAX_BYTES", 100), ("MAX_TEXT_BYTES", 1000), ("MAX_LINES", 100)):
        with monkeypatch.context() as patch, pytest.raises(UsageError):
            patch.setattr(profile_module, name, limit)
            load_profile(path)


def test_what_ships_can_be_read() -> None:
    for profile in shipped_profiles():
        assert profile.device and profile.command and profile.outcomes
