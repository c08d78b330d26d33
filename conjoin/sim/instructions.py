"""Instructions of a device: what it computes, and what waits for what; numbers that differ between classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from conjoin.cost import OperatorCost, Seconds, Source
from conjoin.sim.engine import COMPUTE, Fragment, Instruction, Phase, Ticks, to_ticks
from conjoin.sim.symmetry import Classes


def computing(
    name: str, phase: Phase, ticks: Ticks, host: Ticks, source: Source, where: NDArray[np.bool_] | None = None
) -> Instruction:
    return Instruction(name=name, stream=COMPUTE, ticks=ticks, host=host, phase=phase, source=source, where=where)


def computed(name: str, phase: Phase, seconds: Seconds, cost: OperatorCost) -> Instruction:
    host = cost.host_forward if phase is Phase.FORWARD else cost.host_backward
    return computing(name, phase, to_ticks(seconds.value), to_ticks(host), seconds.source)


def phases(cost: OperatorCost) -> tuple[tuple[Phase, Seconds], ...]:
    return (Phase.FORWARD, cost.forward), (Phase.BACKWARD, cost.backward)


def ordered(instructions: Iterable[Instruction]) -> Fragment:
    """Instructions of which each computation waits for the communication before it."""
    found: list[Instruction] = []
    pending: list[Instruction] = []
    for instruction in instructions:
        if instruction.stream != COMPUTE:
            pending.append(instruction)
        elif pending:
            if instruction.where is None and all(sent.where is None for sent in pending):
                instruction = _waiting(instruction, {sent.stream for sent in pending})
            else:
                found += waits_for(pending)
            pending = []
        found.append(instruction)
    return (*found, *waits_for(pending))


def waits_for(pending: Iterable[Instruction]) -> list[Instruction]:
    """The wait for communication, by those devices that take part in it."""
    by_where: dict[bytes, list[Instruction]] = {}
    for sent in pending:
        by_where.setdefault(b"" if sent.where is None else sent.where.tobytes(), []).append(sent)
    return [
        Instruction(
            "wait",
            COMPUTE,
            0,
            waits=tuple(sorted({sent.stream for sent in some})),
            phase=some[-1].phase,
            where=some[0].where,
        )
        for some in by_where.values()
    ]


def _waiting(instruction: Instruction, streams: Iterable[int]) -> Instruction:
    """An instruction that waits for some streams or events besides."""
    return replace(instruction, waits=(*instruction.waits, *sorted(streams)))


def only_where(ticks: int, where: NDArray[np.bool_] | None) -> Ticks:
    """A number for the classes that something concerns, none for the others."""
    return ticks if where is None else ticks * where.astype(np.int64)


def spread(ticks: list[int], numbers: NDArray[np.int64], classes: Classes) -> Ticks:
    """One number where all classes have the same, else an array: of each class the one that its number says."""
    if len(set(ticks)) == 1:
        return ticks[0]
    return np.array(ticks, np.int64)[numbers].reshape(classes.shape)


def folded(ticks: list[int], classes: Classes) -> Ticks:
    """One number where all classes have the same, else an array of them."""
    if len(set(ticks)) == 1:
        return ticks[0]
    return np.array(ticks, np.int64).reshape(classes.shape)
