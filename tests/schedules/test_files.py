"""Schedules in files: back as they went, and nothing else gets in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import ScheduleError
from conjoin.schedules import (
    Schedule,
    dump_schedule,
    gpipe,
    interleaved,
    load_schedule,
    one_f_one_b,
    with_transfers,
    zero_bubble_v,
)

GOOD = dump_schedule(with_transfers(one_f_one_b(2, 2)))


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 2), with_transfers(one_f_one_b(3, 4)), interleaved(2, 2, 4), zero_bubble_v(2, 3)]
)
def test_a_schedule_comes_back_as_it_went(schedule: Schedule) -> None:
    assert load_schedule(dump_schedule(schedule)) == schedule


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format", "fromat", "unknown key 'fromat'"),
        ("version = 1", "version = 9", "version 9"),
        ("micro_batches = 2", "", "lacks micro_batches"),
        ("micro_batches = 2", "micro_batches = -1", "micro_batches -1"),
        ("micro_batches = 2", "micro_batches = true", "micro_batches True"),
        ("micro_batches = 2", "micro_batches = 100000000", "must be a number from 0 to 65,536"),
        ("owners = [0, 1]", "owners = 2", "owners 2"),
        ("owners = [0, 1]", "owners = [0, 9]", "Owners are counted from 0"),
        ("edges = [[0, 1]]", "edges = [[0]]", r"edge \(0,\)"),
        ("edges = [[0, 1]]", "edges = [[0, 'x']]", "edge 'x'"),
        ("F0.0", "F0", "row 'F0'"),
        ("F0.0", "X0.0", "row 'X0.0'"),
        ("S0>1.0", "S0<1.0", "row 'S0<1.0'"),
        ("F0.0", "F0.99999", "micro-batches are counted"),
        ("F0.0", "F٠.0", "row"),
        ("rows = [", "rows = [3, ", "rows"),
        ("rows = [", "rows = ", "not TOML"),
        ('name = "1f1b"', "name = 3", "name 3"),
    ],
)
def test_what_is_no_schedule_is_refused(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ScheduleError, match=words):
        load_schedule(GOOD.replace(old, new, 1))


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for whole in (text, GOOD.replace("F0.0", text, 1)):
        try:
            load_schedule(whole)
        except ScheduleError as error:
            assert str(error).count(".") >= 2


def test_a_text_beyond_all_measure_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conjoin.schedules.files.MAX_BYTES", 100)
    with pytest.raises(ScheduleError, match="The limit is 100"):
        load_schedule(GOOD)
