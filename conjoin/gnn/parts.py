"""The part of a graph that a rank has: rows of a range of vertices, and the edges that come to them.

Vertices stand in one order, and edges in that of their targets, so that a part is a range of both, a cut is P + 1
numbers, and what goes from one rank to another when the graph is cut anew are ranges again. A plan is told where its
dims of vertices and edges are cut (`PartSizes.on`): its pieces are the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from conjoin.errors import GraphError, UsageError
from conjoin.gnn.adjacency import Adjacency, Ints, from_edges, places_of
from conjoin.gnn.roles import BatchRoles, Role
from conjoin.machine import Cut
from conjoin.runtime import RowExchange


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Where vertices and edges are cut: the part p has those from `cuts[p]` to `cuts[p + 1]`, and edges alike."""

    cuts: tuple[int, ...]
    edge_cuts: tuple[int, ...]

    def on(self, axes: tuple[str, ...]) -> tuple[Cut, ...]:
        """What a mesh is told whose axes split vertices and edges, each known by how many there are."""
        if self.cuts[-1] == self.edge_cuts[-1] and self.cuts != self.edge_cuts:
            raise UsageError(
                f"A graph with {self.cuts[-1]} vertices and as many edges was to be cut into {len(self.cuts) - 1} "
                f"parts. A dim is known by its size, and vertices would be cut where edges are. Add a vertex without "
                f"edges, or train without parts."
            )
        return tuple(Cut(cuts[-1], axes, cuts) for cuts in (self.cuts, self.edge_cuts))

    def of(self, role: Role) -> tuple[int, ...]:
        """The cuts of what is said of vertices, or of edges."""
        return self.cuts if role.kind == "vertices" else self.edge_cuts


@dataclass(frozen=True, slots=True, eq=False)
class WholeGraph:
    """A batch with its vertices in an order and its edges in that of their targets."""

    roles: BatchRoles
    tensors: tuple[Tensor, ...]
    adjacency: Adjacency

    @classmethod
    def of(cls, roles: BatchRoles, batch: Sequence[Tensor], order: Ints | None = None) -> WholeGraph:
        """Bring a batch in order: that of the vertices is theirs unless another is given."""
        _check_batch(roles, batch)
        if order is not None and roles.by_order:
            raise UsageError(
                f"The {roles.num_vertices} vertices of a graph were to stand in another order. The model goes by their "
                f"places in {roles.by_order}, and would compute something else. Leave them in their own order, or have "
                f"the batch say it of every vertex, as a mask does."
            )
        if roles.own_of_edges:
            raise UsageError(
                f"The {roles.num_edges} edges of a graph were to be put in the order of their targets. The model's own "
                f"{roles.own_of_edges} says something of each, and would stay as it is. Put it among the batch, or "
                f"train without parts."
            )
        places = None if order is None else torch.from_numpy(places_of(order, roles.num_vertices))
        source, target = (_ends(batch, at) for at in (roles.source, roles.target))
        if places is not None:
            source, target = places[source.cpu()], places[target.cpu()]
        numbers = [ends.cpu().numpy().astype(np.int64) for ends in (source, target)]
        adjacency = from_edges(roles.num_vertices, numbers[0], numbers[1])
        sorted_edges = target.sort(stable=True).indices
        back = None if order is None else torch.from_numpy(order)
        pairs = zip(batch, roles.roles, strict=True)
        made = tuple(_in_order(tensor, role, back, places, sorted_edges) for tensor, role in pairs)
        return cls(roles, made, adjacency)

    def sizes(self, cuts: Ints) -> PartSizes:
        """Of the parts that a cut of the vertices makes."""
        if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != self.roles.num_vertices or (np.diff(cuts) < 0).any():
            raise GraphError(
                f"Vertices were to be cut at {', '.join(map(str, cuts[:8]))}. Cuts begin with 0, never go down, and "
                f"end with the number of vertices, {self.roles.num_vertices}. Take those of equal_edges."
            )
        return PartSizes(tuple(map(int, cuts)), tuple(map(int, self.adjacency.indptr[cuts])))

    def part(self, cuts: Ints, own: int) -> GraphPart:
        """One of the parts."""
        sizes = self.sizes(cuts)
        held = []
        for tensor, role in zip(self.tensors, self.roles.roles, strict=True):
            start, stop = sizes.of(role)[own], sizes.of(role)[own + 1]
            held.append(tensor if role.kind == "other" else tensor.narrow(role.dim, start, stop - start).clone())
        return GraphPart(self.roles, sizes, own, tuple(held))


@dataclass(frozen=True, slots=True, eq=False)
class GraphPart:
    """What a rank holds of a graph; vertices that edges join are numbered as in the whole."""

    roles: BatchRoles
    sizes: PartSizes
    own: int
    tensors: tuple[Tensor, ...]

    @property
    def num_parts(self) -> int:
        """How many there are."""
        return len(self.sizes.cuts) - 1

    def moved(self, sizes: PartSizes, exchange: RowExchange) -> GraphPart:
        """The part of the same number after another cut: rows and edges go between ranks, who all call it."""
        held = []
        for tensor, role in zip(self.tensors, self.roles.roles, strict=True):
            if role.kind == "other":
                held.append(tensor)
                continue
            rows = tensor.transpose(0, role.dim)
            before, after = self.sizes.of(role), sizes.of(role)
            sent = [_shared(before, self.own, after, other) for other in range(self.num_parts)]
            received = [_shared(before, other, after, self.own) for other in range(self.num_parts)]
            held.append(exchange.send(rows, sent, received).transpose(0, role.dim).contiguous())
        return replace(self, sizes=sizes, tensors=tuple(held))


def _shared(before: Sequence[int], giver: int, after: Sequence[int], taker: int) -> int:
    return max(0, min(before[giver + 1], after[taker + 1]) - max(before[giver], after[taker]))


def _ends(batch: Sequence[Tensor], at: tuple[int, int | None]) -> Tensor:
    tensor = batch[at[0]]
    return tensor if at[1] is None else tensor[at[1]]


def _in_order(tensor: Tensor, role: Role, order: Tensor | None, places: Tensor | None, edges: Tensor) -> Tensor:
    match role.kind:
        case "vertices":
            return tensor if order is None else tensor.index_select(0, order.to(tensor.device))
        case "edges":
            return tensor.index_select(0, edges.to(tensor.device))
        case "ends":
            placed = tensor if places is None else places.to(tensor.device)[tensor].to(tensor.dtype)
            return placed.index_select(role.dim, edges.to(tensor.device))
        case "other":
            return tensor


def _check_batch(roles: BatchRoles, batch: Sequence[Tensor]) -> None:
    if len(batch) != len(roles.roles) or not all(isinstance(each, Tensor) for each in batch):
        raise UsageError(
            f"A batch of {len(batch)} was to be dealt out to devices, and the model and its loss take "
            f"{len(roles.roles)} tensors. Each is told what it says of vertices or edges by its place. Give a tuple of "
            f"tensors, what the model takes first."
        )
    for tensor, role in zip(batch, roles.roles, strict=True):
        wanted = roles.num_vertices if role.kind == "vertices" else roles.num_edges
        if role.kind != "other" and tensor.shape[role.dim] != wanted:
            raise UsageError(
                f"A batch was to be dealt out to devices in which a tensor of shape {list(tensor.shape)} tells of "
                f"{role.kind}. There are {wanted} of them. Give the graph that the model was captured with."
            )
