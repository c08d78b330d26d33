"""Which layers of a graph in bfloat16 are computed in eight bits, and the graph with these.

A layer is a product of what comes with a parameter: `linear`, `addmm`, `mm` or `matmul` whose weight is one, cast and
turned as it may be. As in torchao's recipe both its sizes are multiples of 16, which is what kernels take, and the head
stays in bfloat16: a layer behind which there is no other, whose output decides the loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from conjoin.errors import UsageError
from conjoin.ir import Graph, Leaf, LeafKind, Node, Rewriting, Value, drop_unused
from conjoin.ops import CAST, SCALED_LINEAR

MULTIPLE = 16
_TURNS = ("t", "transpose.int", "permute", "numpy_T", "mT")
_LAYERS = {
    "linear": ("input", "weight"), "addmm": ("mat1", "mat2"), "mm": ("self", "mat2"), "matmul": ("self", "other"),
}  # fmt: skip
"""What comes, and the weight."""


class _Layer(NamedTuple):
    """A product with a parameter; its weight has outputs by inputs where it is a linear layer, else the reverse."""

    node: Node
    input: Value
    weight: Value
    bias: Value | None

    @property
    def fits(self) -> bool:
        """Whether kernels in eight bits take it."""
        sizes = self.weight.type.shape
        return self.weight.type.dtype == torch.bfloat16 and all(size and size % MULTIPLE == 0 for size in sizes)


def in_eight_bits(graph: Graph) -> Graph:
    """The graph with every layer in eight bits that may be; UsageError where none may."""
    layers = [found for node in graph.nodes if (found := _layer(node)) is not None]
    heads = _heads(graph, {layer.node for layer in layers})
    chosen = {layer.node: layer for layer in layers if layer.fits and layer.node not in heads}
    if not chosen:
        raise UsageError(
            f"The precision fp8-mixed was asked for {graph.name}. Of its {len(layers)} layers that multiply by a "
            f"weight {sum(layer.fits for layer in layers)} are in bfloat16 with sizes that are multiples of "
            f"{MULTIPLE}, and a head, behind which there is no other layer, stays as it is. Choose bf16-mixed."
        )
    work = Rewriting(graph)
    for node in graph.nodes:
        if node in chosen:
            work.values[Value(node)] = _replaced(work, chosen[node])
        else:
            work.keep(node)
    return drop_unused(work.finish())


def _layer(node: Node) -> _Layer | None:
    """What a node multiplies by a weight; None where it is no layer."""
    if node.op not in _LAYERS:
        return None
    names = (parameter.name for parameter in node.call.signature.parameters)
    arguments = dict(zip(names, node.args, strict=True))
    incoming, weight = (arguments[name] for name in _LAYERS[node.op])
    bias = arguments.get("bias") if node.op == "linear" else arguments["self"] if node.op == "addmm" else None
    if not _is_weight(weight) or len(weight.type.shape) != 2 or not incoming.type.shape or _is_weight(incoming):
        return None
    if node.op == "addmm" and (not _adds_up(arguments) or bias is None or len(bias.type.shape) != 1):
        return None
    return _Layer(node, incoming, weight, bias)


def _adds_up(arguments: dict[str, Any]) -> bool:
    return arguments.get("beta") in (None, 1) and arguments.get("alpha") in (None, 1)


def _is_weight(value: Any) -> bool:
    """Whether a value is a parameter, or one that was cast or turned."""
    while isinstance(value, Value) and isinstance(value.owner, Node) and value.owner.op in (CAST, *_TURNS):
        value = value.owner.inputs[0]
    return isinstance(value, Value) and isinstance(value.owner, Leaf) and value.owner.kind is LeafKind.PARAMETER


def _heads(graph: Graph, layers: set[Node]) -> set[Node]:
    """The layers from whose outputs no other one is reached."""
    leads: set[Node] = set()
    """Nodes from which a layer is reached."""
    heads: set[Node] = set()
    for node in reversed(graph.nodes):
        users = (user for value in node.outputs() for user in graph.users.get(value, ()))
        if any(user in leads or user in layers for user in users):
            leads.add(node)
        elif node in layers:
            heads.add(node)
    return heads


def _replaced(work: Rewriting, layer: _Layer) -> Value:
    weight = work.values[layer.weight]
    if layer.node.op != "linear":
        weight = work.emit(layer.node, "transpose.int", weight, 0, 1)
    bias = None if layer.bias is None else work.values[layer.bias]
    made: Value = work.emit(layer.node, SCALED_LINEAR, work.values[layer.input], weight, bias)
    return made
