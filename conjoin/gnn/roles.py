"""What the tensors of a batch say: something of every vertex, of every edge, which vertices edges join, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conjoin.comm import OVER_EDGES, EdgeInput, edge_inputs
from conjoin.errors import UsageError
from conjoin.gnn.vertex_order import use_of_order
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value
from conjoin.ops import AGGREGATE

Kind = Literal["vertices", "edges", "ends", "other"]


@dataclass(frozen=True, slots=True)
class Role:
    """What one tensor says."""

    kind: Kind
    dim: int = 0
    """That of the vertices or edges."""


@dataclass(frozen=True, slots=True)
class BatchRoles:
    """What a batch says, tensor by tensor as the model and then the loss take them."""

    num_vertices: int
    num_edges: int
    roles: tuple[Role, ...]
    source: tuple[int, int | None]
    """Which tensor has the sources, and which row of it."""
    target: tuple[int, int | None]
    by_order: str = ""
    """A call of the model that goes by the places of vertices, which so have to stay as they are; empty: none does."""
    own_of_edges: str = ""
    """A tensor of the model's own that says something of every edge, which so have to stay as they are."""


def find_roles(graph: Graph) -> BatchRoles:
    """Read off a captured graph what its inputs say of the vertices and edges of theirs."""
    leaves = [v.owner for v in graph.inputs if isinstance(v, Value) and isinstance(v.owner, Leaf)]
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
    roles = tuple(_role_of(leaf, given, (num_vertices, num_edges)) for leaf in leaves)
    at = {leaf: i for i, leaf in enumerate(leaves)}
    pairs = [(Value(leaf), role.kind) for leaf, role in zip(leaves, roles, strict=True)]
    of_vertices, joined = ({value for value, kind in pairs if kind == one} for one in ("vertices", "ends"))
    used = use_of_order(graph, num_vertices, of_vertices, joined)
    by_order, own = "" if used is None else _told(graph, used), _own_of_edges(graph, num_edges)
    places = (at[source.leaf], source.row), (at[target.leaf], target.row)
    return BatchRoles(num_vertices, num_edges, roles, *places, by_order, own)


def _own_of_edges(graph: Graph, num_edges: int) -> str:
    """A parameter or buffer that weights of edges are made of, with a row for each; empty where there is none."""
    over = [node for node in graph.nodes if node.op == AGGREGATE]
    left = [value.owner for node in over for value in node.inputs[3:]]
    seen: set[Leaf | Node] = set()
    while left:
        owner = left.pop()
        if isinstance(owner, Leaf) and owner.kind is not LeafKind.INPUT and num_edges in owner.type.shape:
            return owner.name
        if isinstance(owner, Node) and owner not in seen:
            left += [value.owner for value in owner.inputs]
        seen.add(owner)
    return ""


def _told(graph: Graph, node: Node) -> str:
    source = graph.sources[graph.nodes.index(node)] if graph.sources else None
    return f"{node.op}" if source is None else f"{node.op} at {source}"


def _role_of(leaf: Leaf, given: list[EdgeInput], sizes: tuple[int, int]) -> Role:
    uses = [each for each in given if each.leaf is leaf]
    if uses:
        return Role("ends", uses[0].dim) if uses[0].use != "weight" else Role("edges")
    size = leaf.type.shape[:1]
    if size == sizes[:1]:
        return Role("vertices")
    return Role("edges") if size == sizes[1:] else Role("other")
