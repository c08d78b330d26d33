"""What has to go from one set of devices to another: slices of a tensor, who holds each and who wants it.

A slice is what a piece of the source and a piece of the target share (AlpaComm 2.2, cut further where targets want
different parts of it). Pieces of one layout are the same or disjoint, so slices are disjoint, and together they are all
that anybody wants. They are kept as arrays: between two meshes of 512 devices there can be a quarter of a million.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.comm.pieces import held_regions
from conjoin.errors import PlanError
from conjoin.ir import Region
from conjoin.machine import Mesh
from conjoin.ops import Layout, Partial

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """The devices of a part of the machine in the order of a mesh over them, and the host of each.

    >>> grid = Grid.of_hosts(2, 4, first_device=8, first_host=2)
    >>> grid.devices, grid.hosts
    ((8, 9, 10, 11, 12, 13, 14, 15), (2, 2, 2, 2, 3, 3, 3, 3))
    """

    mesh: Mesh
    devices: tuple[int, ...]
    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.devices) == len(self.hosts) == self.mesh.size == len(set(self.devices)):
            raise PlanError(
                f"A grid is to have {len(self.devices)} devices on {len(self.hosts)} hosts. Its mesh {self.mesh} has "
                f"{self.mesh.size} places, and no device is there twice. Name one device and its host for each place."
            )

    @classmethod
    def of_hosts(cls, num_hosts: int, devices_per_host: int, first_device: int = 0, first_host: int = 0) -> Grid:
        """Equal hosts, their devices one after another."""
        count = num_hosts * devices_per_host
        hosts = tuple(first_host + i // devices_per_host for i in range(count))
        mesh = Mesh.of_nodes(num_hosts, devices_per_host)
        return cls(mesh, tuple(range(first_device, first_device + count)), hosts)


@dataclass(frozen=True)
class Pieces:
    """The different pieces of a tensor on a grid, and who has each.

    `has` is by piece and host: which devices, as a range in `devices`. Hosts are numbered from 0 here, in the order of
    `host_names`, which source and target share.
    """

    bounds: Numbers
    """By piece, dim, and start or stop."""
    devices: Numbers
    first: Numbers
    count: Numbers
    host_names: tuple[int, ...]

    def host_sets(self) -> tuple[Numbers, list[Numbers]]:
        """The number of each piece's set of hosts, and these sets."""
        sets, numbers = np.unique(self.count > 0, axis=0, return_inverse=True)
        return numbers.reshape(-1), [np.flatnonzero(each) for each in sets]

    def on(self, piece: Numbers, host: Numbers, turn: Numbers) -> Numbers:
        """One of the devices of a host that have a piece, another at every turn."""
        count = self.count[piece, host]
        assert np.all(count > 0)
        return self.devices[self.first[piece, host] + turn % count]


@dataclass(frozen=True)
class Slices:
    """Disjoint slices: which piece of the source and of the target each belongs to, and where it lies."""

    source: Numbers
    target: Numbers
    bounds: Numbers
    sizes: Numbers
    """In elements."""

    def region(self, number: int | np.int64) -> Region:
        return tuple((int(start), int(stop)) for start, stop in self.bounds[number])


def all_hosts(source: Grid, target: Grid) -> tuple[int, ...]:
    """The hosts of two grids together."""
    return tuple(dict.fromkeys((*source.hosts, *target.hosts)))


def pieces_on(shape: tuple[int, ...], layout: Layout, grid: Grid, host_names: tuple[int, ...]) -> Pieces:
    """Who has which piece of a tensor; of partial sums the first device has the value, and the others zeros."""
    regions: Sequence[Region] = held_regions(shape, layout, grid.mesh)
    sums = [axis for axis, placement in layout if isinstance(placement, Partial)]
    places: dict[Region, list[tuple[int, int]]] = {}
    number = {name: i for i, name in enumerate(host_names)}
    for rank, region in enumerate(regions):
        if sums and any(grid.mesh.coordinates(rank)[axis] for axis in sums):
            continue
        if all(stop > start for start, stop in region):
            places.setdefault(region, []).append((number[grid.hosts[rank]], grid.devices[rank]))
    bounds = np.array(list(places), dtype=np.int64).reshape(len(places), len(shape), 2)
    count = np.zeros((len(places), len(host_names)), dtype=np.int64)
    devices: list[int] = []
    for piece, held in enumerate(places.values()):
        for host, device in sorted(held):
            count[piece, host] += 1
            devices.append(device)
    first = np.concatenate([[0], np.cumsum(count.reshape(-1))[:-1]]).reshape(count.shape)
    return Pieces(bounds, np.array(devices, dtype=np.int64), first.astype(np.int64), count, host_names)


def slices_between(source: Pieces, target: Pieces) -> Slices:
    """All that the target wants, cut by who has it and by who wants it."""
    starts = np.maximum(source.bounds[:, None, :, 0], target.bounds[None, :, :, 0])
    stops = np.minimum(source.bounds[:, None, :, 1], target.bounds[None, :, :, 1])
    sizes = np.clip(stops - starts, 0, None).prod(axis=2)
    ones, others = np.nonzero(sizes)
    bounds = np.stack([starts[ones, others], stops[ones, others]], axis=2)
    return Slices(ones, others, bounds, sizes[ones, others])
