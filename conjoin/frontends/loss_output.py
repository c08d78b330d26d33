"""Which output of a model is its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conjoin.ir import Leaf, LeafKind, Node, Result, Value


def find_loss(outputs: tuple[Result, ...], paths: Sequence[tuple[Any, ...]]) -> int | None:
    """The output called `loss`; else the only one, or the only one that the batch and trainable parameters decide.

    It is one floating-point number: that of `(logits, loss)`, but not a learned scale beside features.
    """
    numbers = {
        i: output for i, output in enumerate(outputs)
        if isinstance(output, Value) and output.type.shape == () and output.type.dtype.is_floating_point
    }  # fmt: skip
    named = [i for i, path in enumerate(paths) if path and path[-1] == "loss"]
    if named or len(outputs) == 1:
        return next((i for i in named or [0] if i in numbers), None)
    found = [i for i, output in numbers.items() if _is_trained(output)]
    return found[0] if len(found) == 1 else None


def _is_trained(value: Value) -> bool:
    """Whether it is made of the batch and of a trainable parameter."""
    seen, waiting = {value.owner}, [value.owner]
    while waiting:
        owner = waiting.pop()
        made_of = {operand.owner for operand in owner.inputs} - seen if isinstance(owner, Node) else set()
        seen |= made_of
        waiting += made_of
    leaves = [owner for owner in seen if isinstance(owner, Leaf)]
    return any(leaf.kind is LeafKind.INPUT for leaf in leaves) and any(leaf.trainable for leaf in leaves)
