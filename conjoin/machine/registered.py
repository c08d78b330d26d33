"""Machines that a program registers by name, beside the presets and a user's files."""

from __future__ import annotations

from conjoin.errors import UsageError
from conjoin.machine.limits import shown
from conjoin.machine.machine import Machine
from conjoin.machine.presets import OWN, PRESETS


def register_machine(machine: Machine) -> Machine:
    """Let a machine be asked for by its name, as `--machine NAME` or `NAME:4` for four of its nodes."""
    if not isinstance(machine, Machine):
        raise UsageError(
            f"A {type(machine).__name__} was given to be registered as a machine. A machine is a conjoin.Machine, made "
            f"in Python or read from a file. Write register_machine(conjoin.Machine.load('office.toml'))."
        )
    name = machine.name
    taken = name in PRESETS or name == "local"
    if taken or ":" in name or "/" in name or name.endswith(".toml"):
        why = "conjoin has one of that name" if taken else "names have no ':' and no '/', and do not end in .toml"
        raise UsageError(
            f"The machine {shown(name)} was to be registered. It could not be asked for by that name: {why}. Give it "
            f"another name, with dataclasses.replace(machine, name=...)."
        )
    OWN[name] = machine
    return machine
