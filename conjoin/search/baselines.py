"""The named strategies that a search starts from: each with the degrees that people try by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

from conjoin.errors import StrategyError
from conjoin.ir import REGATHER, Choice, Graph, LeafKind, Value
from conjoin.machine import Machine, Mesh
from conjoin.search.blocks import segments_for
from conjoin.search.drafts import Draft, Settled, lay_out, settle_draft
from conjoin.search.entries import Entry, Variant, make_variant
from conjoin.search.folded_drafts import draft_folded
from conjoin.search.groups import products
from conjoin.search.named_plans import drafter
from conjoin.search.strategies import STORED, read_request
from conjoin.search.strategies.data_parallel import hybrid_degrees
from conjoin.sim import Layouts, Skeleton

_FLAGS = ("", ",sp", ",sp,zero1", ",sp,fsdp")
_PLAIN = (
    "data-parallel", "fsdp", "zero1", "expert", "one-weird-trick", "table-parallel", "reduction", "sbp3d", "spatial",
)  # fmt: skip


def baseline_names(mesh: Mesh) -> tuple[str, ...]:
    """What is tried on a mesh: every strategy as it deals degrees itself, Megatron with every degree inside a node,
    or every degree where a node has one device. Where there are several nodes of several devices, parameters are also
    split inside a node only. Experts are dealt to devices alone, and beside tensor parallelism.

    >>> baseline_names(Mesh.of_nodes(1, 2))[:5]
    ('data-parallel', 'fsdp', 'zero1', 'megatron:tp=2', 'megatron:tp=2,sp')
    >>> [name for name in baseline_names(Mesh.of_nodes(2, 4)) if "hsdp" in name]
    ['hsdp', 'megatron:tp=2,sp,hsdp']
    """
    if mesh.size == 1:
        return ("single",)
    node = [axis.size for axis in mesh.axes if not axis.between_nodes]
    inside = node or [axis.size for axis in mesh.axes]
    tensor = [f"megatron:tp={degree}{flags}" for degree, flags in product(products(inside)[1:], _FLAGS)]
    joined = [f"megatron:tp={degree},sp,expert,fsdp" for degree in products(inside)[1:] if degree < mesh.size]
    if mesh.size == prod(inside):
        return (*_PLAIN[:3], *tensor, *_PLAIN[3:], *joined)
    hybrid = [f"megatron:tp={degree},sp,hsdp" for degree in products(inside)[1:-1]]
    return (*_PLAIN[:3], "hsdp", *tensor, *hybrid, *_PLAIN[3:], *joined)


def least_bytes(name: str, graph: Graph, mesh: Mesh, copies: int) -> float:
    """What parameters, their gradients and so many copies that an optimizer keeps take of a device at least.

    >>> import torch
    >>> from conjoin.frontends import capture
    >>> graph = capture(torch.nn.Linear(8, 8, bias=False).train(), torch.zeros(4, 8))
    >>> names = "data-parallel", "zero1", "megatron:tp=2,sp", "hsdp:shard=2"
    >>> [least_bytes(name, graph, Mesh.of_nodes(1, 4), 2) for name in names]
    [1024.0, 640.0, 512.0, 512.0]
    """
    request = read_request(name)
    if request.name not in ("data-parallel", "fsdp", "zero1", "hsdp", "megatron") or "expert" in request.flags:
        return 0.0
    trained, degree = sum(leaf.type.bytes for leaf in graph.leaves if leaf.is_trained), request.degrees.get("tp", 1)
    told = request.flags | {request.name}
    shard = hybrid_degrees(mesh, request.degrees, {"tp": degree})["shard"] if "hsdp" in told else mesh.size / degree
    gathers = bool(told & {"fsdp", "hsdp"})
    stored = (2 / shard if gathers else 2) + (copies / shard if told.intersection(STORED) else copies)
    return trained * stored / degree


def baselines(
    graph: Graph,
    machine: Machine,
    leaves_out: Callable[[str], bool] = lambda name: False,
    rank: Callable[[str], float] = lambda name: 0,
) -> Iterator[tuple[str, Entry | None]]:
    """The named strategies as entries, one after the other; None where one does not fit the model, or is left out.

    Those of a lower rank come first. What differs only in how parameters are stored is settled once.
    """
    known: dict[str, Settled] = {}
    variants: dict[Graph, Variant] = {}
    for name in sorted(baseline_names(machine.mesh), key=rank):
        try:
            if leaves_out(name):
                yield name, None
                continue
            alike, request = _used_alike(name), read_request(name)
            before = known.get(alike, Settled(graph, Draft(request, ()), ()))
            found = settle_draft(before.graph, drafter(machine, request), draft_folded)
            known[alike] = replace(found, substitutions=(*before.substitutions, *found.substitutions))
            if found.graph not in variants:
                variants[found.graph] = make_variant(found.graph, known[alike].substitutions)
            yield name, _entry(known[alike], variants[found.graph])
        except StrategyError:
            yield name, None


def _used_alike(name: str) -> str:
    """The strategy that uses parameters and data alike, and stores parameters as they are used.

    >>> _used_alike("megatron:tp=2,sp,fsdp"), _used_alike("hsdp"), _used_alike("spatial")
    ('megatron:tp=2,sp', 'data-parallel', 'spatial')
    """
    return stored_otherwise(name) or ("data-parallel" if name in STORED else name)


def stored_otherwise(name: str) -> str:
    """The strategy of which this one only stores the parameters in pieces; none where it is one of its own.

    >>> stored_otherwise("megatron:tp=2,sp,fsdp"), stored_otherwise("fsdp")
    ('megatron:tp=2,sp', '')
    """
    plain, _, flag = name.rpartition(",")
    return plain if flag in STORED else ""


def with_blocks_again(entry: Entry, mode: str) -> Entry | None:
    """A named strategy that runs blocks again, or parts of them; None where the model has none."""
    try:
        segments = segments_for(mode, entry.variant.graph)
    except StrategyError:
        return None
    return replace(entry, name=f"{entry.name}+recompute={mode}", segments=segments)


def _entry(settled: Settled, variant: Variant) -> Entry:
    """What a strategy decides, without the work of making it a plan."""
    layouts, regathered = layouts_by(settled, variant.skeleton)
    return Entry(str(settled.draft.request), variant, layouts, regathered)


def layouts_by(settled: Settled, skeleton: Skeleton, *, is_stage: bool = False) -> tuple[Layouts, frozenset[str]]:
    """The layouts of a settled draft, of a whole model or of a stage, and the parameters that are gathered again."""
    found, graph = lay_out(settled, is_stage=is_stage), settled.graph
    outputs = [found.outputs.get(i, ()) for i, value in enumerate(graph.outputs) if isinstance(value, Value)]
    buffers = {leaf.name: found.leaves[leaf] for leaf in graph.leaves_of(LeafKind.BUFFER)}
    single = Choice((), ())
    choices = [found.choices.get(op.node, single) for op in skeleton.operators]
    layouts = Layouts(
        {i: found.leaves[leaf] for i, leaf in enumerate(graph.leaves)},
        tuple(
            choice if choice is not single else Choice(((),) * len(op.reads), ((),) * len(op.makes))
            for choice, op in zip(choices, skeleton.operators, strict=True)
        ),
        (*outputs, *(buffers[name] for name, _ in graph.updates)),
    )
    return layouts, frozenset(action.tensor for action in settled.draft.memory if action.action == REGATHER)
