"""Random calls, tensors and cuts drawn from declarations."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.ops import Call, TensorType, all_ops, find_spec, random_call, random_cuts, random_tensors

FEW = settings(settings.get_profile("ops"))


@settings(FEW, max_examples=100)
@given(size=st.integers(1, 20), num_pieces=st.integers(1, 6), rng=st.randoms(use_true_random=False))
def test_cuts_leave_no_piece_empty(size: int, num_pieces: int, rng: Random) -> None:
    cuts = random_cuts(size, num_pieces, rng)
    assert cuts[0] == 0 and cuts[-1] == size and list(cuts) == sorted(set(cuts))
    assert len(cuts) - 1 == min(size, num_pieces)


def test_a_seed_gives_the_same_call_and_tensors() -> None:
    for spec in all_ops():
        one, other = (random_call(spec, Random(5)) for _ in range(2))
        assert one == other
        for left, right in zip(random_tensors(spec, one, 1), random_tensors(spec, other, 1), strict=True):
            assert torch.equal(left, right)


def test_values_lie_in_the_domain_and_addresses_in_their_index() -> None:
    log, embedding = find_spec("log"), find_spec("embedding")
    assert log is not None and embedding is not None
    (values,) = random_tensors(log, Call("log", (TensorType((1000,), torch.float64),)), 0)
    assert log.domain[0] <= values.min() and values.max() <= log.domain[1] and values.requires_grad
    call = random_call(embedding, Random(0))
    table, ids = random_tensors(embedding, call, 0)
    assert ids.min() >= 0 and ids.max() < table.shape[0] and not ids.requires_grad


def test_constants_and_what_is_not_smooth_need_no_gradient() -> None:
    equal, norm = find_spec("eq.Tensor"), find_spec("_native_batch_norm_legit_no_training")
    assert equal is not None and norm is not None
    assert not any(t.requires_grad for t in random_tensors(equal, random_call(equal, Random(0)), 0))
    call = random_call(norm, Random(0))
    needs = dict(zip(call.operand_names, (t.requires_grad for t in random_tensors(norm, call, 0)), strict=True))
    assert needs["input"] and not needs["running_mean"] and not needs["running_var"]
