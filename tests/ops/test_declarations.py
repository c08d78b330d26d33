"""Every declaration against torch itself: types, sharding rules on one axis and on two, expansions, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from conjoin.ops import (
    Call,
    Greatest,
    NotationError,
    OpSpec,
    Partial,
    Placement,
    ShardingRule,
    Split,
    TensorType,
    WholeRun,
    all_ops,
    check_expansion,
    check_rule,
    execute,
    find_spec,
    map_tensors,
    operand_spans,
    output_types,
    random_call,
    random_cuts,
    random_tensors,
    run_local,
    run_whole,
    sharding_rules,
    space_of,
)
from conjoin.ops.declarations import elementwise, joining, lookup, movement, reductions, views

OVERLOADS = [name for spec in all_ops() for name in spec.names]
EXPANDED = [name for spec in all_ops() for name in spec.names if spec.expansion or spec.by_parts]
SEEDS = range(6)
each_overload = pytest.mark.parametrize("op", OVERLOADS)


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


def cuts_for(spec: OpSpec, call: Call, rule: ShardingRule, rng: Random) -> tuple[int, ...]:
    """Two or three uneven pieces of the rule's index; where nothing is split, two devices."""
    if rule.index is None:
        return 0, 1, 2
    return random_cuts(space_of(spec, call).sizes[rule.index], rng.choice((2, 2, 3)), rng)


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


SHARES = (1.75, -0.75, 0.0)


def part_of(tensor: Tensor, placements: tuple[Placement, Placement], place: tuple[int, int]) -> Tensor:
    """Partial sums on either axis are multiples of the value; integers are held by the first device."""
    for placement, i in zip(placements, place, strict=True):
        if isinstance(placement, Partial):
            tensor = tensor * (SHARES[i] if tensor.dtype != torch.int64 else int(i == 0))
    return tensor


def recombine(parts: list[tuple[Tensor, ...]], placements: tuple[Placement, ...]) -> tuple[Tensor, ...]:
    def put_together(pieces: tuple[Tensor, ...], placement: Placement) -> Tensor:
        if isinstance(placement, Split):
            return torch.cat(pieces, placement.dim)
        stacked = torch.stack(pieces)
        return stacked.amax(0) if placement is Greatest() else stacked.sum(0)

    return tuple(map(put_together, zip(*parts, strict=True), placements))


def run_on_grid(
    spec: OpSpec,
    call: Call,
    rules: tuple[ShardingRule, ShardingRule],
    cuts: list[tuple[int, ...]],
    tensors: list[Tensor],
) -> tuple[Tensor, ...]:
    """Two indices split at once, each along one axis of a grid of devices."""
    rows = []
    for i, first in enumerate(pairwise(cuts[0])):
        row = []
        for j, second in enumerate(pairwise(cuts[1])):
            pieces = {str(rules[0].index): first, str(rules[1].index): second}
            parts = []
            for n, (tensor, spans) in enumerate(zip(tensors, operand_spans(spec, call, pieces), strict=True)):
                for span in spans:
                    tensor = tensor.narrow(span.dim, span.start, span.stop - span.start)
                parts.append(part_of(tensor, (rules[0].operands[n], rules[1].operands[n]), (i, j)))
            row.append(run_local(spec, call, pieces, parts, execute))
        rows.append(recombine(row, rules[1].outputs))
    return recombine(rows, rules[0].outputs)


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
    cuts = [cuts_for(spec, call, rule, rng) for rule in (first, second)]
    outputs = run_on_grid(spec, call, (first, second), cuts, tensors)
    for got, want in zip(outputs, run_whole(call, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("op", EXPANDED)
@pytest.mark.parametrize("seed", range(30))
def test_every_expansion_computes_the_same(op: str, seed: int) -> None:
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
