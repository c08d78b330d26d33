"""Tests as pytest rewrites them, kept where each worker looks for them: written once, ahead of workers that would all
write the same at the same time."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def write_rewritten(folder: Path, config: pytest.Config) -> None:
    """What pytest keeps of each module of tests in a folder, in the order in which they are collected."""
    gc.enable()  # trees of a whole suite are more than a machine may hold
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(folder.rglob("test_*.py")):
        place = rewrite.get_cache_dir(path)
        kept = place / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(place):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, kept)
