"""Gradients of micro-batches added up where they are made: each in the `grad` of an alias of its parameter.

So the gradients of a micro-batch are never there all at once beside the sums, and each is added while it is still in
the processor's cache. Torch writes on the first sum in place, and that may be memory that two gradients share, as of
two parameters that are flattened and added: it counts twice then. So whatever overlaps is copied after the first pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from conjoin.runtime.program.step_values import Gradients


def add_gradients(
    ends: Sequence[Tensor] | Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    others: Sequence[Tensor] = (),
) -> None:
    """Add the gradients of parameters to their sums, and let others have theirs; from those of some ends of a pass."""
    first = any(parameter.grad is None for parameter in parameters)
    torch.autograd.backward(ends, gradients, inputs=[*parameters, *others])
    if first:
        _part(parameters, others)


def take_gradients(parameters: Iterable[Tensor]) -> Gradients:
    """The gradients as they are added up, which are there no more afterwards."""
    found: Gradients = []
    for parameter in parameters:
        found.append(parameter.grad)
        parameter.grad = None
    return found


def add_to(parameters: Iterable[Tensor], found: Gradients) -> None:
    """Add gradients to those of parameters; what autograd gave out is not written to: others may see it."""
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _part(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Give every sum memory of its own."""
    spans = []
    for place, x in enumerate((*parameters, *others)):
        if x.grad is not None and x.grad.layout == torch.strided:
            begin = x.grad.data_ptr()
            spans.append((begin, begin + x.grad.nbytes, place))
    end, last, shared = 0, 0, set[int]()
    for begin, stop, place in sorted(spans):
        if begin < end:
            shared |= {last, place}
        if stop > end:
            end, last = stop, place
    for place in shared:
        if place < len(parameters):
            parameters[place].grad = parameters[place].grad.clone()  # type: ignore[union-attr] # it has a span
