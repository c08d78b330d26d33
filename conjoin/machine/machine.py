"""The machine: how many nodes, how many devices in each, how fast they are; where descriptions of it come from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from conjoin.errors import UsageError
from conjoin.machine.alpha_beta import CollectiveFit
from conjoin.machine.consistency import check_axes, check_fits, check_network, check_nodes
from conjoin.machine.detection import find_machine
from conjoin.machine.devices import DeviceType
from conjoin.machine.limits import (
    BACKENDS,
    check_count,
    check_description,
    check_device,
    check_label,
    check_total,
    shown,
)
from conjoin.machine.links import Link, NodeKind
from conjoin.machine.mesh import Axis, Mesh
from conjoin.machine.preset_devices import known_device
from conjoin.machine.preset_nodes import one_node
from conjoin.machine.presets import OWN, PRESETS, nearest_preset
from conjoin.machine.reserve import usable_bytes
from conjoin.machine.toml_form import read_file, read_toml, write_file
from conjoin.machine.toml_writing import write_toml
from conjoin.machine.topology import Topology
from conjoin.plugins import load_plugins


@dataclass(frozen=True)
class Machine:
    """Nodes of equally many devices, numbered node by node; with node kinds it also knows speeds and links.

    >>> machine = Machine("office", num_nodes=2, devices_per_node=6, device="cuda")
    >>> print(machine)
    office: 2 nodes × 6 cuda, axes n0:2 d0:2 d1:3
    >>> machine.num_devices, machine.backend
    (12, 'nccl')
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: str
    description: str = ""
    nodes: tuple[NodeKind, ...] = ()
    """The kinds of the nodes in their order; none where speeds are not known."""
    links: tuple[Link, ...] = ()
    """Between nodes "0", "1" … and `switches`; none where every node has its full rate to every other."""
    switches: tuple[str, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    axes: tuple[Axis, ...] = ()
    """The axes of the mesh where they are not the default: ranks run along the last one first."""

    def __post_init__(self) -> None:
        check_label("machine's name", self.name)
        check_count("num_nodes", self.num_nodes)
        check_count("devices_per_node", self.devices_per_node)
        check_total(self.num_nodes, self.devices_per_node)
        check_device(self.device)
        check_description(self.description)
        if self.nodes:
            check_nodes(self.nodes, self.num_nodes, self.devices_per_node, self.device)
        check_network(self.links, self.switches, self.nodes, self.num_nodes)
        check_axes(self.axes, self.num_nodes, self.devices_per_node)
        check_fits(self.fits, self.mesh)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, since machines with their links are large and are looked up often."""
        return hash((self.num_nodes, self.devices_per_node, self.device, self.nodes, self.links, self.fits, self.axes))

    def __getstate__(self) -> dict[str, object]:
        """Without what is kept: hashes are other ones in another process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def __str__(self) -> str:
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        axes = f", axes {self.mesh}" if self.mesh.axes else ""
        return f"{self.name}: {nodes} × {self.devices_per_node} {self.device}{axes}"

    @classmethod
    def preset(cls, name: str, nodes: int | None = None) -> Machine:
        """A known machine, with one node unless told otherwise or fixed by its name.

        >>> print(Machine.preset("summit", nodes=4))
        summit: 4 nodes × 6 cuda, axes n0:2 n1:2 d0:2 d1:3
        """
        if name not in PRESETS and name not in OWN:
            load_plugins(str(name))
        if name in OWN:
            return OWN[name] if nodes is None else OWN[name].with_nodes(nodes)
        if name not in PRESETS:
            raise UsageError(
                f"There is no machine named {shown(name)}. {nearest_preset(str(name))} "
                f"A machine of your own is described in a file whose name ends in .toml."
            )
        known = PRESETS[name]
        fixed = known.fixed_num_nodes
        if nodes is not None and fixed is not None and nodes != fixed:
            raise UsageError(
                f"The machine {name} was asked for with {shown(nodes)} nodes. It always has {fixed}. "
                f"Leave the number out; local:4 is four processes on this host, other machines go into a .toml file."
            )
        num_nodes = nodes if nodes is not None else fixed or 1
        check_count("num_nodes", num_nodes)
        kind = known.node(num_nodes)
        return cls(name, num_nodes, len(kind.devices), kind.devices[0].kind, known.description, (kind,))

    @classmethod
    def detect(cls) -> Machine:
        """The machine this program runs on: one device a rank in a process group, else the devices of this host.

        In a process group all ranks must call it, and all get the same answer. With NCCL each must have set its device.
        Speeds are those of the data sheet where the devices are known; links those such devices have on one host.
        """
        found = find_machine()
        known = known_device(found.told) if found.told else None
        if known is None:
            return cls("detected", found.num_nodes, found.devices_per_node, found.device, found.description)
        kind = one_node("detected", replace(known, memory_bytes=found.memory_bytes), found.devices_per_node)
        if found.num_nodes > 1:
            kind = replace(kind, count=found.num_nodes, links=(), switches=())
        told = f"{found.description} {found.told}, with the speeds of its data sheet; calibrate for links."
        return cls("detected", found.num_nodes, found.devices_per_node, found.device, told, (kind,))

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine file."""
        try:
            return cls.from_toml(read_file(Path(path)))
        except UsageError as error:
            raise UsageError(f"{error}\n  in {str(path)!r}") from None

    @classmethod
    def from_toml(cls, text: str) -> Machine:
        """The machine that the text of a machine file describes."""
        return cls(**read_toml(text))

    def to_toml(self) -> str:
        """The text of a machine file.

        >>> print(Machine("office", 2, 6, "cuda").to_toml())
        format = "conjoin.machine"
        version = 1
        name = "office"
        num_nodes = 2
        devices_per_node = 6
        device = "cuda"
        <BLANKLINE>
        """
        facts = {key: getattr(self, key) for key in ("name", "num_nodes", "devices_per_node", "device", "description")}
        plain = {key: value for key, value in facts.items() if value != ""}
        return write_toml(plain, self.axes, self.nodes, (self.switches, self.links), self.fits)

    def save(self, path: str | Path) -> None:
        """Write a machine file; a half-written one never stands at the path."""
        write_file(Path(path), self.to_toml())

    def with_nodes(self, num_nodes: int) -> Machine:
        """The same machine with another number of nodes; fits over axes between nodes are left out.

        >>> print(Machine("office", 1, 6, "cuda").with_nodes(4))
        office: 4 nodes × 6 cuda, axes n0:2 n1:2 d0:2 d1:3
        """
        if num_nodes == self.num_nodes:
            return self
        if len(self.nodes) > 1 or self.links or self.axes:
            raise UsageError(
                f"The machine {self.name} was asked for with {shown(num_nodes)} nodes. Its description has several "
                f"node kinds, links between nodes or axes of its own, which hold for {self.num_nodes} nodes. "
                f"Leave the number out, or describe the larger machine in a file."
            )
        check_count("num_nodes", num_nodes)
        inside = {axis.name for axis in self.mesh.axes if not axis.between_nodes}
        kinds = tuple(replace(kind, count=num_nodes) for kind in self.nodes)
        fits = tuple(fit for fit in self.fits if inside.issuperset(fit.axes))
        return replace(self, num_nodes=num_nodes, nodes=kinds, fits=fits)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices along prime axes, those between nodes first unless the machine has axes of its own."""
        return Mesh(self.axes) if self.axes else Mesh.of_nodes(self.num_nodes, self.devices_per_node)

    @property
    def num_devices(self) -> int:
        """How many devices there are in all nodes together."""
        return self.num_nodes * self.devices_per_node

    @property
    def backend(self) -> str:
        """The torch.distributed backend for devices of this kind."""
        return BACKENDS[self.device]

    def location(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its position in the node.

        >>> Machine("office", 2, 6, "cuda").location(7)
        (1, 1)
        """
        if not self.axes:
            return divmod(rank, self.devices_per_node)
        location = [0, 0]
        for axis, at in zip(self.mesh.axes, self.mesh.coordinates(rank).values(), strict=True):
            inside = not axis.between_nodes
            location[inside] = location[inside] * axis.size + at
        return location[0], location[1]

    def device_type(self, rank: int) -> DeviceType:
        """The kind of a rank's device, with its speeds."""
        if not self.nodes:
            raise self._without("speeds of the devices", "a [[device_type]] with memory_gigabytes and teraflops")
        node, position = self.location(rank)
        return self.nodes[self._kinds.kind_of(node)].devices[position]

    @cached_property
    def device_types(self) -> tuple[DeviceType, ...]:
        """Every kind of device once, in the order of their first ranks; none where speeds are not known."""
        return tuple(dict.fromkeys(device for kind in self.nodes for device in kind.devices))

    @cached_property
    def usable_bytes(self) -> int:
        """How much memory of every device the tensors of a program may take; see `reserve`."""
        self.device_type(0)
        return min(usable_bytes(device, self.num_devices) for device in self.device_types)

    @cached_property
    def topology(self) -> Topology:
        """The links, as ways between ranks."""
        if not self.has_links:
            raise self._without("links", "link = [...] to each [[node]], and version = 2,")
        return self._kinds

    @property
    def has_links(self) -> bool:
        """Whether it is known how messages travel; one device sends none."""
        return bool(self.nodes) and (self.num_devices == 1 or all(kind.links for kind in self.nodes))

    @cached_property
    def _kinds(self) -> Topology:
        return Topology(self.nodes, self.links, self.location)

    def _without(self, what: str, entry: str) -> UsageError:
        return UsageError(
            f"The {what} of the machine {self.name} were asked for. Its description does not say them. "
            f"Measure them with `conjoin calibrate`, or add {entry} to its .toml file; "
            f"`conjoin machine show summit --toml` prints one that has them."
        )

    def fit_of(self, kind: str, axes: tuple[str, ...]) -> CollectiveFit | None:
        """What was measured for a collective over some axes of the mesh, if it was."""
        if not self.fits:
            return None
        return self._fits.get((kind, axes)) or self._fits.get((kind, self.mesh.in_order(axes)))

    @cached_property
    def _fits(self) -> dict[tuple[str, tuple[str, ...]], CollectiveFit]:
        return {(fit.kind, fit.axes): fit for fit in self.fits}

    def fingerprint(self) -> str:
        """A digest of what decides whether a plan can run: the same in every process, blind to names and speeds.

        >>> Machine.preset("dgx-h100").fingerprint() == Machine("mine", 1, 8, "cuda").fingerprint()
        True
        """
        facts = {"device": self.device, "devices_per_node": self.devices_per_node, "num_nodes": self.num_nodes}
        return f"machine-v1:{_digest(facts)}"

    def speed_fingerprint(self) -> str:
        """A digest of all that a prediction depends on: also speeds, links, fits and axes, blind to the name.

        >>> Machine.preset("dgx-h100").speed_fingerprint() == Machine.preset("dgx-h200").speed_fingerprint()
        False
        """
        facts = {key: value for key, value in asdict(self).items() if key not in ("name", "description")}
        return f"speeds-v1:{_digest(facts)}"


def _digest(facts: dict[str, object]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
