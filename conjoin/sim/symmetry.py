"""Devices that behave alike are simulated once.

Along an axis where every split is even and all devices are of one type, moving every device one place further changes
nothing: not what a device computes, not with whom it talks. Such axes are folded, and one device stands for all along
them; of the others every coordinate is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from conjoin.machine import Mesh


@dataclass(frozen=True)
class Classes:
    """The classes of devices that behave alike: one for every place along the axes kept.

    >>> classes = Classes.keeping(Mesh.of_nodes(2, 6), ["d1"])
    >>> classes.shape, classes.ranks, classes.group(("n0", "d1"))
    ((3,), (0, 1, 2), (0,))
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @classmethod
    def keeping(cls, mesh: Mesh, axes: Iterable[str]) -> Classes:
        return cls(mesh, mesh.in_order(axes))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array with one entry for each class."""
        return tuple(self.mesh.sizes[axis] for axis in self.axes)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """One device of each class, in the order of the array."""
        return self.mesh.group(0, self.axes)

    def at(self, places: Iterable[tuple[str, int]]) -> NDArray[np.bool_] | None:
        """Which classes stand at the places named of some axes, all of which are kept; None where none is named."""
        found: NDArray[np.bool_] | None = None
        for axis, place in places:
            along = np.arange(self.mesh.sizes[axis]) == place
            row = along.reshape([-1 if name == axis else 1 for name in self.axes])
            found = np.broadcast_to(row if found is None else found & row, self.shape)
        return found

    def group(self, axes: Iterable[str]) -> tuple[int, ...]:
        """The axes of the array that the members of a group along axes of the mesh differ in."""
        wanted = set(axes)
        return tuple(position for position, axis in enumerate(self.axes) if axis in wanted)
