"""Views that are written to in ways that no functional form says, or that torch's own functional form would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from conjoin.frontends.functional import targets_of
from conjoin.frontends.problems import Problem, source_of
from conjoin.frontends.torch_private import (
    ExportedProgram,
    aliases_input,
    decomposition_of,
    has_alias_info,
    storages_of_node,
)
from conjoin.ir import ORDERED_BY_KERNELS
from conjoin.ops import operator_name


def overlapping_writes(program: ExportedProgram) -> tuple[Problem, ...]:
    """Writes through views of a tensor whose elements share memory (expanded, or windows that overlap).

    Each of them changes elements beside those it is written to, which no functional form says.
    """
    what = "a write to a part of an expanded tensor"
    advice = "its elements share memory, and others would change too: call .clone() on the expanded tensor first"
    return _told_of_writes(program, what, advice, lambda _, seen: _overlaps(seen.meta.get("val")))


def doubtful_writes(program: ExportedProgram) -> tuple[Problem, ...]:
    """Writes to what is a copy or a view, by how a kernel lays out its result, where the original is read afterwards.

    Tracing says of some kernels that they keep the order in memory of what they are given, and they do not.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}

    def is_doubtful(write: fx.Node, seen: fx.Node) -> bool:
        if not isinstance(seen.target, OpOverload) or operator_name(seen.target) not in _COPY_WHERE_THEY_MUST:
            return False
        originals = list(_seen_through(cast(fx.Node, seen.args[0])))
        is_read = any(order[user] > order[write] for original in originals for user in original.users)
        return is_read and _is_ordered_by_kernel(originals[-1])

    what = "a write to what may be a copy or a view"
    advice = "kernels decide which by how they lay out what they make: call .clone() first, or write to the original"
    return _told_of_writes(program, what, advice, is_doubtful)


_COPY_WHERE_THEY_MUST = frozenset(("contiguous", "reshape", "flatten.using_ints", "ravel", "reshape_as"))
"""Operators that give a view where memory allows it, and a copy elsewhere."""


def _is_ordered_by_kernel(node: fx.Node) -> bool:
    """Whether a kernel that is not as it is traced had something in another order than the usual to begin with."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        if (made := waiting.pop()) in seen:
            continue
        seen.add(made)
        if isinstance(made.target, OpOverload) and operator_name(made.target) in ORDERED_BY_KERNELS:
            given = (read.meta.get("val") for read in made.all_input_nodes)
            if any(isinstance(x, Tensor) and not x.is_contiguous() for x in given):
                return True
        waiting += made.all_input_nodes
    return False


def writes_over_operands(program: ExportedProgram) -> tuple[Problem, ...]:
    """Writes to memory that the same call reads through another view, element for other element.

    Which of them are read before they are written is left to kernels.
    """
    what = "a write to what the same call reads elsewhere in it"
    advice = "what is read there depends on the order in which a kernel writes: call .clone() on what is read"
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    written = ((node, target) for node in calls for target in targets_of(node))
    wrong = (
        node
        for node, target in written
        if any(_reads_what_is_written(node, read, target) for read in node.all_input_nodes)
    )
    return tuple(dict.fromkeys(Problem(what, source_of(node), advice) for node in wrong))


_MANY = 1 << 24
"""Elements of memory whose places are not compared one by one: they are thought to be apart."""


def _reads_what_is_written(write: fx.Node, read: fx.Node, target: fx.Node) -> bool:
    """Whether an element is computed from a place that is written for another one; a copy may write what is there."""
    theirs, mine = read.meta.get("val"), target.meta.get("val")
    if read is target or not isinstance(theirs, Tensor) or not isinstance(mine, Tensor) or not mine.numel():
        return False
    reach = int(max(_end(theirs), _end(mine)))
    if not storages_of_node(read) & storages_of_node(target) or reach > _MANY:
        return False
    places = torch.arange(reach)
    into, of = (places.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (mine, theirs))
    changed, elsewhere = into, of
    if _is_broadcast(of, into.shape):
        of = of.expand_as(into)
        copies = isinstance(write.target, OpOverload) and write.target.overloadpacket is torch.ops.aten.copy_
        changed, elsewhere = into[(of != into) | (not copies)], of[of != into]
    written = torch.zeros(reach, dtype=torch.bool)
    written[changed.flatten()] = True
    return bool(written[elsewhere.flatten()].any())


def _is_broadcast(tensor: Tensor, shape: torch.Size) -> bool:
    sizes = zip(tensor.shape[::-1], shape[::-1], strict=False)
    return tensor.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in sizes)


def _end(tensor: Tensor) -> int | torch.SymInt:
    """How far the memory reaches that its elements lie in."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.storage_offset() + 1 + sum((n - 1) * stride for n, stride in steps) if tensor.numel() else 0


def _told_of_writes(
    program: ExportedProgram, what: str, advice: str, holds: Callable[[fx.Node, fx.Node], bool]
) -> tuple[Problem, ...]:
    """A problem for every write for which something holds of the tensor written to, or of one that it is a view of."""
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    written = ((node, target) for node in calls for target in targets_of(node))
    wrong = [node for node, target in written if any(holds(node, seen) for seen in _seen_through(target))]
    return tuple(dict.fromkeys(Problem(what, source_of(node), advice) for node in wrong))


def _seen_through(view: fx.Node) -> Iterator[fx.Node]:
    """A tensor, and those it is a view of."""
    yield view
    while isinstance(view.target, OpOverload) and aliases_input(view.target) and isinstance(view.args[0], fx.Node):
        view = view.args[0]
        yield view


def _overlaps(tensor: Any) -> bool:
    """Whether two elements of a tensor may lie in one place."""
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def hidden_views(program: ExportedProgram) -> dict[OpOverload, Callable[..., Any]]:
    """Operators that handed out views of their operands though their schemas do not say so, and what they consist of.

    torch itself goes by schemas when it makes a program functional, and loses what is written through such a view.
    """
    found: dict[OpOverload, Callable[..., Any]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or has_alias_info(node.target):
            continue
        reads = frozenset[int]().union(*map(storages_of_node, node.all_input_nodes))
        consists_of = decomposition_of(node.target)
        if consists_of is not None and reads & storages_of_node(node):
            found[node.target] = consists_of
    return found
