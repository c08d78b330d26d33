"""Batch norm by the statistics of each piece of a batch, not of the whole: what data parallelism without synchronized
statistics computes.

The graph says so itself: batch norms become operators whose statistics are those of one of `pieces` equal pieces. They
compute something else than the model on one device; whoever asks for them means that. Running statistics are those
that the first piece leaves. Other devices have nothing of them: all of a dtype are joined before they are handed out,
but for those that the model reads in the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

from conjoin.errors import StrategyError
from conjoin.ir.expansion import drop_unused
from conjoin.ir.graph import Graph
from conjoin.ir.nodes import Node, Value
from conjoin.ir.rewriting import Rewriting
from conjoin.ops import BATCH_NORM_BY_PIECES

_WITH_RUNNING = "_native_batch_norm_legit_functional"
_WITHOUT = ("_native_batch_norm_legit.no_stats", "batch_norm")


def batch_norms(graph: Graph) -> tuple[Node, ...]:
    """The batch norms that take statistics of a batch."""
    return tuple(node for node in graph.nodes if _takes_statistics(node))


def _takes_statistics(node: Node) -> bool:
    if node.op == _WITH_RUNNING:
        return bool(node.call["training"])
    return node.op in _WITHOUT and node.call["running_mean"] is None


def pieces_of(graph: Graph) -> int:
    """Into how many pieces batch norms cut the batch; 1 where statistics are of all of it."""
    return max((node.call["pieces"] for node in graph.nodes if node.op == BATCH_NORM_BY_PIECES), default=1)


def norm_by_pieces(graph: Graph, pieces: int) -> Graph:
    """The graph with every batch norm taking the statistics of each of some equal pieces of the batch."""
    norms = set(batch_norms(graph))
    if not norms or pieces == 1:
        return graph
    work = Rewriting(graph)
    moved: dict[Node, Value] = {}
    for node in graph.nodes:
        if node not in norms:
            work.keep(node)
            continue
        _check(graph, node, pieces)
        running = ("running_mean", "running_var") if node.op == _WITH_RUNNING else ()
        tensors = [_argument(node, name, work) for name in ("input", "weight", "bias", *running)]
        tensors += [None] * (5 - len(tensors))
        call = node.call
        y, rows = work.emit(node, BATCH_NORM_BY_PIECES, *tensors, call["momentum"], call["eps"], pieces)
        work.values[Value(node)] = y
        if running and any(graph.users.get(value) for value in tuple(node.outputs())[3:]):
            _hand_out([node], {node: rows}, work)
        elif running:
            moved[node] = rows
    for several in _alike(moved):
        _hand_out(several, moved, work)
    return drop_unused(work.finish())


def _argument(node: Node, name: str, work: Rewriting) -> Value | None:
    found = node.args[node.call.signature.position(name)]
    return None if found is None else work.values[found]


def _alike(moved: dict[Node, Value]) -> Iterator[list[Node]]:
    """The batch norms with running statistics, those of one dtype together."""
    for dtype in dict.fromkeys(rows.type.dtype for rows in moved.values()):
        yield [node for node, rows in moved.items() if rows.type.dtype == dtype]


def _hand_out(norms: list[Node], moved: dict[Node, Value], work: Rewriting) -> None:
    """New running statistics of several batch norms, joined so that one collective is enough for all."""
    rows = [moved[node] for node in norms]
    sizes = tuple(each.type.shape[1] for each in rows)
    parts = rows
    if len(rows) > 1:
        parts = work.emit(norms[-1], "split_with_sizes", work.emit(norms[-1], "cat", tuple(rows), 1), sizes, 1)
    for node, part in zip(norms, parts, strict=True):
        for row, value in enumerate(tuple(node.outputs())[3:]):
            work.values[value] = work.emit(node, "select.int", part, 0, row)


def _check(graph: Graph, node: Node, pieces: int) -> None:
    source = graph.source_of(node)
    where = f"{source.module or source.file}:{source.line}" if source else node.op
    batch = node.inputs[0].type.shape[0]
    if batch % pieces:
        raise StrategyError(
            f"Batch norm was to take the statistics of each of {pieces} pieces of the batch ({where}). Its batch of "
            f"{batch} has no {pieces} equal pieces. Choose a batch that is a multiple of {pieces}."
        )
    read = {*graph.users, *(value for value in graph.outputs if isinstance(value, Value))}
    if not read.isdisjoint(tuple(node.outputs())[1:3]):
        raise StrategyError(
            f"Batch norm was to take the statistics of each of {pieces} pieces of the batch ({where}). The model reads "
            f"the mean and scale of the whole batch beside its output. Take statistics over all."
        )
