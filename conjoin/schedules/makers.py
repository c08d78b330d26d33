"""Schedules people know, each a function of how many stages and micro-batches there are.

GPipe runs all forwards, then all backwards. 1F1B (Narayanan et al. 2021) starts stage i of S, from 1, with S - i + 1
forwards and goes on with one backward and one forward in turn, so that no more are in flight. Eager 1F1B (AlpaComm 4)
starts with 2(S - i) + 1, so that every transfer has a computation to hide behind; weight gradients may run some
micro-batches later than input gradients, for the same end. Interleaved 1F1B deals out several stages to each owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from conjoin.errors import ScheduleError
from conjoin.schedules.schedule import Kind, Row, Schedule, chain, looped, one_each, v_shaped

MAX_STAGES = 4096
MAX_MICRO_BATCHES = 1 << 16


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards, in the same order.

    >>> print(gpipe(2, 2))
    F0.0 F0.1 B0.0 B0.1
    F1.0 F1.1 B1.0 B1.1
    """
    check_counts(num_stages, num_micro_batches)
    return _in_turn(num_stages, num_micro_batches, [num_micro_batches] * num_stages, "gpipe")


def one_f_one_b(num_stages: int, num_micro_batches: int, max_in_flight: int | None = None) -> Schedule:
    """One backward and one forward in turn, after as many forwards as it takes for the first backward to come.

    >>> print(one_f_one_b(2, 3))
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    check_counts(num_stages, num_micro_batches, max_in_flight)
    first = [num_stages - stage for stage in range(num_stages)]
    return _in_turn(num_stages, num_micro_batches, _capped(first, max_in_flight), "1f1b")


def eager_one_f_one_b(
    num_stages: int, num_micro_batches: int, weight_delay: int | None = None, max_in_flight: int | None = None
) -> Schedule:
    """1F1B with earlier forwards: two more for each stage that follows.

    With `weight_delay` input and weight gradients are rows apart, and a weight gradient runs after the input gradient
    of so many micro-batches later; `least_weight_delay` finds how many.

    >>> print(eager_one_f_one_b(2, 3))
    F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    >>> print(eager_one_f_one_b(1, 3, weight_delay=1))
    F0.0 I0.0 F0.1 I0.1 W0.0 F0.2 I0.2 W0.1 W0.2
    """
    check_counts(num_stages, num_micro_batches, max_in_flight)
    if weight_delay is not None and weight_delay < 0:
        raise ScheduleError(
            f"Weight gradients are to run {weight_delay} micro-batches late. They need their input gradients first. "
            f"Give 0 or more."
        )
    first = [2 * (num_stages - stage) - 1 for stage in range(num_stages)]
    if weight_delay is None:
        return _in_turn(num_stages, num_micro_batches, _capped(first, max_in_flight), "eager-1f1b")
    if max_in_flight is not None:  # what waits for its weight gradient is in flight, too
        first = [max(1, min(number, max_in_flight - weight_delay)) for number in first]
    backward = _delayed(num_micro_batches, weight_delay)
    return _in_turn(num_stages, num_micro_batches, first, f"eager-1f1b, W {weight_delay} late", backward)


def interleaved(num_owners: int, stages_each: int, num_micro_batches: int, slope: int = 2, more: int = 0) -> Schedule:
    """1F1B over stages that are dealt out in turn (Narayanan et al. 2021): a smaller bubble for more transfers.

    Micro-batches go in rounds of about as many as there are owners, each through all stages of an owner. An owner
    begins with `slope` forwards more than the next one, and all with some `more` than the first backward waits for.
    """
    check_counts(num_owners * stages_each, num_micro_batches)
    rounds = max(1, num_micro_batches // num_owners)
    sizes = [num_micro_batches // rounds + (turn < num_micro_batches % rounds) for turn in range(rounds)]
    forwards, backwards = [], []
    begin = 0
    for size in sizes:
        for part in range(stages_each):
            forwards += [(part, micro_batch) for micro_batch in range(begin, begin + size)]
            backwards += [(stages_each - 1 - part, micro_batch) for micro_batch in range(begin, begin + size)]
        begin += size
    rows = []
    for owner in range(num_owners):
        first = (stages_each - 1) * sizes[0] + slope * (num_owners - 1 - owner) + 1 + more
        ahead = [Row(Kind.FORWARD, part * num_owners + owner, micro_batch) for part, micro_batch in forwards]
        back = [(Row(Kind.BACKWARD, part * num_owners + owner, micro_batch),) for part, micro_batch in backwards]
        rows.append(_alternating(ahead, back, first))
    owners = looped(num_owners, stages_each)
    return Schedule(
        owners, num_micro_batches, tuple(rows), chain(len(owners)), f"interleaved, {stages_each} stages each"
    )


def breadth_first(num_owners: int, stages_each: int, num_micro_batches: int) -> Schedule:
    """GPipe over stages that are dealt out in turn: all micro-batches through one stage, then the next."""
    check_counts(num_owners * stages_each, num_micro_batches)
    owners = looped(num_owners, stages_each)
    rows = []
    for owner in range(num_owners):
        mine = range(owner, len(owners), num_owners)
        ahead = [Row(Kind.FORWARD, stage, m) for stage in mine for m in range(num_micro_batches)]
        back = [Row(Kind.BACKWARD, stage, m) for stage in reversed(mine) for m in range(num_micro_batches)]
        rows.append((*ahead, *back))
    return Schedule(owners, num_micro_batches, tuple(rows), chain(len(owners)), "breadth-first")


def there_and_back(num_owners: int, num_micro_batches: int) -> Schedule:
    """1F1B over two stages to an owner, there and back, in the order of zero-bubble V schedules (Qi et al. 2024).

    Gradients of the later stage come to an owner the sooner the further it stands from the first; then the two stages
    take turns, one forward and one backward each.

    >>> print(there_and_back(2, 3))
    F0.0 F0.1 F0.2 F3.0 B3.0 F3.1 B3.1 B0.0 F3.2 B3.2 B0.1 B0.2
    F1.0 F2.0 F1.1 F2.1 B2.0 F1.2 B1.0 F2.2 B2.1 B1.1 B2.2 B1.2
    """
    check_counts(2 * num_owners, num_micro_batches)
    many = max(num_micro_batches, 2 * num_owners - 1)
    rows = []
    for owner in range(num_owners):
        left = num_owners - owner
        order = "f" * (2 * left - 1) + "Ff" * owner + "FB" * left + "fbFB" * (many - 2 * num_owners + owner + 1)
        order += "bFB" * (left - 1) + "bB" * owner + "b" * left
        stages = {"f": owner, "b": owner, "F": 2 * num_owners - 1 - owner, "B": 2 * num_owners - 1 - owner}
        counts = dict.fromkeys(stages, 0)
        mine = []
        for letter in order:
            if counts[letter] < num_micro_batches:
                mine.append(Row(Kind(letter.upper()), stages[letter], counts[letter]))
                counts[letter] += 1
        rows.append(tuple(mine))
    return Schedule(v_shaped(num_owners), num_micro_batches, tuple(rows), chain(2 * num_owners), "there and back")


def with_late_weights(schedule: Schedule, lags: Sequence[int]) -> Schedule:
    """Every backward as an input gradient, followed by the weight gradient of so many backwards before, for each owner.

    >>> print(with_late_weights(one_f_one_b(2, 2), (0, 1)))
    F0.0 F0.1 I0.0 W0.0 I0.1 W0.1
    F1.0 I1.0 F1.1 I1.1 W1.0 W1.1
    """
    table = []
    for rows, lag in zip(schedule.rows, lags, strict=True):
        mine: list[Row] = []
        waiting: list[Row] = []
        for row in rows:
            if row.kind is not Kind.BACKWARD:
                mine.append(row)
                continue
            mine.append(Row(Kind.INPUT_GRADIENT, row.stage, row.micro_batch))
            waiting.append(Row(Kind.WEIGHT_GRADIENT, row.stage, row.micro_batch))
            if len(waiting) > lag:
                mine.append(waiting.pop(0))
        table.append((*mine, *waiting))
    return replace(schedule, rows=tuple(table), name=f"{schedule.name}, W late")


Backward = Callable[[int], Sequence[tuple[Row, ...]]]


def _in_turn(
    num_stages: int, num_micro_batches: int, first: Sequence[int], name: str, backward: Backward | None = None
) -> Schedule:
    """One stage to an owner: so many forwards first, then a backward and a forward in turn."""
    rows = []
    for stage, number in enumerate(first):
        ahead = [Row(Kind.FORWARD, stage, micro_batch) for micro_batch in range(num_micro_batches)]
        if backward is None:
            back: Sequence[tuple[Row, ...]] = [(Row(Kind.BACKWARD, stage, m),) for m in range(num_micro_batches)]
        else:
            back = backward(stage)
        rows.append(_alternating(ahead, back, number))
    return Schedule(one_each(num_stages), num_micro_batches, tuple(rows), chain(num_stages), name)


def _alternating(ahead: Sequence[Row], back: Sequence[tuple[Row, ...]], first: int) -> tuple[Row, ...]:
    rows = list(ahead[:first])
    rest = iter(ahead[first:])
    for group in back:
        rows += group
        rows += islice(rest, 1)
    return tuple(rows)


def _delayed(num_micro_batches: int, delay: int) -> Backward:
    """Input gradients, each followed by the weight gradient of some micro-batches before; the rest at the end."""

    def backward(stage: int) -> list[tuple[Row, ...]]:
        inputs = [Row(Kind.INPUT_GRADIENT, stage, m) for m in range(num_micro_batches)]
        weights = [Row(Kind.WEIGHT_GRADIENT, stage, m) for m in range(num_micro_batches)]
        groups: list[tuple[Row, ...]] = [(row,) for row in inputs[:delay]]
        groups += [(row, weight) for row, weight in zip(inputs[delay:], weights, strict=False)]
        groups[-1] = (*groups[-1], *weights[max(0, num_micro_batches - delay) :])
        return groups

    return backward


def _capped(first: Sequence[int], max_in_flight: int | None) -> list[int]:
    return [number if max_in_flight is None else min(number, max_in_flight) for number in first]


def check_counts(num_stages: int, num_micro_batches: int, max_in_flight: int | None = None) -> None:
    """Refuse numbers that no schedule has."""
    for number, what, most in (
        (num_stages, "stages", MAX_STAGES),
        (num_micro_batches, "micro-batches", MAX_MICRO_BATCHES),
        (1 if max_in_flight is None else max_in_flight, "micro-batches in flight", MAX_MICRO_BATCHES),
    ):
        if not 1 <= number <= most:
            raise ScheduleError(
                f"A schedule was asked for with {number:,} {what}. It can have 1 to {most:,} of them. "
                f"Ask for a number in between."
            )
