"""Whether the parts of a machine fit together: nodes and devices are as many as said, links lead everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

from conjoin.errors import UsageError
from conjoin.machine.alpha_beta import COLLECTIVE_KINDS, CollectiveFit
from conjoin.machine.limits import MAX_DEVICES, check_label, shown, suggestion
from conjoin.machine.links import NETWORK, Link, NodeKind, check_connected, check_ends, check_links, check_switches
from conjoin.machine.mesh import Axis, Mesh, prime_factors
from conjoin.machine.quantities import MICROSECONDS, R_SQUARED, SECONDS_PER_GIGABYTE

MAX_KINDS = 100
MAX_FITS = 10_000


def check_nodes(kinds: Sequence[NodeKind], num_nodes: int, devices_per_node: int, device: str) -> None:
    """Refuse kinds of nodes that do not make up the machine, or of which some have links and others do not."""
    if len(kinds) > MAX_KINDS:
        raise UsageError(
            f"The machine has {len(kinds):,} node kinds. The limit is {MAX_KINDS}. "
            f"Describe nodes that are alike as one."
        )
    _check_names("node kinds", [kind.name for kind in kinds])
    _check_names("device types", [found.name for found in {device: None for kind in kinds for device in kind.devices}])
    if sum(kind.count for kind in kinds) != num_nodes:
        raise UsageError(
            f"The machine has {num_nodes:,} nodes, and its node kinds count {sum(kind.count for kind in kinds):,}. "
            f"Every node is of one kind. Change num_nodes or the counts."
        )
    for kind in kinds:
        _check_devices(kind, devices_per_node, device)
        _check_inside(kind, num_nodes, any(other.links for other in kinds))


def _check_devices(kind: NodeKind, devices_per_node: int, device: str) -> None:
    if len(kind.devices) != devices_per_node:
        raise UsageError(
            f"The node kind {kind.name} has {len(kind.devices):,} devices, and the machine has {devices_per_node:,} in "
            f"every node. All nodes have equally many. Change devices_per_node or the devices of the node kind."
        )
    others = [found.kind for found in kind.devices if found.kind != device]
    if others:
        raise UsageError(
            f"The node kind {kind.name} has devices of kind {others[0]}, and the machine's device is {device}. "
            f"A machine has devices of one kind. Change device, or the device types."
        )


def _check_inside(kind: NodeKind, num_nodes: int, are_links: bool) -> None:
    if are_links and (len(kind.devices) > 1 or num_nodes > 1):
        wanted = [*map(str, range(len(kind.devices))), *([NETWORK] if num_nodes > 1 else [])]
        check_connected(f"node kind {kind.name}", kind.links, wanted)


def check_network(links: Sequence[Link], switches: Sequence[str], kinds: Sequence[NodeKind], num_nodes: int) -> None:
    """Refuse links between nodes that leave nodes out or come without links inside them."""
    if not links and not switches:
        return
    if not all(kind.links for kind in kinds) or not kinds:
        raise UsageError(
            f"The machine has {len(links):,} links between nodes, and nodes without links. Messages come to them from "
            f"devices, over a link to {NETWORK!r} inside the node. Add links to every node kind."
        )
    check_links("network", links)
    check_switches("network", switches)
    check_ends("network", links, num_nodes, switches, noun="node")
    check_connected("network", links, [str(node) for node in range(num_nodes)])


def check_axes(axes: Sequence[Axis], num_nodes: int, devices_per_node: int) -> None:
    """Refuse axes that are not primes, or whose products are not the numbers of nodes and of devices in a node."""
    for axis in axes:
        _check_axis_name(axis.name)
        if type(axis.size) is not int or not 2 <= axis.size <= MAX_DEVICES or len(prime_factors(axis.size)) > 1:
            raise UsageError(
                f"The axis {axis.name} has size {shown(axis.size)}. The axes of a mesh are prime numbers, so that each "
                f"can be used on its own. Write 4 as two axes of 2."
            )
    _check_names("axes", [axis.name for axis in axes])
    for between, noun, number in ((True, "nodes", num_nodes), (False, "devices in a node", devices_per_node)):
        found = prod(axis.size for axis in axes if axis.between_nodes == between)
        if axes and found != number:
            raise UsageError(
                f"The axes {'between nodes' if between else 'inside a node'} make {found:,} {noun}. The machine has "
                f"{number:,}. Change the sizes, or leave axes out to get them from the numbers."
            )


def _check_axis_name(name: str) -> None:
    """Refuse a name that could not be read back from a plan, where layouts are written as `d0:S(0)`."""
    check_label("name of an axis", name)
    if not name.isidentifier():
        word = re.sub(r"\W", "_", name, flags=re.ASCII)
        raise UsageError(
            f"There is an axis named {shown(name)}. Plans write names of axes into layouts, where only letters, digits "
            f"and _ stand, and no digit first. Write {word if word.isidentifier() else f'axis_{word}'} instead."
        )


def check_fits(fits: Sequence[CollectiveFit], mesh: Mesh) -> None:
    """Refuse fits of unknown collectives or over unknown axes, two of the same, and numbers that no clock gives."""
    if len(fits) > MAX_FITS:
        raise UsageError(
            f"The machine has {len(fits):,} fits. The limit is {MAX_FITS:,}. Leave out axes that no plan uses."
        )
    for fit in fits:
        check_fit(fit)
        if not fit.axes or mesh.in_order(fit.axes) != fit.axes:
            raise UsageError(
                f"There is a fit of {fit.kind} over the axes {' '.join(fit.axes)[:200] or '(none)'}. "
                f"A fit names some of the axes of the mesh, {mesh}, in that order. Correct the axes."
            )
    if len({(fit.kind, fit.axes) for fit in fits}) < len(fits):
        raise UsageError(
            "There are two fits of one collective over the same axes. Only one can be right. Leave out the older."
        )


def check_fit(fit: CollectiveFit) -> None:
    """Refuse a fit whose kind or numbers cannot be."""
    if fit.kind not in COLLECTIVE_KINDS:
        raise UsageError(
            f"There is a fit of {shown(fit.kind)}. Collectives are {', '.join(COLLECTIVE_KINDS)}. "
            f"{suggestion(str(fit.kind), COLLECTIVE_KINDS)}"
        )
    where = f"of the fit of {fit.kind} over {' '.join(fit.axes)[:200]}"
    for latency in (fit.latency, fit.small_latency):
        MICROSECONDS.check(f"latency {where}", latency)
    for slope in (fit.seconds_per_byte, fit.small_seconds_per_byte):
        SECONDS_PER_GIGABYTE.check(f"time per byte {where}", slope)
    R_SQUARED.check(f"r_squared {where}", fit.r_squared)
    if type(fit.break_bytes) is not int or not 0 <= fit.break_bytes <= 2**60:
        raise UsageError(
            f"The break_bytes {where} is {shown(fit.break_bytes)}. It is the size of a message. "
            f"Give a whole number of bytes, or 0 for none."
        )


def _check_names(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(
                f"The machine has two {what} named {shown(name)}. Names tell them apart. Rename one of them."
            )
        seen.add(name)
