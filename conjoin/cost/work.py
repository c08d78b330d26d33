"""How much a call and its backward compute and move, and the family of kernels that does it; from the declarations.

The backward of a call is derived from its `terms`, the output as a sum of products of operands:

- An operand in a product: its gradient is the same product with the output's gradient in its place, so the flops of
  the forward; the output's gradient and the other factors are read, its own gradient is written.
- An operand that is only added: its gradient is the output's, which costs nothing where the shapes agree, and is summed
  where the operand was broadcast. What is read out of it (lookups, copies in another order) is put back by a pass over
  the operand.
- An operand in no term (not linear): the gradients of all operands together take twice the forward's flops, as the
  chain rule multiplies at every step, and all operands are read again. Where autograd takes several kernels for it
  (`backward_passes`), each of them reads and writes.
- A view gives its gradient back as a view; a part gives it back padded with zeros, an expanded one summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from conjoin.ops import (
    LINEAR_RELU,
    SCALED_LINEAR,
    Call,
    OpSpec,
    TensorType,
    bytes_read,
    find_spec,
    flops,
    output_types,
    space_of,
    spec_for,
)

CONTRACTION, CONVOLUTION, ATTENTION, RECURRENT = "contraction", "convolution", "attention", "recurrent"
ELEMENTWISE, REDUCTION, LOOKUP, MOVEMENT = "elementwise", "reduction", "lookup", "movement"
VIEW, OPAQUE = "view", "opaque"
FAMILIES = (
    CONTRACTION, CONVOLUTION, ATTENTION, RECURRENT, ELEMENTWISE, REDUCTION, LOOKUP, MOVEMENT, VIEW, OPAQUE,
)  # fmt: skip


class Work(NamedTuple):
    """What a device has to do."""

    flops: float
    bytes: float

    def __bool__(self) -> bool:
        return self.flops > 0 or self.bytes > 0


NO_WORK = Work(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CallWork:
    """Family, dtype it is computed in, and the work of a call and of its backward."""

    family: str
    dtype: str
    forward: Work
    backward: Work


def work_of(call: Call, needs: tuple[int, ...]) -> CallWork:
    """Family and work of a call whose operands at `needs` get a gradient.

    >>> import torch
    >>> x, w = TensorType((8, 4), torch.float32), TensorType((16, 4), torch.float32)
    >>> work = work_of(Call("linear", (x, w, None)), (0, 1))
    >>> work.family, work.dtype, work.forward.flops, work.backward.flops
    ('contraction', 'float32', 1024.0, 2048.0)
    """
    spec = spec_for(call)
    if spec is None:
        return _opaque(call, needs)
    if call.op in FUSED:
        return _fused(call, needs)
    if is_in_eight_bits(call):
        return _in_eight_bits(call, needs)
    family, outputs = _family(spec, call), output_types(spec, call)
    read, written = bytes_read(spec, call), sum(output.bytes for output in outputs)
    forward = NO_WORK if spec.view else Work(flops(spec, call), float(read + written))
    backward = NO_WORK
    if needs and spec.view:
        backward = _view_backward(call, outputs)
    elif needs:
        backward = _backward(_Case(spec, call, family, outputs), needs, forward)
    return CallWork(family, _dtype(call), forward, backward)


def is_product(call: Call, dtype: str) -> bool:
    """Whether a call is a product of matrices in a dtype; torch rounds operands of these to TF32 where that is asked.

    >>> x = TensorType((8, 8), torch.float32)
    >>> is_product(Call("mm", (x, x)), "float32"), is_product(Call("relu", (x,)), "float32")
    (True, False)
    """
    work = work_of(call, ())
    return work.family == CONTRACTION and work.dtype == dtype


_IN_EIGHT_BITS = (11, 10)
"""Of a product in eight bits: to find each operand's scale four, to cast one each, and the products."""
FUSED = {LINEAR_RELU: ("linear", "relu")}
"""Operators that are two in one kernel, a product and a function of it: the function costs nothing until backward."""


def parts_of(call: Call, needs: tuple[int, ...]) -> tuple[tuple[Call, tuple[int, ...]], tuple[Call, tuple[int, ...]]]:
    """The two calls that a fused one is, each with the operands that get a gradient."""
    spec = spec_for(call)
    assert spec is not None, "fused operators are declared"
    product, function = FUSED[call.op]
    return (Call(product, call.args), needs), (Call(function, output_types(spec, call)), (0,) if needs else ())


def _fused(call: Call, needs: tuple[int, ...]) -> CallWork:
    product, function = (work_of(*part) for part in parts_of(call, needs))
    return CallWork(product.family, product.dtype, product.forward, _both(product.backward, function.backward))


def kernel_counts(call: Call) -> tuple[int, int]:
    """How many kernels a call is, and its backward."""
    spec = find_spec(call.op)
    return _IN_EIGHT_BITS if is_in_eight_bits(call) else (1, 1) if spec is None else spec.num_kernels


def is_composed(op: str) -> bool:
    """Whether an operator is written in many kernels, of which one says nothing."""
    spec = find_spec(op)
    return spec is not None and spec.num_kernels != (1, 1)


def is_in_eight_bits(call: Call) -> bool:
    """Whether a call is a product in float8, which it is of operands in bfloat16 only."""
    return call.op == SCALED_LINEAR and call.tensors[0].dtype == torch.bfloat16


def _in_eight_bits(call: Call, needs: tuple[int, ...]) -> CallWork:
    """The products alone: of operands that were cast, and gradients too, half as many bytes are read."""
    plain, (x, weight) = work_of(Call("linear", call.args), needs), call.tensors[:2]
    gradient = plain.forward.bytes - sum(tensor.bytes for tensor in call.tensors)
    less = {0: gradient + weight.bytes, 1: gradient + x.bytes}
    saved = sum(less.get(i, 0.0) / 2 for i in needs)
    forward = Work(plain.forward.flops, plain.forward.bytes - (x.bytes + weight.bytes) / 2)
    backward = Work(plain.backward.flops, plain.backward.bytes - saved) if needs else NO_WORK
    return CallWork(plain.family, "float8", forward, backward)


def _both(one: Work, other: Work) -> Work:
    return Work(one.flops + other.flops, one.bytes + other.bytes)


class _Case(NamedTuple):
    """A call and what was found out about it already."""

    spec: OpSpec
    call: Call
    family: str
    outputs: tuple[TensorType, ...]


def _opaque(call: Call, needs: tuple[int, ...]) -> CallWork:
    """Nothing is known of the operator: as much is taken to be written as read, with one operation for each element."""
    read = float(sum(tensor.bytes for tensor in call.tensors))
    forward = Work(float(sum(tensor.num_elements for tensor in call.tensors)), 2 * read)
    backward = Work(2 * forward.flops, 3 * read) if needs else NO_WORK
    return CallWork(OPAQUE, _dtype(call), forward, backward)


def _dtype(call: Call) -> str:
    """The dtype that a call is computed in: that of its first floating-point operand."""
    found = next((t.dtype for t in call.tensors if t.dtype.is_floating_point or t.dtype.is_complex), torch.float32)
    return str(found).removeprefix("torch.")


def _family(spec: OpSpec, call: Call) -> str:
    if spec.view:
        return VIEW
    if spec.family:
        return spec.family
    notation = space_of(spec, call).notation
    multiplies = any(len(words) > 1 or words[0].endswith("*") for words in _terms(spec, call))
    if multiplies and notation.summed():
        return CONTRACTION
    if any(access.addresses for access in notation.operands):
        return LOOKUP
    if spec.flops == 0:
        return MOVEMENT
    return REDUCTION if notation.summed() or notation.whole else ELEMENTWISE


def _terms(spec: OpSpec, call: Call) -> list[list[str]]:
    """The words of each term; none where the output is linear in nothing."""
    declared = spec.terms if isinstance(spec.terms, str) else spec.terms(call)
    return [term.split() for term in declared.split("+") if term.split()]


def _backward(case: _Case, needs: tuple[int, ...], forward: Work) -> Work:
    names, operands, gradient = case.call.operand_names, case.call.tensors, case.outputs[0].bytes
    terms = _terms(case.spec, case.call)
    if any(not any(_occurs(names[i], words) for words in terms) for i in needs):
        if case.spec.backward_passes:
            return Work(2 * forward.flops, float(case.spec.backward_passes * operands[0].bytes))
        return Work(2 * forward.flops, forward.bytes + sum(operands[i].bytes for i in needs))
    total = NO_WORK
    for i in needs:
        words = next(words for words in terms if _occurs(names[i], words))
        if len(words) > 1 or words[0].endswith("*"):
            others = sum(operands[k].bytes for k in range(len(names)) if k != i and _occurs(names[k], words))
            part = Work(forward.flops, float(gradient + others + operands[i].bytes))
        elif names.count(names[i]) > 1:
            part = NO_WORK  # joined operands: each gradient is a view of a part of the output's
        else:
            part = _added_backward(case, i)
        total = _both(total, part)
    return total


def _occurs(name: str, words: list[str]) -> bool:
    return any(word.strip("*") == name for word in words)


def _view_backward(call: Call, outputs: tuple[TensorType, ...]) -> Work:
    operand = call.tensors[0]
    gradients = sum(output.bytes for output in outputs)
    return NO_WORK if gradients == operand.bytes else Work(0.0, float(gradients + operand.bytes))


def _added_backward(case: _Case, i: int) -> Work:
    """The gradient of an operand that is only added: the output's own, spread, summed or put back."""
    operand, output = case.call.tensors[i], case.outputs[0]
    same_size = operand.num_elements == output.num_elements and operand.dtype == output.dtype
    if same_size and (case.family in (CONTRACTION, CONVOLUTION) or _hands_on(case, i)):
        return NO_WORK
    if case.family == REDUCTION and operand.num_elements > output.num_elements and not _averages(case):
        return NO_WORK  # the gradient of a sum is the output's, expanded without a copy
    summed = float(output.num_elements) if operand.num_elements < output.num_elements else 0.0
    return Work(summed, float(sum(each.bytes for each in case.outputs) + operand.bytes))


def _hands_on(case: _Case, i: int) -> bool:
    name = case.call.operand_names[i]
    return name in case.spec.hands_on and (name == "self" or case.call["alpha"] in (None, 1))


def _averages(case: _Case) -> bool:
    return bool(space_of(case.spec, case.call).notation.averaged)
