"""Every declaration against torch itself: types, sharding rules on one axis and on two, expansions, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch._subclasses import FakeTensorMode

from conjoin.ops import (
    Call,
    NotationError,
    OpSpec,
    TensorType,
    WholeRun,
    all_ops,
    check_expansion,
    check_pair,
    check_rule,
    cuts_for,
    find_spec,
    map_tensors,
    output_types,
    random_call,
    random_tensors,
    run_whole,
    sharding_rules,
)
from conjoin.ops.declarations import elementwise, joining, lookup, movement, reductions, views
from tests.cases import each_of

OVERLOADS = [name for spec in all_ops() for name in spec.names]
EXPANDED = [name for spec in all_ops() for name in spec.names if spec.expansion or spec.by_parts]
SEEDS = range(6)
each_overload = each_of(OVERLOADS)


def each_seed(test: Callable[[str, int], None]) -> Callable[[str], None]:
    """A test of an operator run on what some seeds draw, one after the other."""

    def of_all(op: str) -> None:
        for seed in SEEDS:
            try:
                test(op, seed)
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise

    of_all.__name__, of_all.__doc__ = test.__name__, test.__doc__
    return of_all


def declared(op: str) -> OpSpec:
    spec = find_spec(op)
    assert spec is not None
    return spec


@each_overload
@each_seed
def test_shapes_and_dtypes_are_those_of_torch(op: str, seed: int) -> None:
    spec = declared(op)
    call = random_call(spec, Random(seed), op)
    outputs = run_whole(call, random_tensors(spec, call, seed))
    assert output_types(spec, call) == tuple(TensorType(tuple(o.shape), o.dtype) for o in outputs)


@each_overload
@each_seed
def test_every_sharding_rule_recombines(op: str, seed: int) -> None:
    spec, rng = declared(op), Random(seed)
    call = random_call(spec, rng, op)
    tensors = random_tensors(spec, call, seed)
    if spec.random:
        return  # what is drawn differs each time; see test_randomness.py
    whole = WholeRun.of(call, tensors)
    for rule in sharding_rules(spec, call):
        check_rule(spec, call, rule, tensors, cuts_for(spec, call, rule, rng), whole)


@each_overload
@each_seed
def test_two_indices_split_at_once_recombine(op: str, seed: int) -> None:
    spec, rng = declared(op), Random(seed)
    call = random_call(spec, rng, op)
    splits = list({rule.index: rule for rule in sharding_rules(spec, call) if rule.index is not None}.values())
    if spec.random or len(splits) < 2:
        return
    first, second = rng.sample(splits, 2)
    tensors = random_tensors(spec, call, seed)
    cuts = cuts_for(spec, call, first, rng), cuts_for(spec, call, second, rng)
    check_pair(spec, call, (first, second), tensors, cuts)


@each_of([(op, seed) for op in EXPANDED for seed in range(30)], at_once=60)
def test_every_expansion_computes_the_same(case: tuple[str, int]) -> None:
    op, seed = case
    spec = declared(op)
    call = random_call(spec, Random(seed), op)
    check_expansion(spec, call, random_tensors(spec, call, seed))


FLOATS = (torch.float32, torch.bfloat16, torch.float64)
PROMOTING = {
    name
    for family in (elementwise, reductions, joining, movement, views, lookup)
    for spec in family.OPS
    for name in spec.names
} - {"hardshrink", "leaky_relu", "square", "pairwise_distance", "linalg_cross", "cross"}
"""Where torch promotes dtypes of all kinds; but for some whose shape functions accept what the kernels refuse."""


def types_by_torch(call: Call) -> tuple[TensorType, ...] | None:
    """What the kernel gives; what torch says without data where it refuses these dtypes or values; None if both do."""
    try:
        outputs = run_whole(call, [torch.zeros(t.shape, dtype=t.dtype) for t in call.tensors])
    except Exception:  # a kernel refuses in any way, warnings among them
        with FakeTensorMode():
            try:
                outputs = run_whole(call, [torch.empty(t.shape, dtype=t.dtype) for t in call.tensors])
            except (RuntimeError, NotImplementedError, TypeError, AssertionError):
                return None
    return tuple(TensorType(tuple(o.shape), o.dtype) for o in outputs)


@each_overload
@each_seed
def test_dtypes_follow_torch_promotion(op: str, seed: int) -> None:
    spec, rng = declared(op), Random(seed)
    call = random_call(spec, rng, op)
    kinds: tuple[torch.dtype, ...] = (rng.choice(FLOATS),)
    if op in PROMOTING and rng.random() < 0.6:
        kinds = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64)
    call = Call(
        op,
        map_tensors(op, call.args, lambda t: TensorType(t.shape, rng.choice(kinds)) if t.dtype == torch.float64 else t),
    )
    want = types_by_torch(call)
    if want is None:
        return  # not for these dtypes
    try:
        derived = output_types(spec, call)
    except NotationError:
        return  # opaque for these dtypes
    assert derived == want
