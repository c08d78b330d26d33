"""What commands that search show while they do."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from conjoin.cli.search_answer import progress_line
from conjoin.search import Progress

PROGRESS = Progress(2.5, 0.25, 0.5, 57.5, 12, "trying the layouts of operators on units of 2, 2 and 4 devices " * 2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "width"), [(80, 79), (200, 118)])
def test_the_line_fits_the_terminal_and_is_wiped(monkeypatch: pytest.MonkeyPatch, columns: int, width: int) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress_line() as show:
        show(PROGRESS)
    _, shown, wiped, rest = terminal.getvalue().split("\r")
    assert shown == str(PROGRESS)[:width].ljust(width) and len(str(PROGRESS)) > 80
    assert wiped == " " * width and rest == ""


def test_a_log_gets_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress_line() as show:
        for elapsed in (2.5, 9.0, 11.0, 12.0, 20.5, 22.0):
            show(replace(PROGRESS, elapsed=elapsed))
    assert log.getvalue() == "".join(f"{replace(PROGRESS, elapsed=elapsed)}\n" for elapsed in (11.0, 22.0))
