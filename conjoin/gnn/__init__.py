"""Graphs of vertices as data: files, orders, cuts into parts and what a part costs."""

from conjoin.gnn.adjacency import Adjacency, from_edges, reordered, transposed
from conjoin.gnn.files import GraphData, load_graph, save_graph

__all__ = ["Adjacency", "GraphData", "from_edges", "load_graph", "reordered", "save_graph", "transposed"]
