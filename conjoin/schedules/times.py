"""What rows and transfers take, and what a micro-batch holds in memory: all that is known of stages here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf

from conjoin.schedules.schedule import Edge, Kind, chain

Taken = tuple[tuple[int, float], ...]
"""Numbers of links in the order in which a transfer comes to them, and for how many seconds it takes each up."""


@dataclass(frozen=True, slots=True)
class SharedLinks:
    """Links that several transfers take: by edge, there and back."""

    there: tuple[Taken, ...]
    back: tuple[Taken, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each stage's forward, input gradient and weight gradient, and of what each edge carries."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    activations: tuple[float, ...]
    """By edge, there."""
    gradients: tuple[float, ...]
    """By edge, and back."""
    _: KW_ONLY
    links: SharedLinks | None = None
    """Without them every ordered pair of owners has a link of its own."""

    @classmethod
    def alike(
        cls,
        num_stages: int,
        edges: Sequence[Edge],
        seconds: tuple[float, float, float] = (1, 1, 1),
        transfer: float = 0,
    ) -> Times:
        """The same (forward, input gradient, weight gradient) for all stages, and one time for all transfers.

        >>> Times.alike(2, [(0, 1)], (1, 1, 1), 0.5).gradients
        (0.5,)
        """
        forward, inputs, weights = ((each,) * num_stages for each in seconds)
        return cls(forward, inputs, weights, *((transfer,) * len(edges) for _ in range(2)))

    def of(self, kind: Kind, stage: int) -> float:
        """Seconds of a row that computes."""
        match kind:
            case Kind.FORWARD:
                return self.forward[stage]
            case Kind.INPUT_GRADIENT:
                return self.input_gradient[stage]
            case Kind.WEIGHT_GRADIENT:
                return self.weight_gradient[stage]
            case Kind.BACKWARD:
                return self.input_gradient[stage] + self.weight_gradient[stage]
            case Kind.SEND | Kind.RECEIVE:
                raise ValueError(f"{kind} moves something along an edge")


@dataclass(frozen=True, slots=True)
class Memory:
    """What a micro-batch in flight holds at each stage, in any one unit, and how much each owner has.

    `held` from the forward to the (input) gradient, `kept` of it on to the weight gradient.
    """

    held: tuple[float, ...]
    kept: tuple[float, ...]
    limits: tuple[float, ...]

    @classmethod
    def in_flight(cls, num_stages: int, limits: Sequence[float]) -> Memory:
        """Micro-batches in flight are counted: all stages hold as much, until their weights have their gradients."""
        return cls((1,) * num_stages, (1,) * num_stages, tuple(limits))

    @classmethod
    def unlimited(cls, num_stages: int, num_owners: int) -> Memory:
        """In-flight micro-batches counted, and any number allowed."""
        return cls.in_flight(num_stages, (inf,) * num_owners)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be scheduled: stages with their owners, how many micro-batches, what all takes and holds."""

    owners: tuple[int, ...]
    num_micro_batches: int
    times: Times
    memory: Memory
    edges: tuple[Edge, ...]
    apart: bool = True
    """Whether input and weight gradients may be rows apart."""

    @classmethod
    def of(
        cls, owners: tuple[int, ...], num_micro_batches: int, times: Times | None = None, memory: Memory | None = None
    ) -> Problem:
        """A chain of stages; without times all take the same and transfers nothing, without memory no limit is set."""
        edges = chain(len(owners))
        memory = memory or Memory.unlimited(len(owners), max(owners) + 1)
        return cls(owners, num_micro_batches, times or Times.alike(len(owners), edges), memory, edges)

    @property
    def num_owners(self) -> int:
        return max(self.owners) + 1
