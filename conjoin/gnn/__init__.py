"""Graphs of vertices as data: files, orders, cuts into parts and what a part takes."""

from conjoin.gnn.accuracy import UNLABELLED, Graded
from conjoin.gnn.adjacency import Adjacency, from_edges, reordered, transposed
from conjoin.gnn.cuts import Load, balanced_cuts, equal_edges, equal_vertices
from conjoin.gnn.features import NAMES, Features, Halos, count_halos, vertex_features
from conjoin.gnn.files import GraphData, load_graph, save_graph
from conjoin.gnn.learned import PartitionModel, TimeModel, parse_model, write_model
from conjoin.gnn.online import EpochTold, OnlineParts
from conjoin.gnn.order import breadth_first_order, community_order, metis_order, metis_parts
from conjoin.gnn.parts import GraphPart, PartSizes, WholeGraph
from conjoin.gnn.repartition import Repartition, moved_rows, propose_cuts
from conjoin.gnn.roles import BatchRoles, Role, find_roles
from conjoin.gnn.summary import PartitionSummary, halo_of, summarize

__all__ = [
    "NAMES",
    "UNLABELLED",
    "Adjacency",
    "BatchRoles",
    "EpochTold",
    "Features",
    "Graded",
    "GraphData",
    "GraphPart",
    "Halos",
    "Load",
    "OnlineParts",
    "PartSizes",
    "PartitionModel",
    "PartitionSummary",
    "Repartition",
    "Role",
    "TimeModel",
    "WholeGraph",
    "balanced_cuts",
    "breadth_first_order",
    "community_order",
    "count_halos",
    "equal_edges",
    "equal_vertices",
    "find_roles",
    "from_edges",
    "halo_of",
    "load_graph",
    "metis_order",
    "metis_parts",
    "moved_rows",
    "parse_model",
    "propose_cuts",
    "reordered",
    "save_graph",
    "summarize",
    "transposed",
    "vertex_features",
    "write_model",
]
