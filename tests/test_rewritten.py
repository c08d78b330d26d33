"""What is written ahead of workers is what pytest in a worker looks for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.rewritten import write_rewritten


def test_pytest_finds_what_was_written_ahead(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "within" / "test_of_nothing.py"
    path.parent.mkdir()
    path.write_text("def compare():\n    assert 1 + 1 == 3\n")
    write_rewritten(tmp_path, pytestconfig)
    monkeypatch.setattr(rewrite, "_rewrite_test", None)
    hook = next(each for each in sys.meta_path if isinstance(each, rewrite.AssertionRewritingHook))
    spec = importlib.util.spec_from_file_location("test_of_nothing", path, loader=hook)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    hook.exec_module(module)
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        module.compare()
