"""How many rows parts of the vertices of a graph would send each other, where its edges are known: the model has them,
or the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError, UsageError
from conjoin.frontends.folded_constants import known_value
from conjoin.frontends.torch_export import Exported
from conjoin.frontends.torch_private import is_fake
from conjoin.ir import Graph, Leaf, LeafKind, Node, Rewriting, Value, cut
from conjoin.ops import AGGREGATE, GRAPH_ATTENTION, check_ends

PARTS = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))
"""Into how many parts vertices are taken to be split, one cut inside the other, as axes of a machine do."""

Known = Callable[[Leaf], Tensor | None]


def known_values(exported: Exported, model: nn.Module) -> Known:
    """What leaves are at capture, where they have a value."""
    inputs = dict(zip(exported.input_names, exported.inputs, strict=True))

    def known(leaf: Leaf) -> Tensor | None:
        found = inputs.get(leaf.name) if leaf.kind is LeafKind.INPUT else _attribute(model, leaf.name)
        return found if isinstance(found, Tensor) and not is_fake(found) and not found.is_meta else None

    return known


def _attribute(model: nn.Module, path: str) -> object:
    found: object = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def with_halos(graph: Graph, known: Known) -> Graph:
    """The graph with how many rows parts of vertices send each other said of every call that may be split so."""
    nodes = [node for node in graph.nodes if node.op in (AGGREGATE, GRAPH_ATTENTION)]
    counted: dict[tuple[Value, Value, int, int], tuple[int, ...]] = {}
    work = Rewriting(graph)
    for node in graph.nodes:
        if node not in nodes:
            work.keep(node)
            continue
        at = node.call.signature.position
        source, target = node.args[at("source")], node.args[at("target")]
        key = source, target, node.args[0].type.shape[0], node.args[at("vertices")]
        if key not in counted:
            ends = known_value(source, known), known_value(target, known)
            counted[key] = () if ends[0] is None or ends[1] is None else count_halos(ends[0], ends[1], *key[2:])
        _check_weights(node, known)
        args = [work.values[arg] if isinstance(arg, Value) else arg for arg in node.args]
        args[at("halos")] = counted[key]
        work.values[Value(node)] = work.emit(node, node.op, *args)
    return work.finish()


def count_halos(source: Tensor, target: Tensor, sources: int, targets: int) -> tuple[int, ...]:
    """For every number of parts the number, how many rows each part sends to others, and how many it gets; and so of
    edges that are cut into as many pieces, which go to other parts than their own."""
    found: list[int] = []
    source, target = source.cpu(), target.cpu()
    for name, some, size in (("source", source, sources), ("target", target, targets)):
        _check_ends(name, some, size)
    for factors in PARTS:
        ends = [torch.tensor([stop for _, stop in nested(size, factors)]) for size in (sources, targets)]
        if min(sources, targets) < len(ends[0]):
            continue
        reads = torch.zeros(len(ends[1]), sources, dtype=torch.bool)
        reads[torch.searchsorted(ends[1], target, right=True), source] = True
        owner = torch.searchsorted(ends[0], torch.arange(sources), right=True)
        reads[owner, torch.arange(sources)] = False
        sent = torch.zeros(len(ends[0]), dtype=torch.int64).index_add(0, owner, reads.sum(0))
        found += (len(ends[0]), *sent.tolist(), *reads.sum(1).tolist(), *_moved_edges(target, ends[1], factors))
    return tuple(found)


def _moved_edges(target: Tensor, ends: Tensor, factors: tuple[int, ...]) -> Iterator[int]:
    """Of every piece of the edges those that go to other parts, then of every part those from other pieces."""
    pieces = torch.tensor([stop for _, stop in nested(len(target), factors)])
    lies = torch.searchsorted(pieces, torch.arange(len(target)), right=True)
    goes = torch.searchsorted(ends, target, right=True)
    for part in (lies, goes):
        yield from torch.bincount(part[lies != goes], minlength=len(ends)).tolist()


def _check_ends(name: str, ends: Tensor, size: int) -> None:
    try:
        check_ends(ends, name, size)
    except UsageError as error:
        raise CaptureError(str(error)) from None


def _check_weights(node: Node, known: Known) -> None:
    weight = node.args[3] if node.op == AGGREGATE else None
    value = known_value(weight, known) if isinstance(weight, Value) else None
    wrong = 0 if value is None else int((~value.isfinite()).sum())
    if value is not None and wrong:
        raise CaptureError(
            f"A graph was given with weights of which {wrong} of {value.shape[0]} edges have no finite number. Every "
            f"vertex that such an edge comes to, and then all others, would have none. Correct the weights, or leave "
            f"these edges out."
        )


def nested(size: int, factors: tuple[int, ...]) -> list[tuple[int, int]]:
    """The pieces of a dim that is cut by one axis inside the other.

    >>> nested(7, (2, 2))
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    pieces = [(0, size)]
    for factor in factors:
        pieces = [cut(piece, factor, part) for piece in pieces for part in range(factor)]
    return pieces
