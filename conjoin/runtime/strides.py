"""The order in memory of what random calls read: what is drawn follows it, so checks give it as one device has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from conjoin.ir import Graph, Node, Value, is_parallel, is_random
from conjoin.ops import TensorType, run_whole


def in_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same tensor in another order in memory."""
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def drawn_strides(graph: Graph) -> dict[Value, tuple[int, ...]]:
    """For each operand of a random call the strides of a tensor that one device makes like it, asked without data."""
    drawn = [value for node in graph.nodes if is_random(node.op, node.args) for value in node.inputs]
    needed = {value.owner for value in drawn}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(value.owner for value in node.inputs)
    made: dict[Value, Tensor] = {Value(leaf): _on_meta(leaf.type) for leaf in graph.leaves}
    for node in graph.nodes:
        if is_parallel(node):
            made[Value(node)] = made.get(node.inputs[0], _on_meta(node.types[0]))
        elif node in needed:
            made.update(zip(node.outputs(), _run_on_meta(node, made), strict=True))
    return {value: torch.empty_like(made[value]).stride() for value in drawn}


def _run_on_meta(node: Node, made: Mapping[Value, Tensor]) -> Sequence[Tensor]:
    """A call without data; what is opaque or has no such form makes tensors in the usual order."""
    if node.inputs and node.spec is not None:
        try:
            return run_whole(node.call, [made[value] for value in node.inputs])
        except NotImplementedError:
            pass
    return [_on_meta(type) for type in node.types]


def _on_meta(type: TensorType) -> Tensor:
    return torch.empty(type.shape, dtype=type.dtype, device="meta")
