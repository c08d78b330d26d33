"""Many small cases of one thing, judged some at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def each_of(
    cases: Sequence[Any], name: Callable[[Any], str] = str, at_once: int = 16
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Judge every case by a test of one, some of them in one test of pytest: what a test costs beside what it judges
    is more than thousands of these cost. All cases that fail are told, each by its name.
    """

    def judging(test: Callable[[Any], None]) -> Callable[..., None]:
        def of_some(some: Sequence[Any]) -> None:
            failed = []
            for case in some:
                try:
                    test(case)
                except Exception as error:
                    error.add_note(f"the case is {name(case)}")
                    failed.append(error)
            if failed:
                raise failed[0] if len(failed) == 1 else ExceptionGroup(f"{len(failed)} of {len(some)} cases", failed)

        of_some.__name__, of_some.__doc__, of_some.__module__ = test.__name__, test.__doc__, test.__module__
        groups = [cases[i : i + at_once] for i in range(0, len(cases), at_once)]
        return pytest.mark.parametrize("some", groups, ids=[f"from {name(group[0])}" for group in groups])(of_some)

    return judging
