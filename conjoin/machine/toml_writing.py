"""The text of a machine file: one line for every fact and every link, in the units that people use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from conjoin.machine.alpha_beta import CollectiveFit
from conjoin.machine.devices import DeviceType
from conjoin.machine.links import Link, NodeKind
from conjoin.machine.mesh import Axis
from conjoin.machine.quantities import (
    FACTOR,
    FRACTION,
    GIGABYTES,
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    R_SQUARED,
    SECONDS_PER_GIGABYTE,
    TERAFLOPS,
)

FORMAT = "conjoin.machine"
VERSION = 2
VERSION_WITHOUT_SPEEDS = 1


def write_toml(
    facts: Mapping[str, str | int],
    axes: Sequence[Axis] = (),
    nodes: Sequence[NodeKind] = (),
    network: tuple[Sequence[str], Sequence[Link]] = ((), ()),
    fits: Sequence[CollectiveFit] = (),
) -> str:
    """The text of a machine file; of the first version, which all releases read, where it has all there is to say.

    >>> print(write_toml({"name": "two", "num_nodes": 2}))
    format = "conjoin.machine"
    version = 1
    name = "two"
    num_nodes = 2
    <BLANKLINE>
    """
    has_more = bool(axes or nodes or fits)
    head = {"format": FORMAT, "version": VERSION if has_more else VERSION_WITHOUT_SPEEDS, **facts}
    lines = [f"{key} = {_quoted(value)}" for key, value in head.items()]
    lines += _list("axes", map(_axis, axes))
    lines += _switches(network[0])
    lines += _list("link", map(_link, network[1]))
    for device in dict.fromkeys(device for kind in nodes for device in kind.devices):
        lines += ["", "[[device_type]]", *_device_type(device)]
    for kind in nodes:
        lines += ["", "[[node]]", *_node(kind)]
    for fit in fits:
        lines += ["", "[[fit]]", *_fit(fit)]
    return "".join(f"{line}\n" for line in lines)


def _quoted(value: object) -> str:
    """Printable text and line ends are quoted alike in JSON and in TOML, and so are truth values and lists of text."""
    return json.dumps(value, ensure_ascii=False)


def _list(key: str, items: Iterable[str]) -> list[str]:
    lines = [f"  {{{item}}}," for item in items]
    return [f"{key} = [", *lines, "]"] if lines else []


def _axis(axis: Axis) -> str:
    return f"name = {_quoted(axis.name)}, size = {axis.size}, between_nodes = {_quoted(axis.between_nodes)}"


def _switches(switches: Sequence[str]) -> list[str]:
    return [f"switches = {_quoted(switches)}"] if switches else []


def _link(link: Link) -> str:
    facts = [
        f"between = {_quoted(link.ends)}",
        f"gigabytes_per_second = {GIGABYTES_PER_SECOND.text(link.bandwidth)}",
        f"latency_microseconds = {MICROSECONDS.text(link.latency)}",
    ]
    facts += [f"kind = {_quoted(link.kind)}"] * bool(link.kind)
    facts += ["shared = false"] * (not link.shared) + ["duplex = false"] * (not link.duplex)
    return ", ".join(facts)


def _device_type(device: DeviceType) -> list[str]:
    lines = [
        f"name = {_quoted(device.name)}",
        f"memory_gigabytes = {GIGABYTES.text(device.memory_bytes)}",
        f"memory_gigabytes_per_second = {GIGABYTES_PER_SECOND.text(device.memory_bandwidth)}",
        f"teraflops = {{{', '.join(f'{dtype} = {TERAFLOPS.text(flops)}' for dtype, flops in device.peak_flops)}}}",
    ]
    if device.efficiency:
        parts = ", ".join(f"{_quoted(family)} = {FRACTION.text(part)}" for family, part in device.efficiency)
        lines.append(f"efficiency = {{{parts}}}")
    if device.overhead_seconds:
        lines.append(f"overhead_microseconds = {MICROSECONDS.text(device.overhead_seconds)}")
    if device.host_factor != 1.0:
        lines.append(f"host_factor = {FACTOR.text(device.host_factor)}")
    return lines


def _node(kind: NodeKind) -> list[str]:
    names = [device.name for device in kind.devices]
    return [
        f"name = {_quoted(kind.name)}",
        f"count = {kind.count}",
        f"devices = {_quoted(names[0] if len(set(names)) == 1 else names)}",
        *_switches(kind.switches),
        *_list("link", map(_link, kind.links)),
    ]


def _fit(fit: CollectiveFit) -> list[str]:
    lines = [
        f"kind = {_quoted(fit.kind)}",
        f"axes = {_quoted(fit.axes)}",
        f"latency_microseconds = {MICROSECONDS.text(fit.latency)}",
        f"seconds_per_gigabyte = {SECONDS_PER_GIGABYTE.text(fit.seconds_per_byte)}",
        f"r_squared = {R_SQUARED.text(fit.r_squared)}",
    ]
    if fit.break_bytes:
        lines += [
            f"break_bytes = {fit.break_bytes}",
            f"small_latency_microseconds = {MICROSECONDS.text(fit.small_latency)}",
            f"small_seconds_per_gigabyte = {SECONDS_PER_GIGABYTE.text(fit.small_seconds_per_byte)}",
        ]
    return lines
