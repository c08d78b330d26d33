"""Every attribute of every declared overload, one at a time, in every kind of value that torch's schema lets it have.

Torch judges: where it takes the call, the declaration gives torch's shapes and dtypes, or says that it does not cover
this form; and the sharding rules that it then has recombine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from conjoin.ir import is_random
from conjoin.ops import (
    PLACEMENT_PARAMETERS,
    Call,
    Kind,
    NotationError,
    OpSpec,
    TensorType,
    WholeRun,
    all_ops,
    bind_args,
    check_rule,
    find_operator,
    find_spec,
    output_types,
    random_call,
    random_cuts,
    random_tensors,
    run_whole,
    sharding_rules,
    space_of,
    spec_for,
    types_on_meta,
    why_opaque,
)
from conjoin.ops.declarations.reductions import reduce_over
from tests.cases import each_of

OVERLOADS = [name for spec in all_ops() for name in spec.names if isinstance(find_operator(name), OpOverload)]
MISSTATED = {"_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "logsumexp"}
"""Asked of the kernel itself: without data torch says another thing of these."""
INTERPOLATING = {name for name in OVERLOADS if name.startswith(("upsample_", "grid_sampler"))}
"""So are these: without data torch runs dozens of its own operators for each, which takes a thousand times as long."""
VALUES: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (-1, 0, 1, 2),
    "float": (0.0, 0.5, -1.0, 2, float("inf")),
    "number": (0, 2, -1, 0.5, True),
    "List[int]": ((), (0,), (-1,), (0, 1), (1, 2), (2, 1), (1,), (2,), (2, 2), (0, 1, 2)),
    "List[float]": ((), (1.0,), (2.0, 2.0), (0.5,)),
    "str": (
        "none", "tanh", "floor", "trunc", "ij", "xy", "mean", "sum", "amax", "amin", "prod", "constant", "reflect",
        "replicate", "circular", "linear", "lower", "nearest", "fro", "nuc", "same", "valid",
    ),
    "MemoryFormat": (torch.contiguous_format, torch.preserve_format),
    "ScalarType": (
        torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
        torch.complex64,
    ),
}  # fmt: skip


def values_of(kind: str) -> tuple[Any, ...]:
    return (None, *values_of(kind[9:-1])) if kind.startswith("Optional[") else VALUES[kind]


def declared(op: str) -> OpSpec:
    spec = find_spec(op)
    assert spec is not None
    return spec


def varied(op: str, seed: int) -> Iterator[tuple[str, Call]]:
    """A call of the samples with each of its attributes given each value it may have; each such call once."""
    made: set[str] = set()
    base = random_call(declared(op), Random(seed), op)
    function = find_operator(op)
    assert isinstance(function, OpOverload)
    kinds = {argument.name: str(argument.real_type) for argument in function._schema.arguments}
    for i, parameter in enumerate(base.signature.parameters):
        if parameter.kind is not Kind.ATTRIBUTE or parameter.name in PLACEMENT_PARAMETERS:
            continue
        values = (*values_of(kinds[parameter.name]), *((parameter.default,) if parameter.has_default else ()))
        for value in values:
            call = Call(op, (*base.args[:i], value, *base.args[i + 1 :]))
            written = repr(call.args)  # which tells True from 1
            if written not in made:
                made.add(written)
                yield parameter.name, call


def torch_types(call: Call) -> tuple[TensorType, ...] | None:
    """What torch gives; None where it does not take the call."""
    try:
        if call.op not in MISSTATED | INTERPOLATING:
            return types_on_meta(call)
        outputs = run_whole(call, [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in call.tensors])
    except Exception:  # torch refuses a call in any way
        return None
    return tuple(TensorType(tuple(output.shape), output.dtype) for output in outputs)


def rules_fail(call: Call, seed: int) -> str | None:
    """Which of the rules of a call does not recombine; None where torch cannot run and differentiate it whole."""
    spec = spec_for(call)
    assert spec is not None
    if any(output.dtype.is_floating_point and output.dtype != torch.float64 for output in output_types(spec, call)):
        return None  # parts differ from the whole by rounding, and more than a little
    rng, tensors = Random(seed), random_tensors(spec, call, seed)
    same, *rules = sharding_rules(spec, call)
    try:
        whole = WholeRun.of(call, tensors)
        if not all(bool(output.isfinite().all()) for output in whole.outputs):
            return None  # sums of what is not finite are no numbers
        check_rule(spec, call, same, tensors, (0, 1, 2), whole)
    except Exception:  # not for these values, or without a gradient there
        return None
    for rule in rules:
        cuts = (0, 1, 2) if rule.index is None else random_cuts(space_of(spec, call).sizes[rule.index], 2, rng)
        try:
            check_rule(spec, call, rule, tensors, cuts, whole)
        except Exception as error:  # told with what it is about
            return f"{rule}: {type(error).__name__}: {error}"
    return None


@each_of(OVERLOADS, at_once=8)
def test_types_are_those_of_torch_and_rules_recombine_whatever_the_attributes(op: str) -> None:
    wrong = []
    for name, call in varied(op, seed=len(op)):
        if op == "nanmean" and call["dtype"] is not None and not call["dtype"].is_floating_point:
            continue  # some releases of torch give floating-point numbers all the same
        want = torch_types(call) if spec_for(call) is not None else None
        if want is not None:
            failed = why_opaque(call, want) or (None if is_random(op, call.args) else rules_fail(call, len(op)))
            wrong += [(name, call[name], failed)] if failed is not None else []
    assert wrong == []


def test_a_declaration_that_forgets_an_attribute_is_found() -> None:
    x = TensorType((3, 4), torch.float32)
    call = Call("any.dims", (x, (), False))
    forgets = replace(declared("any.dims"), index=reduce_over("!"))
    assert torch_types(call) != output_types(forgets, call)
    assert why_opaque(call) == "its declaration does not cover this form: " + str(NotationError(
        "an empty dim means another thing in any.dims than in other operators"
    ))  # fmt: skip


REAL, WHOLE = torch.float32, torch.int64
FORMS: dict[str, tuple[str, tuple[Any, ...], str | None]] = {
    "32-bit places": ("bucketize.Tensor", (TensorType((3,), REAL), TensorType((5,), REAL), True), None),
    "32-bit places of rows": (
        "searchsorted.Tensor", (TensorType((5,), REAL), TensorType((3,), REAL), True), None
    ),
    "a range in floats": ("arange.start_step", (0, 0.9, 0.3), None),
    "a range in floats that does not end there": ("arange.start_step", (0, 1.0, 0.3), None),
    "whole numbers of floats": ("arange", (4.5, WHOLE), "cuts them off first"),
    "division that does not round": ("div.Tensor_mode", (TensorType((3,), WHOLE), TensorType((3,), WHOLE)), None),
    "no dims": ("any.dims", (TensorType((3, 4), torch.bool), ()), "an empty dim means another thing"),
    "a sparse gradient": (
        "embedding", (TensorType((5, 2), REAL), TensorType((3,), WHOLE), -1, False, True), "has a sparse gradient",
    ),
    "norm of all": ("_weight_norm", (TensorType((3, 4), REAL), TensorType((1, 4), REAL), -1), "dim -1"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "args", "reason"), FORMS.values(), ids=FORMS)
def test_a_form_is_covered_or_the_reason_is_told(op: str, args: tuple[Any, ...], reason: str | None) -> None:
    call = Call(op, bind_args(op, args, {}))
    if reason is None:
        want = torch_types(call)
        assert want is not None and why_opaque(call, want) is None
    else:
        assert spec_for(call) is None and reason in str(why_opaque(call))
