"""The mesh: devices numbered along prime axes, so that a layout can speak of each axis on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the mesh; devices along it are in different nodes, or in one."""

    name: str
    size: int
    between_nodes: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors of a number, smallest first.

    >>> prime_factors(12)
    (2, 2, 3)
    """
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return (*factors, number) if number > 1 else tuple(factors)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where dims of a size are cut that some axes split, the last running fastest, if not as evenly as can be.

    A partition of a graph is one of its vertices and one of its edges. Pieces may be empty.
    """

    size: int
    axes: tuple[str, ...]
    bounds: tuple[int, ...]
    """The piece p goes from `bounds[p]` to `bounds[p + 1]`."""


@dataclass(frozen=True)
class Mesh:
    """Axes from the slowest to the fastest: rank 0, 1, 2 … run along the last axis first.

    >>> mesh = Mesh.of_nodes(2, 6)
    >>> str(mesh), mesh.coordinates(7)
    ('n0:2 d0:2 d1:3', {'n0': 1, 'd0': 0, 'd1': 1})
    >>> mesh.group(7, ("n0", "d1"))
    (0, 1, 2, 6, 7, 8)
    """

    axes: tuple[Axis, ...]
    cuts: tuple[Cut, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, since what is found of a mesh is looked up often."""
        return hash((self.axes, self.cuts))

    def __reduce__(self) -> tuple[type[Mesh], tuple[tuple[Axis, ...], tuple[Cut, ...]]]:
        """Without what is kept: hashes are other ones in another process."""
        return Mesh, (self.axes, self.cuts)

    @classmethod
    def of_nodes(cls, num_nodes: int, devices_per_node: int) -> Mesh:
        """Prime axes between nodes (`n0`, `n1` …), then prime axes inside a node (`d0`, `d1` …)."""
        between = [Axis(f"n{i}", size, True) for i, size in enumerate(prime_factors(num_nodes))]
        inside = [Axis(f"d{i}", size) for i, size in enumerate(prime_factors(devices_per_node))]
        return cls((*between, *inside))

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))

    @cached_property
    def size(self) -> int:
        """How many devices there are."""
        return prod(axis.size for axis in self.axes)

    @property
    def told(self) -> str:
        """How many devices on which axes, in words.

        >>> Mesh.of_nodes(1, 6).told, Mesh.of_nodes(1, 1).told
        ('6 devices (d0:2 d1:3)', 'one device')
        """
        return f"{self.size} devices ({self})" if self.axes else "one device"

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis by its name."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def _strides(self) -> Mapping[str, int]:
        return {axis.name: prod(later.size for later in self.axes[i + 1 :]) for i, axis in enumerate(self.axes)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        return {name: rank // stride % self.sizes[name] for name, stride in self._strides.items()}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank that stands there; axes left out are at 0."""
        return sum(self._strides[name] * place for name, place in coordinates.items())

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one along the given axes only, the last axis given running fastest."""
        base = rank - sum(self._strides[name] * (rank // self._strides[name] % self.sizes[name]) for name in axes)
        members = [base]
        for name in axes:
            steps = [self._strides[name] * place for place in range(self.sizes[name])]
            members = [member + step for member in members for step in steps]
        return tuple(members)

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along the given axes: every rank is in exactly one."""
        members = self.group(0, axes)
        firsts = self.group(0, [name for name in self.names if name not in axes])
        return tuple(tuple([first + member for member in members]) for first in firsts)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Axis names in the order of the mesh."""
        wanted = set(names)
        return tuple(name for name in self.names if name in wanted)

    def bounds_of(self, size: int, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        """Where a dim is cut that these axes split, if that was said of them, or of others that nest inside them.

        >>> mesh = Mesh.of_nodes(1, 4)
        >>> mesh = Mesh(mesh.axes, (Cut(7, ("d0", "d1"), (0, 1, 3, 3, 7)),))
        >>> mesh.bounds_of(7, ("d0", "d1")), mesh.bounds_of(7, ("d0",)), mesh.bounds_of(8, ("d0",))
        ((0, 1, 3, 3, 7), (0, 3, 7), None)
        """
        for cut in self.cuts:
            if axes and cut.size == size and cut.axes[: len(axes)] == axes:
                return cut.bounds[:: prod(self.sizes[axis] for axis in cut.axes[len(axes) :])]
        return None
