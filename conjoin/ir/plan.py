"""The plan: all that crosses from deciding to running, as one versioned file that people can read, diff and edit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conjoin.errors import PlanError
from conjoin.ir.accumulation import Accumulation, check_accumulation
from conjoin.ir.computation import computation_digest
from conjoin.ir.custom_operators import statements_to_json
from conjoin.ir.files import write_file
from conjoin.ir.graph import Graph
from conjoin.ir.graph_file import fingerprint
from conjoin.ir.host_inputs import host_readers
from conjoin.ir.library_stamps import is_held_for_true, is_own
from conjoin.ir.micro_batched_parts import micro_batched_parts
from conjoin.ir.nodes import LeafKind, Value
from conjoin.ir.offloads import Made, check_offloads, parse_tensors, tensor_text
from conjoin.ir.parallel_verifier import find_layout_faults
from conjoin.ir.parallelize import sequential
from conjoin.ir.reshards import is_parallel
from conjoin.ir.segments import Segment, operators_of, parse_segments, segment_texts
from conjoin.ir.verifier import find_faults
from conjoin.machine import Mesh
from conjoin.ops import CAST, CONFINE, At

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
BUNDLE_BYTES = 25 * 2**20
"""Of a bundle where nobody knows better: as DistributedDataParallel's (torch documentation, `bucket_cap_mb`)."""
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


def read_at_places(graph: Graph) -> frozenset[str]:
    """The parameters that ranks gather of which some read nothing, since a reader runs at one place of an axis; also
    those of which a view or a cast is read so. They cannot be gathered again, for who reads nothing does not come."""
    names = {Value(leaf): leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    found = set[str]()
    for node in graph.nodes:
        read = {names[value] for value in node.inputs if value in names}
        if node.op == CONFINE:
            found |= read
        if read and (is_parallel(node) or node.op == CAST or (node.spec is not None and node.spec.view)):
            names.update(dict.fromkeys(node.outputs(), min(read)))
    return frozenset(found)


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
        if places and (lost := read_at_places(plan.graph) & regathered_parameters(plan)):
            raise ValueError(f"{min(lost)} is to be gathered again, and at some places of an axis nothing reads it")
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
