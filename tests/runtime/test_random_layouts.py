"""Any graph in any legal layouts computes what one device does; and the checker takes exactly the legal ones.

The property that everything else rests on: operators take on every axis of the mesh a random one of their sharding
rules, leaves are stored in random layouts, reshards stand where layouts meet; loss, outputs, gradients and buffers of
every rank are its parts of what one device has. Then the same graphs with a random change: a layout, the order in which
axes nest, a reshard. Those that are still legal, as found by trying all rules and orders, must still compute the same;
all others must be refused with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest

from conjoin.ir import (
    Graph,
    LeafKind,
    Node,
    Plan,
    Value,
    choose,
    find_faults,
    find_layout_faults,
    is_parallel,
    parse_graph,
    plain_call,
    rules_for,
    sequential,
)
from conjoin.machine import Mesh
from conjoin.ops import (
    BATCH,
    PARALLEL_OPS,
    PIPELINE,
    At,
    Copies,
    Invariant,
    Layout,
    Partial,
    Placement,
    ShardingRule,
    Split,
    TensorType,
    all_ops,
    make_layout,
    placement_on,
    space_of,
    spec_for,
)
from tests.runtime.random_graphs import (
    MESHES,
    Sample,
    chain,
    differences,
    on_one_device,
    on_ranks,
    one_operator,
    random_plan,
    rules_at,
)

BLOCKS, CHAINS = range(6), 8
"""Graphs are drawn in blocks, so that test processes can share them."""


def draw(seed: int, places: float = 0.0) -> tuple[Sample, Plan]:
    rng = Random(seed)
    sample = chain(rng)
    return sample, random_plan(sample.graph, rng.choice(MESHES), rng, places)


def check_runs(plan: Plan, sample: Sample) -> None:
    found = differences(plan, on_ranks(plan, sample), on_one_device(sample))
    assert not found, "\n".join([*found[:5], str(plan.mesh), str(plan.graph)])


@pytest.mark.parametrize("block", BLOCKS)
def test_random_graphs_compute_what_one_device_does(block: int) -> None:
    for seed in range(block * CHAINS, (block + 1) * CHAINS):
        sample, plan = draw(seed)
        assert find_faults(plan.graph) == () and find_layout_faults(plan.graph, plan.mesh) == ()
        assert sequential(plan.graph) == sample.graph
        check_runs(plan, sample)


UNDEFINED = ("empty.memory_format", "new_empty", "empty_like", "_conj")
"""Memory as it was found; and a view that torch does not let be read as numbers."""
IN_PAIRS = (PIPELINE, BATCH)
"""Around a part of a graph, and so not by themselves: `test_micro_batched_parts` has them."""
OPERATORS = [n for spec in all_ops() for n in spec.names if n not in (*UNDEFINED, *PARALLEL_OPS, *IN_PAIRS)]
PLAIN = [spec.name for spec in all_ops() if spec.local is None and not spec.random and not callable(spec.index)]
OWN = [name for name in OPERATORS if "::" in name]
CHECKED = [*[name for name in OPERATORS if name not in (*PLAIN, *OWN)][::4], *OWN]


@pytest.mark.parametrize("op", CHECKED)
@pytest.mark.filterwarnings("ignore")
def test_an_operator_computes_what_one_device_does(op: str) -> None:
    rng = Random(op)
    sample = one_operator(op, rng)
    plan = random_plan(sample.graph, rng.choice(MESHES), rng)
    assert find_layout_faults(plan.graph, plan.mesh) == ()
    check_runs(plan, sample)


# What is legal, decided again and in another way: try every rule on every axis, in every order of the axes.


def is_legal(graph: Graph, mesh: Mesh) -> bool:
    return (
        all(_leaf_is_legal(leaf.type, leaf.kind, mesh) for leaf in graph.leaves)
        and all(_lies(type, mesh) for node in graph.nodes for type in node.types)
        and all(_reshard_is_legal(n) if is_parallel(n) else _node_is_legal(n, mesh) for n in graph.nodes)
        and all(_output_is_legal(graph, i) for i in range(len(graph.outputs)))
    )


def _lies(type: TensorType, mesh: Mesh) -> bool:
    """Every device has a piece of every dim."""
    ways = [1] * len(type.shape)
    for axis, placement in type.layout:
        if axis not in mesh.sizes:
            return False
        if isinstance(placement, At) and not 0 <= placement.place < mesh.sizes[axis]:
            return False
        if isinstance(placement, Split):
            if placement.dim >= len(type.shape):
                return False
            ways[placement.dim] *= mesh.sizes[axis]
    return all(n == 1 or n <= size for n, size in zip(ways, type.shape, strict=True))


def _leaf_is_legal(type: TensorType, kind: LeafKind, mesh: Mesh) -> bool:
    kept = (Split, Copies, At) if kind is LeafKind.INPUT else (Split, At)
    if not type.shape and any(isinstance(placement, At) for _, placement in type.layout):
        return False
    return _lies(type, mesh) and all(isinstance(placement, kept) for _, placement in type.layout)


def _output_is_legal(graph: Graph, i: int) -> bool:
    output = graph.outputs[i]
    if not isinstance(output, Value):
        return True
    return not output.type.layout if i == graph.loss else not any(
        isinstance(p, Partial | At) for _, p in output.type.layout
    )


def _node_is_legal(node: Node, mesh: Mesh) -> bool:
    """Whether some rule on every axis, the axes nesting in some order, makes just these layouts."""
    layouts = [*(value.type.layout for value in node.inputs), *(type.layout for type in node.types)]
    axes = sorted({axis for layout in layouts for axis, _ in layout})
    if any(axis not in mesh.sizes for axis in axes):
        return False
    fitting = [
        [rule for rule in (*_all_rules(node), *rules_at(node, mesh.sizes[axis])) if _follows(rule, axis, node)]
        for axis in axes
    ]
    return any(
        _sizes_allow(node, dict(zip(axes, rules, strict=True)), mesh) and _nest(node, rules, axes, layouts)
        for rules in product(*fitting)
    )


def _all_rules(node: Node) -> tuple[ShardingRule, ...]:
    return rules_for(plain_call(node), len(node.types))


def _follows(rule: ShardingRule, axis: str, node: Node) -> bool:
    given = tuple(placement_on(value.type.layout, axis) for value in node.inputs)
    return (rule.operands, rule.outputs) == (given, tuple(placement_on(type.layout, axis) for type in node.types))


def _sizes_allow(node: Node, rules: dict[str, ShardingRule], mesh: Mesh) -> bool:
    call = plain_call(node)
    spec = spec_for(call)
    ways: dict[str, int] = {}
    for axis, rule in rules.items():
        if rule.index is not None:
            ways[rule.index] = ways.get(rule.index, 1) * mesh.sizes[axis]
    return spec is None or all(n <= space_of(spec, call).sizes[index] for index, n in ways.items())


def _nest(node: Node, rules: tuple[ShardingRule, ...], axes: list[str], layouts: list[Layout]) -> bool:
    if not axes:
        return True
    by_axis = dict(zip(axes, rules, strict=True))
    for order in permutations(axes):
        choice = choose({axis: by_axis[axis] for axis in order})
        if [*choice.operands, *choice.outputs] == layouts:
            return True
    return False


TABLE: dict[str, tuple[Placement, Placement]] = {
    "conjoin::replicate": (Invariant(), Copies()),
    "conjoin::unify": (Copies(), Invariant()),
    "conjoin::reduce": (Partial(), Invariant()),
    "conjoin::assign": (Invariant(), Partial()),
}


def _reshard_is_legal(node: Node) -> bool:
    """Axis by axis, as the table of the design says; a partition cuts inside what is cut already."""
    before, after = node.inputs[0].type, node.types[0]
    axes = node.args[-1]
    if not axes or (before.shape, before.dtype) != (after.shape, after.dtype) or len(set(axes)) < len(axes):
        return False
    changes = TABLE.get(node.op)
    if changes is None and node.op in ("conjoin::confine", "conjoin::share"):
        at = At(node.args[1])
        changes = (Invariant(), at) if node.op == "conjoin::confine" else (at, Invariant())
    if changes is None:
        split = Split(node.args[1])
        changes = (Invariant(), split) if node.op == "conjoin::partition" else (split, Invariant())
    entries = list(before.layout)
    for axis in axes:
        if placement_on(before.layout, axis) != changes[0]:
            return False
        entries = [*(entry for entry in entries if entry[0] != axis), (axis, changes[1])]
    return make_layout(entries) == after.layout


# Changes of a graph, made in its text as a person would.

LAYOUT = re.compile(r"\{([xyz]:[^}]*)\}")
TYPE = re.compile(r"f64\[[\d,]*\](?:\{[^}\"]*\})?")
RESHARD = re.compile(r"%(\d+): \S+ = conjoin::\w+\((\S+?), ")


def _random_layout(rng: Random, num_dims: int, mesh: Mesh) -> str:
    options: list[Placement] = [Invariant(), Copies(), Partial(), At(0), At(2), *map(Split, range(num_dims))]
    layout = make_layout((axis, rng.choice(options)) for axis in rng.sample(mesh.names, len(mesh.names)))
    return "{" + ",".join(f"{axis}:{placement}" for axis, placement in layout) + "}" if layout else ""


def _relaid(lines: list[str], rng: Random, mesh: Mesh) -> list[str]:
    """One type in another layout."""
    at = rng.choice([i for i, line in enumerate(lines) if TYPE.search(line)])
    found = rng.choice(list(TYPE.finditer(lines[at])))
    bare = found.group().partition("{")[0]
    num_dims = 0 if bare.endswith("[]") else bare.count(",") + 1
    changed = lines[at][: found.start()] + bare + _random_layout(rng, num_dims, mesh) + lines[at][found.end() :]
    return [*lines[:at], changed, *lines[at + 1 :]]


def _reordered(lines: list[str], rng: Random, mesh: Mesh) -> list[str]:
    """Two axes that split a dim, the other way round."""
    nested = [i for i, line in enumerate(lines) if re.search(r"S\((\d+)\),[xyz]:S\(\1\)", line)]
    if not nested:
        return _relaid(lines, rng, mesh)
    at = rng.choice(nested)
    changed = re.sub(r"([xyz]):S\((\d+)\),([xyz]):S\(\2\)", r"\3:S(\2),\1:S(\2)", lines[at], count=1)
    return [*lines[:at], changed, *lines[at + 1 :]]


def _other_axes(lines: list[str], rng: Random, mesh: Mesh) -> list[str]:
    """A reshard over other axes, or of another dim, or another reshard."""
    reshards = [i for i, line in enumerate(lines) if RESHARD.match(line)]
    if not reshards:
        return _relaid(lines, rng, mesh)
    at = rng.choice(reshards)
    axes = ", ".join(f'"{axis}"' for axis in rng.sample(mesh.names, rng.randint(1, len(mesh.names))))
    changed = rng.choice([
        re.sub(r"axes=\[.*?\]", f"axes=[{axes}]", lines[at]),
        re.sub(r"dim=\d", f"dim={rng.randrange(4)}", lines[at]),
        re.sub("replicate|assign|reduce|unify", rng.choice(["replicate", "assign", "reduce", "unify"]), lines[at]),
        re.sub("partition|combine", rng.choice(["partition", "combine"]), lines[at]),
        re.sub("confine|share", rng.choice(["confine", "share"]), lines[at]),
        re.sub(r"place=\d", f"place={rng.randrange(3)}", lines[at]),
    ])  # fmt: skip
    return [*lines[:at], changed, *lines[at + 1 :]]


def _skipped(lines: list[str], rng: Random, mesh: Mesh) -> list[str]:
    """One reader takes what a reshard was given instead of what it gives."""
    reshards = [match for line in lines if (match := RESHARD.match(line))]
    if not reshards:
        return _relaid(lines, rng, mesh)
    reshard = rng.choice(reshards)
    name = re.compile(rf"%{reshard.group(1)}(?![\d:])")
    readers = [i for i, line in enumerate(lines) if name.search(line)]
    at = rng.choice(readers)
    return [*lines[:at], name.sub(reshard.group(2).replace("\\", "\\\\"), lines[at]), *lines[at + 1 :]]


CHANGES = (_relaid, _reordered, _other_axes, _skipped)


def changed_graphs(plan: Plan, rng: Random, count: int) -> Iterator[Graph]:
    for _ in range(count):
        lines = rng.choice(CHANGES)(str(plan.graph).splitlines(), rng, plan.mesh)
        graph = parse_graph("\n".join(lines) + "\n")
        if graph != plan.graph:
            yield graph


@pytest.mark.parametrize("block", BLOCKS)
def test_a_changed_graph_is_refused_or_computes_the_same(block: int) -> None:
    refused = ran = 0
    for seed in range(1000 + block * CHAINS, 1000 + (block + 1) * CHAINS, 2):
        sample, plan = draw(seed, places=0.25 * (seed % 4 == 0))
        assert is_legal(plan.graph, plan.mesh)
        for graph in changed_graphs(plan, Random(seed), 12):
            faults = find_layout_faults(graph, plan.mesh)
            assert bool(faults) != is_legal(graph, plan.mesh), f"{seed}: {[str(fault) for fault in faults]}\n{graph}"
            assert all(fault.where and fault.what for fault in faults)
            refused += bool(faults)
            if not faults and ran < 3 and not find_faults(graph):
                check_runs(replace(plan, graph=graph), sample)
                ran += 1
    assert refused > 20


def test_a_wrong_graph_that_nobody_refuses_would_be_noticed() -> None:
    """The comparison itself can fail: on one rank a gradient that every rank should have alike is summed twice."""
    caught = 0
    for seed in range(40):
        sample, plan = draw(seed)
        whole = [leaf for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.trainable and not leaf.type.layout]
        if not whole:
            continue
        outcomes = on_ranks(plan, sample)
        gradient = outcomes[-1].gradients[whole[0].name]
        if gradient is not None and gradient.abs().max() > 1e-6:
            gradient.mul_(2)
            assert differences(plan, outcomes, on_one_device(sample)) != []
            caught += 1
        if caught == 3:
            return
    raise AssertionError("no graph had a gradient to spoil")
