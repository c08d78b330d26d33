"""The explanation of a plan as text: a header, then one line an operator with what is sent before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath

from conjoin.comm import BACKWARD, Collective, PerRank
from conjoin.ir import OFFLOAD, OFFLOAD_STATE, RECOMPUTE, STREAM, Source, in_one_line
from conjoin.ops import At, Partial, Split, placement_on
from conjoin.report.explanation import Explanation, Operator, Shipment, layout_text
from conjoin.report.text import format_bytes

_INDENT = "    ~ "


def explanation_text(found: Explanation) -> str:
    """The whole explanation, line by line."""
    lines = [*explanation_summary(found), "", *_code(found)]
    return "\n".join(lines) + "\n"


def explanation_summary(found: Explanation) -> list[str]:
    """The header: what the plan is for, what is stored, what is sent."""
    devices = "1 device" if found.mesh.size == 1 else f"{found.mesh.size} devices, axes {found.mesh}"
    stored, whole = format_bytes(found.stored_bytes), format_bytes(found.parameter_bytes)
    model = f"{found.model.name} {found.model.fingerprint[:16]}".rstrip()  # a stage of a pipeline has no fingerprint
    facts = [
        ("strategy", found.strategy),
        ("mesh", devices),
        ("model", f"{model}, {'train' if found.training else 'eval'}"),
        ("machine", f"{found.machine.name} {found.machine.fingerprint.removeprefix('machine-v1:')[:16]}"),
        ("precision", found.precision),
        ("operators", str(len(found.operators))),
        ("custom", ", ".join(f"{name} of {module or 'an unknown module'}" for name, module in found.custom)),
        ("parameters", f"{stored} stored per rank, {whole} whole"),
        *((action, _memory_text(action, count, found)) for action, count in found.memory),
        ("micro-batches", str(found.num_micro_batches) if found.num_micro_batches > 1 else ""),
        ("rewritten", ", ".join(f"{name} × {count}" for name, count in found.substitutions)),
        ("sent", f"{_amount(found.sent())} in a step"),
    ]
    return [*(f"{name:<12} {text}" for name, text in facts if text), *_kind_lines(found)]


def _memory_text(action: str, asked: int, found: Explanation) -> str:
    """Some parameters are not gathered, or not read in the backward pass."""
    if action == RECOMPUTE:
        return f"{asked} segment{'s' if asked > 1 else ''}, {found.num_recomputed} operators run again in backward"
    if action == OFFLOAD:
        return f"{asked} tensor{'s' if asked > 1 else ''} on the host between forward and backward"
    if action == OFFLOAD_STATE:
        return f"optimizer state of {asked} parameter{'s' if asked > 1 else ''} on the host between updates"
    if action == STREAM:
        return f"{asked} input{'s' if asked > 1 else ''} on the host during the step, read block by block"
    done = found.num_regathered
    parameters = f"{asked} parameter{'s' if asked > 1 else ''}"
    return parameters if done == asked else f"{parameters} asked for, {done} gathered again"


def _kind_lines(found: Explanation) -> Iterator[str]:
    for total in found.totals:
        ways = [f"{format_bytes(sent.largest)} {way}" for way, sent in _directions(total.forward, total.backward)]
        yield f"  {total.kind:<16} {' + '.join(ways)} per rank"


def _directions(forward: PerRank, backward: PerRank) -> list[tuple[str, PerRank]]:
    return [(way, sent) for way, sent in (("forward", forward), (BACKWARD, backward)) if sent.largest]


def _amount(sent: PerRank) -> str:
    return f"{format_bytes(sent.largest)} per rank, {format_bytes(sent.total)} by all ranks"


def _code(found: Explanation) -> Iterator[str]:
    yield from _shipment_lines(found.start)
    for operator in found.operators:
        yield from _shipment_lines(operator.before)
        yield operator_line(operator)
        yield from _shipment_lines(operator.after)
    if found.results:
        yield "results"
        yield from _shipment_lines(found.results)


def operator_line(operator: Operator) -> str:
    """One operator: what it makes, the call, how its work is split, and where in the user's program it stands."""
    made = ", ".join(f"{name}: {type}" for name, type in zip(operator.outputs, operator.node.types, strict=True))
    again = "run again in backward" if operator.again else ""
    notes = "; ".join(filter(None, (split_text(operator), again, source_text(operator.source))))
    return f"{made} = {operator.node.op}({operator.arguments})" + (f"  # {notes}" if notes else "")


def split_text(operator: Operator) -> str:
    """How the work is split: `split n over d0 d1`; what is split is an output dim, or an index of the declaration.

    Where only one place of an axis runs the operator, that is told first: `at place 1 of d0`.
    """
    layout = operator.node.types[0].layout if operator.node.types else ()
    at = [f"at place {placement.place} of {axis}" for axis, placement in layout if isinstance(placement, At)]
    split = [f"split {_index_text(operator, *split)} over {' '.join(split[1])}" for split in operator.splits]
    return ", ".join((*at, *split))


def _index_text(operator: Operator, index: str, axes: tuple[str, ...]) -> str:
    """The index; one that only numbers a dim (`d0`, which an axis may be called too) is named by that dim: of the
    output, or of the operand it is summed over."""
    numbered = index[1:].isdigit()
    match placement_on(operator.node.types[0].layout, axes[0]):
        case Split(dim) if numbered:
            return f"dim {dim}"
        case Partial():
            return f"summed {_operand_dim(operator, axes[0]) if numbered else index}"
    return index


def _operand_dim(operator: Operator, axis: str) -> str:
    """The dim that an axis splits, of the first operand it splits."""
    placements = (placement_on(value.type.layout, axis) for value in operator.node.inputs)
    return next(f"dim {placement.dim}" for placement in placements if isinstance(placement, Split))


def source_text(source: Source | None) -> str:
    """Where an operator stands, in few words: the module's path, then file and line."""
    if source is None:
        return ""
    return in_one_line(f"{source.module} {PurePath(source.file).name}:{source.line}".strip())


def _shipment_lines(shipments: Iterable[Shipment]) -> Iterator[str]:
    for shipment in shipments:
        for collective in shipment.collectives:
            yield f"{_INDENT}{collective_text(shipment, collective)}, {_amount(collective.sent)}"


def collective_text(shipment: Shipment, collective: Collective) -> str:
    """One collective without its bytes: direction, kind, axes, and what it moves from which layout to which."""
    arrow = "" if shipment.becomes is None or shipment.type is None else f" -> {layout_text(shipment.becomes)}"
    what = f"{shipment.what}{arrow}"
    if collective.of_gradient and shipment.type is None:
        what = f"{len(shipment.tensors)} gradients"
    elif collective.of_gradient:
        what = f"the gradient of {what.replace(' -> ', ' <- ')}"
    elif collective.direction == BACKWARD:
        what = f"{what} again"
    return f"{collective.direction} {collective.kind} of {what} over {' '.join(collective.axes)}"
