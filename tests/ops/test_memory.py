"""Values and gradients do not depend on how numbers lie in memory, nor on what was there before.

The judge is the operator on contiguous operands. Judged are all ways to it: the operator itself, what pieces compute,
and what it expands to. Each call that these make is given operands that lie in some way, and gradients that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from conjoin.ops import (
    ATTENTION_FROM_ROW,
    Call,
    CheckFailed,
    Emit,
    Invariant,
    OpSpec,
    TensorType,
    WholeRun,
    aggregation,
    all_ops,
    check_expansion,
    check_rule,
    cuts_for,
    execute,
    find_spec,
    random_call,
    random_gradients,
    random_tensors,
    sharding_rules,
    torch_private,
)
from conjoin.runtime.program.functions import BATCH_NORMS, of_pieces
from tests.cases import each_of
from tests.memory_orders import (
    Lay,
    apart,
    as_usual,
    execute_laid,
    in_one_place,
    laid,
    ones_anywhere,
    poisoned_memory,
    turned,
    within,
)

OVERLOADS = [name for spec in all_ops() for name in spec.names if not spec.random]
REFUSED = (
    "view size is not compatible",
    "Expected X.is_contiguous",
    "Tensor must have a",
    "grad_input must be contiguous",
    "grad_weight must be contiguous",
    "grad_weight needs to be contiguous",
    "Unsupported memory format",
)
"""What torch's own operators say that take numbers only as they lie usually: nothing is wrong in silence."""
WRONG_IN_TORCH = {"median.dim", "_native_batch_norm_legit_no_training"}
"""On CPUs (2.11 and 2.13): of numbers that are the same along a dim a median is one that lies elsewhere, and the
gradient of batch norm by statistics that lie apart, of images whose channels lie last, is made of what lies between."""
NUM_SPLITS = 2
"""Of a call, for each way; other calls split other indices."""
NOT_SMOOTH = {"det", "linalg_det", "inverse", "linalg_inv"}
"""Of matrices whose rows are alike."""


WAYS: tuple[tuple[Lay, ...], ...] = ((turned,), (in_one_place,), (turned, within, apart))
MORE_WAYS = (*WAYS, (apart,), (within,))
"""For operators of our own, which call kernels themselves."""


@pytest.fixture(autouse=True)
def _compiled_kernels_for_small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "_FEW", 0)


@each_of(OVERLOADS)
@pytest.mark.filterwarnings("ignore:.*(non-contiguous|deterministic)")
def test_numbers_may_lie_as_they_like(op: str) -> None:
    check_op(op)


def check_op(op: str) -> None:
    spec = find_spec(op)
    assert spec is not None
    for seed, lays in enumerate(MORE_WAYS * 2 if "::" in op else WAYS):
        if op in WRONG_IN_TORCH or (in_one_place in lays and op in NOT_SMOOTH):
            continue
        try:
            check_laid(spec, random_call(spec, Random(seed), op), lays, seed)
        except RuntimeError as error:
            if not any(text in str(error) for text in REFUSED):
                raise


def check_laid(spec: OpSpec, call: Call, lays: tuple[Lay, ...], seed: int, emit: Emit | None = None) -> None:
    """All that computes a call, on operands and gradients that lie in some way."""
    emit = emit or execute_laid(*lays)
    tensors, rng, give = random_tensors(spec, call, seed), Random(seed), random_gradients
    if in_one_place in lays:
        tensors, give = [_alike(x, rng) for x in tensors], _all_alike
    whole = WholeRun.of(call, tensors, give)
    splits = [rule for rule in sharding_rules(spec, call) if rule.index is not None]
    unsplit = [rule for rule in sharding_rules(spec, call) if Invariant() in rule.outputs]
    rules = [*unsplit, *rng.sample(splits, min(len(splits), NUM_SPLITS))]
    with poisoned_memory():
        for rule in rules:
            check_rule(spec, call, rule, tensors, cuts_for(spec, call, rule, rng), whole, emit)
        if spec.expansion is not None or spec.by_parts is not None:
            check_expansion(spec, call, tensors, whole, emit)


ONES: tuple[tuple[Lay, ...], ...] = ((ones_anywhere,), (as_usual, ones_anywhere), (ones_anywhere, as_usual))


@each_of(OVERLOADS, at_once=64)
@pytest.mark.filterwarnings("ignore:.*(non-contiguous|deterministic|indexing argument)")
def test_a_dim_of_one_may_have_any_stride(op: str) -> None:
    """Of images: whether channels lie last cannot be seen from it. Batch norms run as programs run those of pieces."""
    spec = find_spec(op)
    assert spec is not None
    calls = ((seed, random_call(spec, Random(seed), op)) for seed in range(8 if op not in WRONG_IN_TORCH else 0))
    for seed, call in calls:
        if any(len(t.shape) in (4, 5) for t in call.tensors):
            for lays in ONES:
                check_ones(spec, call, lays, seed)


def check_ones(spec: OpSpec, call: Call, lays: tuple[Lay, ...], seed: int, pieces: bool = True) -> None:
    turn = cycle(lays)

    def emit(op: str, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return execute(op, *args)

        return laid((of_pieces(run) if pieces and op in BATCH_NORMS else run)(*laid(args, turn)), turn)

    try:
        check_laid(spec, call, (), seed, emit)
    except RuntimeError as error:
        if not any(text in str(error) for text in REFUSED):
            raise


def _alike(x: Tensor, rng: Random) -> Tensor:
    """The same along a dim."""
    if not x.dim() or not x.numel():
        return x
    one = x.detach().narrow(rng.randrange(x.dim()), 0, 1)
    return one.expand(x.shape).contiguous().requires_grad_(x.requires_grad)


def _all_alike(outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients as those of a sum."""
    return tuple(None if x is None else torch.full_like(x, 0.7) for x in random_gradients(outputs))


def test_features_that_lie_apart_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention by blocks hands them to torch's kernels as they are."""
    monkeypatch.setattr(torch_private, "_rows_in_one_piece", lambda x: x)
    with pytest.raises((CheckFailed, ExceptionGroup)):
        check_op(ATTENTION_FROM_ROW)


@pytest.mark.parametrize("op", BATCH_NORMS)
def test_images_that_are_misread_are_seen(op: str) -> None:
    """Torch misreads them: a release that does not wants none of this."""
    spec = find_spec(op)
    assert spec is not None
    with pytest.raises(CheckFailed):
        for seed in range(200):
            for lays in ONES:
                check_ones(spec, random_call(spec, Random(seed), op), lays, seed, pieces=False)


def test_what_is_left_unwritten_is_seen() -> None:
    spec = find_spec("relu")
    assert spec is not None
    unwritten = replace(spec, local=lambda form: form.emit("empty_like", form["self"]))
    with pytest.raises(CheckFailed):
        check_laid(unwritten, Call("relu", (TensorType((4,), torch.float64),)), (within,), 0)
