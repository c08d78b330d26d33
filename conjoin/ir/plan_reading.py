"""A plan read back from plain data, of which nothing is believed: PlanError says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from conjoin.errors import GraphError, PlanError
from conjoin.ir.accumulation import Accumulation, check_accumulation
from conjoin.ir.custom_operators import read_statements
from conjoin.ir.graph import Graph
from conjoin.ir.limits import MAX_ITEMS
from conjoin.ir.nodes import LeafKind
from conjoin.ir.offloads import parse_tensors
from conjoin.ir.parser import parse_graph
from conjoin.ir.plan import (
    BUNDLE_BYTES,
    FORMAT,
    OFFLOAD,
    OFFLOAD_STATE,
    RECOMPUTE,
    REGATHER,
    STREAM,
    VERSION,
    Mark,
    MemoryAction,
    Plan,
    Substitution,
    offload_actions,
    recompute_actions,
)
from conjoin.ir.segments import parse_segments
from conjoin.machine import Axis, Cut, Mesh

MAX_CHUNKS = 64
_MAX_BUNDLE_BYTES, _MAX_RANKS = 2**40, 2**20
_ACTIONS = (REGATHER, RECOMPUTE, OFFLOAD, OFFLOAD_STATE, STREAM)


def plan_from_json(data: Any) -> Plan:
    """Rebuild a plan of one stage from plain data; PlanError says what is wrong with it."""
    return read_plan(data, _load)


T = TypeVar("T")


def read_plan(data: Any, load: Callable[[dict[str, Any]], T]) -> T:
    """What is loaded from plain data of this format; PlanError says what is wrong with it."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(
            f"This is not a plan: its 'format' is not {FORMAT!r}. Another kind of file was given. Check the path."
        )
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise PlanError(
            f"The plan has another format version than {VERSION}. It was written by another release. "
            f"Make the plan again."
        )
    try:
        return load(data)
    except GraphError as error:
        raise PlanError(f"The graph in the plan cannot be read: {error}") from None
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            f"The plan is malformed: {reason[:300]}. It was damaged or edited wrongly. Correct it or make it again."
        ) from None


KEYS = frozenset({
    "format", "version", "strategy", "model", "machine", "mesh", "stages", "schedule", "memory", "substitutions",
    "predictions", "graph", "accumulate", "operators", "computes", "precision", "bundle_bytes", "chunks", "cuts",
})  # fmt: skip


def _load(data: dict[str, Any]) -> Plan:
    check_keys(data, KEYS)
    if data["stages"] or data["schedule"] is not None:
        raise ValueError("it has several stages, where a plan of one is read")
    undeclared = read_statements(data.get("operators", []))
    plan = read_decisions(data, mark_from_json(data["model"], "model"), mark_from_json(data["machine"], "machine"))
    check_declared(plan.graph, undeclared)
    return replace(
        plan,
        predictions=figures_from_json(data["predictions"]),
        accumulation=accumulation_from_json(data["accumulate"], plan.graph) if "accumulate" in data else None,
        precision=line_from_json(data.get("precision", ""), "its precision"),
        chunks=_chunks(data.get("chunks", 1)),
    )


def check_keys(data: dict[str, Any], known: Collection[str]) -> None:
    """ValueError where data has other keys."""
    unknown = data.keys() - known
    if unknown:
        raise ValueError(f"{', '.join(sorted(map(repr, unknown)))[:200]} is unknown")


def graph_from_json(data: Mapping[str, Any]) -> Graph:
    """The graph that stands in a file line by line."""
    return parse_graph("\n".join(_text(line, "a line of the graph") for line in items_of(data, "graph")) + "\n")


def read_decisions(data: Mapping[str, Any], model: Mark, machine: Mark) -> Plan:
    """A plan as far as it is a graph on a mesh with what is decided beside layouts."""
    graph = graph_from_json(data)
    return Plan(
        graph=graph,
        mesh=_with_cuts(mesh_from_json(items_of(data, "mesh")), items_of(data, "cuts") if "cuts" in data else []),
        model=model,
        machine=machine,
        strategy=line_from_json(data["strategy"], "strategy"),
        memory=_actions(items_of(data, "memory"), graph),
        substitutions=tuple(_substitution(entry) for entry in items_of(data, "substitutions")),
        computes=None if data["computes"] is None else line_from_json(data["computes"], "what it computes"),
        bundle_bytes=_bundle_bytes(data.get("bundle_bytes", BUNDLE_BYTES)),
    )


def check_declared(graph: Graph, undeclared: Mapping[str, str]) -> None:
    """Refuse what splits an operator that nobody has declared here: nothing says that it may be split."""
    split = [node.op for node in graph.nodes if node.op in undeclared and any(type.layout for type in node.types)]
    if split:
        module, count = undeclared[split[0]], split.count(split[0])
        calls = "1 call" if count == 1 else f"{count} calls"
        where = f"the module {module} does" if module else "it was declared in a program of its own"
        how = f"Name it with --import {module}, or imports=[{module!r}]" if module else "Declare it before reading"
        raise PlanError(
            f"The plan of {graph.name} splits the operator {split[0]} ({calls}), which nobody has declared "
            f"here: {where}. Without its declaration nothing says that it may be split. {how}."
        )


def _bundle_bytes(entry: Any) -> int:
    if type(entry) is not int or not 1 <= entry <= _MAX_BUNDLE_BYTES:
        raise ValueError(f"bundles of {str(entry)[:40]} bytes are none; a number from 1 to {_MAX_BUNDLE_BYTES:,} is")
    return entry


def _chunks(entry: Any) -> int:
    if type(entry) is not int or not 1 <= entry <= MAX_CHUNKS:
        raise ValueError(f"products in {str(entry)[:40]} chunks are none; a number from 1 to {MAX_CHUNKS} is")
    return entry


def accumulation_from_json(entry: Any, graph: Graph, *, own_statistics: bool = False) -> Accumulation:
    match entry:
        case {"steps": int(steps), "cut": list(cut), "whole": list(whole), **rest} if not rest:
            pass
        case _:
            raise ValueError(f"{str(entry)[:60]} does not say how many micro-batches there are of what")
    names = tuple(_text(name, "an input") for name in cut)
    pairs = [_fields(pair, ("input", "of")) for pair in whole]
    made = Accumulation(steps, names, tuple((name, other) for name, other in pairs))
    check_accumulation(graph, made, own_statistics=own_statistics)
    return made


def items_of(data: Mapping[str, Any], key: str) -> list[Any]:
    entries = data[key]
    if not isinstance(entries, list) or len(entries) > MAX_ITEMS:
        raise ValueError(f"{key} is not a list of at most {MAX_ITEMS:,} entries")
    return entries


def _text(item: Any, what: str) -> str:
    if not isinstance(item, str):
        raise ValueError(f"{what} is not text")
    return item


def line_from_json(item: Any, what: str) -> str:
    """Text that people are shown: a stranger's file must not write to their terminal as it likes."""
    text = _text(item, what)
    if not text.isprintable():
        raise ValueError(f"{what} is not one line of printable characters")
    return text


def _fields(entry: Any, names: tuple[str, ...]) -> list[str]:
    if not isinstance(entry, dict) or entry.keys() != set(names):
        raise ValueError(f"{str(entry)[:60]} does not have exactly {', '.join(names)}")
    return [line_from_json(entry[name], name) for name in names]


def _substitution(entry: Any) -> Substitution:
    return Substitution(*_fields(entry, ("name", "where", "proof")))


def mark_from_json(entry: Any, what: str) -> Mark:
    name, fingerprint = _fields(entry, ("name", "fingerprint"))
    if len(fingerprint) > 128:
        raise ValueError(f"the fingerprint of the {what} is too long")
    return Mark(name, fingerprint)


def mesh_from_json(entries: list[Any]) -> Mesh:
    axes = []
    for entry in entries:
        match entry:
            case {"axis": str(name), "size": int(size), "between_nodes": bool(between), **rest} if not rest:
                pass
            case _:
                raise ValueError(f"{str(entry)[:60]} is not an axis of the mesh")
        if isinstance(size, bool) or not 2 <= size <= _MAX_RANKS or not name.isidentifier():
            raise ValueError(f"{name[:40]!r} of size {size} is not an axis of the mesh")
        axes.append(Axis(name, size, between))
    mesh = Mesh(tuple(axes))
    if len({axis.name for axis in axes}) < len(axes) or len(axes) > 20 or mesh.size > _MAX_RANKS:
        raise ValueError(f"the mesh has an axis twice, or more than {_MAX_RANKS:,} ranks")
    return mesh


def _with_cuts(mesh: Mesh, entries: list[Any]) -> Mesh:
    """A mesh with what is said of where dims are cut."""
    cuts = []
    for entry in entries:
        match entry:
            case [int(size), [*axes], [*bounds]] if (
                all(type(bound) is int for bound in bounds)
                and set(axes) <= set(mesh.names)
                and len(bounds) == 1 + prod(mesh.sizes[axis] for axis in axes)
                and bounds == sorted(bounds)
                and (bounds[0], bounds[-1]) == (0, size)
            ):
                cuts.append(Cut(size, tuple(axes), tuple(bounds)))
            case _:
                raise ValueError(f"{str(entry)[:60]} is not a cut of a dim")
    return Mesh(mesh.axes, tuple(cuts))


def _actions(entries: list[Any], graph: Graph) -> tuple[MemoryAction, ...]:
    read = [MemoryAction(*_fields(entry, ("action", "tensor"))) for entry in entries]
    parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    for made in read:
        if made.action not in _ACTIONS:
            raise ValueError(f"there is no memory action {made.action[:40]!r}; known are {', '.join(_ACTIONS)}")
        if made.action in (REGATHER, OFFLOAD_STATE) and made.tensor not in parameters:
            raise ValueError(f"{made.action} names {made.tensor[:60]!r}, which is no parameter")
    segments = parse_segments(graph, (made.tensor for made in read if made.action == RECOMPUTE), as_read=True)
    tensors = parse_tensors(graph, (made.tensor for made in read if made.action == OFFLOAD), as_read=True)
    others = (made for made in read if made.action not in (RECOMPUTE, OFFLOAD))
    return (*others, *recompute_actions(graph, segments), *offload_actions(graph, tensors))


def figures_from_json(entry: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(entry, dict) or len(entry) > 1000:
        raise ValueError("predictions are not named figures")
    for name, figure in entry.items():
        line_from_json(name, "the name of a prediction")
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ValueError(f"the prediction {name[:40]!r} is not a number")
    return tuple((name, float(figure)) for name, figure in entry.items())
