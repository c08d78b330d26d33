"""When bundles of parameters are gathered and their gradients reduced, as the runtime does it.

A gather is started one bundle ahead of its use, and again for the backward pass where the plan drops what was gathered;
gradients are packed and reduced when the last of a bundle is there, while the rest of the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch

from conjoin.comm import (
    BundleKind,
    Entry,
    ParameterBundle,
    StepKind,
    common_places,
    held_bytes,
    ring_bytes,
    sum_per_rank,
)
from conjoin.ops import CAST, Call, TensorType, bind_args
from conjoin.sim.engine import COMPUTE, NUM_STREAMS, Fragment, Instruction, Phase, to_ticks
from conjoin.sim.fragments import Drafts


@dataclass(frozen=True, slots=True)
class Use:
    """Where a parameter is used in one layout, by the place of the operator."""

    first: int
    last_kept: int
    """The last operator whose backward reads it; -1 where none does."""
    back: bool
    """Whether it gets a gradient there."""


@dataclass
class Around:
    """What stands around the operators because of bundles."""

    before: dict[int, Fragment] = field(default_factory=dict)
    """Before an operator runs forward."""
    before_back: dict[int, Fragment] = field(default_factory=dict)
    after_back: dict[int, Fragment] = field(default_factory=dict)
    num_events: int = 0
    at_end: Fragment = ()
    """After the last micro-batch."""


def schedule_bundles(
    bundles: Sequence[ParameterBundle], uses: Mapping[Entry, Use], drafts: Drafts, at_end: bool = False
) -> Around:
    """All fragments of all bundles, by the operator they stand before or after.

    Gradients of what is stored whole are summed up `at_end` where there are several micro-batches.
    """
    around = Around()
    chains: dict[BundleKind, list[_Bundle]] = {}
    for bundle in bundles:
        found = [uses[entry] for entry in bundle.entries]
        made = _Bundle(bundle, drafts, found, NUM_STREAMS + around.num_events)
        around.num_events += bundle.kind.gathers
        chains.setdefault(bundle.kind, []).append(made)
    for kind, chain in chains.items():
        if kind.gathers:
            _gather_forward(chain, around)
        elif kind.dtype != kind.stored:
            for made in chain:
                _append(around.before, made.first, made.cast())
        if kind.regather:
            _gather_backward(chain, around)
        for made in chain:
            if made.back and at_end and not kind.gathers:
                around.at_end += made.reduce()
            elif made.back:
                _append(around.after_back, made.first, made.reduce())
    return around


def _append(fragments: dict[int, Fragment], position: int, more: Fragment) -> None:
    fragments[position] = fragments.get(position, ()) + more


def _gather_forward(chain: list[_Bundle], around: Around) -> None:
    started: set[int] = set()
    for position in sorted(range(len(chain)), key=lambda i: chain[i].first):
        for wanted in (position, position + 1):
            if wanted < len(chain) and wanted not in started:
                started.add(wanted)
                _append(around.before, chain[position].first, chain[wanted].gather(Phase.FORWARD))
        _append(around.before, chain[position].first, chain[position].arrive(Phase.FORWARD))


def _gather_backward(chain: list[_Bundle], around: Around) -> None:
    started: set[int] = set()
    needed = [i for i in range(len(chain)) if chain[i].last_kept >= 0]
    for position in sorted(needed, key=lambda i: -chain[i].last_kept):
        for wanted in (position, position - 1):
            if wanted in needed and wanted not in started:
                started.add(wanted)
                _append(around.before_back, chain[position].last_kept, chain[wanted].gather(Phase.BACKWARD))
        _append(around.before_back, chain[position].last_kept, chain[position].arrive(Phase.BACKWARD))


class _Bundle:
    """The instructions of one bundle."""

    def __init__(self, bundle: ParameterBundle, drafts: Drafts, uses: Sequence[Use], event: int) -> None:
        self.kind, self._drafts, self._event = bundle.kind, drafts, event
        self.first = min(use.first for use in uses)
        self.last_kept = max(use.last_kept for use in uses)
        self.back = any(use.back for use in uses)
        mesh = drafts.mesh
        self._held = sum_per_rank((held_bytes(root.type, mesh) for root, _ in bundle.entries), mesh.size).largest
        self._stored = sum_per_rank((held_bytes(leaf.type, mesh) for leaf in bundle.leaves), mesh.size).largest
        self._summed = sum_per_rank((held_bytes(type, mesh) for type in bundle.sums), mesh.size).largest
        self._places = common_places(*(root.type.layout for root, _ in bundle.entries))
        self._num_members = prod(mesh.sizes[axis] for axis in bundle.kind.axes)

    def gather(self, phase: Phase) -> Fragment:
        """Pack what is stored, and start to gather; nobody waits yet."""
        packed = self._pack(self._stored, self.kind.stored, self.kind.dtype, phase)
        return *packed, self._collective(StepKind.ALL_GATHER, phase, self._event)

    def cast(self) -> Fragment:
        """Cast what is stored, for use."""
        return (self._at_places(casting(self._stored, self.kind.stored, self.kind.dtype, Phase.FORWARD, self._drafts)),)

    def arrive(self, phase: Phase) -> Fragment:
        """Wait for a gather; the pieces are views of what came, or are put together."""
        return (Instruction("wait", COMPUTE, 0, waits=(self._event,), phase=phase),)

    def reduce(self) -> Fragment:
        """Pack the gradients and start to sum them up."""
        members = self._num_members if self.kind.gathers else 1
        kind = StepKind.REDUCE_SCATTER if self.kind.gathers else StepKind.ALL_REDUCE
        packed = self._pack(self._held * members, self.kind.dtype, self.kind.summed, Phase.BACKWARD)
        return *packed, *self._widen(), self._collective(kind, Phase.BACKWARD)

    def _widen(self) -> Fragment:
        """Cast sums to what is stored; that is done after the collective, and takes as long before it."""
        if self.kind.summed == self.kind.stored:
            return ()
        made = casting(self._summed, self.kind.summed, self.kind.stored, Phase.BACKWARD, self._drafts)
        return (self._at_places(made),)

    def _collective(self, kind: StepKind, phase: Phase, event: int = -1) -> Instruction:
        members, held = self._num_members, self._held if kind is StepKind.ALL_GATHER else self._summed
        sent = ring_bytes(held, members) if kind is StepKind.ALL_REDUCE else held * (members - 1)
        made = self._drafts.collective(kind.value, self.kind.axes, sent, phase, self._places)
        return made if event < 0 else _with_event(made, event)

    def _pack(self, num_bytes: int, source: torch.dtype, target: torch.dtype, phase: Phase) -> Fragment:
        """Pack tensors of so many bytes; then cast them where the dtype is to be another one."""
        made = [pack(num_bytes, source, phase, self._drafts)]
        made += [casting(num_bytes, source, target, phase, self._drafts)] if source != target else []
        return tuple(map(self._at_places, made))

    def _at_places(self, made: Instruction) -> Instruction:
        where = self._drafts.classes.at(self._places)
        return made if where is None else replace(made, host=made.host * where.astype(np.int64), where=where)


def accumulating(parameters: Sequence[TensorType], drafts: Drafts) -> Fragment:
    """Adding the gradients of a micro-batch to those before."""
    totals: dict[torch.dtype, int] = {}
    for type in parameters:
        totals[type.dtype] = totals.get(type.dtype, 0) + held_bytes(type, drafts.mesh).largest // type.dtype.itemsize
    found = []
    for dtype, count in totals.items():
        flat = TensorType((max(1, count),), dtype)
        cost = drafts.prices.operator(Call("add.Tensor", (flat, flat, 1)), (), 0)
        ticks, host = to_ticks(cost.forward.value), to_ticks(cost.host_forward)
        found.append(Instruction("add", COMPUTE, ticks, host, phase=Phase.BACKWARD, source=cost.forward.source))
    return tuple(found)


def casting(num_bytes: int, source: torch.dtype, target: torch.dtype, phase: Phase, drafts: Drafts) -> Instruction:
    """Casting so many bytes of one dtype to another."""
    flat = TensorType((max(1, num_bytes // source.itemsize),), source)
    cost = drafts.prices.operator(Call(CAST, bind_args(CAST, (flat,), {"dtype": target})), (), 0)
    ticks, host = to_ticks(cost.forward.value), to_ticks(cost.host_forward)
    return Instruction("cast", COMPUTE, ticks, host, phase=phase, source=cost.forward.source)


def _with_event(instruction: Instruction, event: int) -> Instruction:
    return replace(instruction, event=event)


def pack(num_bytes: int, dtype: torch.dtype, phase: Phase, drafts: Drafts) -> Instruction:
    """Copying tensors into one after the other."""
    flat = TensorType((max(1, num_bytes // dtype.itemsize),), dtype)
    cost = drafts.prices.operator(Call("clone", (flat, None)), (), 0)
    ticks, host = to_ticks(cost.forward.value), to_ticks(cost.host_forward)
    return Instruction("pack", COMPUTE, ticks, host, phase=phase, source=cost.forward.source)
