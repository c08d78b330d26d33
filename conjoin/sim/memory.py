"""How much memory a device holds during a training step, and what is known of it: the questions to a walk."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from conjoin.errors import UsageError
from conjoin.ops import At
from conjoin.sim.memory_walk import Memory, Walk
from conjoin.sim.offloads import Log, OnHost
from conjoin.sim.periods import Seam
from conjoin.sim.prices import OPTIMIZER_COPIES
from conjoin.sim.program import Program


def check_optimizer(name: str) -> None:
    """Refuse an optimizer of which nobody knows what it remembers."""
    if name not in OPTIMIZER_COPIES:
        raise UsageError(
            f"The optimizer {name[:40]!r} was asked for. Known are {', '.join(OPTIMIZER_COPIES)}. "
            f"Name the one that remembers as many tensors for a parameter as yours."
        )


def follow_offloads(program: Program, kind: str) -> Log:
    """When tensors that lie on the host go and come, on devices of a kind."""
    return _followed(program, kind).hosts.log


def _followed(program: Program, kind: str) -> Walk:
    walk = Walk(program, "sgd", kind, 0)
    walk.run()
    return walk


def kept_tensors(program: Program, kind: str) -> list[OnHost]:
    """All that operators make and devices of a kind keep for the backward pass, in the order it is made."""
    inside = {position for first, last in program.again for position in range(first, last)}
    operators = enumerate(program.skeleton.operators)
    made = tuple((p, i) for p, op in operators if p not in inside and not op.is_kept for i in range(len(op.makes)))
    asking = copy(program)
    asking.offloads = replace(program.offloads, tensors=made)
    return [tensor for tensor in _followed(asking, kind).hosts.numbered if tensor.asked >= 0]


def measure_memory(program: Program, optimizer: str = "adam", kind: str = "cuda") -> Memory:
    """Follow the memory of a training step on devices of a kind."""
    found = [Walk(program, optimizer, kind, rank).run() for rank in _asked_ranks(program)]
    return max(found, key=lambda memory: memory.peak)


def _asked_ranks(program: Program) -> Sequence[int]:
    """The first rank of every place of the axes that have places."""
    mesh = program.drafts.mesh
    layouts = {*program.leaves.values(), *(layout for c in program.choices for layout in (*c.operands, *c.outputs))}
    axes = mesh.in_order({axis for layout in layouts for axis, placement in layout if isinstance(placement, At)})
    return mesh.group(0, axes)


def measure_peak(program: Program, optimizer: str, kind: str) -> int | None:
    """The bytes at the peak, with what is left out at seams; None where not every period there adds as much."""
    found = [_peak(program, Walk(program, optimizer, kind, rank)) for rank in _asked_ranks(program)]
    return None if None in found else max(peak for peak in found if peak is not None)


def _peak(program: Program, walk: Walk) -> int | None:
    """On a rank. Within a stretch what is held changes by as much in every period: it is most at one of the ends."""
    curve, more, peak, at = walk.run().curve, 0, 0, 0
    for seam in program.seams:
        peak = max(peak, more + max(curve[at : seam.place]))
        added = _added_at(seam, curve, walk.after)
        if added is None:
            return None
        more, at = more + added, seam.place
    return max(peak, more + max(curve[at:]))


def _added_at(seam: Seam, *curves: Sequence[int]) -> int | None:
    """What all that is left out at a seam adds; None where the periods around it differ."""
    around = range(seam.place - 2 * seam.length, seam.place)
    changes = {curve[place + seam.length] - curve[place] for curve in curves for place in around}
    return changes.pop() * (seam.count // seam.length) if len(changes) == 1 else None
