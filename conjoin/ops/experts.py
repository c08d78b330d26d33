"""Layers of experts: every row of the data meets the weights of the expert that it was sent to, and of no other.

    expert_linear(x, weight, expert)[i] = x[i // c] @ weight[expert[i]]             c rows for each row of x
    expert_network(x, inward, outward, expert)[i] = f(x[i // c] @ inward[e]) @ outward[e]     with e = expert[i]
    routed_experts(x, inward, outward, expert, gate)[i] = (f(y @ gate[e]) * (y @ inward[e])) @ outward[e]  y = x[i // c]

Rows are brought into the order of their experts, multiplied group by group, and put back; sorting is stable, so that
equal calls add up in the same order. `experts` says how many there are in all: where the weights are those of a part of
them only, the rows of the others are zero, and are not computed. The ends of the groups are read by the host once, and
not at all where one kernel takes all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.dtypes import under_autocast
from conjoin.ops.first_order import first_order

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""What may stand between the two layers of an expert."""


def expert_linear(x: Tensor, weight: Tensor, expert: Tensor, experts: int) -> Tensor:
    """Each row times the matrix of its expert; a row of x is read by as many neighbouring rows as there are for it.

    >>> x, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[[3.0]], [[5.0]]])
    >>> expert_linear(x, weight, torch.tensor([0, 1, 1, 0]), 2).flatten()
    tensor([ 3.,  5., 10.,  6.])
    """
    groups = _Groups.of(expert, weight.shape[0], experts)
    with _plain(x):
        return groups.put_back(groups.times(groups.rows_of(x), weight))


def expert_network(x: Tensor, inward: Tensor, outward: Tensor, expert: Tensor, experts: int, activation: str) -> Tensor:
    """Both layers of every row's expert; where the first makes twice what the second takes, half gates half."""
    groups = _Groups.of(expert, inward.shape[0], experts)
    with _plain(x):
        h = groups.times(groups.rows_of(x), inward)
        return groups.put_back(groups.times(_activated(h, outward.shape[1], activation), outward))


def routed_experts(  # noqa: PLR0913 - as a network has them, and the gate
    x: Tensor,
    inward: Tensor,
    outward: Tensor,
    expert: Tensor,
    experts: int,
    activation: str,
    gate: Tensor | None = None,
) -> Tensor:
    """The same, with what gates in a matrix of its own where it is given: then features of an expert may be split."""
    if gate is None:
        return expert_network(x, inward, outward, expert, experts, activation)
    groups = _Groups.of(expert, inward.shape[0], experts)
    with _plain(x):
        rows = groups.rows_of(x)
        h = ACTIVATIONS[activation](groups.times(rows, gate)) * groups.times(rows, inward)
        return groups.put_back(groups.times(h, outward))


def _activated(h: Tensor, width: int, activation: str) -> Tensor:
    if h.shape[1] == width:
        return ACTIVATIONS[activation](h)
    gate, up = h[:, :width], h[:, width:]
    return ACTIVATIONS[activation](gate) * up


def _plain(x: Tensor) -> AbstractContextManager[Any]:
    """In the dtypes given, as torch's own product of groups is, whatever autocast the caller runs under."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if under_autocast(kind) else nullcontext()


@dataclass(frozen=True, slots=True)
class _Groups:
    """The rows in the order of their experts, without those of experts that are not here."""

    order: Tensor
    ends: Tensor
    """Where the rows of each expert end."""
    num_rows: int
    """All of them, in the order they came in."""

    @staticmethod
    def of(expert: Tensor, num_here: int, experts: int) -> _Groups:
        num_rows = expert.shape[0]
        if expert.is_meta:
            num_own = -(-num_rows * num_here // experts)  # as many as there are if all are chosen alike
            return _Groups(expert.new_empty(num_own), expert.new_empty(num_here, dtype=torch.int32), num_rows)
        is_here = (expert >= 0) & (expert < num_here)
        ids, order = torch.where(is_here, expert, num_here).sort(stable=True)
        numbers = torch.arange(num_here, device=expert.device, dtype=ids.dtype)
        ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
        if num_here < experts:
            order = order[: int(ends[-1])]
        return _Groups(order, ends, num_rows)

    def rows_of(self, x: Tensor) -> Tensor:
        return take_rows(x, self.order, self.num_rows)

    def times(self, rows: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _Product.apply(rows, weight, self.ends)  # type: ignore[no-untyped-call]
        return product

    def put_back(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.num_rows, rows.shape[1]).index_copy(0, self.order, rows)


def take_rows(x: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Rows in an order, of so many, of which each row of x is as many neighbouring ones.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 0]), 4).flatten()
    tensor([2., 1.])
    """
    rows: Tensor = _Taken.apply(x, order, num_rows)  # type: ignore[no-untyped-call]
    return rows


class _Taken(torch.autograd.Function):
    """Rows in an order, each row of x as often as there are rows for it; gradients are added up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape, ctx.num_rows = x.shape, num_rows
        each = num_rows // max(x.shape[0], 1)
        return x.index_select(0, order if each == 1 else order // max(each, 1))

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        num, width = ctx.shape
        whole = gradient.new_zeros(ctx.num_rows, width).index_copy_(0, order, gradient)
        return (whole if ctx.num_rows == num else whole.view(num, -1, width).sum(1)), None, None


class _Product(torch.autograd.Function):
    """Rows, in groups that end somewhere, times a matrix for each group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return _times(rows, weight, ends)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        needs = ctx.needs_input_grad
        return (
            _times(gradient, weight.transpose(1, 2), ends) if needs[0] else None,
            _outer(rows, gradient, ends) if needs[1] else None,
            None,
        )


def _times(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its matrix."""
    if _in_one_kernel(rows, weight):
        return functional.grouped_mm(rows, weight, offs=ends)
    made = rows.new_empty(rows.shape[0], weight.shape[2])
    for i, (start, end) in _spans(ends):
        torch.mm(rows[start:end], weight[i], out=made[start:end])
    return made


def _outer(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the matrices: each group of rows, transposed, times that of gradients."""
    if _in_one_kernel(rows, gradient):
        return functional.grouped_mm(rows.t(), gradient, offs=ends)
    made = rows.new_zeros(ends.shape[0], rows.shape[1], gradient.shape[1])
    for i, (start, end) in _spans(ends):
        torch.mm(rows[start:end].t(), gradient[start:end], out=made[i])
    return made


def _spans(ends: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """The groups that have rows, with where each starts and ends; none where there are no values to look at."""
    known = [0] if ends.is_meta else [0, *ends.tolist()]
    return [(i, (start, end)) for i, (start, end) in enumerate(pairwise(known)) if start < end]


_ALIGNED = 16
"""Bytes that rows and columns of torch's product of groups are multiples of."""


def _in_one_kernel(rows: Tensor, other: Tensor) -> bool:
    """Whether torch has one kernel for all groups: in bfloat16, on GPUs from Ampere on, of sizes that are aligned."""
    if not (rows.is_cuda and rows.dtype == other.dtype == torch.bfloat16 and rows.shape[0]):
        return False
    sizes = (rows.shape[1], other.shape[-1])
    strides = [stride * other.itemsize % _ALIGNED for stride in other.stride() if stride != 1]
    lies_well = other.stride(-1) == 1 or other.stride(-2) == 1
    is_able = torch.cuda.get_device_capability(rows.device) >= (8, 0) and hasattr(functional, "grouped_mm")
    return is_able and lies_well and not any(strides) and not any(n * other.itemsize % _ALIGNED for n in sizes)
