"""A step with as much of it on the host as can be: what is left is there for a moment, or never away.

Of two plans that do not fit, the one that takes more may be the one that can be made to fit. What is run again instead
is not told apart: it is gone from the device as long as what lies on the host.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from conjoin.sim.memory import kept_tensors
from conjoin.sim.program import Program


def relieved(program: Program, kind: str) -> Program:
    """A program whose memory is that of devices of a kind with optimizer states away, and what is kept for the backward
    pass."""
    trained = (leaf.name for leaf in program.skeleton.graph.leaves if leaf.is_trained)
    states = frozenset(trained if kind == "cuda" else ())  # else the host's memory is the device's
    tensors = tuple(sorted(tensor.made for tensor in kept_tensors(program, kind)))
    found = copy(program)
    found.offloads = replace(program.offloads, tensors=tensors, states=states)
    return found
