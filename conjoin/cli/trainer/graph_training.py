"""Training on a whole graph: a step is an epoch, vertices lie in parts, and it is told how many it gets right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conjoin.cli.models import capture_model
from conjoin.comm import edge_inputs
from conjoin.gnn import (
    Adjacency,
    EpochTold,
    Graded,
    OnlineParts,
    WholeGraph,
    community_order,
    equal_edges,
    find_roles,
    reordered,
    summarize,
)
from conjoin.ir import Graph, LeafKind, Plan, Value, flatten_tree
from conjoin.ops import Split, split_axes
from conjoin.runtime import ParallelModule
from conjoin.search import plan_alike


def is_on_a_graph(graph: Graph) -> bool:
    """Whether the batch of a model is a graph, with edges among its inputs."""
    return graph.training and any(each.leaf.kind is LeafKind.INPUT for each in edge_inputs(graph))


def graded_plan(plan: Plan, model: nn.Module, batch: Any, loss: Any) -> tuple[Plan, Graded]:
    """The plan with what is right among its outputs, and the loss that says so."""
    graded = Graded(loss)
    graph = capture_model(model, batch, graded, precision=plan.precision or None)
    return plan_alike(plan, graph).plan, graded


def share_of_right(outputs: Any) -> float | None:
    """The accuracy that a graded loss tells, if it does."""
    if not isinstance(outputs, dict) or "correct" not in outputs:
        return None
    return float(outputs["correct"]) / max(float(outputs["counted"]), 1.0)


class GraphParts:
    """The parts of the graph that a plan trains on, on this rank."""

    def __init__(self, parts: OnlineParts) -> None:
        self._parts = parts

    @classmethod
    def of(cls, step: ParallelModule, graph: Graph, batch: Any) -> GraphParts | None:
        """Cut a graph into parts, or None where the plan does not split vertices and edges."""
        plan, roles = step.plan, find_roles(graph)
        if not isinstance(plan, Plan) or plan.accumulation is not None or roles.own_of_edges:
            return None
        if not all(isinstance(value, Value) for value in graph.inputs):  # a matrix of edges is given as one
            return None
        leaves = {leaf.name: leaf for leaf in plan.graph.leaves}
        ends = [leaves[each.leaf.name].type.layout for each in edge_inputs(graph) if each.leaf.name in leaves]
        if not ends or not all(any(isinstance(p, Split) for _, p in layout) for layout in ends):
            return None
        tensors = [tensor.cpu() for tensor in flatten_tree(batch)[0] if isinstance(tensor, Tensor)]
        at = next(i for i, role in enumerate(roles.roles) if role.kind == "vertices")
        axes = split_axes([value.type.layout for value in plan.graph.inputs if isinstance(value, Value)][at], 0)
        num_parts = len(plan.mesh.group(0, axes))
        if roles.num_vertices < num_parts or roles.num_vertices == roles.num_edges:  # told apart by how many there are
            return None
        whole = WholeGraph.of(roles, tensors)
        order = None
        if not roles.by_order:
            order = _shared(lambda: _best_order(whole.adjacency, num_parts), roles.num_vertices)
        whole = whole if order is None else WholeGraph.of(roles, tensors, order)
        return cls(OnlineParts(whole, equal_edges(whole.adjacency, num_parts), step))

    @property
    def batch(self) -> tuple[Tensor, ...]:
        """This rank's part, in the order in which the model and its loss take it."""
        return self._parts.batch

    @contextmanager
    def timed(self) -> Iterator[Callable[[], None]]:
        """Around a step; what is given is called between its two passes."""
        with self._parts.timed() as clock:
            yield clock.turn

    def learn(self, epochs_left: int) -> EpochTold:
        """What every part took; the graph may lie elsewhere afterwards."""
        return self._parts.learn(epochs_left)


def _best_order(adjacency: Adjacency, num_parts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of the vertices' own and that of communities the one in which parts read fewer rows of each other."""
    found = community_order(adjacency)
    moved = reordered(adjacency, found)
    halos = [summarize(each, equal_edges(each, num_parts)).total_halo_rows for each in (adjacency, moved)]
    return found if halos[1] < halos[0] else np.arange(adjacency.num_vertices)


def _shared(make: Callable[[], Any], count: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """What rank 0 makes of so many numbers, on every rank; None where it leaves them as they are."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = torch.from_numpy(make()) if is_first else torch.empty(count, dtype=torch.int64)
    if dist.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        sent = found.to(device)
        dist.broadcast(sent, 0)
        found = sent.cpu()
    return None if torch.equal(found, torch.arange(count)) else found.numpy()
