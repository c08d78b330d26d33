"""The search against trying everything, on a few of the small models of `everything.py`."""

from __future__ import annotations

import pytest

from tests.search.everything import compare, try_everything


@pytest.mark.parametrize(
    "seed",
    [
        2,  # chunks of the second best win
        59,  # chunks win of what fits with inputs in pieces alone
        80,  # of two blocks; layers are split otherwise than anything found before, each with its weight
        89,  # states on the host
        104,  # three devices, the batch in two; what is slower and larger fits with its state on the host
    ],
)
def test_nothing_is_faster_than_what_is_found(seed: int) -> None:
    best = try_everything(seed)
    assert best is not None and best.plans > 100
    row = compare(best, budget=5.0)
    assert row.is_as_good, row
