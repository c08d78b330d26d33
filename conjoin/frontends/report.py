"""What capture did not understand, complete and in one piece: operator, count, the user's line, consequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conjoin.ir import Graph, Source
from conjoin.ops import OPAQUE, why_opaque


@dataclass(frozen=True, slots=True)
class OpaqueOperator:
    """An operator that no declaration covers as it is called: it runs, the same on every device."""

    op: str
    count: int
    source: Source | None
    reason: str

    def __str__(self) -> str:
        where = f", first at {self.source}" if self.source else ""
        return f"{self.op}: {self.count} call(s){where}; runs replicated, is never split or rewritten: {self.reason}"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything not understood; `complete` when there is nothing."""

    opaque: tuple[OpaqueOperator, ...]
    dropped: tuple[str, ...] = ()
    """What a graph cannot keep of outputs and attributes, in words."""
    checked: str = ""
    """Whether the graph was compared with the model, in words."""

    @property
    def complete(self) -> bool:
        return not self.opaque and not self.dropped

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.opaque]
        lines += self.dropped
        found = f"Not understood ({len(lines)}), while the rest is still optimized:" if lines else _COMPLETE
        return "\n  ".join([found, *lines, *([self.checked] if self.checked else [])])


_COMPLETE = "Everything was understood."


def not_understood(graph: Graph, dropped: tuple[str, ...] = (), checked: str = "") -> Report:
    """Everything in a graph that is kept as it is, because nothing is known about it."""
    found: dict[str, OpaqueOperator] = {}
    for node in graph.nodes:
        if node.spec is None:
            op, types = node.op.removeprefix(OPAQUE), tuple(type.laid_out(()) for type in node.types)
            reason = why_opaque(node.call, types) or "it was called in a form that its declaration did not cover"
            first = found.setdefault(op, OpaqueOperator(op, 0, graph.source_of(node), reason))
            found[op] = replace(first, count=first.count + 1)
    return Report(tuple(found.values()), dropped, checked)
