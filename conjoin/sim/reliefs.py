"""A step with as much of it on the host as can be: what is there for a moment is left, and what is never away.

Of two plans that do not fit, the one that takes more may be the one that can be made to fit. What is run again instead
is not told apart: it is gone from the device as long as what lies on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from conjoin.ir import Made
from conjoin.sim.memory import kept_tensors
from conjoin.sim.program import Program


def reliefs(program: Program, kind: str) -> Iterator[Program]:
    """The memory of a program on devices of a kind, with optimizer states away, then with what is kept for the backward
    pass away too: tensors that come and go are there for a while, so that neither need be the smaller."""
    has_host = kind == "cuda"  # else the host's memory is the device's
    trained = (leaf.name for leaf in program.skeleton.graph.leaves if leaf.is_trained)
    states = frozenset(trained) if has_host else frozenset[str]()
    if states:
        yield _without(program, (), states)
    if tensors := tuple(sorted(tensor.made for tensor in kept_tensors(program, kind))):
        yield _without(program, tensors, states)


def _without(program: Program, tensors: tuple[Made, ...], states: frozenset[str]) -> Program:
    found = copy(program)
    found.offloads = replace(program.offloads, tensors=tensors, states=states)
    return found
