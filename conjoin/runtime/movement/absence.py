"""Tensors of which a rank has nothing: what stands for them where another place of the mesh runs a branch.

A rank that a node does not concern skips it. Its backward pass must still come through every reshard that the others
come through, and in the same order: a collective needs all its members. So the operands of what was skipped, which are
empty here, are joined to one empty tensor where the branch is read again. Autograd runs what was made last first,
whatever lies between, and reshards are made in the same order on all ranks; their backwards are then run alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conjoin.comm import leaves_early
from conjoin.ir import Graph, Value, is_parallel, origin
from conjoin.ops import At, first_order
from conjoin.runtime.ranks.communicator import uncompiled


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: tuple[tuple[int, ...], torch.dtype, torch.device], *operands: Tensor) -> Tensor:
        shape, dtype, device = like
        ctx.operands = [(tuple(x.shape), x.dtype, x.device) for x in operands]
        return torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.operands)


@uncompiled
def join(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *operands: Tensor) -> Tensor:
    """An empty tensor whose gradient goes back to the operands of what was skipped."""
    if dtype.is_floating_point or dtype.is_complex:
        return _Joined.apply((shape, dtype, device), *operands)  # type: ignore[no-any-return, no-untyped-call]
    return torch.empty(shape, dtype=dtype, device=device)


def is_confined(graph: Graph) -> bool:
    """Whether some node of a graph runs at one place of an axis only."""
    return any(isinstance(placement, At) for node in graph.nodes for t in node.types for _, placement in t.layout)


def find_leaving(graph: Graph) -> dict[Value, list[Value]]:
    """For every value how it is read at places where it is not, in the order of reading."""
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    reads = [value for node in graph.nodes if not is_parallel(node) for value in node.inputs]
    found: dict[Value, list[Value]] = {}
    for value in (*reads, *results):
        if leaves_early(origin(value).type.layout, value.type.layout):
            found.setdefault(origin(value), []).append(value)
    return found
