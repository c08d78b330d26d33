"""Cases that are judged some at a time: each is judged, and each that fails is told."""

from __future__ import annotations

import pytest

from tests.cases import each_of


def test_every_case_is_judged_and_all_that_fail_are_told() -> None:
    judged = []

    def even(number: int) -> None:
        judged.append(number)
        assert number % 2 == 0

    test = each_of(range(10), lambda number: f"number {number}", at_once=4)(even)
    (groups,) = (mark.args[1] for mark in test.pytestmark)
    for group, wrong in zip(groups, ([1, 3], [5, 7], [9]), strict=True):
        with pytest.raises((AssertionError, ExceptionGroup)) as told:
            test(group)
        errors = getattr(told.value, "exceptions", (told.value,))
        assert [error.__notes__ for error in errors] == [[f"the case is number {number}"] for number in wrong]
    assert judged == list(range(10))
