"""What carrying out a reshard holds for a moment: packed parts, parts that arrive, results of steps on the way."""

from __future__ import annotations

from math import prod

from conjoin.comm import Route, Step, StepKind, held_bytes
from conjoin.machine import Mesh
from conjoin.ops import Split, TensorType

SHARING = frozenset({StepKind.RELABEL, StepKind.SLICE, StepKind.DROP})
"""Steps whose result is the memory they start from."""


def carrying_bytes(route: Route, type: TensorType, mesh: Mesh, kind: str, rank: int) -> int:
    """The most that is there at once on a rank besides what the reshard starts from, its result included."""
    peak = before = 0
    for step in route.steps:
        if step.kind in SHARING:
            continue
        had, made = (held_bytes(type.laid_out(layout), mesh)[rank] for layout in (step.source, step.target))
        peak = max(peak, before + made + _passing(step, had, made, kind, mesh))
        before = made
    return peak


def _passing(step: Step, had: int, made: int, kind: str, mesh: Mesh) -> int:
    """What a step needs besides its operand and its result, as `runtime` carries it out."""
    match step.kind:
        case StepKind.REDUCE_SCATTER:
            return had * (2 if kind == "cpu" else 1)  # packed; on Gloo also what is to be added up
        case StepKind.ALL_GATHER:
            return 0 if _gathered_dims(step) == {0} else made  # rows come in their places, others are put there
        case StepKind.ALL_TO_ALL | StepKind.BROADCAST | StepKind.GATHER | StepKind.SCATTER | StepKind.SEND:
            return had + made
        case StepKind.REDUCE:
            return prod(mesh.sizes[axis] for axis in step.axes) * made
        case _:
            return 0


def _gathered_dims(step: Step) -> set[int]:
    """The dims along which pieces are put together."""
    kept = dict(step.target)
    changed = (placement for axis, placement in step.source if axis in step.axes and kept.get(axis) != placement)
    return {placement.dim for placement in changed if isinstance(placement, Split)}
