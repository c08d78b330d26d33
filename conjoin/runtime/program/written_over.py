"""What is written over on graphs: a bias and an activation go into memory that a layer or a sum was just written to.

What a network on a graph makes is as large as all features of its vertices, and new memory for each thing made of it
costs a processor more than the numbers do. Nobody else may read what is written over, nor its own gradient, nor a
segment that is run again; an autocast may want another dtype. On a processor layers on vertices write to large pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from conjoin.ir import Node, Value
from conjoin.ops import AGGREGATE, find_function, linear_of_positive, linear_of_vertices
from conjoin.runtime.program.functions import Function
from conjoin.runtime.program.recompute import SEGMENT

_IN_PLACE: dict[str, Function] = {"add.Tensor": torch.Tensor.add_, "relu": torch.relu_}
_UNREAD = ("add.Tensor", "linear")
"""Whose gradients do not read what they made."""
_INTO = "writes into"


def mark_in_place(node: Node, made: fx.Node) -> None:
    """Say of a call that it may write over its first operand, as far as the graph tells."""
    into, first = _IN_PLACE.get(node.op), node.args[0] if node.args else None
    if into is None or not isinstance(first, Value) or not isinstance(first.owner, Node):
        return
    makes_new = _is_sum(first.owner) or first.owner.op in _UNREAD
    if makes_new and first.type == node.types[0]:
        made.meta[_INTO] = into


def _is_sum(node: Node) -> bool:
    return node.op == AGGREGATE and "max" not in node.args


def write_over(program: fx.Graph) -> None:
    """Let calls write over what a layer on vertices or a sum of them made, or a call that has written over it."""
    sums, layer = find_function(AGGREGATE), find_function("linear")
    if all(node.target is not sums for node in program.nodes):
        return
    new = set[fx.Node]()
    for node in program.nodes:
        first: Any = node.args[0] if node.args else None
        alone = isinstance(first, fx.Node) and len(first.users) == 1 and _segment(first) == _segment(node)
        if node.target is layer:
            node.target = linear_of_vertices
            if alone and first in new and first.target is torch.relu_:
                node.target = linear_of_positive
                node.replace_input_with(first, first.args[0])
                program.erase_node(first)
        elif alone and first in new and _INTO in node.meta:
            node.target = node.meta[_INTO]
        elif node.target is not sums:
            continue
        new.add(node)


def _segment(node: fx.Node) -> Any:
    """The one that a call is run again with, if with any."""
    return node.meta.get(SEGMENT)
