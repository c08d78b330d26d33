"""How what random calls read lies in memory: numbers are drawn in that order, so it must stay as the model has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

Order = tuple[int, ...]
"""The dims of a tensor as they lie in memory, the outermost first."""


def drawn_orders(graph: fx.Graph, values: Mapping[fx.Node, Any] = MappingProxyType({})) -> list[list[Order]]:
    """How the operands of each random call lie in memory, which is the order that numbers are drawn in."""
    return [
        [order_of(values.get(read, read.meta["val"])) for read in node.all_input_nodes]
        for node in graph.nodes
        if draws(node)
    ]


def order_of(tensor: Tensor) -> Order:
    """How what is made like a tensor lies."""
    drawn = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))
    strides = drawn.stride()
    return tuple(sorted(range(drawn.dim()), key=lambda dim: (-strides[dim], dim)))


def keep_orders(graph: fx.Graph, orders: list[list[Order]], replaced: Collection[fx.Node] = ()) -> None:
    """Lay out what random calls read as it lay when calls were in place: a call that returns a new value chooses.

    `orders` are those of before. The values of calls that were `replaced`, and of what reads them, are looked at again.
    """
    if not orders:
        return
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes if replaced else ():
        follows = node.op == "call_function" and any(read in values for read in node.all_input_nodes)
        if node in replaced or follows:
            given = fx.node.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta["val"]))
            values[node] = node.target(*given[0], **given[1])
    drawing = [node for node in graph.nodes if draws(node)]
    for node, before, after in zip(drawing, orders, drawn_orders(graph, values), strict=True):
        for read, wanted, found in zip(list(node.all_input_nodes), before, after, strict=True):
            is_for_all = len(wanted) < len(found)  # as `torch.vmap` draws, from an operand of its own
            if wanted != found and not is_for_all:
                with graph.inserting_before(node):
                    node.replace_input_with(read, _laid_out(graph, read, wanted))


def _laid_out(graph: fx.Graph, node: fx.Node, order: Order) -> fx.Node:
    """A copy of a tensor whose dims lie in this order."""
    back = tuple(order.index(dim) for dim in range(len(order)))
    ops = torch.ops.aten
    calls = (ops.permute.default, order), (ops.clone.default,), (ops.permute.default, back)
    for function, *args in calls:
        kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format} if function is ops.clone.default else {}
        made = graph.call_function(function, (node, *args), kwargs)
        made.meta = {**node.meta, "val": function(node.meta["val"], *args, **kwargs)}
        node = made
    return node


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers. Unused draws stay: what is drawn after them must not change."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
