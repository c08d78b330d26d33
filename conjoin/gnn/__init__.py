"""Graphs of vertices as data: how the parts of a graph become pieces of tensors."""

from conjoin.gnn.padding import UNLABELLED, Padding, pad_parts

__all__ = ["UNLABELLED", "Padding", "pad_parts"]
