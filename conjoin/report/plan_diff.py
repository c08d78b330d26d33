"""What differs between two plans: how they were made, what is stored, how operators are split, what is sent.

Operators are lined up by what stays when a plan changes (operator, attributes, shapes, the user's line), so that plans
of graphs that were rewritten differently can be compared too. A plan of one stage and a pipeline, or two pipelines that
are cut at different places, are lined up the same way: what moved to another stage is told as that.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from itertools import zip_longest
from typing import Any

from conjoin.ir import (
    OFFLOAD,
    RECOMPUTE,
    Graph,
    LeafKind,
    Node,
    Pipeline,
    Plan,
    Stage,
    offloaded_tensors,
    operators_of,
    pipeline_to_json,
    plan_to_json,
    recomputed_segments,
)
from conjoin.report.explanation import Explanation, Operator, explain
from conjoin.report.explanation_text import collective_text, source_text, split_text
from conjoin.report.pipelines import between_text, ranks_text
from conjoin.report.text import format_bytes
from conjoin.schedules import Schedule

_NUMBER = re.compile(r"%[0-9]+")
_LAYER = re.compile(r"(?:(?<=\.)|(?<=param:)|(?<=buffer:))[0-9]+(?=[. :])")
"""The number of a layer in the name of a module or tensor."""
_ROWS = 6
"""How many rows of a schedule are told from where two orders part."""
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
    stages: tuple[Change, ...]
    """Of pipelines: the schedule, and which ranks have which stage."""
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
        told = _folded(changes)
        yield from (f"  {line}" for line in told[:_SHOWN])
        if len(told) > _SHOWN:
            yield f"    and {len(told) - _SHOWN} more"


def _folded(changes: Iterable[Change]) -> list[str]:
    """Lines in which what layers have in common is told once: `4 × param:blocks.*.weight: …`."""
    alike: dict[str, list[str]] = {}
    for line in map(str, changes):
        alike.setdefault(_LAYER.sub("*", line), []).append(line)
    return [found[0] if len(found) == 1 else f"{line[:2]}{len(found)} × {line[2:]}" for line, found in alike.items()]


@dataclass(frozen=True, slots=True)
class _Part:
    """A plan of one stage, or a stage of a pipeline."""

    plan: Plan
    found: Explanation
    where: str = ""
    arriving: frozenset[str] = frozenset()
    """What comes from other stages, as operators read it."""


def diff_plans(before: Plan | Pipeline, after: Plan | Pipeline) -> PlanDiff:
    """What differs between two legal plans, each of one stage or several."""
    old, new = _parts(before), _parts(after)
    found = {
        "making": tuple(_changed(_making(before), _making(after))),
        "stages": (*_changed(_stages(before), _stages(after)), *_row_changes(before, after)),
        "memory": tuple(_counted(_memory(old), _memory(new))),
        "storage": tuple(_changed(_storage(old), _storage(new))),
        "operators": tuple(_operator_changes(old, new)),
        "transfers": tuple(_counted(_transfers(before, old), _transfers(after, new))),
        "traffic": tuple(_changed(_traffic(old), _traffic(new))),
    }
    other = () if any(found.values()) else tuple(_line_changes(before, after))
    return PlanDiff(**found, other=other)


def _parts(plan: Plan | Pipeline) -> list[_Part]:
    if isinstance(plan, Plan):
        return [_Part(plan, explain(plan))]
    return [
        _Part(stage.plan, explain(stage.plan), f" in stage {i}", frozenset(f"input:{a.input}" for a in stage.arrivals))
        for i, stage in enumerate(plan.stages)
    ]


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


def _making(plan: Plan | Pipeline) -> dict[str, str]:
    mesh = " ".join(f"{axis}{' between nodes' if axis.between_nodes else ''}" for axis in plan.mesh.axes)
    plans = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]
    return {
        "strategy": plan.strategy,
        "mesh": mesh or "one device",
        "model": f"{plan.model.name} {plan.model.fingerprint}",
        "machine": f"{plan.machine.name} {plan.machine.fingerprint}",
        "micro-batches": str(plan.accumulation.steps if plan.accumulation is not None else 1),
        "mode": "train" if plan.graph.training else "eval",
        "precision": plan.precision or "as the model is",
        **{f"{s.name} at {s.where}": "applied" for each in plans for s in each.substitutions},
    }


def _stages(plan: Plan | Pipeline) -> dict[str, str]:
    if isinstance(plan, Plan):
        return {}
    owners = zip(plan.schedule.owners, plan.stages, strict=True)
    stages = {f"stage {i}": _stage_text(owner, stage) for i, (owner, stage) in enumerate(owners)}
    return {"schedule": plan.schedule.name, **stages}


def _stage_text(owner: int, stage: Stage) -> str:
    borrowed = f", borrows {', '.join(stage.borrowed)}" if stage.borrowed else ""
    return f"{stage.plan.strategy} on {ranks_text(stage.ranks)} of owner {owner}{borrowed}"


def _row_changes(before: Plan | Pipeline, after: Plan | Pipeline) -> Iterator[Change]:
    """Where owners run the rows of one schedule in another order."""
    if isinstance(before, Plan) or isinstance(after, Plan) or _shape(before.schedule) != _shape(after.schedule):
        return
    for owner, sides in enumerate(zip(before.schedule.rows, after.schedule.rows, strict=True)):
        if sides[0] != sides[1]:
            pairs = enumerate(zip_longest(*sides))
            first = next(i for i, (one, other) in pairs if one != other)
            texts = (" ".join(map(str, rows[first : first + _ROWS])) or "the end" for rows in sides)
            yield Change(f"owner {owner} from row {first} on", *texts)


def _shape(schedule: Schedule) -> tuple[str, tuple[int, ...], int, int]:
    return schedule.name, schedule.owners, schedule.num_owners, schedule.num_micro_batches


def _memory(parts: Sequence[_Part]) -> list[str]:
    """What is done to save memory; operators, whose numbers shift between plans, by what they are."""
    return [f"{text}{part.where}" for part in parts for text in _memory_of(part.plan)]


def _memory_of(plan: Plan) -> list[str]:
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


def _storage(parts: Sequence[_Part]) -> dict[str, str]:
    """How leaves lie, and in which stages."""
    found: dict[str, list[str]] = {}
    for part in parts:
        leaves = part.plan.graph.leaves
        parameters = part.plan.graph.leaves_of(LeafKind.PARAMETER)
        for leaf in (*parameters, *(leaf for leaf in leaves if leaf.kind is not LeafKind.PARAMETER)):
            if str(leaf) not in part.arriving:
                found.setdefault(str(leaf), []).append(f"{leaf.type}{part.where}")
    return {name: ", ".join(types) for name, types in found.items()}


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator, with what tells it from others wherever it runs."""

    operator: Operator
    where: str
    line: str
    """A call without layouts, numbers of values, reshards and stages."""

    @property
    def place(self) -> str:
        return _place(self.operator)

    @property
    def lies(self) -> str:
        """How it is split, how its outputs lie, and in which stage."""
        types = ", ".join(map(str, self.operator.node.types))
        return f"{split_text(self.operator)} giving {types}".lstrip() + self.where

    @property
    def split(self) -> str:
        return (split_text(self.operator) + self.where).strip()


def _calls(parts: Sequence[_Part]) -> list[_Call]:
    return [
        _Call(each, part.where, _normal_line(each, part.arriving)) for part in parts for each in part.found.operators
    ]


def _operator_changes(old: Sequence[_Part], new: Sequence[_Part]) -> Iterator[Change]:
    for one, other in _aligned(_calls(old), _calls(new)):
        if one is None or other is None:
            here = one or other
            assert here is not None
            yield Change(here.place, *(None if call is None else call.split for call in (one, other)))
        elif one.lies != other.lies:
            yield Change(one.place, one.lies, other.lies)


def _place(operator: Operator) -> str:
    return f"{operator.node.op} {source_text(operator.source)}".strip()


def _aligned(some: Sequence[_Call], others: Sequence[_Call]) -> Iterator[tuple[_Call | None, _Call | None]]:
    """Pairs of operators that are the same call at the same place; None beside those of one plan only."""
    left, right = ([call.line for call in side] for side in (some, others))
    if left == right:
        yield from zip(some, others, strict=True)
        return
    for tag, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(some[a:b], others[c:d], strict=True)
        else:
            yield from ((call, None) for call in some[a:b])
            yield from ((None, call) for call in others[c:d])


def _normal_line(operator: Operator, arriving: frozenset[str]) -> str:
    types = ", ".join(str(type.laid_out(())) for type in operator.node.types)
    arguments = _NUMBER.sub("%", operator.arguments)
    for name in sorted(arriving, key=len, reverse=True):
        arguments = arguments.replace(name, "%")
    return f"{types} = {operator.node.op}({arguments}) @ {operator.source}"


def _transfers(plan: Plan | Pipeline, parts: Sequence[_Part]) -> list[str]:
    """What goes between stages, and every collective inside them, in words."""
    between = [] if isinstance(plan, Plan) else [between_text(transfer) for transfer in plan.transfers()]
    return between + [f"{text}{part.where}" for part in parts for text in _collectives(part.found)]


def _collectives(found: Explanation) -> list[str]:
    """Values, whose numbers shift between plans, are told by what made them."""
    makers = {name: _place(operator) for operator in found.operators for name in operator.outputs}
    texts = []
    for shipment in found.shipments:
        name = shipment.tensors[0] if shipment.tensors else ""
        for collective in shipment.collectives:
            texts.append(collective_text(shipment, collective).replace(f"{name} ", f"{makers.get(name, name)} ", 1))
    return texts


def _traffic(parts: Sequence[_Part]) -> dict[str, str]:
    told = {}
    for part in parts:
        sent = {total.kind: part.found.sent(total.kind).largest for total in part.found.totals}
        figures = {"parameters stored": part.found.stored_bytes, **sent, "sent in all": part.found.sent().largest}
        for name, count in figures.items():
            told[f"{name}{part.where}"] = f"{format_bytes(count)} ({count:,} B) per rank"
    return told


def _line_changes(before: Plan | Pipeline, after: Plan | Pipeline) -> Iterator[Change]:
    """The lines of the plan files that differ, when only these tell the plans apart."""
    old, new = (json.dumps(_to_json(plan), indent=1, ensure_ascii=False).splitlines() for plan in (before, after))
    for line in unified_diff(old, new, lineterm="", n=0):
        if line[:1] in "+-" and line[:3] not in ("+++", "---"):
            yield Change(line[1:].strip(), "" if line[0] == "-" else None, None if line[0] == "-" else "")


def _to_json(plan: Plan | Pipeline) -> dict[str, Any]:
    data = plan_to_json(plan) if isinstance(plan, Plan) else pipeline_to_json(plan)
    return {**data, "predictions": None}
