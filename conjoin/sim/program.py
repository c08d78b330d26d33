"""A training step as a program of fragments: forward, backward in reverse, the wait for gradients, the update.

When the layouts of one operator change, the fragments that differ are made anew and the others are kept: those of the
operator itself, of operators that read the same tensors or what it makes, and of bundles whose parameters change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from conjoin.comm import (
    AGREEMENT_BYTES,
    ParameterBundle,
    held_bytes,
    leaves_early,
    ring_bytes,
    run_again,
)
from conjoin.ir import Choice, LeafKind, Segment, host_readers
from conjoin.ops import Layout, TensorType
from conjoin.sim.bundles import accumulating, schedule_bundles
from conjoin.sim.engine import BETWEEN, COMPUTE, INSIDE, NUM_STREAMS, Fragment, Instruction, Phase, to_ticks
from conjoin.sim.fragment_order import FragmentOrder
from conjoin.sim.fragments import Departure, Drafts, Supply
from conjoin.sim.held_for_step import HeldForStep, reads_stored
from conjoin.sim.host_inputs import EdgesHere, Streaming, in_blocks, streaming_along_edges, streaming_of
from conjoin.sim.instructions import ordered
from conjoin.sim.offloads import Copies, Offloads, update_by_parts
from conjoin.sim.parameter_uses import FoundBundles, ParameterUses, bundle_uses
from conjoin.sim.parts import part_spans
from conjoin.sim.periods import Seam
from conjoin.sim.skeleton import Layouts, Skeleton
from conjoin.sim.updates import UpdatedPieces, UpdatePrices

NOTHING_OFFLOADED = Offloads()
_NOT_SUPPLIED = Supply((), False, False, False)
_KEPT = 0.13
"""What the host takes to keep the gradient of a parameter and to drop it before the next step, of what it takes to
launch a collective: 6 and 2 µs on an H200's host, by backwards into leaves and whole models (2026-11-18)."""


@dataclass(frozen=True, slots=True)
class Change:
    """Other layouts for one operator, and for leaves that it reads, by their numbers."""

    operator: int
    choice: Choice
    leaves: Mapping[int, Layout]


Version = tuple[int, Layout]
"""A tensor, by its number, in one of its layouts."""


@dataclass(frozen=True, slots=True)
class UsedBundle:
    """Parameters that travel together, by their numbers."""

    bundle: ParameterBundle
    versions: tuple[Version, ...]
    """In the layouts of their use."""
    stored: tuple[Version, ...]
    """The parameters themselves: what is used may be cast from them."""


class Program:
    """The fragments of a training step, and what they were made from."""

    def __init__(  # noqa: PLR0913 – what may be chosen of a step
        self,
        skeleton: Skeleton,
        layouts: Layouts,
        drafts: Drafts,
        regathered: frozenset[str] = frozenset(),
        segments: tuple[Segment, ...] = (),
        steps: int = 1,
        offloads: Offloads = NOTHING_OFFLOADED,
        bundles: FoundBundles | None = None,
    ) -> None:
        self.offloads, self.copies = offloads, Copies({}, {}, 0)
        """What lies on the host, and the copies of it beside the fragments."""
        readers = host_readers(skeleton.graph, offloads.inputs)
        self._host_readers = {i: readers[op.node] for i, op in enumerate(skeleton.operators) if op.node in readers}
        """Operators that read inputs from the host."""
        self.steps = steps
        """Micro-batches one after the other, of which the operators here are one."""
        self.parts = part_spans(skeleton.graph)
        """Operators that run in micro-batches of their own."""
        self.order = FragmentOrder(len(skeleton.operators), steps, self.parts)
        segments = (*segments, *(part.segment for part in self.parts))
        self.skeleton, self.drafts, self.regathered, self.segments = skeleton, drafts, regathered, segments
        self.again = run_again(segments, [operator.remembers for operator in skeleton.operators])
        """What the backward pass runs again of each segment."""
        self._segment_of = {position: span for span in self.again for position in range(span[0], span[1] + 1)}
        self.choices, self.leaves, self.results = list(layouts.choices), dict(layouts.leaves), layouts.results
        self.numbers = task_numbers(skeleton, drafts)
        self._cast_from = skeleton.casts
        self._may_run_once = steps > 1 and any(reads_stored(skeleton, op) for op in skeleton.operators)
        self._uses = self._parameter_uses().all() if bundles is None else {}
        self._bundle(bundles)
        self.supplies: list[tuple[Supply, ...]] = [(_NOT_SUPPLIED,) * len(op.reads) for op in skeleton.operators]
        self.departures: dict[int, tuple[tuple[Layout, bool], ...]] = {}
        """For every tensor that leaves for places as soon as it is made: where to, and whether a gradient returns."""
        for root in range(len(skeleton.roots)):
            self._read(root)
        self.fragments: list[Fragment] = [()] * (2 * len(skeleton.operators) + 4)
        for position in range(len(skeleton.operators)):
            self._make(position)
        self._start()
        self._middle()
        self._finish()

    def unrolled(self) -> Sequence[Fragment]:
        """The fragments in the order they run, with copies beside them."""
        copied = bool(self.offloads.tensors) and not self.parts
        return self.order.unrolled(self.copies.around(self.fragments) if copied else self.fragments)

    @property
    def seams(self) -> tuple[Seam, ...]:
        """Where fragments are left out, forward and backward."""
        return self.order.seams(self.skeleton.left_out)

    def segment_of(self, position: int) -> Segment | None:
        """The segment to run again that an operator stands in."""
        return self._segment_of.get(position)

    @property
    def num_events(self) -> int:
        return self._around.num_events + self.copies.num_events

    @property
    def first_copy_event(self) -> int:
        """The first event that is none of a bundle."""
        return NUM_STREAMS + self._around.num_events

    @property
    def offloaded_states(self) -> list[int]:
        """The parameters whose optimizer state lies on the host, by their numbers."""
        leaves = ((i, root.leaf) for i, root in enumerate(self.skeleton.roots))
        return [i for i, leaf in leaves if leaf is not None and leaf.is_trained and leaf.name in self.offloads.states]

    @property
    def roots_on_host(self) -> list[int]:
        """The inputs that lie on the host during a step, by their numbers."""
        leaves = ((i, root.leaf) for i, root in enumerate(self.skeleton.roots))
        return [i for i, leaf in leaves if leaf is not None and leaf.name in self.offloads.inputs]

    def streaming(self, position: int) -> Streaming | None:
        """What an operator has copied from the host block by block."""
        reader = self._host_readers.get(position)
        if reader is None:
            return None
        operator, operands = self.skeleton.operators[position], self.choices[position].operands
        if reader.is_by_edges:
            node, placed = self.drafts.node(self.numbers[position], self.choices[position])
            return streaming_along_edges(EdgesHere.of(node, placed, self.drafts.mesh), reader, operator.needs)
        types = tuple(self.skeleton.roots[root].type for root in operator.reads)

        def held(i: int) -> int:
            return held_bytes(types[i].laid_out(operands[i]), self.drafts.mesh)[0]

        return streaming_of(operator, reader, types, held)

    def changed(self, change: Change) -> tuple[Program, list[int]]:
        """The program after a change, and which of its fragments differ, in ascending order."""
        after = copy(self)
        after.choices, after.leaves = list(self.choices), {**self.leaves, **change.leaves}
        after.supplies, after.fragments = list(self.supplies), list(self.fragments)
        after.departures = dict(self.departures)
        after.choices[change.operator] = change.choice
        if self._may_run_once:
            return after._anew(self)
        operator = self.skeleton.operators[change.operator]
        touched = {change.operator, *after._bundle_again(self, operator.reads)}
        for root in {*operator.reads, *operator.makes, *change.leaves}:
            touched |= after._read(root)
        touched |= after._rerunning(touched)
        for position in touched:
            after._make(position)
        if change.operator in self.skeleton.draws or after.leave_at_start() != self.leave_at_start():
            after._start()
        if {*operator.makes, *operator.reads} & {*self.skeleton.results}:
            after._middle()
        if change.leaves or after.leave_at_start() != self.leave_at_start():
            after._finish()
        frame = (0, len(self.skeleton.operators) + 1, len(self.fragments) - 2, len(self.fragments) - 1)
        positions = {*frame, *map(self.order.forward, touched), *map(self.order.backward, touched)}
        return after, sorted(p for p in positions if after.fragments[p] is not self.fragments[p])

    def _anew(self, before: Program) -> tuple[Program, list[int]]:
        """The program in its layouts made from the beginning, with the fragments that are as before: what runs once for
        all micro-batches is tied to the whole step."""
        layouts = Layouts(leaves=self.leaves, choices=tuple(self.choices), results=self.results)
        made = Program(self.skeleton, layouts, self.drafts, self.regathered, self.segments, self.steps)
        pairs = enumerate(zip(made.fragments, before.fragments, strict=True))
        changed = [position for position, (new, old) in pairs if new is not old and new != old]
        for position in set(range(len(made.fragments))) - set(changed):
            made.fragments[position] = before.fragments[position]
        return made, changed

    def layout_of(self, root: int) -> Layout:
        """The layout in which a tensor is made or stored."""
        maker = self.skeleton.roots[root].maker
        return self.leaves[root] if maker < 0 else self.choices[maker].outputs[self.skeleton.outputs[root]]

    def _read(self, root: int) -> set[int]:
        """How a tensor comes to everyone who reads it; for which of them that is new."""
        readers = self.skeleton.readers[root]
        changed: set[int] = set()
        own, backs, last_back = self.layout_of(root), self.skeleton.backs[root], self.skeleton.last_back[root]
        wanted = [self.choices[position].operands[operand] for position, operand in readers]
        seen = {own, *self._bundled.get(root, ())}
        leaving: dict[Layout, bool] = {}
        for i, (position, operand) in enumerate(readers):
            arrives = wanted[i] not in seen
            seen.add(wanted[i])
            back = arrives and any(b and w == wanted[i] for b, w in zip(backs, wanted, strict=True))
            early = leaves_early(own, wanted[i]) or self._is_brought_once(root, position)
            if arrives and (early or self._is_summed_with(root, wanted)):
                leaving[wanted[i]] = back
                arrives = back = False
            adds = backs[i] and readers[i] != last_back
            found = self.supplies[position]
            supply = Supply(own if arrives else (), arrives, back, adds)
            if supply != found[operand]:
                self.supplies[position] = (*found[:operand], supply, *found[operand + 1 :])
                changed.add(position)
        return changed | self._leave(root, tuple(leaving.items()))

    def _find_once(self) -> frozenset[int]:
        held = HeldForStep(self.skeleton, self.leaves, self._bundled, self.regathered)
        return held.made_once(self.choices, self.cast_by_bundles)

    def _is_brought_once(self, root: int, reader: int) -> bool:
        """Whether what comes to a reader in another layout does so once for all micro-batches."""
        if self.steps == 1 or reader in self.once:
            return False
        leaf = self.skeleton.roots[root].leaf
        if leaf is None:
            return self.skeleton.roots[root].maker in self.once
        return leaf.kind is LeafKind.PARAMETER and leaf.name not in self.regathered

    def _is_summed_with(self, root: int, wanted: Sequence[Layout]) -> bool:
        """Whether a tensor is summed up in chunks with the product that makes it: everyone reads it in one layout, the
        first of them in the same segment."""
        maker = self.skeleton.roots[root].maker
        if self.drafts.chunks == 1 or maker < 0 or len(set(wanted)) > 1 or root in self.skeleton.results:
            return False
        if self._is_whole(maker) or self.segment_of(maker) != self.segment_of(self.skeleton.readers[root][0][0]):
            return False
        return self.drafts.sums_in_chunks(self.numbers[maker], self.choices[maker], wanted[0])

    def _is_whole(self, position: int) -> bool:
        """Whether an operator goes at once: it ends a segment, or what it makes is kept of one."""
        segment = self._segment_of.get(position)
        return segment is not None and (position == segment[1] or position in segment.kept)

    def _leave(self, root: int, leaving: tuple[tuple[Layout, bool], ...]) -> set[int]:
        """Take note of where a tensor is sent when it is made; its maker where that is new."""
        if leaving == self.departures.get(root, ()):
            return set()
        self.departures[root] = leaving
        maker = self.skeleton.roots[root].maker
        return {maker} if maker >= 0 else set()

    def leave_at_start(self) -> list[tuple[int, Layout, Layout, bool]]:
        """What is stored, or comes in, and is sent to places before anything runs."""
        stored = (root for root in sorted(self.departures) if self.skeleton.roots[root].maker < 0)
        return [(root, self.leaves[root], *way) for root in stored for way in self.departures[root]]

    def _make(self, position: int) -> None:
        """Put the fragments of an operator into the program, with what bundles have around it."""
        forward, backward = self._fragments(position)
        around = self._around
        self.fragments[self.order.forward(position)] = _joined(around.before.get(position, ()), forward)
        self.fragments[self.order.backward(position)] = _joined(
            around.before_back.get(position, ()), self._rerun(position), backward, around.after_back.get(position, ())
        )

    def _fragments(self, position: int) -> tuple[Fragment, Fragment]:
        if position in self.cast_by_bundles or position in self.once:
            return (), ()
        return self._own_fragments(position)

    def _own_fragments(self, position: int) -> tuple[Fragment, Fragment]:
        """An operator forward and backward, wherever in the step that is."""
        makes = self.skeleton.operators[position].makes
        departures = tuple(Departure(i, *way) for i, root in enumerate(makes) for way in self.departures.get(root, ()))
        number, choice = self.numbers[position], self.choices[position]
        is_whole = self._is_whole(position)
        made = self.drafts.fragments(number, choice, self.supplies[position], departures, is_whole=is_whole)
        streaming = self.streaming(position)
        if streaming is None:
            return made
        (forward, backward), link = made, self.drafts.prices.host_link()
        again = forward if streaming.runs_again else ()
        return (
            in_blocks(forward, streaming.forward_bytes, link, Phase.FORWARD),
            in_blocks(backward, streaming.backward_bytes, link, Phase.BACKWARD, again),
        )

    def _made_at_start(self) -> tuple[Fragment, ...]:
        """What is made before the first micro-batch, for all of them."""
        once = (self._own_fragments(position)[0] for position in sorted(self.once))
        return (self._around.at_start, *once) if self.steps > 1 else ()

    def _taken_back(self) -> list[Instruction]:
        """The way back of what was made for all micro-batches, when they are over."""
        backwards = (self._own_fragments(position)[1] for position in sorted(self.once, reverse=True))
        return [instruction for fragment in backwards for instruction in fragment]

    def _added_up(self) -> list[TensorType]:
        """Of what gradients of micro-batches are added up: parameters, and what is made of them."""
        found: list[TensorType] = []
        for i, root in enumerate(self.skeleton.roots):
            readers, backs = self.skeleton.readers[i], self.skeleton.backs[i]
            wanted = [
                self.choices[position].operands[operand]
                for (position, operand), back in zip(readers, backs, strict=True)
                if back and position not in self.once
            ]
            if root.leaf is not None and root.leaf.is_trained and wanted:
                found.append(root.type.laid_out(self.leaves[i]))
            elif root.leaf is None and root.maker in self.once:
                found += (root.type.laid_out(layout) for layout in dict.fromkeys(wanted))
        return found

    def _rerunning(self, positions: Iterable[int]) -> set[int]:
        """The operators before whose backward a segment is run again that has one of some operators."""
        return {self._segment_of[position][1] for position in positions if position in self._segment_of}

    def _rerun(self, position: int) -> Fragment:
        """What is run again before the backward of an operator: all of its segment where it is the last of one."""
        segment = self._segment_of.get(position)
        if segment is None or segment[1] != position:
            return ()
        found: list[Instruction] = []
        for earlier in range(segment[0], position + 1):
            found += self._around.before_again.get(earlier, ())
            is_whole = earlier < position and earlier not in segment.kept
            again = self._fragments(earlier)[0] if is_whole else self._rerun_last(earlier)
            found += (replace(task, phase=Phase.RECOMPUTE) for task in again)
        return tuple(found)

    def _rerun_last(self, position: int) -> Fragment:
        """Of the last operator of a segment, and of those that are not run again: their operands arrive."""
        if position in self.cast_by_bundles or position in self.once:
            return ()
        forward = self._fragments(position)[0]
        computes = next(i for i, task in enumerate(forward) if task.stream == COMPUTE)
        return forward[: computes + 1] if self.computes_again(position) else ordered(forward[:computes])

    def computes_again(self, position: int) -> bool:
        """Whether the last operator of a segment computes again: not where autograd keeps only what it reads, or where
        what it makes was kept."""
        segment = self._segment_of.get(position)
        if segment is not None and position in segment.kept:
            return False
        kept = self.drafts.kept(self.numbers[position], self.choices[position], "cpu")
        return bool(kept.outputs or kept.extra)

    def _parameter_uses(self) -> ParameterUses:
        return ParameterUses(self.skeleton, self.choices, self.leaves, self.again)

    def _bundle(self, known: FoundBundles | None = None) -> None:
        """Find the bundles where they are not known, and what they put around the operators."""
        bundles, numbers = known or bundle_uses(self._uses, self.skeleton, self.drafts, self.regathered, self.again)
        self.bundles = tuple(
            UsedBundle(
                bundle,
                tuple((numbers[v], layout) for v, layout in bundle.entries),
                tuple((self._cast_from.get(root := numbers[v], root), v.type.layout) for v, _ in bundle.entries),
            )
            for bundle in bundles
        )
        self._bundled: dict[int, list[Layout]] = {}
        for root, layout in (version for bundle in self.bundles for version in bundle.versions):
            self._bundled.setdefault(root, []).append(layout)
        self.cast_by_bundles = frozenset(
            self.skeleton.roots[root].maker for root in self._cast_from if self._is_only_bundled(root)
        )
        """Operators that cast a parameter which nobody reads but through bundles: those cast on the way."""
        self.once = self._find_once() if self._may_run_once else frozenset[int]()
        """Operators that run once for all micro-batches."""
        self._around = schedule_bundles(bundles, self.again, self.drafts, defers=self.steps > 1)

    def _is_only_bundled(self, root: int) -> bool:
        bundled, readers = self._bundled.get(root, ()), self.skeleton.readers[root]
        wanted = [self.choices[position].operands[operand] for position, operand in readers]
        return bool(bundled) and root not in self.skeleton.results and all(layout in bundled for layout in wanted)

    def _bundle_again(self, before: Program, reads: tuple[int, ...]) -> set[int]:
        """Find the bundles again where a change concerns a parameter; the operators around which they then differ."""
        concerned = [root for root in reads if root in self._uses]
        concerned += [root for root, source in self._cast_from.items() if source in reads]
        if not concerned:
            return set()
        self._uses = {**self._uses, **{root: self._parameter_uses().find(root) for root in concerned}}
        self._bundle()
        was, now = before._around, self._around
        casts = set(before.cast_by_bundles ^ self.cast_by_bundles)
        if was == now:
            self._around = was
            return casts
        if (was.after_all, was.at_end) != (now.after_all, now.at_end):
            self._finish()
        pairs = (
            (was.before, now.before), (was.before_again, now.before_again),
            (was.before_back, now.before_back), (was.after_back, now.after_back),
        )  # fmt: skip
        return casts | {p for a, b in pairs for p in {*a, *b} if a.get(p) != b.get(p)}

    def _start(self) -> None:
        """Ranks that have to draw alike make sure that they do; what is stored leaves for places; what is made of
        parameters alone is made for all micro-batches."""
        mesh, axes = self.drafts.mesh, set(self.drafts.mesh.names)
        away = [
            instruction
            for root, own, target, _ in self.leave_at_start()
            for instruction in self.drafts.route(self.skeleton.roots[root].type, own, target)[0]
        ]
        away += (instruction for fragment in self._made_at_start() for instruction in fragment)
        placed = (self.drafts.node(self.numbers[i], self.choices[i])[1] for i in self.skeleton.draws)
        if all(set(found.axes) == axes for found in placed):
            self.fragments[0] = ordered(away)
            return
        sent = ring_bytes(AGREEMENT_BYTES, mesh.size)
        self.fragments[0] = ordered([self.drafts.collective("all-reduce", mesh.names, sent, Phase.FORWARD), *away])

    def _middle(self) -> None:
        """Results are brought into the layouts they come out in; a loss has its gradient brought back."""
        found: list[Instruction] = []
        seen: set[tuple[int, Layout]] = set()
        for root, layout in zip(self.skeleton.results, self.results, strict=True):
            own = self.layout_of(root)
            if layout != own and (root, layout) not in seen and not self._is_read(root, layout):
                found += self.drafts.route(self.skeleton.roots[root].type, own, layout)[0]
            seen.add((root, layout))
        self.fragments[len(self.skeleton.operators) + 1] = ordered(found)

    def _is_read(self, root: int, layout: Layout) -> bool:
        readers = self.skeleton.readers[root]
        return any(self.choices[position].operands[operand] == layout for position, operand in readers)

    def _finish(self) -> None:
        """The wait for all gradients, and the update of what is stored."""
        if not self.skeleton.graph.training:
            return
        stored = [self.skeleton.roots[root].type.laid_out(self.leaves[root]) for root in self.skeleton.trained]
        drafts, mesh = self.drafts, self.drafts.mesh
        several = self.steps > 1
        self.fragments[-2] = (*self._around.after_all, *(accumulating(self._added_up(), drafts) if several else ()))
        wait = Instruction("wait", COMPUTE, 0, waits=(INSIDE, BETWEEN), phase=Phase.BACKWARD)
        home = [
            instruction
            for root, own, target, back in self.leave_at_start()
            if back
            for instruction in drafts.route(self.skeleton.roots[root].type, own, target)[1]
        ]
        pieces = UpdatedPieces(stored, mesh)
        alike = not drafts.prices.unlike_axes() and pieces.are_even
        ticks, source = drafts.per_class(tuple(stored), UpdatePrices(pieces, drafts.prices).on, alike)
        kept = to_ticks(_KEPT * len(stored) * drafts.prices.launch())
        update = Instruction("update", COMPUTE, ticks, kept, phase=Phase.UPDATE, source=source)
        updates = self._updates(update, stored) if self.offloads.states else (update,)
        self.fragments[-1] = (*ordered([*self._taken_back(), *home]), *self._around.at_end, wait, *updates)

    def _updates(self, update: Instruction, stored: Sequence[TensorType]) -> Fragment:
        """The update where optimizer state lies on the host."""
        mesh, roots = self.drafts.mesh, self.skeleton.roots
        trained = [i for i, root in enumerate(roots) if root.leaf is not None and root.leaf.is_trained]
        moved = [trained.index(i) for i in self.offloaded_states]
        held = [held_bytes(type, mesh)[0] for type in stored]
        return update_by_parts(update, held, moved, self.drafts.prices.host_link())


def task_numbers(skeleton: Skeleton, drafts: Drafts) -> list[int]:
    """For every operator the number of its task."""
    tasks, places = skeleton.tasks
    numbers = [drafts.number(task) for task in tasks]
    return [numbers[place] for place in places]


def _joined(*fragments: Fragment) -> Fragment:
    """Fragments one after the other; the very object where there is only one."""
    present = [fragment for fragment in fragments if fragment]
    if len(present) == 1:
        return present[0]
    return tuple(instruction for fragment in present for instruction in fragment)
