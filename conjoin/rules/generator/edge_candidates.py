"""Candidates for operators over the edges of a graph: each exchanged with every other operator.

Enumeration takes operators of one or two operands, and these have more: rows, the ends of edges, weights. What is of
use about them is which operators they may be exchanged with, so that is what is enumerated: for each operator, and each
choice of its operands, what is made of its result against the operator on what is made of those operands.

    aggregate(g(x, y), s, t) = g(aggregate(x, s, t), y)                         and for y, and for both

The same for their weights. Which of these hold, a proof decides; most do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from conjoin.rules.generator.vocabulary import Choice, along, parts_along, plain
from conjoin.rules.operators import OPS, RuleOp
from conjoin.rules.patterns import Apply, Expr, Input, Rule

_OTHERS = (
    *plain("add sub mul div neg relu exp square scale bias gain matmul linear transpose"),
    *along("concat", -2, -1), *parts_along(-2, -1), *along("sum mean", -2, -1), *along("softmax", -1),
)  # fmt: skip
_ROWS, _WEIGHT = 0, 3
"""Operands of which something may be made before."""
_VERTICES = (("vertices", "n"),)


def edge_candidates() -> tuple[Rule, ...]:
    """Every candidate.

    >>> print(edge_candidates()[0])
    : add(aggregate[vertices=n](x, s, t), aggregate[vertices=n](y, s, t)) => aggregate[vertices=n](add(x, y), s, t)
    """
    over_edges = [op for op in OPS if op.kind == "edges"]
    return tuple(rule for op in over_edges for choice in _OTHERS for rule in _exchanged(op, choice))


def _exchanged(op: RuleOp, choice: Choice) -> Iterator[Rule]:
    inner = tuple(Input(name) for name in "xy"[: choice.num_args])
    for place in (_ROWS, _WEIGHT)[: op.num_args - 2]:
        whole = _over_edges(op, place, Apply(choice.op, choice.params, inner))
        for chosen in product((True, False), repeat=len(inner)):
            if any(chosen):
                args = (_over_edges(op, place, arg) if is_it else arg for arg, is_it in zip(inner, chosen, strict=True))
                yield Rule("", (Apply(choice.op, choice.params, tuple(args)),), (whole,))


def _over_edges(op: RuleOp, place: int, made: Expr) -> Expr:
    operands = tuple(map(Input, "zsta"))[: op.num_args]
    return Apply(op.name, _VERTICES, (*operands[:place], made, *operands[place + 1 :]))
