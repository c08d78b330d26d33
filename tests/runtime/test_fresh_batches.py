"""Other batches of the same kind: other values, of the same range."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from conjoin.runtime.verification.fresh_batches import Freshness, fresh_batches

KINDS: dict[str, Tensor] = {
    "numbers": torch.randn(8, 5),
    "probabilities": torch.rand(8, 5),
    "addresses": torch.randint(9, (8, 5)),
    "bytes": torch.randint(255, (4, 6), dtype=torch.uint8),
    "booleans": torch.arange(40) % 3 == 0,
    "one value": torch.full((4, 3), 2.0),
    "zeros": torch.zeros(4, 3),
    "half": torch.randn(8, 5).half(),
    "a mask": torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -inf),
    "two values": (torch.arange(30) % 4 == 0).float(),
    "complex": torch.randn(8, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_values_of_the_same_kind(name: str) -> None:
    given = KINDS[name]
    first, second = (batch["x"] for batch in fresh_batches({"x": given}, 2, Freshness.MIXED))
    assert first.shape == given.shape and first.dtype == given.dtype
    assert not torch.equal(first, given) and not torch.equal(first, second)
    if given.is_complex():
        return
    low, high = given.double().min(), given.double().max()
    if name == "one value":
        low = torch.tensor(1.0)
    if name == "zeros":
        high = torch.tensor(1.0)
    assert (first.double() >= low).all() and (first.double() <= high).all()
    if name in ("a mask", "two values"):
        assert first.unique().tolist() == given.unique().tolist()


def test_the_same_tensor_given_twice_is_drawn_twice() -> None:
    x = torch.arange(20)
    one, other = fresh_batches((x, x), 1, Freshness.MIXED)[0]
    assert not torch.equal(one, other) and sorted(one.tolist()) == sorted(other.tolist()) == x.tolist()


def test_samples_in_another_order() -> None:
    x = torch.arange(20).reshape(10, 2)
    (shuffled,) = fresh_batches((x,), 1, Freshness.SHUFFLED)[0]
    assert not torch.equal(shuffled, x) and sorted(shuffled.tolist()) == x.tolist()


def test_they_are_the_same_whenever_they_are_asked_for() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = fresh_batches(KINDS, 2, Freshness.MIXED)[1]
    torch.rand(5)
    again = fresh_batches(KINDS, 2, Freshness.MIXED)[1]
    assert all(torch.equal(first[name], again[name]) for name in KINDS)
    torch.set_rng_state(state)


def test_what_is_no_tensor_and_what_wants_gradients_stay() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    found = fresh_batches([x, 7, None, {"a": "word"}], 1, Freshness.MIXED)[0]
    assert found[1:] == [7, None, {"a": "word"}] and found[0].requires_grad and found[0].is_leaf
