"""The order in memory of values on one device, found without data: what random calls draw follows it.

`dropout` of a transposed tensor draws for its elements in the order in which they lie. A graph whose values are the
same but lie otherwise draws other numbers for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from conjoin.ir.builder import is_random
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Node, Value
from conjoin.ir.reshards import is_parallel
from conjoin.ops import Call, TensorType, run_whole, spec_for

Strides = tuple[int, ...]
_IMAGE_RANK = 4


@lru_cache(maxsize=32)
def strides_in(graph: Graph, channels_last: bool = False) -> Mapping[Value, Strides]:
    """The strides of all values. Leaves lie as usual, or the images among them with their channels last."""
    found = {Value(leaf): _usual(leaf.type, channels_last) for leaf in graph.leaves}
    add_strides(found, graph.nodes)
    return found


def add_strides(found: dict[Value, Strides], nodes: Iterable[Node]) -> None:
    """Add the strides of what calls make to those of what they read."""
    for node in nodes:
        if is_parallel(node):
            found[Value(node)] = found[node.inputs[0]]
        else:
            made = _made(node.call, tuple(found[value] for value in node.inputs))
            found.update(zip(node.outputs(), made or (_usual(type, False) for type in node.types), strict=True))


def drawn_strides(graph: Graph) -> dict[Value, Strides]:
    """How what random calls draw for each of their operands lies in memory."""
    random = [node for node in graph.nodes if is_random(node.op, node.args)]
    strides = strides_in(graph) if random else {}
    return {value: _drawn(value.type, strides[value]) for node in random for value in node.inputs}


def orders_looked_at(graph: Graph, channels_last: bool) -> list[Strides]:
    """The order in memory as all calls see it that look at it, one after the other.

    Those are random calls. An opaque call may look at it too: `as_strided` reads what lies there.
    """
    looking = [node for node in graph.nodes if looks_at_order(node)]
    strides = strides_in(graph, channels_last) if looking else {}
    return [
        _drawn(value.type, strides[value]) if is_random(node.op, node.args) else strides[value]
        for node in looking
        for value in node.inputs
    ]


def _drawn(type: TensorType, strides: Strides) -> Strides:
    return torch.empty_like(_on_meta(type, strides)).stride()


@lru_cache(maxsize=1 << 16)
def looks_at_order(node: Node) -> bool:
    """Whether what a call gives may depend on the order in memory of what it reads."""
    return is_random(node.op, node.args) or (node.spec is None and not is_parallel(node))


@lru_cache(maxsize=1 << 14)
def _made(call: Call, operands: tuple[Strides, ...]) -> tuple[Strides, ...]:
    """The strides that a call gives its results; none are known where it is opaque or has no form without data."""
    spec = spec_for(call)
    tensors = [_on_meta(type, strides) for type, strides in zip(call.tensors, operands, strict=True)]
    if spec is None or not tensors:
        return ()
    try:
        made = run_whole(call, tensors)
    except (NotImplementedError, RuntimeError):
        return ()
    if spec.name == "conv2d" and any(map(_has_channels_last, tensors[:2])):  # as kernels do, and without data not
        made = tuple(x.contiguous(memory_format=torch.channels_last) for x in made)
    return tuple(x.stride() for x in made)


def _has_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _usual(type: TensorType, channels_last: bool) -> Strides:
    order = torch.channels_last if channels_last and len(type.shape) == _IMAGE_RANK else torch.contiguous_format
    return torch.empty(type.shape, device="meta", memory_format=order).stride()


def _on_meta(type: TensorType, strides: Strides) -> Tensor:
    return torch.empty_strided(type.shape, strides, dtype=type.dtype, device="meta")
