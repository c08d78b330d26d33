"""When bundles of parameters are gathered and their gradients reduced, as the runtime does it.

A gather is started with what is wanted before it, and again for the backward pass where the plan drops what was
gathered; gradients are packed and reduced when the last of a bundle is there, while the rest of the backward pass goes
on. Pieces are all-reduced over the axes on which they are stored alike when the gradients of the next bundle are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from conjoin.comm import (
    BundleKind,
    ParameterBundle,
    StepKind,
    common_places,
    flights_backward,
    flights_forward,
    held_bytes,
    num_devices,
    ring_bytes,
    sent_bytes,
)
from conjoin.ir import Segment
from conjoin.ops import CAST, Call, TensorType, bind_args
from conjoin.sim.engine import COMPUTE, NUM_STREAMS, Fragment, Instruction, Phase, to_ticks
from conjoin.sim.fragments import Drafts


@dataclass
class Around:
    """What stands around the operators because of bundles."""

    before: dict[int, Fragment] = field(default_factory=dict)
    """Before an operator runs forward."""
    before_again: dict[int, Fragment] = field(default_factory=dict)
    """Before it is run again in the backward pass."""
    before_back: dict[int, Fragment] = field(default_factory=dict)
    after_back: dict[int, Fragment] = field(default_factory=dict)
    num_events: int = 0
    at_start: Fragment = ()
    """Before the first micro-batch."""
    after_all: Fragment = ()
    """After the backward pass."""
    at_end: Fragment = ()
    """After the last micro-batch."""


def schedule_bundles(
    bundles: Sequence[ParameterBundle], segments: Sequence[Segment], drafts: Drafts, defers: bool = False
) -> Around:
    """All fragments of all bundles, by the operator they stand before or after.

    Where it `defers`, what is cast where it is stored is so before all micro-batches, and gradients of what is stored
    alike are summed up at the end of them.
    """
    around = Around(num_events=2 * len(bundles))
    made = [_Bundle(bundle, drafts, NUM_STREAMS + 2 * i) for i, bundle in enumerate(bundles)]
    spans = {position: span for span in segments for position in range(span[0], span[1] + 1)}
    _gather_forward(made, flights_forward(bundles, drafts.bundle_bytes), around, spans)
    _cast(made, around, spans, defers)
    _gather_backward(made, flights_backward(bundles, drafts.bundle_bytes), around, spans)
    chains: dict[BundleKind, list[_Bundle]] = {}
    for each in made:
        if each.use.back:
            chains.setdefault(each.kind, []).append(each)
    for chain in chains.values():
        _reduce(chain, around, defers)
    return around


def _append(fragments: dict[int, Fragment], position: int, more: Fragment) -> None:
    fragments[position] = fragments.get(position, ()) + more


def _gather_forward(
    made: list[_Bundle], flights: Sequence[tuple[int, ...]], around: Around, spans: Mapping[int, Segment]
) -> None:
    started: set[int] = set()
    for i in sorted(range(len(made)), key=lambda i: made[i].use.reads[0]):
        bundle, position = made[i], made[i].use.reads[0]
        if bundle.kind.gathered:
            for wanted in (i, *flights[i]):
                if wanted not in started:
                    started.add(wanted)
                    _append(around.before, position, made[wanted].gather(Phase.FORWARD))
            _append(around.before, position, bundle.arrive(Phase.FORWARD))


def _cast(made: list[_Bundle], around: Around, spans: Mapping[int, Segment], defers: bool) -> None:
    """What is only cast: once for all micro-batches, else where it is used, in its second run too."""
    for bundle in sorted((each for each in made if each.is_cast), key=lambda each: each.use.reads[0]):
        position = bundle.use.reads[0]
        if defers:
            around.at_start += bundle.cast(Phase.FORWARD)
            continue
        _append(around.before, position, bundle.cast(Phase.FORWARD))
        if position in spans:
            _append(around.before_again, position, bundle.cast(Phase.RECOMPUTE))


def _gather_backward(
    made: list[_Bundle], flights: Sequence[tuple[int, ...]], around: Around, spans: Mapping[int, Segment]
) -> None:
    """A segment that is run again brings its bundles where it first did; what others brought it is given."""
    needed = [i for i in range(len(made)) if made[i].is_gathered_again]
    inside = {i for i in needed if spans.get(made[i].use.reads[0], (-1, -1))[1] == made[i].use.last_kept}
    started: set[int] = set()
    for i in sorted(needed, key=lambda i: (-made[i].use.last_kept, i in inside)):
        use = made[i].use
        where = around.before_again if i in inside else around.before_back
        position = use.reads[0] if i in inside else use.last_kept
        for wanted in (i, *flights[i]):
            if wanted not in started:
                started.add(wanted)
                _append(where, position, made[wanted].gather(Phase.BACKWARD))
        _append(where, position, made[i].arrive(Phase.BACKWARD))


def _reduce(chain: list[_Bundle], around: Around, defers: bool) -> None:
    """Gradients of bundles of one kind are reduced, the last first; few are scattered at once."""
    kind = chain[0].kind
    for i, bundle in reversed(list(enumerate(chain))):
        earlier = chain[i + 1 :][0:1] if kind.summed else chain[i + 2 :][0:1]
        before = earlier[0].proceed(not defers) if earlier and kind.gathered else ()
        after = bundle.scatter() if kind.gathered else bundle.pack_gradients()
        if not kind.gathered and not defers:
            after += bundle.sum_up()
        _append(around.after_back, bundle.use.reads[0], before + after)
    if kind.summed and defers:
        around.at_end += tuple(task for bundle in chain for task in bundle.sum_up())
    if kind.gathered and kind.summed:
        around.after_all += chain[0].proceed(not defers)


class _Bundle:
    """The instructions of one bundle."""

    def __init__(self, bundle: ParameterBundle, drafts: Drafts, event: int) -> None:
        self.kind, self.use, self.is_gathered_again = bundle.kind, bundle.use, bundle.is_gathered_again
        self._drafts, self._gathered, self._scattered = drafts, event, event + 1
        mesh, stored, kind = drafts.mesh, [leaf.type for leaf in bundle.leaves], bundle.kind
        self._num_others = num_devices(kind.gathered, mesh) - 1
        self._sent = sent_bytes((root.type for root, _ in bundle.entries), kind.gathered, mesh).largest
        self._count = self._sent // kind.dtype.itemsize
        """How many elements each member sends to another: those of the one that has most."""
        self._held = max(1, sent_bytes(stored, (), mesh).largest)
        self._is_flat = bundle.is_flat
        self._places = common_places(*(root.type.layout for root, _ in bundle.entries))

    @property
    def is_cast(self) -> bool:
        """Whether all that is done to it for its use is a cast."""
        return not self.kind.gathered and self.kind.dtype != self.kind.stored

    def gather(self, phase: Phase) -> Fragment:
        """Pack what is stored, and start to gather; nobody waits yet."""
        packed = self._copied(self._count, self.kind.stored, self.kind.dtype, phase)
        sent = self._sent * self._num_others
        made = self._drafts.collective(StepKind.ALL_GATHER.value, self.kind.gathered, sent, phase, self._places)
        return packed, replace(made, event=self._gathered)

    def cast(self, phase: Phase) -> Fragment:
        """Cast what is stored, for use."""
        return (self._copied(self._held // self.kind.stored.itemsize, self.kind.stored, self.kind.dtype, phase),)

    def arrive(self, phase: Phase) -> Fragment:
        """Wait for a gather, and put the parameters together from everyone's pieces."""
        wait = Instruction("wait", COMPUTE, 0, waits=(self._gathered,), phase=phase)
        count, dtype = self._count * (1 + self._num_others), self.kind.dtype
        return (wait,) if self._is_flat else (wait, self._copied(count, dtype, dtype, phase))

    def scatter(self) -> Fragment:
        """Pack gradients and start to scatter their sums."""
        sent = self._count * self.kind.added.itemsize * self._num_others
        made = self._drafts.collective(
            StepKind.REDUCE_SCATTER.value, self.kind.gathered, sent, Phase.BACKWARD, self._places
        )
        return *self.pack_gradients(), replace(made, event=self._scattered)

    def proceed(self, sums: bool) -> Fragment:
        """Wait for the pieces, and start to sum them up over the axes on which they are stored alike."""
        wait = Instruction("wait", COMPUTE, 0, waits=(self._scattered,), phase=Phase.BACKWARD)
        return wait, *(self.sum_up() if sums and self.kind.summed else self._cast_back())

    def sum_up(self) -> Fragment:
        """Start to sum pieces up; the cast to what is stored comes after, and takes as long before it."""
        count = self._held // self.kind.stored.itemsize
        sent = ring_bytes(count * self.kind.added.itemsize, num_devices(self.kind.summed, self._drafts.mesh))
        made = self._drafts.collective(
            StepKind.ALL_REDUCE.value, self.kind.summed, sent, Phase.BACKWARD, self._places
        )
        return *self._cast_back(), made

    def _cast_back(self) -> Fragment:
        """Pieces from what they are summed in to what is stored."""
        kind = self.kind
        if kind.added == kind.stored:
            return ()
        return (self._copied(self._held // kind.stored.itemsize, kind.added, kind.stored, Phase.BACKWARD),)

    def pack_gradients(self) -> Fragment:
        """Gradients one after the other, in the dtype in which they are summed up."""
        if self._is_flat and self.kind.gathered and self.kind.dtype == self.kind.added:
            return ()
        count = self._count * (1 + self._num_others)
        return (self._copied(count, self.kind.dtype, self.kind.added, Phase.BACKWARD),)

    def _copied(self, count: int, source: torch.dtype, target: torch.dtype, phase: Phase) -> Instruction:
        """So many elements copied, cast on the way."""
        made = copying(count, source, target, phase, self._drafts)
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


def copying(count: int, source: torch.dtype, target: torch.dtype, phase: Phase, drafts: Drafts) -> Instruction:
    """Copying so many elements of one dtype into memory of another."""
    key = count, source, target, phase
    if key not in drafts.copies:
        drafts.copies[key] = _copying(count, source, target, phase, drafts)
    return drafts.copies[key]


def _copying(count: int, source: torch.dtype, target: torch.dtype, phase: Phase, drafts: Drafts) -> Instruction:
    flat = TensorType((max(1, count),), source)
    cast = Call(CAST, bind_args(CAST, (flat,), {"dtype": target}))
    cost = drafts.prices.operator(Call("clone", (flat, None)) if source == target else cast, (), 0)
    ticks, host = to_ticks(cost.forward.value), to_ticks(cost.host_forward)
    name = "pack" if source == target else "cast"
    return Instruction(name, COMPUTE, ticks, host, phase=phase, source=cost.forward.source)
