"""A node on a mesh, as what is worked out of it is remembered by."""

from __future__ import annotations

from dataclasses import dataclass, field

from conjoin.ir import Node, Placed, plain_call
from conjoin.machine import Mesh
from conjoin.ops import Call, TensorType


@dataclass(frozen=True, slots=True)
class NodeOnMesh:
    """Alike are all nodes that make the same call in the same layouts, as equal layers do."""

    call: Call
    placed: Placed
    types: tuple[TensorType, ...]
    mesh: Mesh
    node: Node = field(compare=False)

    @classmethod
    def of(cls, node: Node, placed: Placed, mesh: Mesh) -> NodeOnMesh:
        types = (*(value.type for value in node.inputs), *node.types)
        return cls(plain_call(node), placed, types, mesh, node)
