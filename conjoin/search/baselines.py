"""The named strategies that a search starts from: each with the degrees that people try by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Plan
from conjoin.machine import Machine, Mesh
from conjoin.search.groups import products
from conjoin.search.planning import make_plan

_PLAIN = ("data-parallel", "fsdp", "zero1", "one-weird-trick", "table-parallel", "reduction", "sbp3d", "spatial")


def baseline_names(mesh: Mesh) -> tuple[str, ...]:
    """What is tried on a mesh: every strategy as it deals degrees itself, Megatron with every degree inside a node.

    >>> baseline_names(Mesh.of_nodes(1, 2))[:5]
    ('data-parallel', 'fsdp', 'zero1', 'megatron:tp=2', 'megatron:tp=2,sp')
    """
    if mesh.size == 1:
        return ("single",)
    inside = [axis.size for axis in mesh.axes if not axis.between_nodes] or [axis.size for axis in mesh.axes[-1:]]
    degrees = [degree for degree in products(inside) if degree > 1]
    tensor = [f"megatron:tp={degree}{flags}" for degree, flags in product(degrees, ("", ",sp"))]
    return (*_PLAIN[:3], *tensor, *_PLAIN[3:])


def baselines(graph: Graph, machine: Machine) -> Iterator[tuple[str, Plan | None]]:
    """The plans of the named strategies, one after the other; None where one does not fit the model."""
    for name in baseline_names(machine.mesh):
        try:
            yield name, make_plan(graph, machine, name)
        except StrategyError:
            yield name, None
