"""Putting a file in its place: what is no file stays, links are followed, and names may be as long as they can be."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISFIFO

import pytest

from conjoin.machine import write_aside


def test_a_file_is_put_where_links_lead(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(Path("real") / "plan.json")
    for content in (b"first", b"second"):
        write_aside(link, content)
        assert link.is_symlink() and (real / "plan.json").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["link", "real"] and os.listdir(real) == ["plan.json"]


def test_what_is_no_plain_file_stays(tmp_path: Path) -> None:
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    for path in (pipe, link, loop):
        with pytest.raises(OSError, match="it is not a plain file"):
            write_aside(path, b"")
    assert S_ISFIFO(pipe.stat().st_mode) and link.is_symlink() and loop.is_symlink()


def test_every_name_that_a_file_may_have_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write_aside(path, b"long")
    assert path.read_bytes() == b"long"
