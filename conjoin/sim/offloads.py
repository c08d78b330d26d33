"""What lies on the host during a step, and the copies of it beside what is computed.

The memory of a step says when a tensor is copied, has left, is brought and is asked for (`OnHost`, followed by
`memory.py`); here these become instructions on two streams of their own, one for each direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from conjoin.comm import num_ahead, updated_together
from conjoin.ir import Made
from conjoin.sim.engine import COMPUTE, FROM_HOST, TO_HOST, Fragment, Instruction, Phase, to_ticks
from conjoin.sim.heap import Heap
from conjoin.sim.prices import HostLink


@dataclass(frozen=True, slots=True)
class Offloads:
    """Tensors that lie on the host between forward and backward, parameters whose optimizer state does, and inputs that
    do during the step."""

    tensors: tuple[Made, ...] = ()
    states: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.states or self.inputs)


class Act(Enum):
    """What happens to a tensor that lies on the host."""

    SEND = "to host"
    LEAVE = "wait for host"
    BRING = "from host"
    ASK = "wait for device"


@dataclass(eq=False, slots=True)
class OnHost:
    """A tensor of a step that is copied to the host."""

    made: Made
    number: int
    num_bytes: int
    block: int
    """Its memory on the device; -1 while it is not there."""
    asks: int = 0
    """How often the backward pass has yet to ask for it."""
    sent: int = 0
    """After which fragment it is copied."""
    asked: int = -1
    """Before which fragment the backward pass first asks for it; -1 where it never does."""


Log = list[tuple[Act, int, OnHost]]
"""What happens in which fragment of a step."""


class Hosts:
    """What is on the host while the memory of a step is followed."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._by_block: dict[int, OnHost] = {}
        """By its first memory on the device."""
        self._leaving: list[OnHost] = []
        self.untouched: set[int] = set()
        """Memory that does not leave."""
        self.numbered: list[OnHost] = []
        self.log: Log = []
        self.fragment = 0
        """Which is followed."""

    def keep(self, block: int) -> int | OnHost:
        """Hold memory for the backward pass, or know that it is on the host."""
        tensor = self._by_block.get(block)
        if tensor is None:
            return self._heap.hold(block)
        tensor.asks += 1
        return tensor

    def send(self, block: int, made: Made, kept: Sequence[list[int | OnHost]]) -> None:
        """Copy memory to the host, where that was kept for the backward pass too."""
        heap = self._heap
        if block in self._by_block or block in self.untouched or not heap.sizes[block] * heap.holders[block]:
            return
        tensor = OnHost(made, len(self.numbered), heap.sizes[block], heap.hold(block), sent=self.fragment)
        self._by_block[block] = tensor
        self.numbered.append(tensor)
        self.log.append((Act.SEND, self.fragment, tensor))
        for held in kept:
            for i in [i for i, one in enumerate(held) if one == block]:
                held[i] = self.keep(block)
                heap.drop(block)
        self._leaving.append(tensor)
        while len(self._leaving) > num_ahead(tensor.num_bytes for tensor in reversed(self._leaving)):
            left = self._leaving.pop(0)
            self.log.append((Act.LEAVE, self.fragment, left))
            heap.drop(left.block)
            left.block = -1

    def ask(self, kept: Iterable[int | OnHost]) -> None:
        """The backward pass needs what is kept; what was made before it on the host is started."""
        for tensor in _on_host(kept):
            tensor.asked = self.fragment if tensor.asked < 0 else tensor.asked
            earlier = self.numbered[: tensor.number][::-1]
            for other in (tensor, *earlier[: num_ahead(other.num_bytes for other in earlier)]):
                if other.block < 0 and other.asks > 0:
                    other.block = self._heap.allocate(other.num_bytes)
                    self.log.append((Act.BRING, self.fragment, other))
            if tensor not in self._leaving:
                self.log.append((Act.ASK, self.fragment, tensor))
            tensor.asks -= 1

    def answered(self, kept: Iterable[int | OnHost]) -> None:
        """What asked for tensors has run: those that nobody else asks for are gone."""
        for tensor in _on_host(kept):
            if tensor.asks == 0 and tensor.block >= 0:
                self._heap.drop(tensor.block)
                tensor.block = -1

    def drop(self, kept: Iterable[int | OnHost]) -> None:
        """Of what was kept let go of what is no longer needed on the device."""
        for held in kept:
            if isinstance(held, int):
                self._heap.drop(held)


def _on_host(kept: Iterable[int | OnHost]) -> list[OnHost]:
    return [held for held in kept if isinstance(held, OnHost)]


def there(held: int | OnHost) -> int:
    """Memory on the device of something kept."""
    return held if isinstance(held, int) else held.block


@dataclass(frozen=True, slots=True)
class Copies:
    """Instructions beside the fragments of a step."""

    before: Mapping[int, Fragment]
    after: Mapping[int, Fragment]
    num_events: int

    def around(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """The fragments with the copies before and after each."""
        return [(*self.before.get(i, ()), *fragment, *self.after.get(i, ())) for i, fragment in enumerate(fragments)]


@dataclass
class _Making:
    link: HostLink
    first_event: int
    before: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    after: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    def add(self, act: Act, fragment: int, tensor: OnHost) -> None:
        sent = self.first_event + 2 * tensor.number
        come = sent + 1
        match act:
            case Act.SEND:
                self.after[fragment].append(copying(self.link, tensor.num_bytes, Phase.FORWARD, sent))
            case Act.LEAVE:
                self.after[fragment].append(Instruction(act.value, COMPUTE, 0, waits=(sent,)))
            case Act.BRING:
                brought = copying(self.link, tensor.num_bytes, Phase.BACKWARD, come)
                self.before[fragment].append(replace(brought, waits=(COMPUTE, sent)))
            case Act.ASK:
                self.before[fragment].append(
                    Instruction(act.value, COMPUTE, 0, waits=(come,), phase=Phase.BACKWARD)
                )


def make_copies(log: Log, link: HostLink, first_event: int) -> Copies:
    """The copies of a step, by what happened in it; events are counted from one on."""
    making = _Making(link, first_event)
    for entry in log:
        making.add(*entry)
    count = 1 + max((tensor.number for _, _, tensor in log), default=-1)
    before, after = ({i: tuple(some) for i, some in each.items()} for each in (making.before, making.after))
    return Copies(before, after, 2 * count)


def copying(link: HostLink, num_bytes: int, phase: Phase, event: int = -1) -> Instruction:
    """A copy after all that was computed: to the host in the forward pass, else from it."""
    seconds = link.seconds(num_bytes)
    there = phase is Phase.FORWARD
    return Instruction(
        Act.SEND.value if there else Act.BRING.value,
        TO_HOST if there else FROM_HOST,
        to_ticks(seconds.value),
        host=to_ticks(link.launch),
        waits=(COMPUTE,),
        event=event,
        phase=phase,
        sent=num_bytes,
        source=seconds.source,
    )


def update_by_parts(update: Instruction, stored: Sequence[int], moved: Sequence[int], link: HostLink) -> Fragment:
    """The update of parameters of some bytes, of which some, by their places, are remembered on the host.

    While some are updated, what is remembered of the next is brought, and that of those before goes back.
    """
    remembered = [link.remembered * stored[i] for i in moved]
    if not sum(remembered):
        return (update,)
    parts = updated_together(remembered)
    total = max(sum(stored), 1)
    bring = [copying(link, sum(remembered[i] for i in part), Phase.BACKWARD) for part in parts]
    found = [bring[0]]
    rest = total - sum(stored[i] for i in moved)
    for k, part in enumerate(parts):
        found.append(Instruction(Act.ASK.value, COMPUTE, 0, waits=(FROM_HOST,), phase=Phase.UPDATE))
        found += bring[k + 1 : k + 2]
        mine = sum(stored[moved[i]] for i in part) + (rest if k == len(parts) - 1 else 0)
        found.append(replace(update, ticks=update.ticks * mine // total, host=update.host * mine // total))
        sent = copying(link, sum(remembered[i] for i in part), Phase.FORWARD)
        found.append(replace(sent, phase=Phase.UPDATE))
    return (*found, Instruction(Act.LEAVE.value, COMPUTE, 0, waits=(TO_HOST,), phase=Phase.UPDATE))
