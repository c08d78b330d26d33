"""From the entries of a machine file to the parts of a machine; every problem is told with the path of its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from conjoin.errors import UsageError
from conjoin.machine.alpha_beta import CollectiveFit
from conjoin.machine.consistency import (
    MAX_FITS,
    MAX_KINDS,
    check_axes,
    check_fit,
    check_fits,
    check_network,
    check_nodes,
)
from conjoin.machine.devices import MAX_FAMILIES, DeviceType
from conjoin.machine.limits import (
    check_count,
    check_description,
    check_device,
    check_label,
    check_total,
    shown,
    suggestion,
)
from conjoin.machine.links import MAX_DEVICES_OF_KIND, MAX_LINKS, Link, NodeKind
from conjoin.machine.mesh import Axis, Mesh
from conjoin.machine.quantities import (
    FACTOR,
    FRACTION,
    GIGABYTES,
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    R_SQUARED,
    SECONDS_PER_GIGABYTE,
    TERAFLOPS,
    Quantity,
)

NEEDED = ("name", "num_nodes", "devices_per_node", "device")
KEYS_OF_VERSION = {
    1: (*NEEDED, "description"),
    2: (*NEEDED, "description", "axes", "switches", "link", "device_type", "node", "fit"),
}
_EXAMPLES = {
    "name": '"my-cluster"', "num_nodes": "4", "devices_per_node": "8", "device": '"cuda"', "size": "2", "count": "4",
    "between": '["0", "1"]', "gigabytes_per_second": "25.0", "latency_microseconds": "1.5", "memory_gigabytes": "80.0",
    "memory_gigabytes_per_second": "2000.0", "teraflops": "{float32 = 19.5}", "devices": '"A100"', "axes": '["d0"]',
    "kind": '"all-reduce"', "seconds_per_gigabyte": "0.08", "r_squared": "0.99",
}  # fmt: skip

_MAX_TABLES = {"device_type": MAX_KINDS, "node": MAX_KINDS, "axes": 100, "link": MAX_LINKS, "fit": MAX_FITS}
MAX_PROBLEMS = 100
"""After so many no more tables are read: nobody wants to read on."""

T = TypeVar("T")
Entries = Mapping[str, Any]
Types = Mapping[str, DeviceType | None]


class MachineReader:
    """Reads parts and keeps the problems; a part with a problem is None, and so is all that needs it."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def attempt(self, make: Callable[[], T], at: str = "") -> T | None:
        """What `make` gives, or None and one more problem."""
        try:
            return make()
        except UsageError as error:
            self.problems.append(f"{error}\n  at {at}" if at else str(error))
            return None

    def facts(self, entries: Entries, version: int) -> dict[str, Any]:
        """What a `Machine` is made of, if there was no problem."""
        self._keys("", entries, KEYS_OF_VERSION[version], NEEDED, version)
        self._check_basics(entries)
        facts = {key: entries[key] for key in KEYS_OF_VERSION[1] if key in entries}
        if version > 1 and not self.problems:
            facts |= self._speeds(entries)
        return facts

    def _check_basics(self, entries: Entries) -> None:
        checks: dict[str, Callable[[object], None]] = {
            "name": lambda value: check_label("machine's name", value),
            "num_nodes": lambda value: check_count("num_nodes", value),
            "devices_per_node": lambda value: check_count("devices_per_node", value),
            "device": check_device,
            "description": check_description,
        }
        before = len(self.problems)
        for key in [key for key in checks if key in entries]:
            self.attempt(lambda key=key: checks[key](entries[key]))  # type: ignore[misc]
        if len(self.problems) == before and {"num_nodes", "devices_per_node"} <= entries.keys():
            self.attempt(lambda: check_total(entries["num_nodes"], entries["devices_per_node"]))

    def _speeds(self, entries: Entries) -> dict[str, Any]:
        """The parts, each checked by itself, and, where all of them are good, against each other."""
        num_nodes, per_node, device = (entries[key] for key in NEEDED[1:])
        types = self._device_types(entries, device)
        nodes = [self._node(path, table, types, per_node) for path, table in self._tables(entries, "node")]
        axes = [self._axis(path, table) for path, table in self._tables(entries, "axes")]
        links = [self._link(path, table) for path, table in self._tables(entries, "link")]
        fits = [self._fit(path, table) for path, table in self._tables(entries, "fit")]
        switches = self.attempt(lambda: _texts("switches", entries.get("switches", [])))
        parts: dict[str, Any] = {"axes": axes, "nodes": nodes, "links": links, "fits": fits, "switches": switches}
        if self.problems:
            return {}
        parts = {key: tuple(value) for key, value in parts.items()}
        if parts["nodes"]:
            self.attempt(lambda: check_nodes(parts["nodes"], num_nodes, per_node, device), "node")
        self.attempt(lambda: check_network(parts["links"], parts["switches"], parts["nodes"], num_nodes), "link")
        self.attempt(lambda: check_axes(parts["axes"], num_nodes, per_node), "axes")
        if not self.problems:
            mesh = Mesh(parts["axes"]) if axes else Mesh.of_nodes(num_nodes, per_node)
            self.attempt(lambda: check_fits(parts["fits"], mesh), "fit")
        return parts

    def _device_types(self, entries: Entries, device: str) -> Types:
        """The device types by name; None for one with a problem, which is told once and not at every use."""
        types: dict[str, DeviceType | None] = {}
        for path, table in self._tables(entries, "device_type"):
            found, name = self._device_type(path, table, device), table.get("name")
            if isinstance(name, str) and name in types:
                self.attempt(lambda path=path, name=name: _refuse_twice(path, name))  # type: ignore[misc]
            elif isinstance(name, str):
                types[name] = found
        return types

    def _device_type(self, path: str, table: Entries, device: str) -> DeviceType | None:
        needed = ("name", "memory_gigabytes", "memory_gigabytes_per_second", "teraflops")
        if not self._keys(path, table, (*needed, "efficiency", "overhead_microseconds", "host_factor"), needed):
            return None
        memory = self._number(path, table, "memory_gigabytes", GIGABYTES)
        bandwidth = self._number(path, table, "memory_gigabytes_per_second", GIGABYTES_PER_SECOND)
        flops = self._numbers(f"{path}.teraflops", table["teraflops"], TERAFLOPS)
        efficiency = self._numbers(f"{path}.efficiency", table.get("efficiency", {}), FRACTION)
        overhead = self._number(path, table, "overhead_microseconds", MICROSECONDS, 0)
        host = self._number(path, table, "host_factor", FACTOR, 1)
        if None in (memory, bandwidth, flops, efficiency, overhead, host):
            return None
        rates = round(memory), bandwidth, flops, efficiency  # type: ignore[arg-type]
        return self.attempt(lambda: DeviceType(table["name"], device, *rates, overhead, host), path)  # type: ignore[arg-type]

    def _node(self, path: str, table: Entries, types: Types, per_node: int) -> NodeKind | None:
        if not self._keys(path, table, ("name", "count", "devices", "switches", "link"), ("name", "count", "devices")):
            return None
        devices = self.attempt(lambda: _devices(f"{path}.devices", table["devices"], types, per_node))
        links = [self._link(where, link) for where, link in self._tables(table, "link", path)]
        switches = self.attempt(lambda: _texts(f"{path}.switches", table.get("switches", [])))
        wires = tuple(link for link in links if link is not None)
        good = tuple(device for device in devices or () if device is not None)
        if devices is None or len(good) < len(devices) or switches is None or len(wires) < len(links):
            return None
        return self.attempt(lambda: NodeKind(table["name"], table["count"], good, wires, switches), path)

    def _link(self, path: str, table: Entries) -> Link | None:
        needed = ("between", "gigabytes_per_second", "latency_microseconds")
        if not self._keys(path, table, (*needed, "kind", "shared", "duplex"), needed):
            return None
        ends = self.attempt(lambda: _two_texts(f"{path}.between", table["between"]))
        bandwidth = self._number(path, table, "gigabytes_per_second", GIGABYTES_PER_SECOND)
        latency = self._number(path, table, "latency_microseconds", MICROSECONDS)
        flags = [
            self.attempt(lambda key=key: _truth(f"{path}.{key}", table.get(key, True)))  # type: ignore[misc]
            for key in ("shared", "duplex")
        ]
        if ends is None or bandwidth is None or latency is None or None in flags:
            return None
        kind = self.attempt(lambda: _text(f"{path}.kind", table.get("kind", "")))
        if kind is None:
            return None
        return self.attempt(lambda: Link(ends, bandwidth, latency, kind, bool(flags[0]), bool(flags[1])), path)

    def _axis(self, path: str, table: Entries) -> Axis | None:
        if not self._keys(path, table, ("name", "size", "between_nodes"), ("name", "size")):
            return None
        name = self.attempt(lambda: _text(f"{path}.name", table["name"]))
        between = self.attempt(lambda: _truth(f"{path}.between_nodes", table.get("between_nodes", False)))
        return None if name is None or between is None else Axis(name, table["size"], between)

    def _fit(self, path: str, table: Entries) -> CollectiveFit | None:
        needed = ("kind", "axes", "latency_microseconds", "seconds_per_gigabyte", "r_squared")
        small = ("small_latency_microseconds", "small_seconds_per_gigabyte")
        if not self._keys(path, table, (*needed, "break_bytes", *small), needed):
            return None
        axes = self.attempt(lambda: _texts(f"{path}.axes", table["axes"]))
        numbers = [
            self._number(path, table, "latency_microseconds", MICROSECONDS),
            self._number(path, table, "seconds_per_gigabyte", SECONDS_PER_GIGABYTE),
            self._number(path, table, "r_squared", R_SQUARED),
            self._number(path, table, small[0], MICROSECONDS, 0),
            self._number(path, table, small[1], SECONDS_PER_GIGABYTE, 0),
        ]
        good = [number for number in numbers if number is not None]
        if axes is None or len(good) < len(numbers):
            return None
        latency, slope, r_squared, small_latency, small_slope = good
        fit = CollectiveFit(
            table["kind"], axes, latency, slope, r_squared, table.get("break_bytes", 0), small_latency, small_slope
        )
        return self.attempt(lambda: _checked(fit), path)

    def _number(
        self, path: str, table: Entries, key: str, quantity: Quantity, default: int | None = None
    ) -> float | None:
        return self.attempt(lambda: quantity.read(f"{path}.{key}", table.get(key, default)))

    def _numbers(self, path: str, table: object, quantity: Quantity) -> tuple[tuple[str, float], ...] | None:
        if not isinstance(table, dict) or len(table) > MAX_FAMILIES:
            return self.attempt(lambda: _refuse(path, table, "a table such as {float32 = 19.5}"))
        read = [(key, self._number(path, table, key, quantity)) for key in table]
        found = tuple((key, number) for key, number in read if number is not None)
        return found if len(found) == len(read) else None

    def _tables(self, entries: Entries, key: str, path: str = "") -> list[tuple[str, Entries]]:
        """The tables in a list, each with its path."""
        where = f"{path}.{key}" if path else key
        found = entries.get(key, [])
        if isinstance(found, list) and len(found) > _MAX_TABLES[key]:
            self.attempt(lambda: _refuse_many(where, len(found), _MAX_TABLES[key]))
            return []
        if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
            self.attempt(lambda: _refuse(where, found, "a list of tables, as from [[...]] or [{...}, {...}]"))
            return []
        return [(f"{where}[{i}]", table) for i, table in enumerate(found)]

    def _keys(self, path: str, table: Entries, known: Sequence[str], needed: Sequence[str], version: int = 2) -> bool:
        """Whether all keys that are needed are there; keys nobody knows are a problem too, but no hindrance."""
        if len(self.problems) >= MAX_PROBLEMS:
            return False
        dot, owner = (f"{path}.", path) if path else ("", "machine")
        whose = f"The table {path}" if path else f"A machine of version {version}"
        for key in [key for key in table if key not in known][:10]:
            self.problems.append(
                f"The machine has an unknown key {shown(dot + key)}. {whose} has the keys {', '.join(known)}. "
                f"{suggestion(key, known)}"
            )
        missing = [key for key in needed if key not in table]
        if missing:
            every = "Every machine says" if not path else "Every such table says"
            self.problems.append(
                f"The {owner} lacks {', '.join(missing)}. {every} {', '.join(needed)}. "
                f"Add a line such as {missing[0]} = {_EXAMPLES[missing[0]]}."
            )
        return not missing


def _checked(fit: CollectiveFit) -> CollectiveFit:
    check_fit(fit)
    return fit


def _refuse(path: str, value: object, wanted: str) -> Any:
    raise UsageError(f"The {path} is {_kind_of(value)}. It must be {wanted}. Correct it.")


def _refuse_many(path: str, count: int, limit: int) -> None:
    raise UsageError(f"The list {path} has {count:,} tables. The limit is {limit:,}. Describe what is alike as one.")


def _refuse_twice(path: str, name: str) -> None:
    raise UsageError(
        f"The {path} is named {shown(name)}, as is one before it, and there are no two device types of one name. "
        f"Names tell them apart. Rename one of them."
    )


def _kind_of(value: object) -> str:
    return "of type float" if isinstance(value, Decimal) else shown(value)


def _text(path: str, value: object) -> str:
    return value if isinstance(value, str) else _refuse(path, value, "text in quotes")


def _truth(path: str, value: object) -> bool:
    return value if isinstance(value, bool) else _refuse(path, value, "true or false")


def _texts(path: str, value: object) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    return _refuse(path, value, 'a list of texts, as ["a", "b"]')  # type: ignore[no-any-return]


def _two_texts(path: str, value: object) -> tuple[str, str]:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value):
        return value[0], value[1]
    return _refuse(path, value, 'a list of two texts, as ["0", "1"]')  # type: ignore[no-any-return]


def _devices(path: str, value: object, types: Types, per_node: int) -> tuple[DeviceType | None, ...]:
    """One name stands for every position, a list names each."""
    if per_node > MAX_DEVICES_OF_KIND:
        _refuse(path, per_node, f"a description of at most {MAX_DEVICES_OF_KIND:,} devices in a node")
    names = _texts(path, [value] * per_node if isinstance(value, str) else value)
    if len(names) != per_node:
        raise UsageError(
            f"The {path} names {len(names):,} devices. The machine has {per_node:,} in every node. "
            f"Name as many, or one name without a list for all."
        )
    for name in dict.fromkeys(names):
        if name not in types:
            hint = suggestion(name, types) if types else "Add a [[device_type]] of this name."
            raise UsageError(f"The {path} names {shown(name)}. There is no [[device_type]] of this name. {hint}")
    return tuple(types[name] for name in names)
