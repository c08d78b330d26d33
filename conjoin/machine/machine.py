"""The machine: how many nodes, how many devices in each, of which kind; where descriptions of it come from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from conjoin.errors import UsageError
from conjoin.machine.detection import find_machine
from conjoin.machine.limits import (
    BACKENDS,
    check_count,
    check_description,
    check_device,
    check_name,
    check_total,
    shown,
    suggestion,
)
from conjoin.machine.mesh import Mesh
from conjoin.machine.presets import PRESETS
from conjoin.machine.toml_form import read_file, read_toml, write_file, write_toml


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal devices, numbered node by node.

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

    def __post_init__(self) -> None:
        check_name(self.name)
        check_count("num_nodes", self.num_nodes)
        check_count("devices_per_node", self.devices_per_node)
        check_total(self.num_nodes, self.devices_per_node)
        check_device(self.device)
        check_description(self.description)

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
        if name not in PRESETS:
            raise UsageError(
                f"There is no machine named {shown(name)}. {suggestion(str(name), PRESETS)} "
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
        return cls(name, num_nodes, known.devices_per_node, known.device, known.description)

    @classmethod
    def detect(cls) -> Machine:
        """The machine this program runs on: one device a rank in a process group, else the devices of this host.

        In a process group all ranks must call it, and all get the same answer. With NCCL each must have set its device.
        """
        found = find_machine()
        return cls("detected", found.num_nodes, found.devices_per_node, found.device, found.description)

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
        return write_toml({key: value for key, value in asdict(self).items() if value != ""})

    def save(self, path: str | Path) -> None:
        """Write a machine file; a half-written one never stands at the path."""
        write_file(Path(path), self.to_toml())

    @cached_property
    def mesh(self) -> Mesh:
        """The devices along prime axes, those between nodes first."""
        return Mesh.of_nodes(self.num_nodes, self.devices_per_node)

    @property
    def num_devices(self) -> int:
        """How many devices there are in all nodes together."""
        return self.num_nodes * self.devices_per_node

    @property
    def backend(self) -> str:
        """The torch.distributed backend for devices of this kind."""
        return BACKENDS[self.device]

    def fingerprint(self) -> str:
        """A digest of what decides whether a plan can run: the same in every process, blind to name and description.

        >>> Machine.preset("dgx-h100").fingerprint() == Machine("mine", 1, 8, "cuda").fingerprint()
        True
        """
        facts = {"device": self.device, "devices_per_node": self.devices_per_node, "num_nodes": self.num_nodes}
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return f"machine-v1:{hashlib.sha256(canonical.encode()).hexdigest()}"
