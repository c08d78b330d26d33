"""The environment: where the cache is, and what is told where there is no place for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conjoin.cli import main
from conjoin.environment import cache_directory
from conjoin.errors import CaptureError, ConjoinError, GraphError, UsageError
from tests.ir.wording import assert_three_sentences


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONJOIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "conjoin"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "conjoin"
    monkeypatch.setenv("CONJOIN_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"
    assert list(tmp_path.iterdir()) == []


def test_an_account_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UsageError, match="Set CONJOIN_CACHE") as told:
        cache_directory()
    assert_three_sentences(told.value)
    assert main(["doctor"]) == 2 and capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("kind", [CaptureError, GraphError, UsageError])
def test_every_error_for_the_user_is_of_one_kind(kind: type[Exception]) -> None:
    assert issubclass(kind, ConjoinError)
