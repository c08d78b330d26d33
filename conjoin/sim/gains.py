"""What it would bring to run segments of a step again in the backward pass: bytes saved, and seconds spent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conjoin.comm import held_bytes, run_again
from conjoin.ir import Segment
from conjoin.sim.engine import COMPUTE, to_seconds
from conjoin.sim.program import Program, Version


@dataclass(frozen=True, slots=True)
class Gain:
    """Of one segment, on the device that holds most."""

    num_bytes: int
    """Of the inside, which autograd would keep."""
    seconds: float
    """Of the forward pass, which is run again."""


def gain_of(program: Program, segment: Segment, kind: str) -> Gain:
    """What running a segment again brings on devices of a kind."""
    remembered = [operator.remembers for operator in program.skeleton.operators]
    counted = _Counted(program, kind)
    for first, last in run_again([segment], remembered):
        for position in range(first, last + 1):
            counted.add(position)
    return Gain(counted.num_bytes, to_seconds(counted.ticks))


class _Counted:
    """What is kept of operators one after the other, and how long they compute."""

    def __init__(self, program: Program, kind: str) -> None:
        self._program, self._kind = program, kind
        self._memory: dict[Version, Version] = {}
        """For everything made so far the tensor whose memory it lies in."""
        self._kept: set[Version] = set()
        self.num_bytes = self.ticks = 0

    def add(self, position: int) -> None:
        program = self._program
        operator, choice = program.skeleton.operators[position], program.choices[position]
        found = program.drafts.kept(program.numbers[position], choice, self._kind)
        reads = list(zip(operator.reads, choice.operands, strict=True))
        makes = list(zip(operator.makes, choice.outputs, strict=True))
        for made, shared in zip(makes, found.views, strict=True):
            self._memory[made] = self._memory.get(reads[shared], reads[shared]) if shared >= 0 else made
        for kept in (*(reads[i] for i in found.operands), *(makes[i] for i in found.outputs)):
            self._keep(self._memory.get(kept, kept))
        self.num_bytes += found.extra
        forward = program.fragments[program.order.forward(position)]
        self.ticks += sum(int(np.max(task.ticks)) for task in forward if task.stream == COMPUTE)

    def _keep(self, version: Version) -> None:
        """Count what was made inside, once; what comes from outside is kept in any case."""
        if version in self._memory and version not in self._kept:
            self._kept.add(version)
            type = self._program.skeleton.roots[version[0]].type
            self.num_bytes += held_bytes(type.laid_out(version[1]), self._program.drafts.mesh).largest
