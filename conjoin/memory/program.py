"""A step as the memory sees it: operations that read and make tensors of some bytes, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from conjoin.errors import PlanError


@dataclass(frozen=True, slots=True)
class Operation:
    """What is computed on the device: while it runs, all that it reads and makes is there."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in an order in which they can run. What none of them makes is on the host when the step begins."""

    operations: tuple[Operation, ...]
    bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        made: set[str] = set()
        leaves = self.leaves
        for operation in self.operations:
            early = [name for name in operation.inputs if name not in made and name not in leaves]
            twice = [name for name in operation.outputs if name in made]
            unknown = [name for name in (*operation.inputs, *operation.outputs) if self.bytes.get(name, -1) < 0]
            if early or twice or unknown:
                raise PlanError(
                    f"A step was asked for in which {operation.name} reads {early or 'nothing'} too early, makes "
                    f"{twice or 'nothing'} a second time, and does not know the bytes of {unknown or 'nothing'}. Each "
                    "tensor is made once, before it is read, and has a size. Put the operations in order."
                )
            made |= set(operation.outputs)

    @property
    def leaves(self) -> frozenset[str]:
        """Tensors that no operation makes."""
        made = {name for operation in self.operations for name in operation.outputs}
        return frozenset(name for operation in self.operations for name in operation.inputs if name not in made)

    def needs(self, operation: Operation) -> int:
        """Return the bytes that are on the device while an operation runs, if nothing else is."""
        return sum(self.bytes[name] for name in {*operation.inputs, *operation.outputs})

    def check_capacity(self, capacity: int) -> None:
        """Refuse a device on which some operation does not fit even by itself."""
        largest = max(self.operations, key=self.needs, default=None)
        if largest is not None and self.needs(largest) > capacity:
            raise PlanError(
                f"A step was to run in {capacity} bytes of device memory. {largest.name} alone reads and makes "
                f"{self.needs(largest)} bytes, which are there at once. Split it over more devices, or allow more."
            )


WriteBack = Literal["always", "needed"]
"""When a tensor is copied to the host: when it is made (ROC), or when it leaves the device and is still needed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation as it is run: what is done before it to make room and to have its inputs."""

    operation: str
    loads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    """Copied to the host: what leaves the device before the operation, or what it made."""
    drops: tuple[str, ...] = ()
    """Leave the device before the operation."""
    again: bool = False
    """It ran before, and what it made was dropped."""


@dataclass(frozen=True, slots=True)
class Residence:
    """Where the tensors of a step are, operation after operation, and what is moved and made again for that."""

    steps: tuple[Step, ...]
    loaded_bytes: int
    written_bytes: int
    remade_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Between device and host, both ways."""
        return self.loaded_bytes + self.written_bytes


def residence_of(program: Program, steps: tuple[Step, ...]) -> Residence:
    """Return the residence that some steps make up, with what they move and make again."""
    seconds = {operation.name: operation.seconds for operation in program.operations}
    loaded = sum(program.bytes[name] for step in steps for name in step.loads)
    written = sum(program.bytes[name] for step in steps for name in step.writes)
    return Residence(steps, loaded, written, sum(seconds[step.operation] for step in steps if step.again))
