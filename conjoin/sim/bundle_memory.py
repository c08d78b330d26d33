"""What bundles of parameters hold on a rank: gathered for their use, packed and summed up as gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from conjoin.comm import BundleKind, flights_backward, flights_forward
from conjoin.sim.heap import Heap
from conjoin.sim.program import Program, UsedBundle, Version


class BundleMemory:
    """The blocks of bundles on their way, forward and backward."""

    def __init__(self, program: Program, heap: Heap, kind: str, held: Callable[[Version], int]) -> None:
        self._program, self._heap, self._kind, self._held = program, heap, kind, held
        """The last tells the bytes of a tensor in a layout."""
        bundles, size = program.bundles, program.drafts.bundle_bytes
        found = [used.bundle for used in bundles]
        self._flights = {
            again: {used: [bundles[i] for i in some] for used, some in zip(bundles, each, strict=True)}
            for again, each in ((False, flights_forward(found, size)), (True, flights_backward(found, size)))
        }
        self._flying: dict[UsedBundle, int] = {}
        self._gathered_before: dict[int, list[UsedBundle]] = {}
        """What the backward of an operator needs again, by its place."""
        for used in bundles:
            if used.bundle.is_gathered_again:
                self._gathered_before.setdefault(used.bundle.use.last_kept, []).append(used)
        self._gathered: dict[UsedBundle, list[int]] = {}
        """What was gathered again for the backward pass."""
        self._scattering: dict[BundleKind, list[int]] = {}
        """Packed gradients that may not have been sent yet."""
        self._put_off: dict[BundleKind, list[int]] = {}
        """Gradients that may not have been added to those of earlier micro-batches yet."""

    def gather(self, used: UsedBundle, there: Collection[Version]) -> list[int]:
        """The blocks of a bundle's parameters for the forward pass, where some tensors are there already."""
        others = (other for other in self._flights[False][used] if other.versions[0] not in there)
        return self._arrived(used, (used, *others))

    def gather_again(self, position: int) -> None:
        """Parameters that the backward of an operator needs and that were dropped."""
        for used in self._gathered_before.get(position, ()):
            others = (other for other in self._flights[True][used] if other not in self._gathered)
            self._gathered[used] = self._arrived(used, (used, *others))

    def _arrived(self, used: UsedBundle, wanted: Sequence[UsedBundle]) -> list[int]:
        """Others are started with a bundle; when everyone's pieces have come, they are put together."""
        for other in wanted:
            if other not in self._flying:
                own = ((root, self._program.layout_of(root)) for root, _ in other.versions)
                self._heap.pass_by(sum(map(self._held, own)))
                self._flying[other] = self._heap.allocate(sum(map(self._held, other.versions)))
        flat = self._flying.pop(used)
        if used.bundle.is_flat:
            return [flat]
        blocks = [self._heap.allocate(self._held(version)) for version in used.versions]
        self._heap.drop(flat)
        return blocks

    def reduce(self, used: UsedBundle, grads: dict[Version, int]) -> None:
        """The gradients of a bundle are packed and summed up; each then is a view of one block."""
        heap, kind = self._heap, used.bundle.kind
        for block in self._gathered.pop(used, ()):
            heap.drop(block)
        if not used.bundle.use.back:
            return
        count = sum(map(self._held, used.versions)) // kind.dtype.itemsize
        whole, held = count * kind.added.itemsize, sum(map(self._held, used.stored))
        under_way = self._scattering.setdefault(kind, [])
        self._let_go(under_way, 0 if kind.summed else 1)
        as_it_is = used.bundle.is_flat and kind.added == kind.dtype and kind.gathered
        packed = heap.hold(grads[used.versions[0]]) if as_it_is else heap.allocate(whole)
        is_own = kind.gathered or kind.added != kind.stored  # another block than what was packed
        result = heap.allocate(held) if is_own else packed
        narrow = held * kind.added.itemsize // kind.stored.itemsize if kind.added != kind.stored else 0
        heap.pass_by(self._passing(whole) + narrow if kind.gathered else 0)
        self._hand_over(used, grads, result)
        if kind.gathered:
            under_way.append(packed)
        else:
            heap.drop(packed)
        if is_own:
            heap.drop(result)

    def _hand_over(self, used: UsedBundle, grads: dict[Version, int], result: int) -> None:
        """A sum becomes the gradients of what is stored, or is added to those of earlier micro-batches later."""
        kind = used.bundle.kind
        puts_off = self._program.steps > 1 and bool(kind.summed)
        for version, own in zip(used.versions, used.stored, strict=True):
            if version in grads:
                self._heap.drop(grads.pop(version))
            if not puts_off:
                grads[own] = self._heap.hold(result)
        if puts_off and kind.gathered:
            last = self._put_off.setdefault(kind, [])
            self._let_go(last, 0)
            last.append(self._heap.hold(result))

    def end(self) -> None:
        """At the end of the backward pass all was sent and added."""
        for blocks in (*self._scattering.values(), *self._put_off.values()):
            self._let_go(blocks, 0)

    def _let_go(self, blocks: list[int], count: int) -> None:
        """Of some blocks all but the last few."""
        while len(blocks) > count:
            self._heap.drop(blocks.pop(0))

    def _passing(self, num_bytes: int) -> int:
        """What a reduce-scatter needs besides: on Gloo it is done by sending parts to those who sum them."""
        return num_bytes if self._kind == "cpu" else 0
