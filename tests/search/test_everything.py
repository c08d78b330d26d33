"""The search against trying everything, on a few of the small models of `everything.py`."""

from __future__ import annotations

import pytest

from tests.search.everything import compare, try_everything


@pytest.mark.parametrize("seed", [2, 3, 10])  # chunks of the second best win; states on the host; the batch in pieces
def test_nothing_is_faster_than_what_is_found(seed: int) -> None:
    best = try_everything(seed)
    assert best is not None and best.plans > 300
    row = compare(best, budget=3.0)
    assert row.is_as_good, row
