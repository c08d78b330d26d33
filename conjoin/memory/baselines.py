"""What others do with a device that is too small: load everything every time, or drop what was not used for longest."""

from __future__ import annotations

from conjoin.memory.program import Program, Residence, Step, WriteBack, residence_of


def streaming(program: Program) -> Residence:
    """Every operation loads what it reads and writes what it makes: NeuGraph's way (ROC, section 4.7.7)."""
    steps = tuple(Step(o.name, tuple(dict.fromkeys(o.inputs)), o.outputs, o.outputs) for o in program.operations)
    return residence_of(program, steps)


def least_recently_used(
    program: Program, capacity: int, write_back: WriteBack = "always", counted: bool = False
) -> Residence:
    """In the program's order; where there is no room, what was not used for longest leaves, needed later or not.

    Such a cache does not know that nobody reads a tensor any more. With references `counted` it does: then these leave
    at once.
    """
    program.check_capacity(capacity)
    last_read = {name: i for i, o in enumerate(program.operations) for name in o.inputs}
    on_host, device, steps = set(program.leaves), dict[str, None](), []
    for i, operation in enumerate(program.operations):
        here = dict.fromkeys((*operation.inputs, *operation.outputs))
        loads = tuple(name for name in dict.fromkeys(operation.inputs) if name not in device)
        drops: list[str] = []
        room = capacity - sum(program.bytes[name] for name in here)
        others = [name for name in device if name not in here]
        while sum(program.bytes[name] for name in others) > room:
            drops.append(others.pop(0))
        writes = tuple(name for name in drops if name not in on_host and last_read.get(name, -1) > i)
        if write_back == "always":
            writes = operation.outputs
        on_host |= set(writes)
        steps.append(Step(operation.name, loads, writes, tuple(drops)))
        device = dict.fromkeys((*others, *here))
        if counted:
            device = {name: None for name in device if last_read.get(name, -1) > i}
    return residence_of(program, tuple(steps))
