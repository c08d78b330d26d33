"""The machine: devices on a mesh of prime axes, their speeds and links, from a file, a preset or the running group."""

from conjoin.machine.alpha_beta import (
    COLLECTIVE_KINDS,
    CollectiveFit,
    LineFit,
    fit_collective,
    fit_line,
    reduce_repeats,
)
from conjoin.machine.devices import DeviceType
from conjoin.machine.files import place_of, reason_of, write_aside
from conjoin.machine.links import NETWORK, Link, NodeKind
from conjoin.machine.machine import Machine
from conjoin.machine.mesh import Axis, Cut, Mesh, prime_factors
from conjoin.machine.names import find_machine_files, parse_machine
from conjoin.machine.parts import devices_of, part_of, parts_of
from conjoin.machine.preset_devices import PRESET_DEVICES, architecture_of, nearest_device, preset_name
from conjoin.machine.presets import preset_names, registered_names
from conjoin.machine.registered import register_machine
from conjoin.machine.toml_form import machine_file_problems
from conjoin.machine.topology import Topology
from conjoin.machine.wiring import DirectedLink, Route

__all__ = [
    "COLLECTIVE_KINDS", "NETWORK", "PRESET_DEVICES", "Axis", "CollectiveFit", "Cut", "DeviceType", "DirectedLink",
    "LineFit", "Link", "Machine", "Mesh", "NodeKind", "Route", "Topology", "architecture_of", "devices_of",
    "find_machine_files", "fit_collective", "fit_line", "machine_file_problems", "nearest_device", "parse_machine",
    "part_of", "parts_of", "place_of", "preset_name", "preset_names", "prime_factors", "reason_of",
    "reduce_repeats", "register_machine", "registered_names", "write_aside",
]  # fmt: skip
