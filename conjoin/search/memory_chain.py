"""Plans that do not fit a GPU, relieved jointly: of every segment what it makes is kept, made again, or on the host.

The step is a chain of segments (`memory/chain.py`), with seconds and bytes as the simulator has them. What the chain
leaves out, memory that is there for a moment, is learned from the simulation of what it chose: as long as that does not
fit the chain is asked again, for as many bytes less. Where nothing fits, optimizer state goes to the host too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from conjoin.ir import Segment
from conjoin.memory import Choice, Link, Option, find_choice
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry
from conjoin.sim import COMPUTE, OnHost, Program, kept_tensors, measure_memory, to_seconds

_TRIES = 4
"""How often the chain is asked again: each time for what the simulation found too much, which is little after two."""
_SEGMENTS = range(2, 41)
"""How many a chain may have."""
KEEP, AGAIN, HOST, AGAIN_FROM_HOST = "kept", "run again", "on the host", "run again from the host"


def relieve_by_chains(
    contest: Contest, entry: Entry, program: Program, ways: Sequence[tuple[Segment, ...]], left: Callable[[], float]
) -> None:
    """Enter a plan that does not fit again, with the best choice for each way to cut it into segments."""
    if contest.machine.device != "cuda":  # the host's memory is the device's
        return
    chain = _Chain(program, contest.machine.device)
    peak = measure_memory(program, contest.optimizer, chain.kind).peak
    states = frozenset(leaf.name for leaf in entry.variant.skeleton.graph.leaves if leaf.is_trained)
    for moved in (frozenset[str](), states):
        free = contest.capacity - peak + (chain.state_bytes(contest.optimizer) if moved else 0)
        tried = replace(entry, offloads=replace(entry.offloads, tensors=(), states=moved))
        found: list[tuple[float, int, tuple[Segment, ...]]] = []
        for segments in ways:
            if len(segments) in _SEGMENTS and left() > 0:
                choice = find_choice(*chain.asked(segments, free), chain.copy_seconds)
                found += [(choice.seconds, len(segments), segments)] if choice is not None else []
        for seconds, count, segments in sorted(found):  # those first that promise most
            if left() > 0 and (contest.best is None or seconds < contest.best.seconds):
                contest.tell(f"{count} segments kept, run again or on the host, {entry.name}")
                _enter_best(contest, tried, chain, segments, free)
        if contest.best is not None:
            return


def _enter_best(contest: Contest, entry: Entry, chain: _Chain, segments: Sequence[Segment], free: int) -> None:
    links, room = chain.asked(segments, free)
    for _ in range(_TRIES):
        found = find_choice(links, room, chain.copy_seconds)
        if found is None or (contest.best is not None and found.seconds > contest.best.seconds):
            return
        made = _chosen(entry, chain, segments, found)
        outcome = contest.judge(made, contest.simulate(made))
        if outcome.peak_bytes is None or outcome.peak_bytes <= contest.capacity:
            return
        room -= outcome.peak_bytes - contest.capacity


def _chosen(entry: Entry, chain: _Chain, segments: Sequence[Segment], found: Choice) -> Entry:
    """The entry with what was chosen for every segment; what comes after the last is kept."""
    again: list[Segment] = []
    tensors: list[OnHost] = []
    counts: dict[str, int] = {}
    for segment, option in zip(segments, found.options, strict=False):
        counts[option.name] = counts.get(option.name, 0) + 1
        again += [segment] if option.name in (AGAIN, AGAIN_FROM_HOST) else []
        tensors += chain.inside(segment) if option.name == HOST else []
        tensors += chain.leaving(segment) if option.name == AGAIN_FROM_HOST else []
    told = [f"{count} {name}" for name, count in counts.items() if name != KEEP]
    told += ["optimizer state on the host"] if entry.offloads.states else []
    offloads = replace(entry.offloads, tensors=tuple(sorted(tensor.made for tensor in tensors)))
    name = f"{entry.name}, of {len(segments)} segments {' and '.join(told) or 'all kept'}"
    return replace(entry, name=name, segments=tuple(sorted(again)), offloads=offloads)


@dataclass(frozen=True)
class _Chain:
    """What a program is as a chain."""

    program: Program
    kind: str

    @cached_property
    def tensors(self) -> list[OnHost]:
        return kept_tensors(self.program, self.kind)

    def copy_seconds(self, num_bytes: int) -> float:
        return self.program.drafts.prices.host_link().seconds(num_bytes).value

    def state_bytes(self, optimizer: str) -> int:
        """What leaves the device with the optimizer's state."""
        return measure_memory(self.program, optimizer, self.kind).optimizer_state

    def inside(self, segment: Segment) -> list[OnHost]:
        """What a segment makes and somebody keeps."""
        return [tensor for tensor in self.tensors if segment[0] <= tensor.made[0] <= segment[1]]

    def leaving(self, segment: Segment) -> list[OnHost]:
        """Of that what is read after the segment."""
        skeleton = self.program.skeleton
        made = ((tensor, skeleton.operators[tensor.made[0]].makes[tensor.made[1]]) for tensor in self.inside(segment))
        return [tensor for tensor, root in made if any(place > segment[1] for place, _ in skeleton.readers[root])]

    def asked(self, segments: Sequence[Segment], free: int) -> tuple[list[Link], int]:
        """The segments, and how many bytes they may have where so many are free beside all of them; less than none
        where too many are there."""
        links = self._links(segments)
        return links, free + sum(link.options[0].kept_bytes for link in links)

    def _links(self, segments: Sequence[Segment]) -> list[Link]:
        """The segments, and what comes after the last."""
        count = len(self.program.skeleton.operators)
        rest = Segment(segments[-1][1] + 1, count - 1)
        found = [self._link(segment) for segment in segments]
        return [*found, replace(last := self._link(rest), options=last.options[:1])] if rest[0] < count else found

    def _link(self, segment: Segment) -> Link:
        places, program = range(segment[0], segment[1] + 1), self.program
        forward = sum(self._seconds(program.order.forward(place)) for place in places)
        backward = sum(self._seconds(program.order.backward(place)) for place in places)
        inside, last = self.inside(segment), 2 * len(program.skeleton.operators) + 1
        kept = sum(tensor.num_bytes for tensor in inside)
        crossing = sum(tensor.num_bytes for tensor in inside if last - tensor.asked > segment[1])
        leaving = sum(tensor.num_bytes for tensor in self.leaving(segment))
        options = [Option(KEEP, kept), Option(AGAIN, crossing, forward), Option(HOST, 0, 0.0, kept)]
        options += [Option(AGAIN_FROM_HOST, crossing - leaving, forward, leaving)] if 0 < leaving <= crossing else []
        return Link(forward, backward, kept, tuple(options))

    def _seconds(self, fragment: int) -> float:
        tasks = self.program.fragments[fragment]
        return to_seconds(sum(int(np.max(task.ticks)) for task in tasks if task.stream == COMPUTE))
