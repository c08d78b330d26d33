"""The checker: every way in which a table can be wrong is refused, and told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import ScheduleError
from conjoin.schedules import (
    Kind,
    Memory,
    Row,
    Schedule,
    chain,
    check,
    gpipe,
    load_schedule,
    one_f_one_b,
    with_transfers,
)


def table(*rows: str, owners: tuple[int, ...] | None = None, num: int = 2) -> Schedule:
    """A schedule as written, unchecked."""

    def read(text: str) -> Row:
        body, micro_batch = text[1:].split(".")
        stage, _, peer = body.replace("<", ">").partition(">")
        return Row(Kind(text[0]), int(stage), int(micro_batch), int(peer) if peer else None)

    owners = owners or tuple(range(len(rows)))
    return Schedule(owners, num, tuple(tuple(map(read, each.split())) for each in rows), chain(len(owners)), "t")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (table("F0.0 B0.0 F0.1"), "has F for stage 0 and micro-batch 1"),
        (table("F0.0 B0.0 F0.1 I0.1"), "has F, I for stage 0 and micro-batch 1"),
        (table("F0.0 B0.0 W0.0 F0.1 B0.1"), "has F, B, W for stage 0"),
        (table("F0.0 F0.0 B0.0 F0.1 B0.1"), "row F0.0 more than once"),
        (
            table("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"),
            "F0.2 at owner 0. That cannot be: micro-batches are counted from 0 to 1",
        ),
        (table("F0.0 B0.0 F1.1 B0.1"), "F1.1 at owner 0. That cannot be: stage 1 is not one of its stages"),
        (table("B0.0 F0.0 F0.1 B0.1"), "B0.0 waits for F0.0"),
        (table("F0.0 W0.0 I0.0 F0.1 B0.1"), "W0.0 waits for I0.0"),
        (table("F0.0 B0.0 F0.1 B0.1", "F1.1 F1.0 B1.0 B1.1"), "F1.1 waits for F0.1"),
        (table("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1", owners=(1, 0)), "stage 0 is not one of its stages"),
        (table("F0.0 F0.1 B0.0 B0.1", owners=(1,)), "Owners are counted from 0"),
        (replace(gpipe(2, 2), edges=((1, 0),)), "edge 1 → 0"),
        (replace(gpipe(2, 2), edges=((0, 1), (0, 1))), "Edges are there once each"),
        (replace(gpipe(2, 2), num_micro_batches=0), "0 micro-batches"),
    ],
)
def test_wrong_tables_are_refused_in_three_sentences(schedule: Schedule, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert words in str(error.value)
    assert str(error.value).count(". ") >= 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("F0.0 S0>1.0 R0<1.0 B0.0", "R1<0.0 F1.0 B1.0"), "lacks S1>0.0"),
        (("F0.0 S0>1.0 S0>1.0 R0<1.0 B0.0", "R1<0.0 F1.0 B1.0 S1>0.0"), "S0>1.0 more than once"),
        (("F0.0 S0>1.0 B0.0 R0<1.0", "R1<0.0 F1.0 B1.0 S1>0.0"), "B0.0 waits for R0<1.0"),
        (("S0>1.0 F0.0 R0<1.0 B0.0", "R1<0.0 F1.0 B1.0 S1>0.0"), "S0>1.0 waits for F0.0"),
        (("F0.0 S0>2.0 R0<1.0 B0.0", "R1<0.0 F1.0 B1.0 S1>0.0"), "no edge joins stages 0 and 2"),
        (("F0.0 S0.0 R0<1.0 B0.0", "R1<0.0 F1.0 B1.0 S1>0.0"), "sends and receives name another stage"),
    ],
)
def test_wrong_transfers_are_refused(rows: tuple[str, ...], words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check(table(*rows, num=1))
    assert words in str(error.value)


def test_two_sends_that_wait_for_each_other_are_a_deadlock_unless_buffered() -> None:
    """Both owners send first and receive then: the classical exchange."""
    rows = ("F0.0 S0>1.0 F0.1 S0>1.1 R0<1.0 B0.0 R0<1.1 B0.1", "R1<0.0 F1.0 B1.0 S1>0.0 R1<0.1 F1.1 B1.1 S1>0.1")
    assert check(table(*rows), rendezvous=False).in_flight == (2, 1)
    with pytest.raises(ScheduleError, match="with rendezvous sends: 2 of 2 owners wait for ever"):
        check(table(*rows))


def test_within_memory() -> None:
    check(one_f_one_b(3, 6), Memory.in_flight(3, (3, 2, 1)))
    with pytest.raises(ScheduleError, match="holds 3 at owner 0, and 2 are allowed"):
        check(one_f_one_b(3, 6), Memory.in_flight(3, (2, 2, 1)))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_row_taken_away_doubled_or_moved_before_what_it_needs_is_found(data: st.DataObject) -> None:
    base = one_f_one_b(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
    schedule = data.draw(st.sampled_from([base, with_transfers(base)]))
    owner = data.draw(st.integers(0, schedule.num_owners - 1))
    rows = list(schedule.rows[owner])
    at = data.draw(st.integers(0, len(rows) - 1))
    changed = data.draw(st.sampled_from([rows[:at] + rows[at + 1 :], [*rows[: at + 1], *rows[at:]]]))
    wrong = replace(schedule, rows=(*schedule.rows[:owner], tuple(changed), *schedule.rows[owner + 1 :]))
    with pytest.raises(ScheduleError):
        check(wrong)


def test_a_file_with_a_table_that_cannot_run_is_refused() -> None:
    text = 'format = "conjoin-schedule"\nversion = 1\nmicro_batches = 1\nowners = [0]\nrows = ["B0.0 F0.0"]\n'
    with pytest.raises(ScheduleError, match=r"B0\.0 waits for F0\.0"):
        load_schedule(text)
