"""What differs between two plans: how they were made, what is stored, how operators are split, what is sent.

Operators are lined up by what stays when a plan changes (operator, attributes, shapes, the user's line), so that plans
of graphs that were rewritten differently can be compared too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from typing import Any

from conjoin.ir import (
    OFFLOAD,
    RECOMPUTE,
    Graph,
    LeafKind,
    Node,
    Plan,
    offloaded_tensors,
    operators_of,
    plan_to_json,
    plan_to_text,
    recomputed_segments,
)
from conjoin.report.explanation import Explanation, Operator, explain
from conjoin.report.explanation_text import collective_text, source_text, split_text
from conjoin.report.text import format_bytes

_NUMBER = re.compile(r"%[0-9]+")
_SHOWN = 40
"""How many lines of one kind the text lists."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs; None where a plan does not have it."""

    what: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.what}" + (f": {self.after}" if self.after else "")
        if self.after is None:
            return f"- {self.what}" + (f": {self.before}" if self.before else "")
        return f"  {self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The differences between two plans, group by group; predictions do not count."""

    making: tuple[Change, ...]
    """Strategy, mesh, and what the plans were made for."""
    memory: tuple[Change, ...]
    storage: tuple[Change, ...]
    """Leaves that are stored or given in different layouts."""
    operators: tuple[Change, ...]
    transfers: tuple[Change, ...]
    traffic: tuple[Change, ...]
    """Bytes per rank and step."""
    other: tuple[Change, ...]
    """Lines of the plan files, where nothing of the above tells the plans apart."""

    @property
    def groups(self) -> tuple[tuple[str, tuple[Change, ...]], ...]:
        return tuple((name, getattr(self, name)) for name in self.__slots__)

    @property
    def equal(self) -> bool:
        """Whether the plans are the same."""
        return not any(changes for _, changes in self.groups)

    def to_json(self) -> dict[str, Any]:
        """The differences as plain data."""
        listed = {
            name: [{"what": change.what, "before": change.before, "after": change.after} for change in changes]
            for name, changes in self.groups
        }
        return {"equal": self.equal, **listed}

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def _lines(diff: PlanDiff) -> Iterator[str]:
    if diff.equal:
        yield "The plans are the same."
    for name, changes in diff.groups:
        if changes:
            yield name
            yield from (f"  {change}" for change in changes[:_SHOWN])
        if len(changes) > _SHOWN:
            yield f"    and {len(changes) - _SHOWN} more"


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What differs between two legal plans."""
    old, new = explain(before), explain(after)
    found = {
        "making": tuple(_changed(_making(before), _making(after))),
        "memory": tuple(_counted(_memory(before), _memory(after))),
        "storage": tuple(_changed(_storage(before), _storage(after))),
        "operators": tuple(_operator_changes(old, new)),
        "transfers": tuple(_counted(_transfers(old), _transfers(new))),
        "traffic": tuple(_changed(_traffic(old), _traffic(new))),
    }
    other = () if any(found.values()) else tuple(_line_changes(before, after))
    return PlanDiff(**found, other=other)


def _changed(before: dict[str, str], after: dict[str, str]) -> Iterator[Change]:
    """What has another text, or stands on one side only."""
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield Change(what, before.get(what), after.get(what))


def _counted(before: Iterable[str], after: Iterable[str]) -> Iterator[Change]:
    """What stands more often on one side than on the other."""
    had, has = Counter(before), Counter(after)
    for what in dict.fromkeys((*had, *has)):
        fewer, more = had[what] - has[what], has[what] - had[what]
        if fewer > 0:
            yield Change(_times(fewer, what), "", None)
        if more > 0:
            yield Change(_times(more, what), None, "")


def _times(count: int, what: str) -> str:
    return what if count == 1 else f"{count} × {what}"


def _making(plan: Plan) -> dict[str, str]:
    mesh = " ".join(f"{axis}{' between nodes' if axis.between_nodes else ''}" for axis in plan.mesh.axes)
    return {
        "strategy": plan.strategy,
        "mesh": mesh or "one device",
        "model": f"{plan.model.name} {plan.model.fingerprint}",
        "machine": f"{plan.machine.name} {plan.machine.fingerprint}",
        "micro-batches": str(plan.accumulation.steps if plan.accumulation is not None else 1),
        "mode": "train" if plan.graph.training else "eval",
        "precision": plan.precision or "as the model is",
        **{f"{s.name} at {s.where}": "applied" for s in plan.substitutions},
    }


def _memory(plan: Plan) -> list[str]:
    """What is done to save memory; operators, whose numbers shift between plans, by what they are."""
    operators = operators_of(plan.graph)
    segments = recomputed_segments(plan)
    places = [tuple(_called(operators[i], plan.graph) for i in segment) for segment in segments]
    kept = [f" but {len(segment.kept)}" if segment.kept else "" for segment in segments]
    placed = (RECOMPUTE, OFFLOAD)
    others = [f"{action.action} {action.tensor}" for action in plan.memory if action.action not in placed]
    others += [f"{OFFLOAD} {_called(operators[place], plan.graph)}" for place, _ in offloaded_tensors(plan)]
    return [*others, *(f"{RECOMPUTE} {first} to {last}{but}" for (first, last), but in zip(places, kept, strict=True))]


def _called(node: Node, graph: Graph) -> str:
    return f"{node.op} {source_text(graph.source_of(node))}".strip()


def _storage(plan: Plan) -> dict[str, str]:
    stored = {str(leaf): str(leaf.type) for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)}
    return stored | {str(leaf): str(leaf.type) for leaf in plan.graph.leaves if leaf.kind is not LeafKind.PARAMETER}


def _operator_changes(old: Explanation, new: Explanation) -> Iterator[Change]:
    for one, other in _aligned(old.operators, new.operators):
        if one is None or other is None:
            here = one or other
            assert here is not None
            texts = [None if operator is None else split_text(operator) for operator in (one, other)]
            yield Change(_place(here), *texts)
        elif _lie(one) != _lie(other):
            yield Change(_place(one), _lie(one), _lie(other))


def _place(operator: Operator) -> str:
    return f"{operator.node.op} {source_text(operator.source)}".strip()


def _lie(operator: Operator) -> str:
    """How an operator is split and how its outputs lie."""
    types = ", ".join(map(str, operator.node.types))
    return f"{split_text(operator)} giving {types}".lstrip()


Pair = tuple[Operator | None, Operator | None]


def _aligned(some: tuple[Operator, ...], others: tuple[Operator, ...]) -> Iterator[Pair]:
    """Pairs of operators that are the same call at the same place; None beside those of one plan only."""
    left, right = ([_normal_line(operator) for operator in side] for side in (some, others))
    if left == right:
        yield from zip(some, others, strict=True)
        return
    for tag, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(some[a:b], others[c:d], strict=True)
        else:
            yield from ((operator, None) for operator in some[a:b])
            yield from ((None, operator) for operator in others[c:d])


def _normal_line(operator: Operator) -> str:
    """A call without layouts, numbers of values and reshards."""
    types = ", ".join(str(type.laid_out(())) for type in operator.node.types)
    return f"{types} = {operator.node.op}({_NUMBER.sub('%', operator.arguments)}) @ {operator.source}"


def _transfers(found: Explanation) -> list[str]:
    """Every collective in words; values, whose numbers shift between plans, by what made them."""
    makers = {name: _place(operator) for operator in found.operators for name in operator.outputs}
    texts = []
    for shipment in found.shipments:
        name = shipment.tensors[0] if shipment.tensors else ""
        for collective in shipment.collectives:
            texts.append(collective_text(shipment, collective).replace(f"{name} ", f"{makers.get(name, name)} ", 1))
    return texts


def _traffic(found: Explanation) -> dict[str, str]:
    sent = {total.kind: found.sent(total.kind).largest for total in found.totals}
    figures = {"parameters stored": found.stored_bytes, **sent, "sent in all": found.sent().largest}
    return {name: f"{format_bytes(count)} ({count:,} B) per rank" for name, count in figures.items()}


def _line_changes(before: Plan, after: Plan) -> Iterator[Change]:
    """The lines of the plan files that differ, when only these tell the plans apart."""
    old, new = ({**plan_to_json(plan), "predictions": None} for plan in (before, after))
    if old == new:
        return
    lines = unified_diff(plan_to_text(before).splitlines(), plan_to_text(after).splitlines(), lineterm="", n=0)
    for line in lines:
        if line[:1] in "+-" and line[:3] not in ("+++", "---"):
            yield Change(line[1:].strip(), "" if line[0] == "-" else None, None if line[0] == "-" else "")
