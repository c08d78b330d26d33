"""The machine: devices on a mesh of prime axes, from a file, a preset or the running process group."""

from conjoin.machine.mesh import Axis, Mesh, prime_factors

__all__ = ["Axis", "Mesh", "prime_factors"]
