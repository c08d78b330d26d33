"""The plan: all that crosses from deciding to running, as one versioned file that people can read, diff and edit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from conjoin.errors import GraphError, PlanError
from conjoin.ir.accumulation import Accumulation, check_accumulation
from conjoin.ir.computation import computation_digest
from conjoin.ir.custom_operators import read_statements, statements_to_json
from conjoin.ir.files import write_file
from conjoin.ir.graph import Graph
from conjoin.ir.graph_file import fingerprint
from conjoin.ir.host_inputs import host_readers
from conjoin.ir.library_stamps import is_held_for_true, is_own
from conjoin.ir.limits import MAX_ITEMS
from conjoin.ir.micro_batched_parts import micro_batched_parts
from conjoin.ir.nodes import LeafKind
from conjoin.ir.offloads import Made, check_offloads, parse_tensors, tensor_text
from conjoin.ir.parallel_verifier import find_layout_faults
from conjoin.ir.parallelize import sequential
from conjoin.ir.parser import parse_graph
from conjoin.ir.segments import Segment, operators_of, parse_segments, segment_texts
from conjoin.ir.verifier import find_faults
from conjoin.machine import Axis, Cut, Mesh
from conjoin.ops import At

FORMAT = "conjoin.plan"
VERSION = 1
REGATHER = "regather"
"""Memory action: a parameter gathered for the forward pass is dropped after it and gathered again for the backward."""
RECOMPUTE = "recompute"
"""Memory action: of consecutive operators, `%3..%7`, only what they read from outside is kept for the backward pass,
which runs them again; and of `%3..%7 but %5` what makes %5, which is not."""
OFFLOAD = "offload"
"""Memory action: a tensor, `%12`, is copied to the host when it is made and brought back for the backward pass."""
OFFLOAD_STATE = "offload-state"
"""Memory action: what the optimizer remembers of a parameter lies on the host and is brought for its update."""
STREAM = "stream"
"""Memory action: an input lies on the host during the step, and who reads it gets it block by block."""
_ACTIONS = (REGATHER, RECOMPUTE, OFFLOAD, OFFLOAD_STATE, STREAM)
BUNDLE_BYTES = 25 * 2**20
"""Of a bundle where nobody knows better: as DistributedDataParallel's (torch documentation, `bucket_cap_mb`)."""
_MAX_BUNDLE_BYTES = 2**40
MAX_CHUNKS = 64
_MAX_RANKS = 2**20
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """What a plan was made for: a name for people, a fingerprint for the check."""

    name: str
    fingerprint: str
    graph: Graph | None = field(default=None, compare=False, repr=False)
    """The captured model itself, as long as it is at hand; a file does not hold it."""


def model_mark(graph: Graph) -> Mark:
    """The mark of a captured model; the values of its constants do not count, a model on meta has none."""
    return Mark(graph.name, fingerprint(graph, constants=False), graph)


def captured_graph(plan: Plan) -> Graph | None:
    """The captured model that a plan was made of: at hand, or the plan's graph without layouts where it is that.

    None of a plan from a file whose graph was rewritten, or is that of a micro-batch.
    """
    if plan.model.graph is not None:
        return plan.model.graph
    whole = sequential(plan.graph)
    return whole if fingerprint(whole, constants=False) == plan.model.fingerprint else None


@dataclass(frozen=True, slots=True)
class MemoryAction:
    """What is done to a tensor to save memory, or to all tensors that consecutive operators make."""

    action: str
    tensor: str


def recompute_actions(graph: Graph, segments: Iterable[tuple[int, int]]) -> tuple[MemoryAction, ...]:
    """The memory actions by which segments of a graph are run again in the backward pass."""
    return tuple(MemoryAction(RECOMPUTE, name) for name in segment_texts(graph, segments))


def recomputed_segments(plan: Plan) -> tuple[Segment, ...]:
    """The segments that the backward pass runs again, in order; ValueError where an action names none."""
    return parse_segments(plan.graph, (action.tensor for action in plan.memory if action.action == RECOMPUTE))


def offload_actions(
    graph: Graph, tensors: Iterable[Made], states: Iterable[str] = (), inputs: Iterable[str] = ()
) -> tuple[MemoryAction, ...]:
    """The memory actions by which tensors of a graph, optimizer state of parameters, and inputs lie on the host."""
    made = (MemoryAction(OFFLOAD, tensor_text(graph, tensor)) for tensor in sorted(tensors))
    others = [MemoryAction(OFFLOAD_STATE, name) for name in sorted(states)]
    return (*made, *others, *(MemoryAction(STREAM, name) for name in sorted(inputs)))


def offloaded_tensors(plan: Plan) -> tuple[Made, ...]:
    """The tensors that lie on the host between forward and backward; ValueError where an action names none."""
    return parse_tensors(plan.graph, (action.tensor for action in plan.memory if action.action == OFFLOAD))


def offloaded_states(plan: Plan) -> frozenset[str]:
    """The parameters whose optimizer state lies on the host."""
    return frozenset(action.tensor for action in plan.memory if action.action == OFFLOAD_STATE)


def host_inputs(plan: Plan) -> frozenset[str]:
    """The inputs that lie on the host during a step."""
    return frozenset(action.tensor for action in plan.memory if action.action == STREAM)


def regathered_parameters(plan: Plan) -> frozenset[str]:
    """The parameters that are dropped after the forward pass and gathered again for the backward."""
    return frozenset(action.tensor for action in plan.memory if action.action == REGATHER)


@dataclass(frozen=True, slots=True)
class Substitution:
    """A rewrite that was applied, where, and why it is right."""

    name: str
    where: str
    proof: str
    """Of a rule of the library its method and stamp, as `definitions:0123456789abcdef`; of a user's own rule also for
    which operators it was proven, and in which file it stands; otherwise a sentence."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A parallel graph on a mesh, with what it was made from and for."""

    graph: Graph
    mesh: Mesh
    model: Mark
    """Of the captured graph."""
    machine: Mark
    strategy: str
    """How the plan was made: a strategy with its degrees, or a search."""
    memory: tuple[MemoryAction, ...] = ()
    substitutions: tuple[Substitution, ...] = ()
    predictions: tuple[tuple[str, float], ...] = ()
    """Named figures with their unit: `seconds_per_step`."""
    accumulation: Accumulation | None = None
    """The graph is that of a micro-batch, several of which make up a step; None where it is that of the whole batch."""
    computes: str | None = None
    """The digest of what the graph computed when the plan was made; None where that is left to whoever edits it."""
    precision: str = ""
    """In which precision the model was captured, as `bf16-mixed@cuda`; empty where it was as it is."""
    bundle_bytes: int = BUNDLE_BYTES
    """How many bytes of parameters, as they are used, at least travel in the same collectives."""
    chunks: int = 1
    """In how many chunks of its rows a product goes that a collective is next to: one is sent while others compute."""

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        write_file(path, plan_to_text(self), "plan", PlanError)

    def __str__(self) -> str:
        where = f"{self.mesh.size} ranks ({self.mesh})" if self.mesh.size > 1 else "one device"
        return f"{self.strategy} plan of {self.model.name} for {where}"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; the graph as its text form, line by line."""
    operators = statements_to_json(plan.graph)
    return {
        "format": FORMAT,
        "version": VERSION,
        "strategy": plan.strategy,
        "model": {"name": plan.model.name, "fingerprint": plan.model.fingerprint},
        "machine": {"name": plan.machine.name, "fingerprint": plan.machine.fingerprint},
        "mesh": mesh_to_json(plan.mesh),
        **({"cuts": [[cut.size, cut.axes, cut.bounds] for cut in plan.mesh.cuts]} if plan.mesh.cuts else {}),
        "stages": [],
        "schedule": None,
        **decisions_to_json(plan),
        "predictions": dict(plan.predictions),
        **({} if plan.accumulation is None else {"accumulate": accumulation_to_json(plan.accumulation)}),
        **({"precision": plan.precision} if plan.precision else {}),
        **({"operators": operators} if operators else {}),
        "graph": str(plan.graph).splitlines(),
    }


def mesh_to_json(mesh: Mesh) -> list[dict[str, Any]]:
    """A mesh as plain data, axis by axis."""
    return [{"axis": a.name, "size": a.size, "between_nodes": a.between_nodes} for a in mesh.axes]


def decisions_to_json(plan: Plan) -> dict[str, Any]:
    """What is decided beside layouts, as plain data."""
    return {
        "memory": [{"action": action.action, "tensor": action.tensor} for action in plan.memory],
        "substitutions": [{"name": s.name, "where": s.where, "proof": s.proof} for s in plan.substitutions],
        "computes": plan.computes,
        **({"bundle_bytes": plan.bundle_bytes} if plan.bundle_bytes != BUNDLE_BYTES else {}),
        **({"chunks": plan.chunks} if plan.chunks != 1 else {}),
    }


def accumulation_to_json(accumulation: Accumulation) -> dict[str, Any]:
    return {
        "steps": accumulation.steps,
        "cut": list(accumulation.cut),
        "whole": [{"input": name, "of": other} for name, other in accumulation.whole],
    }


def plan_to_text(plan: Plan) -> str:
    """The plan as it stands in its file: one line for every operator."""
    return json.dumps(plan_to_json(plan), indent=1, ensure_ascii=False) + "\n"


def plan_fingerprint(plan: Plan) -> str:
    """What must be equal on all ranks: everything that decides what runs."""
    data = {k: v for k, v in plan_to_json(plan).items() if k not in ("predictions", "strategy", "operators")}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_plan(plan: Plan) -> Plan:
    """The plan itself when it is legal; otherwise PlanError lists every fault."""
    faults = find_faults(plan.graph) or find_layout_faults(plan.graph, plan.mesh)
    if not faults:
        _check_memory(plan)
        _check_substitutions(plan)
        _check_computation(plan)
        return plan
    listed = "\n".join(f"  {fault}" for fault in faults[:_SHOWN])
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise PlanError(
        f"The plan of {plan.model.name} on the mesh {plan.mesh} is not legal: {len(faults)} "
        f"fault{'s' if len(faults) > 1 else ''} found. It was edited, or written for other operators or another mesh. "
        f"Correct these lines or make the plan again:\n{listed}{more}"
    )


def _check_memory(plan: Plan) -> None:
    try:
        segments, offloads = recomputed_segments(plan), offloaded_tensors(plan)
        check_offloads(plan.graph, offloads, segments)
        streamed = host_inputs(plan)
        host_readers(plan.graph, streamed)
        if plan.accumulation is not None:
            check_accumulation(plan.graph, plan.accumulation)
        parts = micro_batched_parts(plan.graph)
        inside = {node for part in parts for node in part.nodes}
        operators = operators_of(plan.graph)
        if any(node in inside for first, last in segments for node in operators[first : last + 1]):
            raise ValueError("what runs in micro-batches is run again, one by one, without being asked to")
        if parts and plan.accumulation is not None:
            raise ValueError("a part of it runs in micro-batches of its own")
        places = [p for node in plan.graph.nodes for type in node.types for _, p in type.layout if isinstance(p, At)]
        if parts and offloads:
            raise ValueError("what runs in micro-batches keeps nothing that could lie on the host")
        if streamed and (parts or places or plan.accumulation is not None):
            raise ValueError("inputs are to lie on the host during the step, and a part of them is read at a time")
        if places and (segments or parts or offloads or plan.accumulation is not None):
            raise ValueError(f"{len(places)} tensors are made at one place of an axis only, and others would wait")
    except ValueError as error:
        raise PlanError(
            f"The plan of {plan.model.name} saves memory in a way that it cannot: {error}. Its memory actions or "
            f"micro-batches were edited, or are those of another graph. Correct them or make the plan again."
        ) from None


def _check_computation(plan: Plan) -> None:
    if plan.computes is not None and plan.computes != computation_digest(plan.graph, plan.accumulation):
        raise PlanError(
            f"The plan of {plan.model.name} does not compute what it did when it was made: an operator, an attribute "
            f"or what one reads was edited, not only layouts. It would train another model than the one it is for. "
            f'Undo that edit; where it is meant, write "computes": null into the plan.'
        )


def _check_substitutions(plan: Plan) -> None:
    for applied in plan.substitutions:
        if is_held_for_true(applied.proof):
            continue
        raise PlanError(
            f"The plan of {plan.model.name} was made by the rule {applied.name!r} with the proof {applied.proof}. "
            f"{_gone(applied.proof)}, and the plan may train another model. Make the plan again."
        )


def _gone(proof: str) -> str:
    if is_own(proof):
        return "The operators have changed since that rule was proven, or how rules are applied to them"
    return "The library has no rule with that stamp any more: it was refuted, changed, dropped or proven anew since"


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
