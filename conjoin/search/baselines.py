"""The named strategies that a search starts from: each with the degrees that people try by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from conjoin.errors import StrategyError
from conjoin.ir import REGATHER, Choice, Graph, LeafKind, Value
from conjoin.machine import Machine, Mesh
from conjoin.search.contest import Entry, make_variant
from conjoin.search.drafting import Settled, lay_out, settle_draft
from conjoin.search.groups import products
from conjoin.search.planning import drafter
from conjoin.sim import Layouts

_FLAGS = ("", ",sp", ",sp,zero1", ",sp,fsdp")
_PLAIN = (
    "data-parallel", "fsdp", "zero1", "expert", "one-weird-trick", "table-parallel", "reduction", "sbp3d", "spatial",
)  # fmt: skip


def baseline_names(mesh: Mesh) -> tuple[str, ...]:
    """What is tried on a mesh: every strategy as it deals degrees itself, Megatron with every degree inside a node,
    or every degree where a node has one device.

    >>> baseline_names(Mesh.of_nodes(1, 2))[:5]
    ('data-parallel', 'fsdp', 'zero1', 'megatron:tp=2', 'megatron:tp=2,sp')
    """
    if mesh.size == 1:
        return ("single",)
    inside = [axis.size for axis in mesh.axes if not axis.between_nodes] or [axis.size for axis in mesh.axes]
    degrees = [degree for degree in products(inside) if degree > 1]
    tensor = [f"megatron:tp={degree}{flags}" for degree, flags in product(degrees, _FLAGS)]
    return (*_PLAIN[:3], *tensor, *_PLAIN[3:])


def least_bytes(name: str, graph: Graph, mesh: Mesh, copies: int) -> float:
    """What parameters, their gradients and so many copies that an optimizer keeps take of a device at least.

    >>> import torch
    >>> from conjoin.frontends import capture
    >>> graph = capture(torch.nn.Linear(8, 8, bias=False).train(), torch.zeros(4, 8))
    >>> [least_bytes(name, graph, Mesh.of_nodes(1, 4), 2) for name in ("data-parallel", "zero1", "megatron:tp=2,sp")]
    [1024.0, 640.0, 512.0]
    """
    trained = sum(leaf.type.bytes for leaf in graph.leaves if leaf.trainable)
    plain, _, flags = name.partition(":")
    degree = next((int(flag[3:]) for flag in flags.split(",") if flag.startswith("tp=")), 1)
    if plain not in ("data-parallel", "fsdp", "zero1", "megatron"):
        return 0.0
    gathers, shares = "fsdp" in name, "zero1" in name
    rest = mesh.size / degree
    stored = (2 / rest if gathers else 2) + (copies / rest if gathers or shares else copies)
    return trained * stored / degree


def baselines(
    graph: Graph,
    machine: Machine,
    leaves_out: Callable[[str], bool] = lambda name: False,
    rank: Callable[[str], float] = lambda name: 0,
) -> Iterator[tuple[str, Entry | None]]:
    """The named strategies as entries, one after the other; None where one does not fit the model, or is left out.

    Those of a lower rank come first.
    """
    for name in sorted(baseline_names(machine.mesh), key=rank):
        try:
            yield name, None if leaves_out(name) else _entry(settle_draft(graph, drafter(machine, name)))
        except StrategyError:
            yield name, None


def stored_otherwise(name: str) -> str:
    """The strategy of which this one only stores the parameters in pieces; none where it is one of its own.

    >>> stored_otherwise("megatron:tp=2,sp,fsdp"), stored_otherwise("fsdp")
    ('megatron:tp=2,sp', '')
    """
    plain, _, flag = name.rpartition(",")
    return plain if flag in ("zero1", "fsdp") else ""


def _entry(settled: Settled) -> Entry:
    """What a strategy decides, without the work of making it a plan."""
    found, variant = lay_out(settled), make_variant(settled.graph, settled.substitutions)
    graph = settled.graph
    outputs = [found.outputs.get(i, ()) for i, value in enumerate(graph.outputs) if isinstance(value, Value)]
    buffers = {leaf.name: found.leaves[leaf] for leaf in graph.leaves_of(LeafKind.BUFFER)}
    single = Choice((), ())
    choices = [found.choices.get(op.node, single) for op in variant.skeleton.operators]
    layouts = Layouts(
        {i: found.leaves[leaf] for i, leaf in enumerate(graph.leaves)},
        tuple(
            choice if choice is not single else Choice(((),) * len(op.reads), ((),) * len(op.makes))
            for choice, op in zip(choices, variant.skeleton.operators, strict=True)
        ),
        (*outputs, *(buffers[name] for name, _ in graph.updates)),
    )
    regathered = frozenset(action.tensor for action in settled.draft.memory if action.action == REGATHER)
    return Entry(str(settled.draft.request), variant, layouts, regathered)
