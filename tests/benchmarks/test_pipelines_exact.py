"""What pipelines on processes are judged by: one that does not train like the plain model is found out."""

from __future__ import annotations

import math

import pytest

from benchmarks.pipelines_exact import BOUND, Trained, difference, train_plainly


@pytest.fixture(scope="module")
def wanted() -> Trained:
    return train_plainly("resnet", 2)


def test_other_micro_batches_are_other_training(wanted: Trained) -> None:
    """Of batch statistics, that is; for what works on samples apart they are the same."""
    assert difference(wanted, wanted) == 0.0 and difference(train_plainly("resnet", 4), wanted) > 1e3 * BOUND
    assert difference(train_plainly("gpt", 4), train_plainly("gpt", 2)) < BOUND


@pytest.mark.parametrize("what", ["loss", "norm", "weight", "count", "nan"])
def test_whatever_is_off_is_told(wanted: Trained, what: str) -> None:
    losses, norms, state = list(wanted.losses), list(wanted.norms), dict(wanted.state)
    weight = next(key for key in state if key.endswith("weight"))
    count = next(key for key in state if key.endswith("num_batches_tracked"))
    if what == "loss":
        losses[2] *= 1 + 1e-8
    elif what == "norm":
        norms[4] *= 1 + 1e-8
    elif what == "weight":
        state[weight] = state[weight] * (1 + 1e-8)
    elif what == "count":
        state[count] = state[count] + 1
    else:
        state[weight] = state[weight] * math.nan
    assert difference(Trained(losses, norms, state), wanted) > BOUND
