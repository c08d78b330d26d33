"""How a machine is named in one word, as on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from conjoin.errors import UsageError
from conjoin.machine.limits import shown
from conjoin.machine.machine import Machine
from conjoin.machine.parts import part_of

_NUMBER = re.compile(r"[0-9]{1,9}")
_PART = re.compile(r"(.+):([0-9]{1,9})x([0-9]{1,9})", re.DOTALL)


def parse_machine(text: str, directory: Path | None = None) -> Machine:
    """The machine that a word names: `local:4`, a preset as `summit` or `summit:4`, or a path that ends in .toml.

    In a directory of machine files, `office.toml` gives the name `office`, also before a preset of that name. Followed
    by `:2x4`, a name stands for the first two nodes and four devices of each.

    >>> print(parse_machine("local:4"))
    local: 1 node × 4 cpu, axes d0:2 d1:2
    >>> print(parse_machine("summit:32"))
    summit: 32 nodes × 6 cuda, axes n0:2 n1:2 n2:2 n3:2 n4:2 d0:2 d1:3
    >>> print(parse_machine("summit:2x3"))
    summit:2x3: 2 nodes × 3 cuda, axes n0:2 d0:3
    """
    part = _PART.fullmatch(text)
    if part is not None:
        return _parse_part(part[1], int(part[2]), int(part[3]), directory)
    if text.endswith(".toml") or os.sep in text:
        return Machine.load(text)
    name, colon, digits = text.partition(":")
    number = _parse_number(text, digits) if colon else None
    if name == "local":
        return _local(number)
    files = find_machine_files(directory) if directory is not None else {}
    if name in files:
        machine = Machine.load(files[name])
        return machine if number is None else machine.with_nodes(number)
    return Machine.preset(name, number)


def _parse_part(name: str, num_nodes: int, devices_per_node: int, directory: Path | None) -> Machine:
    """A part of a machine; of one that can have any number of nodes as many are taken as are asked for."""
    machine = _local(devices_per_node) if name == "local" else parse_machine(name, directory)
    is_file = name.endswith(".toml") or os.sep in name
    if num_nodes > machine.num_nodes and not is_file and name != "local":
        machine = parse_machine(f"{name}:{num_nodes}", directory)
    return part_of(machine, num_nodes, devices_per_node)


def find_machine_files(directory: Path) -> dict[str, Path]:
    """The machine files of a directory by the names they give; nothing where there is no such directory."""
    try:
        found = sorted(directory.glob("*.toml"))
    except (OSError, ValueError):
        return {}
    return {path.name.removesuffix(".toml"): path for path in found}


def _local(num_processes: int | None) -> Machine:
    if num_processes is None:
        raise UsageError(
            "The machine local was named without a number. It stands for processes on this host, and their number is "
            "not known. Write local:4 for four of them."
        )
    return Machine("local", 1, num_processes, "cpu", "Processes on the CPU of this host.")


def _parse_number(text: str, digits: str) -> int:
    if not _NUMBER.fullmatch(digits):
        raise UsageError(
            f"The machine {shown(text)} was asked for, and {shown(digits)} is not a number of nodes. "
            f"What follows the colon must be a whole number of at most nine digits. Write a name such as summit:4."
        )
    return int(digits)
