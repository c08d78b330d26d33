"""What the tensors of a batch say: something of every vertex, of every edge, which vertices edges join, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conjoin.comm import OVER_EDGES, EdgeInput, edge_inputs
from conjoin.errors import UsageError
from conjoin.ir import Graph, Leaf, Node, Value

Kind = Literal["vertices", "edges", "ends", "other"]
_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss")


@dataclass(frozen=True, slots=True)
class Role:
    """What one tensor says."""

    kind: Kind
    dim: int = 0
    """That of the vertices or edges."""
    fill: float = 0
    """What is said of rows that belong to no vertex: of labels, that they do not count."""


@dataclass(frozen=True, slots=True)
class BatchRoles:
    """What a batch says, tensor by tensor as the model and then the loss take them."""

    num_vertices: int
    num_edges: int
    roles: tuple[Role, ...]
    source: tuple[int, int | None]
    """Which tensor has the sources, and which row of it."""
    target: tuple[int, int | None]
    is_labelled: bool
    """Whether the loss leaves vertices out that have a label for that."""
    mixes: str | None
    """What makes one thing of all vertices that then goes into each; None where nothing does."""


def find_roles(graph: Graph) -> BatchRoles:
    """Read off a captured graph what its inputs say of the vertices and edges of theirs."""
    leaves = [value.owner for value in graph.inputs if isinstance(value, Value)]
    given = [each for each in edge_inputs(graph) if each.leaf in leaves]
    ends = {use: next((each for each in given if each.use == use), None) for use in ("source", "target")}
    source, target = ends["source"], ends["target"]
    if source is None or target is None:
        raise UsageError(
            f"The edges of {graph.name} were to be dealt out to devices. Its aggregations read none that the batch "
            f"has: they are the model's own, are made inside it, or there are no aggregations. Let the model take "
            f"them, and make the plan again."
        )
    first = next(node for node in graph.nodes if node.op in OVER_EDGES)
    num_vertices, num_edges = first.call["vertices"], source.leaf.type.shape[source.dim]
    labels = _labels(graph)
    roles = tuple(_role_of(leaf, given, labels, (num_vertices, num_edges)) for leaf in leaves)
    at = {leaf: i for i, leaf in enumerate(leaves)}
    return BatchRoles(
        num_vertices, num_edges, roles, (at[source.leaf], source.row), (at[target.leaf], target.row),
        any(leaf in labels for leaf in leaves), _mixing(graph, (num_vertices, num_edges)),
    )  # fmt: skip


def _role_of(leaf: Leaf, given: list[EdgeInput], labels: dict[Leaf, int], sizes: tuple[int, int]) -> Role:
    uses = [each for each in given if each.leaf is leaf]
    if uses:
        return Role("ends", uses[0].dim) if uses[0].use != "weight" else Role("edges")
    size = leaf.type.shape[:1]
    if size == sizes[:1]:
        return Role("vertices", fill=labels.get(leaf, 0))
    return Role("edges") if size == sizes[1:] else Role("other")


def _labels(graph: Graph) -> dict[Leaf, int]:
    """Inputs that are the targets of losses, with the one that is left out."""
    found: dict[Leaf, int] = {}
    for node in graph.nodes:
        if node.op in _LOSSES:
            owner = node.inputs[1].owner
            while isinstance(owner, Node) and owner.op in ("reshape", "_to_copy", "squeeze.dim"):
                owner = owner.inputs[0].owner
            if isinstance(owner, Leaf):
                found[owner] = node.call["ignore_index"]
    return found


def _mixing(graph: Graph, sizes: tuple[int, int]) -> str | None:
    """The first operator that brings something made of all vertices back to each, as batch norms do."""
    rows = {Value(leaf) for leaf in graph.leaves if leaf.type.shape[:1] and leaf.type.shape[0] in sizes}
    mixed: set[Value] = set()
    for node in graph.nodes:
        made = [Value(node, i) for i in range(len(node.types))]
        of_rows = any(value in rows for value in node.inputs)
        is_row = [type.shape[:1] and type.shape[0] in sizes for type in node.types]
        if any(is_row) and (any(value in mixed for value in node.inputs) or "batch_norm" in node.op):
            return node.op
        rows.update(value for value, whether in zip(made, is_row, strict=True) if whether)
        if of_rows or any(value in mixed for value in node.inputs):
            mixed.update(value for value, whether in zip(made, is_row, strict=True) if not whether)
    return None
