"""What a rewriting takes away from a graph and what it puts there, both on values of the old graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conjoin.ir.nodes import Leaf, Node, Value, make_node
from conjoin.ir.rewriting import Rewriting
from conjoin.ops import map_tensors


@dataclass(frozen=True)
class Replacement:
    """What a rewrite takes away and what it puts there; the calls in an order in which they can be run."""

    old: tuple[Node, ...]
    new: tuple[Node, ...]
    outputs: tuple[tuple[Value, Value], ...]
    """What was there, and what takes its place."""


def replacements(work: Rewriting) -> Iterator[Replacement]:
    """One for each old node whose outputs something else stands for now; where what is put there begins with something
    that the old calls did not come by, the two cannot be told apart from the rest, and there is none."""
    stood: dict[Value, Value] = {}
    for old, new in work.values.items():
        stood.setdefault(new, old)
    ends: dict[Node, list[Value]] = {}
    for value in work.values:
        if isinstance(value.owner, Node) and value.owner not in work.kept:
            ends.setdefault(value.owner, []).append(value)
    for some in ends.values():
        found = _replacement(work, some, stood)
        if found is not None:
            yield found


def _replacement(work: Rewriting, ends: Sequence[Value], stood: Mapping[Value, Value]) -> Replacement | None:
    def is_given(value: Value) -> bool:
        return stood.get(value, ends[0]) not in ends

    new_ends = [work.values[value] for value in ends]
    made = _calls_for(new_ends, is_given)
    now = {value: stood[value] for node in made for value in node.inputs if is_given(value)}
    now |= {value: stood[value] for value in new_ends if is_given(value)}
    starts = frozenset(now.values())
    added: list[Node] = []
    for node in made:
        if any(value not in now for value in node.inputs):  # a leaf that the old graph has not
            return None
        added.append(make_node(node.op, map_tensors(node.op, node.args, now.__getitem__), node.types))
        now.update(zip(node.outputs(), added[-1].outputs(), strict=True))
    gone = _calls_for(ends, starts.__contains__)
    met = {*ends, *(value for node in gone for value in node.inputs)}
    if any(value not in now for value in new_ends) or any(
        isinstance(value.owner, Node) and value not in met for value in starts
    ):
        return None
    return Replacement(gone, tuple(added), tuple((one, now[work.values[one]]) for one in ends))


def _calls_for(ends: Sequence[Value], is_given: Callable[[Value], bool]) -> tuple[Node, ...]:
    """The calls that values are made by, from what is given on, in an order in which they can be run."""
    found: dict[Node, None] = {}
    waiting: list[Leaf | Node] = [value.owner for value in reversed(ends) if not is_given(value)]
    while waiting:
        owner = waiting[-1]
        missing = [v.owner for v in (owner.inputs if isinstance(owner, Node) else ()) if not is_given(v)]
        missing = [other for other in missing if isinstance(other, Node) and other not in found]
        if missing:
            waiting += missing
        elif isinstance(waiting.pop(), Node):
            found.setdefault(owner)  # type: ignore[arg-type]
    return tuple(found)
