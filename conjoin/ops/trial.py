"""A declaration put to the test: random calls, every derived rule on one axis and on two, types, expansions.

What it says is compared with the operator itself, run whole. The first call for which it is wrong is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from conjoin.ops.check import CheckFailed, WholeRun, check_expansion, check_pair, check_rule, run_whole, types_on_meta
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import random_call, random_cuts, random_tensors
from conjoin.ops.sharding import ShardingRule, sharding_rules, splittable
from conjoin.ops.spec import Call, OpSpec, map_tensors, output_types, space_of
from conjoin.ops.tensor_type import TensorType

NUM_CALLS = 12
_OTHER_DTYPES = (torch.float32, torch.bfloat16)


class CannotTry(Exception):
    """The operator does not run on what its declaration says that it takes."""


def try_out(spec: OpSpec, num_calls: int = NUM_CALLS) -> int:
    """How many derived rules held on random calls; CheckFailed tells a counterexample, CannotTry why there is none.

    Every index that may be split is split at least once.
    """
    held, seen, cut = 0, set[str](), set[str]()
    for seed in range(num_calls):
        rng = Random(seed)
        call, tensors = _drawn(spec, rng, seed)
        whole = _whole(call, tensors)
        _check_types(spec, call, whole)
        rules = sharding_rules(spec, call)
        for rule in rules:
            with _told(call):
                check_rule(spec, call, rule, tensors, cuts_for(spec, call, rule, rng), whole)
        held += len(rules)
        _check_more(spec, call, tensors, rules, rng)
        space = space_of(spec, call)
        seen |= {index for index in space.notation.indices() if index not in space.notation.whole}
        cut.update(splittable(space))
    if seen - cut:
        raise CannotTry(f"in {num_calls} calls the index {min(seen - cut)} was never longer than 1, and never split")
    return held


def cuts_for(spec: OpSpec, call: Call, rule: ShardingRule, rng: Random) -> tuple[int, ...]:
    """Two or three uneven pieces of the rule's index; where nothing is split, two devices."""
    if rule.index is None:
        return 0, 1, 2
    return random_cuts(space_of(spec, call).sizes[rule.index], rng.choice((2, 2, 3)), rng)


def _drawn(spec: OpSpec, rng: Random, seed: int) -> tuple[Call, list[Tensor]]:
    """A random call with its operands."""
    try:
        call = random_call(spec, rng)
        return call, random_tensors(spec, call, seed)
    except (AssertionError, NotationError, LookupError, TypeError, ValueError) as error:
        raise CannotTry(f"no call can be drawn from it: {_first_line(error)}") from None


def _whole(call: Call, tensors: list[Tensor]) -> WholeRun:
    """The operator on the whole operands, which gives the same each time."""
    try:
        once, again = (run_whole(call, [x.detach() for x in tensors]) for _ in range(2))
        if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(once, again, strict=True)):
            return WholeRun.of(call, tensors)
    except Exception as error:  # a stranger's operator on random numbers may fail in any way; it is told
        raise CannotTry(f"{shown(call)} fails with {type(error).__name__}: {_first_line(error)}") from None
    raise CannotTry(f"{shown(call)} gives other values when it is called again")


def _check_types(spec: OpSpec, call: Call, whole: WholeRun) -> None:
    """The types that the declaration gives are those of the outputs, also for other dtypes of floats."""
    made = tuple(TensorType(tuple(x.shape), x.dtype) for x in whole.outputs)
    _compare_types(spec, call, made)
    for dtype in _OTHER_DTYPES:
        other = Call(call.op, map_tensors(call.op, call.args, partial(_in_dtype, dtype)))
        try:
            stated = types_on_meta(other)
        except Exception:  # not for these dtypes
            continue
        if stated is not None:
            _compare_types(spec, other, stated)


def _in_dtype(dtype: torch.dtype, type: TensorType) -> TensorType:
    return TensorType(type.shape, dtype) if type.dtype.is_floating_point else type


def _compare_types(spec: OpSpec, call: Call, made: tuple[TensorType, ...]) -> None:
    derived = output_types(spec, call)
    if derived != made:
        says, gives = (", ".join(map(str, types)) for types in (derived, made))
        raise CheckFailed(f"{shown(call)} gives {gives}, and its declaration says {says}")


def _check_more(spec: OpSpec, call: Call, tensors: list[Tensor], rules: tuple[ShardingRule, ...], rng: Random) -> None:
    """Two indices split at once, and what the operator expands to."""
    splits = [rule for rule in rules if rule.index is not None]
    with _told(call):
        if len(splits) > 1:
            first, second = rng.sample(splits, 2)
            cuts = (cuts_for(spec, call, first, rng), cuts_for(spec, call, second, rng))
            check_pair(spec, call, (first, second), tensors, cuts)
        if spec.expansion is not None or spec.by_parts is not None:
            check_expansion(spec, call, tensors)


@contextmanager
def _told(call: Call) -> Iterator[None]:
    """Whatever a part of a call raises refutes the declaration, and is told with the call."""
    try:
        yield
    except Exception as error:  # a stranger's operator may fail in any way on a part that it should take
        what = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {_first_line(error)}"
        raise CheckFailed(f"for {shown(call)}: {what}") from None


def shown(call: Call) -> str:
    """A call in one line: `scan(f64[3,4], 2)`."""
    return f"{call.op}({', '.join(_words(value) for value in call.args)})"


def _words(value: Any) -> str:
    return f"[{', '.join(map(_words, value))}]" if isinstance(value, tuple) else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200].rstrip(".")
