"""Through which operands gradients come back is as declared: torch is asked, with one operand that needs one at a time.

A rank that skips an operator, because another place of the mesh runs it, knows from the declaration alone which of the
operands' collectives it must come through in the backward pass.
"""

from __future__ import annotations

from random import Random

import pytest
from torch import Tensor

from conjoin.ops import Call, OpSpec, all_ops, find_spec, random_call, random_tensors, run_whole
from tests.cases import each_of

OVERLOADS = [name for spec in all_ops() for name in spec.names]
NUM_SAMPLES = 4
NOT_IMPLEMENTED = {
    "bernoulli.p",
    "copy",
    "floor_divide",
    "floor_divide.Scalar",
    "heaviside",
    "normal_functional",
    "randint_like",
    "randint_like.low_dtype",
}
"""In torch: it raises where a gradient comes, with or without a plan."""


@each_of(OVERLOADS)
@pytest.mark.filterwarnings("ignore:.*(deterministic|indexing argument)")
def test_gradients_come_back_through_what_is_declared(op: str) -> None:
    spec = find_spec(op)
    assert spec is not None
    for seed in range(NUM_SAMPLES if op not in NOT_IMPLEMENTED else 0):
        call = random_call(spec, Random(seed), op)
        check_flow(spec, call, random_tensors(spec, call, seed))


def check_flow(spec: OpSpec, call: Call, tensors: list[Tensor]) -> None:
    for position, name in enumerate(call.operand_names):
        if not tensors[position].dtype.is_floating_point and not tensors[position].dtype.is_complex:
            continue
        asked = [x.detach().clone().requires_grad_(i == position) for i, x in enumerate(tensors)]
        declared = spec.smooth and name not in spec.constants
        try:
            made = run_whole(call, asked)
        except RuntimeError as error:
            assert not declared and "not differentiable with respect to" in str(error), f"{call} by {name}: {error}"
            continue
        passes = any(x.requires_grad for x in made)
        numeric = any(x.dtype.is_floating_point or x.dtype.is_complex for x in made)
        assert passes == (declared and numeric), f"{call} by {name}: torch {passes}, declared {declared}"
