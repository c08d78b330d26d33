"""What a device computes in each step of a ring, as calls of attention: the one with the most to do."""

from __future__ import annotations

from collections.abc import Iterator

from conjoin.comm import Ring
from conjoin.cost import ATTENTION
from conjoin.ir import Node, plain_call, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import ATTENTION_FROM_ROW, Call, TensorType


def ring_calls(node: Node, ring: Ring, mesh: Mesh) -> Iterator[Call]:
    """The calls of all steps: with its own keys, then with those of every other piece, or half of them."""
    whole = plain_call(node)
    shapes = [region_shape(region_of(v.type.shape, v.type.layout, mesh, 0)) for v in node.inputs]
    query, key, value, *masks = (TensorType(shape, v.type.dtype) for shape, v in zip(shapes, node.inputs, strict=True))
    rest = whole["scale"], whole["enable_gqa"]
    if masks:
        mask = TensorType((*masks[0].shape[:-1], min(masks[0].shape[-1], key.shape[2])), masks[0].dtype)
        yield from [Call(ATTENTION, (query, key, value, mask, 0.0, False, *rest))] * ring.size
        return
    yield Call(ATTENTION_FROM_ROW, (query, key, value, 0 if ring.is_causal else key.shape[2], *rest))
    seen = ring.lengths[0] // 2 if ring.swaps else ring.lengths[0]
    key, value = (TensorType((*x.shape[:2], seen, x.shape[3]), x.dtype) for x in (key, value))
    for _ in range(ring.size - 1):
        yield Call(ATTENTION_FROM_ROW, (query, key, value, seen, *rest))
