"""The machine: devices on a mesh of prime axes, from a file, a preset or the running process group."""

from conjoin.machine.machine import Machine
from conjoin.machine.mesh import Axis, Mesh, prime_factors
from conjoin.machine.naming import parse_machine
from conjoin.machine.presets import preset_names

__all__ = ["Axis", "Machine", "Mesh", "parse_machine", "preset_names", "prime_factors"]
