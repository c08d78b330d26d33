"""Proof by running: split as a rule says, compute the parts, recombine, compare values and gradients with the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, assert_never

import torch
from torch import Tensor

from conjoin.ops.aten import find_operator
from conjoin.ops.local import Emit, LocalForm, Pieces, Span, operand_spans, run_local
from conjoin.ops.placement import At, Copies, Greatest, Invariant, Partial, Placement, Split
from conjoin.ops.sharding import ShardingRule
from conjoin.ops.spec import Call, OpSpec, map_tensors, space_of, spread_args
from conjoin.ops.tensor_type import TensorType


class CheckFailed(AssertionError):
    """A declaration says something that running it refutes."""


def execute(op: str, *args: Any, device: str | None = None) -> Any:
    """Apply an operator by name to real tensors; lists of outputs come back as tuples."""
    positional, keywords = spread_args(op, args, device)
    result = find_operator(op)(*positional, **keywords)
    return tuple(result) if isinstance(result, list) else result


def _feeding(tensors: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    """Hands the tensors out one after the other, whatever stood in their places."""
    feed = iter(tensors)
    return lambda _: next(feed)


def run_whole(call: Call, tensors: Sequence[Tensor], device: str | None = None) -> tuple[Tensor, ...]:
    """The operator on the whole operands; a tensor that it makes of nothing is made on the device."""
    args = map_tensors(call.op, call.args, _feeding(tensors))
    result = execute(call.op, *args, device=None if tensors else device)
    return tuple(result) if isinstance(result, tuple) else (result,)


def _take(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    for span in spans:
        tensor = tensor.narrow(span.dim, span.start, span.stop - span.start)
    return tensor


def _addend(tensor: Tensor, part: int) -> Tensor:
    """One of the partial sums of a tensor: the first two differ in every element and in sign, the rest is zero."""
    generator = torch.Generator().manual_seed(tensor.numel())
    if tensor.is_floating_point() or tensor.is_complex():
        share = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) * 3 - 1
        return tensor * (share, 1 - share, torch.zeros_like(share))[min(part, 2)]
    noise = torch.randint(-3, 4, tensor.shape, generator=generator, dtype=tensor.dtype)
    return (tensor - noise, noise, torch.zeros_like(noise))[min(part, 2)]


def _part_of(tensor: Tensor, placement: Placement, spans: Sequence[Span], part: int) -> Tensor:
    match placement:
        case Partial():
            return _addend(tensor, part)
        case Split() | Copies() | Invariant() | Greatest() | At():
            return _take(tensor, spans)
        case _:
            assert_never(placement)


def _recombine(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    match placement:
        case Split(dim):
            return torch.cat(list(parts), dim)
        case Partial():
            return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
        case Greatest():
            return torch.stack(list(parts)).amax(0)
        case Copies() | Invariant():
            if any(not torch.allclose(part, parts[0], rtol=0, atol=0, equal_nan=True) for part in parts[1:]):
                raise CheckFailed("copies differ")
            return parts[0]
        case At(place):
            return parts[place]
        case _:
            assert_never(placement)


def split_run_recombine(
    spec: OpSpec,
    call: Call,
    rule: ShardingRule,
    tensors: Sequence[Tensor],
    cuts: Sequence[int],
    emit: Emit = execute,
) -> tuple[Tensor, ...]:
    """Run every part of a call split at `cuts` (piece boundaries of the rule's index) and put the outputs together."""
    results = []
    for part, piece in enumerate(pairwise(cuts)):
        pieces: Pieces = {} if rule.index is None else {rule.index: piece}
        spans = operand_spans(spec, call, pieces)
        local = [_part_of(t, p, s, part) for t, p, s in zip(tensors, rule.operands, spans, strict=True)]
        results.append(run_local(spec, call, pieces, local, emit))
    if isinstance(rule.operands[0] if rule.operands else None, Invariant):
        results = results[:1]
    return tuple(
        _recombine(parts, placement) for parts, placement in zip(zip(*results, strict=True), rule.outputs, strict=True)
    )


def random_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """A gradient for every output that may have one, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(o.shape, generator=generator, dtype=o.dtype) if o.is_floating_point() or o.is_complex() else None
        for o in outputs
    )


def _gradients(
    outputs: Sequence[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(o, g) for o, g in zip(outputs, given, strict=True) if o.requires_grad and g is not None]
    wanted = [t for t in tensors if t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(wanted)
    return list(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))


_TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""What rounding may make of sums in another order, relative; other dtypes are exact, or as good as."""


def _compare(what: str, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise CheckFailed(f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    if got.dtype != want.dtype:
        raise CheckFailed(f"{what}: dtype {got.dtype} instead of {want.dtype}")
    if torch.equal(got, want):
        return
    dtype, wide = want.dtype, torch.complex128 if want.is_complex() else torch.float64
    got, want = got.detach().to(wide), want.detach().to(wide)
    tolerance = _TOLERANCE.get(dtype, 1e-9)
    if not torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise CheckFailed(f"{what}: off by {(got - want).abs().max().item():.3g}")


GiveGradients = Callable[[Sequence[Tensor]], tuple[Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class WholeRun:
    """What an operator gives for whole operands, and the gradients of those that have one."""

    outputs: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]
    """The gradients of outputs that these are made of."""
    gradients: tuple[Tensor | None, ...]

    @staticmethod
    def of(call: Call, tensors: Sequence[Tensor], give: GiveGradients = random_gradients) -> WholeRun:
        """Run it once, for all that is compared with it."""
        outputs = run_whole(call, tensors)
        given = give(outputs)
        return WholeRun(outputs, given, tuple(_gradients(outputs, tensors, given)))


def _compare_all(what: str, got: Sequence[Tensor], want: WholeRun, tensors: Sequence[Tensor]) -> None:
    """Compare outputs, then the gradients of every operand; an absent gradient is zero."""
    if len(got) != len(want.outputs):
        raise CheckFailed(f"{what}: {len(got)} outputs instead of {len(want.outputs)}")
    for i, (ours, theirs) in enumerate(zip(got, want.outputs, strict=True)):
        _compare(f"{what}: output {i}", ours, theirs)
    wanted = [t for t in tensors if t.requires_grad]
    for i, (tensor, *pair) in enumerate(zip(wanted, _gradients(got, tensors, want.given), want.gradients, strict=True)):
        ours, theirs = (torch.zeros_like(tensor) if gradient is None else gradient for gradient in pair)
        _compare(f"{what}: gradient {i}", ours, theirs)


def check_rule(  # noqa: PLR0913 - a rule of a call on numbers in pieces, what it is compared with, what runs it
    spec: OpSpec,
    call: Call,
    rule: ShardingRule,
    tensors: Sequence[Tensor],
    cuts: Sequence[int],
    whole: WholeRun | None = None,
    emit: Emit = execute,
) -> None:
    """Raise CheckFailed unless the parts, recombined, are the whole: outputs and the gradients of every operand.

    The whole may be given: it is the same for all rules of a call; and how parts are run.
    """
    parts = split_run_recombine(spec, call, rule, tensors, cuts, emit)
    what = f"{call.op} [{rule}] split {rule.index} at {list(cuts)}"
    _compare_all(what, parts, whole or WholeRun.of(call, tensors), tensors)


def check_pair(
    spec: OpSpec,
    call: Call,
    rules: tuple[ShardingRule, ShardingRule],
    tensors: Sequence[Tensor],
    cuts: tuple[Sequence[int], Sequence[int]],
) -> None:
    """Raise CheckFailed unless the outputs are those of the whole where two indices are split at once."""
    what = f"{call.op} split {rules[0].index} at {list(cuts[0])} and {rules[1].index} at {list(cuts[1])}"
    rows = []
    for i, first in enumerate(pairwise(cuts[0])):
        row = []
        for j, second in enumerate(pairwise(cuts[1])):
            pieces = {str(rules[0].index): first, str(rules[1].index): second}
            parts = [
                _share(_take(tensor, spans), (rules[0].operands[n], rules[1].operands[n]), (i, j))
                for n, (tensor, spans) in enumerate(zip(tensors, operand_spans(spec, call, pieces), strict=True))
            ]
            row.append(run_local(spec, call, pieces, parts, execute))
        rows.append(tuple(map(_recombine, zip(*row, strict=True), rules[1].outputs)))
    outputs = map(_recombine, zip(*rows, strict=True), rules[0].outputs)
    for i, (got, want) in enumerate(zip(outputs, run_whole(call, tensors), strict=True)):
        _compare(f"{what}: output {i}", got, want)


_SHARES = (1.75, -0.75, 0.0)


def _share(tensor: Tensor, placements: tuple[Placement, Placement], place: tuple[int, int]) -> Tensor:
    """Partial sums on either axis are multiples of the value; whole numbers are held by the first device."""
    for placement, i in zip(placements, place, strict=True):
        if isinstance(placement, Partial):
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            tensor = tensor * (int(i == 0) if whole else _SHARES[i])
    return tensor


def check_expansion(
    spec: OpSpec, call: Call, tensors: Sequence[Tensor], whole: WholeRun | None = None, emit: Emit = execute
) -> None:
    """Raise CheckFailed unless what the operator expands to computes what it does, outputs and gradients."""
    compositions = [each for each in (spec.expansion, spec.by_parts) if each is not None]
    assert compositions, f"{spec.name} has no expansion"
    for composition in compositions:
        args = map_tensors(call.op, call.args, _feeding(tensors))
        result = composition(LocalForm(spec, call, space_of(spec, call), {}, args, emit))
        expanded = tuple(result) if isinstance(result, tuple) else (result,)
        _compare_all(f"{call.op} expanded", expanded, whole or WholeRun.of(call, tensors), tensors)


def types_on_meta(call: Call) -> tuple[TensorType, ...] | None:
    """What torch itself says of the outputs, asked without data; None where the operator has no such answer."""
    tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in call.tensors]
    try:
        outputs = run_whole(call, tensors, "meta")
    except NotImplementedError:
        return None
    return tuple(TensorType(tuple(output.shape), output.dtype) for output in outputs)
