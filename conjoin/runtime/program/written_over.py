"""What is written over: a bias and an activation go into the memory that a sum over neighbours was just written to.

Such a sum is as large as all features of a graph, and new memory for each thing made of it costs a processor more than
the numbers do. Nobody else may read what is written over, nor its own gradient, nor a segment that
is run again; an autocast may want another dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from conjoin.ir import Node, Value
from conjoin.ops import AGGREGATE, find_function
from conjoin.runtime.program.functions import Function
from conjoin.runtime.program.recompute import SEGMENT

_IN_PLACE: dict[str, Function] = {"add.Tensor": torch.Tensor.add_, "relu": torch.relu_}
_UNREAD = ("add.Tensor",)
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
    """Let calls write over what one of these sums made, or a call that has written over it."""
    sums = find_function(AGGREGATE)
    written = set[fx.Node]()
    for node in program.nodes:
        first: Any = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or _INTO not in node.meta or len(first.users) > 1:
            continue
        if first.meta.get(SEGMENT) != node.meta.get(SEGMENT):  # it is read again when the segment is
            continue
        if first.target is sums or first in written:
            node.target = node.meta[_INTO]
            written.add(node)
