"""Tokens that were put into one dim for a loss are left in theirs, so that sequences may be split there.

    cross_entropy(flatten(x), flatten(t))    becomes    token_entropy(x, t)

Samples and positions in one dim can be split by samples only: pieces of every sequence do not lie side by side there. A
loss adds up over tokens, each on its own, whatever dims they stand in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from conjoin.ir import Graph, Node, Rewriting, Value
from conjoin.ops import CAST, TOKEN_ENTROPY, TOKEN_LIKELIHOOD
from conjoin.search.rehearsed import finish_rehearsed

_LOSSES = {"cross_entropy_loss": TOKEN_ENTROPY, "nll_loss_nd": TOKEN_LIKELIHOOD}
_ALONG_CLASSES = ("log_softmax.int", "_log_softmax")
_EACH_BY_ITSELF = (CAST, "contiguous", "clone", "alias")


@dataclass(frozen=True, slots=True)
class Flattened:
    """A reshape of samples × positions × classes to tokens × classes, and what is done to it up to the losses."""

    reshape: Node
    between: tuple[Node, ...]
    losses: tuple[Node, ...]


def find_flattened(graph: Graph, node: Node) -> Flattened | None:
    """The way from a reshape to losses, when its result is used for nothing else."""
    if node.op != "reshape" or not node.inputs:
        return None
    before, after = node.inputs[0].type.shape, node.types[0].shape
    if len(before) != 3 or after != (before[0] * before[1], before[2]):
        return None
    between, losses, open_ends = [], [], [node]
    while open_ends:
        value = Value(open_ends.pop())
        for user in graph.users.get(value, ()):
            if _is_loss(user, value):
                losses.append(user)
            elif user.op in _EACH_BY_ITSELF or (user.op in _ALONG_CLASSES and user.call.dim() == 1):
                between.append(user)
                open_ends.append(user)
            else:
                return None
        if value in graph.outputs:
            return None
    return Flattened(node, tuple(between), tuple(losses)) if losses else None


def _is_loss(node: Node, scores: Value) -> bool:
    """Whether a node is a loss of some scores, whose targets are classes."""
    return node.op in _LOSSES and node.args[0] == scores and not node.call["target"].dtype.is_floating_point


def unflatten(graph: Graph, nodes: Collection[Node]) -> Graph:
    """The graph with the tokens of these reshapes left in their dims."""
    found = [each for node in nodes if (each := find_flattened(graph, node)) is not None]
    work = Rewriting(graph)
    shaped: dict[Value, Value] = {}
    """What stands for flattened values, in the dims they had."""
    places = {node: each for each in found for node in (each.reshape, *each.between, *each.losses)}
    for node in graph.nodes:
        if node not in places:
            work.keep(node)
        elif node is places[node].reshape:
            shaped[Value(node)] = work.values[node.inputs[0]]
        elif node in places[node].losses:
            work.values[Value(node)] = _loss(node, shaped, work)
        else:
            shaped[Value(node)] = _moved(node, shaped[node.inputs[0]], work)
    return finish_rehearsed(work)


def _moved(node: Node, x: Value, work: Rewriting) -> Any:
    """One operator between the reshape and a loss, on tokens in their dims; it runs along the last dim, or none."""
    rest = node.args[1:] if node.op not in _ALONG_CLASSES else (2, *node.args[2:])
    return work.emit(node, node.op, x, *rest)


def _loss(node: Node, shaped: dict[Value, Value], work: Rewriting) -> Any:
    scores, target, weight, *rest = node.args
    x = shaped[scores]
    tokens = x.type.shape[:2]
    aims = _as_tokens(node, target, tokens, work)
    made = work.emit(node, _LOSSES[node.op], x, aims, None if weight is None else work.values[weight], *rest)
    return made if not node.types[0].shape else work.emit(node, "reshape", made, node.types[0].shape)


def _as_tokens(node: Node, target: Value, tokens: tuple[int, ...], work: Rewriting) -> Any:
    """Targets by samples and positions; those that were so before they were flattened are taken from there."""
    owner = target.owner
    if isinstance(owner, Node) and owner.op == "reshape" and owner.inputs[0].type.shape == tokens:
        return work.values[owner.inputs[0]]
    return work.emit(node, "reshape", work.values[target], tokens)
