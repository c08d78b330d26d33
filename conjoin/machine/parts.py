"""Parts of a machine: its first nodes, and of each the first devices, as launchers number them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from conjoin.errors import UsageError
from conjoin.machine.alpha_beta import CollectiveFit
from conjoin.machine.devices import DeviceType
from conjoin.machine.limits import shown
from conjoin.machine.links import Link, NodeKind, is_number_below
from conjoin.machine.machine import Machine
from conjoin.machine.mesh import Axis, Mesh


def part_of(machine: Machine, num_nodes: int, devices_per_node: int) -> Machine:
    """The first nodes of a machine with the first devices of each; fits are kept where they hold for the part.

    >>> print(part_of(Machine.preset("summit", nodes=4), 2, 3))
    summit:2x3: 2 nodes × 3 cuda, axes n0:2 d0:3
    """
    if not 1 <= num_nodes <= machine.num_nodes or not 1 <= devices_per_node <= machine.devices_per_node:
        raise UsageError(
            f"A part of {machine.name} of {shown(num_nodes)} nodes × {shown(devices_per_node)} devices was asked for. "
            f"The machine has {machine.num_nodes} × {machine.devices_per_node}. Ask for at least one of each, and no "
            f"more than that."
        )
    if (num_nodes, devices_per_node) == (machine.num_nodes, machine.devices_per_node):
        return machine
    several = num_nodes > 1
    between, inside = _kept(machine, True, num_nodes), _kept(machine, False, devices_per_node)
    whole = between is not None and inside is not None
    axes = (*(between or ()), *(inside or ()))
    return replace(
        machine,
        name=f"{machine.name}:{num_nodes}x{devices_per_node}",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        nodes=_first_nodes(machine.nodes, num_nodes, devices_per_node),
        links=_first(machine.links, num_nodes, machine.num_nodes) if several else (),
        switches=machine.switches if several else (),
        axes=tuple(axis for axis in machine.axes if axis in axes) if whole else (),
        fits=_renamed(machine, axes, Mesh.of_nodes(num_nodes, devices_per_node)) if whole else (),
    )


def devices_of(machine: Machine, ranks: Sequence[int]) -> Machine:
    """The part of a machine that some ranks are: whole nodes one after the other, or neighbours in one node.

    >>> print(devices_of(Machine.preset("summit", nodes=4), range(6, 18)))
    summit:2x6: 2 nodes × 6 cuda, axes n0:2 d0:2 d1:3
    """
    inside = machine.devices_per_node
    places = [machine.location(rank) for rank in ranks]
    nodes = list(dict.fromkeys(node for node, _ in places))
    each, left = divmod(len(ranks), len(nodes))
    whole = len(nodes) == 1 or (not left and each == inside)
    if left or not whole or places != [(node, position) for node in nodes for position in _row(places, node)]:
        raise UsageError(
            f"The ranks {', '.join(map(str, ranks[:8]))} of {machine.name} were asked for as a part of it. A part is "
            f"whole nodes, or neighbouring devices of one node, of {inside}. Choose such ranks."
        )
    made = part_of(machine, len(nodes), each)
    if len(machine.device_types) < 2 or made is machine:
        return made
    kinds = [machine.device_type(rank) for rank in ranks]
    return _with_devices(made, [kinds[i * each : (i + 1) * each] for i in range(len(nodes))])


def _row(places: Sequence[tuple[int, int]], node: int) -> list[int]:
    """The positions of some devices in a node, if they are neighbours."""
    found = [position for other, position in places if other == node]
    return list(range(found[0], found[0] + len(found)))


def _with_devices(machine: Machine, rows: Sequence[Sequence[DeviceType]]) -> Machine:
    """A part whose nodes have the devices of the nodes that it stands for."""
    kind = machine.nodes[0]
    nodes = tuple(replace(kind, count=1, devices=tuple(row)) for row in rows)
    return replace(machine, nodes=nodes)


def parts_of(machine: Machine) -> Iterator[Machine]:
    """The machine and every part that leaves axes of its mesh out, the largest first.

    >>> [part.num_devices for part in parts_of(Machine.preset("summit"))]
    [6, 3, 2, 1]
    """
    pairs = [(n, d) for n in _divisors(machine.num_nodes) for d in _divisors(machine.devices_per_node)]
    for num_nodes, devices_per_node in sorted(pairs, key=lambda pair: (-pair[0] * pair[1], pair[0])):
        try:
            yield part_of(machine, num_nodes, devices_per_node)
        except UsageError:  # what is left has no links between some of its devices
            continue


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _kept(machine: Machine, between_nodes: bool, number: int) -> tuple[Axis, ...] | None:
    """The innermost axes that so many nodes, or devices of a node, run along; None where they are no row of axes."""
    axes = [axis for axis in machine.mesh.axes if axis.between_nodes == between_nodes]
    rows = (tuple(axes[start:]) for start in range(len(axes) + 1))
    return next((row for row in rows if prod(axis.size for axis in row) == number), None)


def _first_nodes(kinds: Sequence[NodeKind], num_nodes: int, devices_per_node: int) -> tuple[NodeKind, ...]:
    found, left = list[NodeKind](), num_nodes
    for kind in kinds:
        if left > 0:
            links = _first(kind.links, devices_per_node, len(kind.devices))
            devices = kind.devices[:devices_per_node]
            found.append(replace(kind, count=min(kind.count, left), devices=devices, links=links))
            left -= kind.count
    return tuple(found)


def _first(links: Sequence[Link], number: int, before: int) -> tuple[Link, ...]:
    """The links that lead to none of the ends which are left out."""
    gone = {str(i) for i in range(number, before) if is_number_below(str(i), before)}
    return tuple(link for link in links if gone.isdisjoint(link.ends))


def _renamed(machine: Machine, kept: Sequence[Axis], mesh: Mesh) -> tuple[CollectiveFit, ...]:
    """The fits over axes that are kept, by the names which these have in the part."""
    names = {axis.name: axis.name for axis in kept}
    if not machine.axes:
        names = {old.name: new.name for old, new in zip(kept, mesh.axes, strict=True)}
    return tuple(
        replace(fit, axes=tuple(names[axis] for axis in fit.axes))
        for fit in machine.fits
        if names.keys() >= set(fit.axes)
    )
