"""The search against trying everything, on a few of the small models of `everything.py`."""

from __future__ import annotations

import pytest

from tests.search.everything import compare


@pytest.mark.parametrize("seed", [1, 2, 10])  # in the last only plans with the batch in pieces fit and are fast
def test_nothing_is_faster_than_what_is_found(seed: int) -> None:
    row = compare(seed, budget=3.0)
    assert row is not None and row.plans > 300
    assert row.is_as_good, row
