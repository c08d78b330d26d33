"""Plans that do not fit, with less of their inputs on each device.

Named strategies may give the whole of an input to devices that read a piece of it each: such a piece is enough. On one
GPU inputs may lie on the host during the step: features and edges of a graph, say. They are copied block by block
whenever they are read, which takes longer than anything else that frees as much. Inputs are few, so that every choice
of the large ones is tried; what then still does not fit is relieved further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

from conjoin.ir import LeafKind, streamable_inputs
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome
from conjoin.search.exact.problem import given_layout

_SMALL = 50
"""An input that is no more than this part of the capacity frees nothing that matters."""
_MOST = 4
"""Inputs that are chosen among: 15 ways."""
_FURTHER = 2
"""How many of those that do not fit are relieved further, the fastest first."""


def relieve_by_inputs(contest: Contest, entry: Entry, left: Callable[[], float]) -> list[Outcome]:
    """Enter a plan for one GPU with every choice of its large inputs on the host; those worth relieving further."""
    if contest.machine.device != "cuda" or contest.mesh.size > 1:  # the host's memory is the device's; or they are cut
        return []
    graph = entry.variant.skeleton.graph
    sizes = {leaf.name: leaf.type.bytes for leaf in graph.leaves_of(LeafKind.INPUT)}
    large = [names for names in streamable_inputs(graph) if sum(map(sizes.get, names)) * _SMALL > contest.capacity]  # type: ignore[arg-type]
    found = list[Outcome]()
    for count in range(1, min(len(large), _MOST) + 1):
        for chosen in combinations(large[:_MOST], count):
            if left() <= 0:
                contest.cut_short = True
                return found
            made = _with(entry, frozenset(name for names in chosen for name in names))
            contest.tell(made.name)
            found.append(contest.judge(made, contest.simulate(made)))
    heavy = [outcome for outcome in found if (outcome.peak_bytes or 0) > contest.capacity]
    return sorted(heavy, key=lambda outcome: outcome.seconds)[: _FURTHER - 1] + heavy[-1:]


def inputs_in_pieces(entry: Entry) -> Entry | None:
    """An entry with every input in the pieces in which all that read it do; None where that is so already."""
    skeleton, layouts = entry.variant.skeleton, entry.layouts
    pieces = {}
    for root, stored in layouts.leaves.items():
        leaf, readers = skeleton.roots[root].leaf, skeleton.readers[root]
        if leaf is not None and leaf.kind is LeafKind.INPUT and not stored:
            pieces[root] = given_layout([layouts.choices[position].operands[operand] for position, operand in readers])
    if not any(pieces.values()):
        return None
    cut = replace(layouts, leaves={**layouts.leaves, **pieces})
    return replace(entry, name=f"{entry.name}, inputs in pieces", layouts=cut)


def _with(entry: Entry, inputs: frozenset[str]) -> Entry:
    name = f"{entry.name}, {', '.join(sorted(inputs))} on the host"
    return replace(entry, name=name, offloads=replace(entry.offloads, inputs=inputs))
