"""How much memory a device holds during a training step, fragment by fragment.

Parameters, buffers, optimizer state and the batch stay. What an operator makes lives until its last reader has run, and
longer where autograd keeps it; views share the memory of what they view. Gradients live from their first contribution
until they are passed on; those of parameters stay until the update, and are gone before the next step begins. Rank 0
is asked: it holds at least as much of every tensor as any other rank. Where branches run at places of an axis, the
first rank of every place is asked, and the fullest told. Of a segment that the backward pass runs again only what it is
given is kept; what is kept of its inside is there from when it is run again. What libraries hold for themselves is not
counted (cuBLAS: about 70 MB on an H200, once in a process), nor what convolutions need for a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from conjoin.comm import (
    backward_route,
    held_bytes,
    reshard,
)
from conjoin.ir import LeafKind, Segment
from conjoin.ops import Layout
from conjoin.sim.autograd_keeps import Kept, nothing_kept
from conjoin.sim.bundle_memory import BundleMemory
from conjoin.sim.carried_bytes import SHARING, carrying_bytes
from conjoin.sim.heap import Heap
from conjoin.sim.offloads import Hosts, OnHost, there
from conjoin.sim.prices import OPTIMIZER_COPIES
from conjoin.sim.program import Program, UsedBundle, Version
from conjoin.sim.skeleton import LeftOut
from conjoin.sim.updates import update_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device that holds most."""

    parameters: int
    buffers: int
    optimizer_state: int
    inputs: int
    gradients: int
    """Of parameters, at the end of the backward pass."""
    peak: int
    peak_place: int
    """The fragment in which the peak is reached."""
    curve: tuple[int, ...]
    """The largest number of bytes held during each fragment."""
    on_host: int = 0
    """What lies in the memory of the host, for this device."""

    @property
    def activations(self) -> int:
        """What is there at the peak besides what stays."""
        return self.peak - self.parameters - self.buffers - self.optimizer_state - self.inputs


class Walk:
    """One pass over a program on a rank: forward, backward, update."""

    added_up = -1
    """The block of the gradients of earlier micro-batches, where there are several."""

    def __init__(self, program: Program, optimizer: str, kind: str, rank: int) -> None:
        self.program, self.skeleton, self.mesh = program, program.skeleton, program.drafts.mesh
        self.optimizer, self.kind, self.rank = optimizer, kind, rank
        self.heap = Heap()
        self.blocks: dict[Version, int] = {}
        """Where every tensor that is there has its memory, by layout."""
        self.grads: dict[Version, int] = {}
        self.kept: list[list[int | OnHost]] = [[] for _ in self.skeleton.operators]
        self.unread = self._count_reads()
        self.num_reads = self.unread.copy()
        self.bundle_of = {version: bundle for bundle in program.bundles for version in bundle.versions}
        self.bundles = BundleMemory(program, self.heap, kind, lambda version: self._held(*version))
        self._reduced_after: dict[int, list[UsedBundle]] = {}
        """What is reduced after the backward of an operator, by its place, the last first."""
        for used in program.bundles:
            self._reduced_after.setdefault(used.bundle.use.reads[0], []).insert(0, used)
        self.copies: dict[Version, int] = {}
        """Parameters that are cast for all micro-batches, which stay for the step."""
        self.starts = {segment[0]: segment for segment in program.again}
        self.lasts = {segment[1]: segment for segment in program.again}
        self.inside = {position for first, last in program.again for position in range(first, last + 1)}
        self.given: dict[Segment, dict[Version, int | OnHost]] = {}
        """What is kept of each segment that is run again."""
        self.shelved: dict[int, list[int]] = {}
        """What operators of such a segment made that are not run again."""
        self.offloaded: dict[int, list[int]] = {}
        """By operator which of its outputs are to lie on the host; of a segment by its last."""
        for place, i in program.offloads.tensors:
            self.offloaded.setdefault(place, []).append(i)
        self.hosts, self.after = Hosts(self.heap), list[int]()
        """What is on the host; what is held after each fragment."""

    def run(self) -> Memory:
        stays = self._settle()
        self.hosts.untouched |= {*self.blocks.values()}
        operators = range(len(self.skeleton.operators))
        for root in self.program.leaves:
            self._depart(root)
        curve = [self._end_fragment()]
        seams = {gone.seam: gone for gone in self.skeleton.left_out}
        for position in operators:
            if position in seams:
                self._pass_forward(seams[position])
            self.hosts.fragment = len(curve)
            self._enter(position)
            self._forward(position, keeps=position not in self.inside)
            self._shelve(position)
            self._leave(position)
            self._offload(position)
            curve.append(self._end_fragment())
        self._start_gradients()
        curve.append(self._end_fragment())
        for position in reversed(operators):
            self.hosts.fragment = len(curve)
            self._backward(position)
            curve.append(self._end_fragment())
            if position in seams:
                self._pass_backward(seams[position])
        for root, layout in self.program.leaves.items():
            self._come_home(root, layout)
        self.bundles.end()
        curve.append(self._end_fragment())
        gradients = sum(self.heap.sizes[block] for block in set(self.grads.values()))
        if self.program.steps > 1:  # they are added to what is there
            gradients = self.heap.sizes[self.added_up]
            for version in list(self.grads):
                self._forget(version)
            self.heap.take_peak()
        self.heap.pass_by(self._update_bytes())
        curve.append(self._end_fragment())
        peak = max(curve)
        on_host = sum(tensor.num_bytes for tensor in self.hosts.numbered) + sum(self._states()) * self._copies
        on_host += sum(self._held(root, self.program.leaves[root]) for root in self.program.roots_on_host)
        return Memory(*stays, gradients, peak, curve.index(peak), tuple(curve), on_host)

    def _pass_forward(self, gone: LeftOut) -> None:
        """Parameters were read in what is left out; what is held for that is told by how it changes in a period."""
        live, peak = self.heap.live, self.heap.peak
        stands_for = {leaf: before for leaf, before, _ in gone.leaves}
        for root, layout in (version for used in self.program.bundles for version in used.versions):
            if root in stands_for and not self.unread[stands_for[root], layout]:
                self.heap.drop(self.blocks[root, layout])
        self.heap.live, self.heap.peak = live, peak

    def _pass_backward(self, gone: LeftOut) -> None:
        """The same where gradients were given to parameters that wait for others."""
        live, peak = self.heap.live, self.heap.peak
        stands_for = {leaf: behind for leaf, _, behind in gone.leaves}
        for root, layout in (version for used in self.program.bundles for version in used.versions):
            block = self.grads.get((stands_for[root], layout), -1) if root in stands_for else -1
            if block >= 0:
                self.grads[root, layout] = self.heap.allocate(self.heap.sizes[block])
        self.heap.live, self.heap.peak = live, peak

    def _end_fragment(self) -> int:
        """The most that was held in a fragment."""
        self.after.append(self.heap.live)
        return self.heap.take_peak()

    @property
    def _copies(self) -> int:
        return OPTIMIZER_COPIES[self.optimizer] if self.skeleton.graph.training else 0

    def _states(self) -> list[int]:
        """Bytes of every parameter whose optimizer state lies on the host."""
        return [self._held(i, self.program.leaves[i]) for i in self.program.offloaded_states]

    def _held(self, root: int, layout: Layout) -> int:
        return held_bytes(self.skeleton.roots[root].type.laid_out(layout), self.mesh)[self.rank]

    def _settle(self) -> tuple[int, int, int, int]:
        """Everything that stays: parameters, buffers with constants, optimizer state, inputs."""
        totals: Counter[LeafKind] = Counter()
        trained = 0
        for root, layout in self.program.leaves.items():
            leaf = self.skeleton.roots[root].leaf
            assert leaf is not None
            num_bytes = 0 if leaf.name in self.program.offloads.inputs else self._held(root, layout)
            self.blocks[root, layout] = self.heap.hold(self.heap.allocate(num_bytes))
            totals[leaf.kind] += num_bytes
            trained += num_bytes if leaf.is_trained else 0
        state = self._copies * (trained - sum(self._states()))
        self.heap.allocate(state)
        if self.program.steps > 1:  # the gradients so far, and the other micro-batches
            self.added_up = self.heap.allocate(trained)
            totals[LeafKind.INPUT] += self._other_batches()
            self._make_for_all()
        others = totals[LeafKind.BUFFER] + totals[LeafKind.CONSTANT]
        return totals[LeafKind.PARAMETER], others, state, totals[LeafKind.INPUT]

    def _make_for_all(self) -> None:
        """What is made of parameters alone, once for all micro-batches, but for views of them."""
        made = ((zip(self._versions(p)[1], self._kept_by(p).views, strict=True)) for p in sorted(self.program.once))
        found = [version for pairs in made for version, shared in pairs if shared < 0]
        found += self._departing(version for p in sorted(self.program.once) for version in self._versions(p)[1])
        kinds = ((used, used.bundle.kind) for used in self.program.bundles)
        found += [v for used, k in kinds if not k.gathered and k.dtype != k.stored for v in used.versions]
        self.copies = {version: self.heap.allocate(self._held(*version)) for version in found}

    def _other_batches(self) -> int:
        """What the inputs of the other micro-batches take: as much as those of this one, each."""
        inputs = [i for i, root in enumerate(self.skeleton.roots) if root.leaf and root.leaf.kind is LeafKind.INPUT]
        num_bytes = (self.program.steps - 1) * sum(self._held(i, self.program.leaves[i]) for i in inputs)
        self.heap.allocate(num_bytes)
        return num_bytes

    def _count_reads(self) -> Counter[Version]:
        """How often every tensor is read in each layout in the forward pass; a reshard reads what it starts from."""
        found: Counter[Version] = Counter()
        program = self.program
        for root, readers in enumerate(self.skeleton.readers):
            own = program.layout_of(root)
            wanted = [program.choices[position].operands[operand] for position, operand in readers]
            found.update((root, layout) for layout in wanted)
            found[root, own] += len({*wanted} - {own})
        for root, layout in zip(self.skeleton.results, program.results, strict=True):
            found[root, layout] += 1
            found[root, program.layout_of(root)] += layout != program.layout_of(root)
        return found

    def _read(self, version: Version) -> None:
        """Somebody has read a tensor; after the last reader it is gone unless autograd keeps it."""
        self.unread[version] -= 1
        if self.unread[version] == 0:
            self.heap.drop(self.blocks[version])

    def _arrive(self, root: int, layout: Layout) -> None:
        """Bring a tensor into a layout, on its own or with its bundle."""
        own = self.program.layout_of(root)
        if (root, layout) in self.blocks:
            return
        bundle = self.bundle_of.get((root, layout))
        if bundle is not None:
            self._bring(bundle)
            return
        route = reshard(self.skeleton.roots[root].type.shape, own, layout, self.mesh)
        if (root, layout) in self.copies:
            self.blocks[root, layout] = self.heap.hold(self.copies[root, layout])
        elif all(step.kind in SHARING for step in route.steps) and self._held(root, layout):
            self.blocks[root, layout] = self.heap.hold(self.blocks[root, own])
        else:
            type = self.skeleton.roots[root].type
            self.heap.pass_by(carrying_bytes(route, type, self.mesh, self.kind, self.rank))
            self.blocks[root, layout] = self.heap.allocate(self._held(root, layout))
        self._read((root, own))

    def _depart(self, root: int) -> None:
        """A tensor is sent to places as soon as it is there."""
        for layout, _ in self.program.departures.get(root, ()):
            self._arrive(root, layout)

    def _departing(self, makes: Iterable[Version]) -> list[Version]:
        """The layouts in which what an operator makes is sent on at once."""
        return [(root, layout) for root, _ in makes for layout, _ in self.program.departures.get(root, ())]

    def _bring(self, used: UsedBundle) -> None:
        """The parameters of a bundle as they are used: those stored, cast from them, or what was gathered."""
        kind = used.bundle.kind
        if kind.gathered:
            blocks = self.bundles.gather(used, self.blocks.keys())
        else:
            is_cast = kind.dtype != kind.stored
            pairs = zip(used.versions, used.stored, strict=True)
            blocks = [
                self.heap.allocate(self._held(*mine))
                if is_cast and mine not in self.copies
                else self.heap.hold(self.copies.get(mine, self.blocks[own]))
                for mine, own in pairs
            ]
        self.blocks.update(zip(used.versions, blocks, strict=True))
        segment = self.program.segment_of(used.bundle.use.reads[0])
        if segment is not None and kind.gathered:
            kept = [self.heap.allocate(0) if kind.regather else self.heap.hold(block) for block in blocks]
            self.given[segment].update(zip(used.versions, kept, strict=True))

    def _kept_by(self, position: int) -> Kept:
        program = self.program
        number, choice = program.numbers[position], program.choices[position]
        if not program.drafts.node(number, choice)[1].runs_on(self.mesh, self.rank):
            needs = self.skeleton.operators[position].needs
            return nothing_kept(len(choice.outputs), len(needs))
        kept, streaming = program.drafts.kept(number, choice, self.kind), program.streaming(position)
        if streaming is None:
            return kept
        passing, back = streaming.forward_held, streaming.backward_held
        outputs, more = (0,) if streaming.keeps_output else (), streaming.keeps_more
        kept = replace(kept, operands=streaming.keeps, outputs=outputs, extra=more)
        return replace(kept, passing=passing, passing_back=back)

    def _versions(self, position: int) -> tuple[list[Version], list[Version]]:
        """What an operator reads and makes, each in its layout."""
        operator, choice = self.skeleton.operators[position], self.program.choices[position]
        return list(zip(operator.reads, choice.operands, strict=True)), list(
            zip(operator.makes, choice.outputs, strict=True)
        )

    def _enter(self, position: int) -> None:
        """Where a segment begins that is run again all that it is given is kept."""
        if position not in self.starts:
            return
        given = self._given(self.starts[position])
        self.given[self.starts[position]] = {read: self.hosts.keep(self.blocks[read]) for read in given}

    def _shelve(self, position: int) -> None:
        """Keep what an operator made that is not run again."""
        segment = self.program.segment_of(position)
        if segment is not None and position in segment.kept:
            made = [self.heap.hold(self.blocks[version]) for version in self._versions(position)[1]]
            self.shelved[position] = [*made, self.heap.allocate(self._kept_by(position).extra)]

    def _from_shelf(self, position: int, makes: list[Version]) -> bool:
        """Whether what an operator made is there already, where its segment is run again."""
        for made, block in zip(makes, self.shelved.get(position, ()), strict=False):
            self.blocks[made] = self.heap.hold(block)
        return position in self.shelved

    def _leave(self, position: int) -> None:
        """After the forward pass of a segment parameters are dropped that are gathered again."""
        given = self.given.get(self.lasts[position], {}) if position in self.lasts else {}
        for read, held in given.items():
            if self._is_dropped(read) and isinstance(held, int):
                self.heap.drop(held)
                given[read] = self.heap.allocate(0)

    def _given(self, segment: Segment) -> list[Version]:
        """What a segment reads from outside, each in the layout it has there; what bundles bring inside, as stored."""
        inside: set[Version] = set()
        found: dict[Version, None] = {}
        for position in range(segment[0], segment[1] + 1):
            reads, makes = self._versions(position)
            for read, supply in zip(reads, self.program.supplies[position], strict=True):
                used = self.bundle_of.get(read)
                if used is not None and self.program.segment_of(used.bundle.use.reads[0]) == segment:
                    found.update(dict.fromkeys(used.stored))
                    inside.update(used.versions)
                source = (read[0], supply.own) if supply.arrives else read
                found.update({} if source in inside else {source: None})
                inside.add(read)
            inside.update((*makes, *self._departing(makes)))
        return list(found)

    def _rerun(self, segment: Segment) -> None:
        """Run a segment again, and keep what autograd then keeps; what comes out of it is there until the end."""
        blocks, unread = self.blocks, self.unread
        given = {read: there(held) for read, held in self.given[segment].items()}
        self.blocks, self.unread = dict(given), self._reads_inside(segment)
        out = {made for made, count in self.unread.items() if count < self.num_reads[made]} - given.keys()
        self.unread.update([*given, *out])
        for position in range(segment[0], segment[1] + 1):
            self._forward(position, computes=position < segment[1] or self.program.computes_again(position))
        for made in out & self.blocks.keys():
            self.heap.drop(self.blocks[made])
        self.blocks, self.unread = blocks, unread

    def _reads_inside(self, segment: Segment) -> Counter[Version]:
        """How often every tensor is read in a segment; what nobody reads there is none the less listed."""
        found: Counter[Version] = Counter()
        for position in range(segment[0], segment[1] + 1):
            reads, makes = self._versions(position)
            for read, supply in zip(reads, self.program.supplies[position], strict=True):
                found.update([read, (read[0], supply.own)] if supply.arrives else [read])
            found.update(dict.fromkeys(makes, 0))
            found.update((root, self.program.layout_of(root)) for root, _ in self._departing(makes))
        return found

    def _forward(self, position: int, keeps: bool = True, computes: bool = True) -> None:
        reads, makes = self._versions(position)
        if position in self.program.cast_by_bundles:
            self._read(reads[0])
            return
        kept = self._kept_by(position)
        for read in reads:
            self._arrive(*read)
        shelved = self._from_shelf(position, makes) if keeps else False
        for i, made in enumerate(makes if computes else ()):
            shared = kept.views[i]
            block = self.copies.get(made, self.blocks[reads[shared]] if shared >= 0 else -1)
            self.blocks[made] = self.heap.hold(block) if block >= 0 else self.heap.allocate(kept.made[i])
        self.heap.pass_by(kept.passing + (0 if keeps else kept.extra))
        if keeps:
            held = [self.blocks[reads[i]] for i in kept.operands if not self._is_dropped(reads[i])]
            held += [self.blocks[makes[i]] for i in kept.outputs if computes or shelved]
            self.kept[position] = [self.hosts.keep(block) for block in dict.fromkeys(held)]
            if kept.extra and not shelved:
                self.kept[position].append(self.heap.allocate(kept.extra))
        for read in reads:
            self._read(read)
        for made in makes if computes or shelved else ():
            if not self.unread[made]:
                self.heap.drop(self.blocks[made])
        for root, _ in makes:
            self._depart(root)

    def _offload(self, position: int) -> None:
        """After an operator, or the segment that it ends, copy to the host what it made."""
        segment = self.program.segment_of(position)
        if segment is not None and position < segment[1]:
            return
        for place in range(position if segment is None else segment[0], position + 1):
            makes = self._versions(place)[1] if place not in self.program.cast_by_bundles else []
            for i in self.offloaded.get(place, ()) if makes else ():
                is_view = any(shared >= 0 for shared in self._kept_by(place).views)
                kept = self.kept[0 if is_view else place : place + 1]
                self.hosts.send(self.blocks[makes[i]], (place, i), kept)

    def _is_dropped(self, version: Version) -> bool:
        used = self.bundle_of.get(version)
        return used is not None and used.bundle.kind.regather

    def _start_gradients(self) -> None:
        """Results come out and stay, as in a loop that holds them; the loss has a gradient."""
        graph = self.skeleton.graph
        for i, (root, layout) in enumerate(zip(self.skeleton.results, self.program.results, strict=True)):
            self._arrive(root, layout)
            if graph.training and i == graph.loss:
                own = self.program.layout_of(root)
                self.grads[root, own] = self.heap.allocate(self._held(root, own))

    def _backward(self, position: int) -> None:
        reads, makes = self._versions(position)
        for root, own in makes:
            self._come_home(root, own)
        if self.skeleton.operators[position].needs:
            self.bundles.gather_again(position)
        if position in self.lasts:
            given = self.given[self.lasts[position]].values()
            self.hosts.ask(given)
            self._rerun(self.lasts[position])
            self.hosts.answered(given)
        self.hosts.ask(self.kept[position])
        self._give_gradients(position, reads, makes)
        for made in makes:
            self._forget(made)
        self.hosts.answered(self.kept[position])
        self.hosts.drop(self.kept[position])
        for (root, layout), supply in zip(reads, self.program.supplies[position], strict=True):
            if supply.back and (root, layout) in self.grads:
                self._carry_back(root, supply.own, layout)
        over = self.given.pop(self.starts[position], {}) if position in self.starts else {}
        self.hosts.drop((*over.values(), *self.shelved.pop(position, ())))
        for used in self._reduced_after.get(position, ()):
            self.bundles.reduce(used, self.grads)
        if self.program.steps > 1:
            self._add_up(position, reads)

    @cached_property
    def bundled(self) -> frozenset[int]:
        """Parameters that travel in bundles."""
        return frozenset(root for root, _ in self.bundle_of)

    def _add_up(self, position: int, reads: list[Version]) -> None:
        """Gradients of parameters that are complete are added to those of earlier micro-batches; of bundles whose
        sums are put off when those of the next one come, of others at the end of the pass."""
        for root, _ in reads:
            is_alone = self.skeleton.roots[root].leaf is not None and root not in self.bundled
            if is_alone and position == min(self.skeleton.readers[root])[0]:
                self._forget((root, self.program.layout_of(root)))

    def _carry_back(self, root: int, own: Layout, layout: Layout) -> None:
        """A gradient goes the way back that its tensor came."""
        type = self.skeleton.roots[root].type
        back = backward_route(reshard(type.shape, own, layout, self.mesh), self.mesh)
        self.heap.pass_by(carrying_bytes(back, type, self.mesh, self.kind, self.rank))
        block = self.heap.allocate(self._held(root, own))
        self._forget((root, layout))
        self._give((root, own), block)

    def _come_home(self, root: int, own: Layout) -> None:
        """Gradients come back from the places that a tensor was sent to when it was made."""
        for layout, back in self.program.departures.get(root, ()):
            if back and (root, layout) in self.grads:
                self._carry_back(root, own, layout)

    def _give_gradients(self, position: int, reads: list[Version], makes: list[Version]) -> None:
        """What the backward of an operator makes; what bundles cast has its gradient from them."""
        if position in self.program.cast_by_bundles:
            return
        needs = self.skeleton.operators[position].needs
        kept = self._kept_by(position)
        for (num_bytes, shared), i in zip(kept.gradients, needs, strict=True):
            block = self.grads.get(makes[shared], -1) if shared >= 0 else -1
            self._give(reads[i], self.heap.hold(block) if block >= 0 else self.heap.allocate(num_bytes))
        self.heap.pass_by(kept.passing_back)

    def _forget(self, version: Version) -> None:
        """A gradient was passed on."""
        block = self.grads.pop(version, -1)
        if block >= 0:
            self.heap.drop(block)

    def _give(self, version: Version, block: int) -> None:
        """A contribution to a gradient: added to what is there."""
        if version in self.grads:
            self.heap.drop(block)
        else:
            self.grads[version] = block

    def _update_bytes(self) -> int:
        """What the update needs besides what is there."""
        if not self.skeleton.graph.training:
            return 0
        moved = {*self.program.offloaded_states}
        sizes = [self._held(root, self.program.leaves[root]) for root in self.skeleton.trained if root not in moved]
        return update_bytes(self.optimizer, self.kind, sizes, self._states())
