"""AutoDDL's figures 3 and 8: the least communication of a chain of layers, by the exact core and over all grids.

    python -m benchmarks.autoddl_exact [--nodes 128 4096] [--units 2 3 4] [--output FILE]

Every layer of the 4-layer MLP (32768-16384-4096-2048-512) is computed on a grid of m x n x k nodes: m split the
samples, n what comes out, k what is summed. Only bytes count: a node sends one byte in one unit of time, there is no
latency, and computing takes the same on every grid. The reference is AutoDDL's sum (sections 4.3 and 4.4, table 2),
minimised over all grids of all layers by dynamic programming along the chain (`least_over_grids`). It shares no code
with `conjoin.search.exact`, which works on units, groups of axes of the mesh (every cut into so many is solved), or on
all axes, counted, since they are alike; these are then given names, and summed up again with them.

Figure 3 is the attention layer of a GPT on 64 nodes, the query-key-value layer on 4x8x2 and the projection on 4x4x4.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from math import prod
from pathlib import Path
from time import process_time

import zoo
from conjoin.cost import OperatorCost, Seconds, Source
from conjoin.frontends import capture
from conjoin.machine import Mesh, parse_machine
from conjoin.ops import Call, TensorType
from conjoin.search import (
    CountedProblem,
    CountedSpace,
    Objective,
    OperatorSeconds,
    Problem,
    ReshardSeconds,
    Space,
    canonical,
    cuts,
    name_axes,
)
from conjoin.sim import HostLink, Skeleton, take_graph_apart

RESULT = Path(__file__).parent / "results" / "autoddl_exact.json"
SIZES = (32768, 16384, 4096, 2048, 512)
BATCH = 4096
ITEM = 4
"""Bytes of a number."""

Grid = tuple[int, int, int]
"""How many ways m, n and k."""


@dataclass(frozen=True)
class Bytes:
    """Prices by which only bytes count; products take so long that nobody computes anything twice."""

    factor: float = 1.0

    def computing(self, call: Call) -> float:
        """What a product takes."""
        if call.op != "linear":
            return 0.0
        inputs, weights = call.tensors[:2]
        return self.factor * prod(inputs.shape) * weights.shape[0]

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        nothing = Seconds(0.0, Source.ESTIMATED)
        return OperatorCost(Seconds(self.computing(call), Source.ESTIMATED), nothing, 0.0, 0.0)

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        return Seconds(float(sent), Source.ESTIMATED)

    def update(self, parameters: Sequence[TensorType], rank: int) -> Seconds:
        return Seconds(0.0, Source.ESTIMATED)

    def slowed(self) -> int:
        return 0

    def host_link(self) -> HostLink:
        return HostLink("cpu", 0, lambda size: Seconds(float(size), Source.ESTIMATED))

    def unlike_axes(self) -> tuple[str, ...]:
        return ()


def grids(nodes: int) -> Iterator[Grid]:
    """All m x n x k with that product, powers of two."""
    powers = [1 << i for i in range(nodes.bit_length()) if 1 << i <= nodes]
    return ((m, n, nodes // (m * n)) for m, n in product(powers, powers) if nodes % (m * n) == 0)


def weights_bytes(grid: Grid, inputs: int, outputs: int) -> float:
    """The all-reduce of gradients of weights and bias over the m nodes that have the same part of them.

    The bias is stored split over n and k: each of the k nodes adds its own part of it to its partial sums.
    """
    m, n, k = grid
    return 2 * (1 - 1 / m) * ITEM * (inputs + 1) * outputs / (n * k)


def between_bytes(one: Grid, other: Grid, batch: int, features: int) -> float:
    """From the partial sums that one layer makes to what the next reads, and the same for gradients (section 4.3).

    A reduce-scatter over k splits the tensor over all nodes, an all-gather over the next layer's n ends it. Between
    them nodes that split samples may do so again or be gathered, those that split features may do so again (as the
    next k) or be gathered, and those of k are free; only nodes without such a place exchange all to all. The paper has
    that for whole grids: none exchange where m or n fits the next layer, else all.
    """
    (m, n, k), (next_m, next_n, next_k) = one, other
    whole, nodes = batch * features * ITEM, m * n * k
    misplaced = max(1.0, max(1.0, m / next_m) * max(1.0, n / next_k) / next_n)
    scatter, gather = (1 - 1 / k) * whole / (m * n), (1 - 1 / next_n) * whole / (next_m * next_k)
    return 2 * (scatter + (1 - 1 / misplaced) * whole / nodes + gather)


def attention_share(query_key_value: Grid, projection: Grid) -> Fraction:
    """Figure 3: what a node receives for an attention layer's activations, forward, of all tokens times features.

    All-gather of what comes in, reduce-scatter of queries, keys and values (three times as many); the same for the
    projection. Attention works on whole heads of whole sequences, and needs nothing.
    """
    (m, n, k), (next_m, next_n, next_k) = query_key_value, projection
    misplaced = max(Fraction(1), max(Fraction(1), Fraction(m, next_m)) * max(Fraction(1), Fraction(n, next_k)) / next_n)
    return (
        (1 - Fraction(1, n)) / (m * k)
        + 3 * (1 - Fraction(1, k)) / (m * n)
        + (1 - 1 / misplaced) / (m * n * k)
        + (1 - Fraction(1, next_n)) / (next_m * next_k)
        + (1 - Fraction(1, next_k)) / (next_m * next_n)
    )


def megatron_share(data: int, tensor: int) -> Fraction:
    """The same for Megatron: an all-reduce after the projection."""
    return 2 * (1 - Fraction(1, tensor)) / data


def least_attention(nodes: int, max_m: int) -> tuple[Fraction, Grid, Grid]:
    """The least over all grids in which no weight is held more than so many times."""
    few = [grid for grid in grids(nodes) if grid[0] <= max_m]
    return min((attention_share(one, other), one, other) for one in few for other in few)


def end_bytes(grid: Grid, batch: int, features: int) -> float:
    """The last layer's sums are scattered, its gradient gathered; the loss, one number, is summed over all nodes."""
    m, n, k = grid
    return 2 * (1 - 1 / k) * batch * features * ITEM / (m * n) + 2 * (1 - 1 / (m * n * k)) * ITEM


def least_over_grids(nodes: int, sizes: Sequence[int], batch: int) -> tuple[float, list[Grid]]:
    """The least bytes of a chain of layers, and the grids: dynamic programming from the first layer to the last."""
    best: dict[Grid, tuple[float, list[Grid]]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        reached: dict[Grid, tuple[float, list[Grid]]] = {}
        for grid in grids(nodes):
            own = weights_bytes(grid, inputs, outputs)
            before = [(0.0, list[Grid]())] if not layer else [
                (total + between_bytes(other, grid, batch, inputs), path) for other, (total, path) in best.items()
            ]  # fmt: skip
            total, path = min(before, key=lambda item: item[0])
            reached[grid] = total + own, [*path, grid]
        best = reached
    ends = [(total + end_bytes(grid, batch, sizes[-1]), path) for grid, (total, path) in best.items()]
    return min(ends, key=lambda item: item[0])


def bytes_of(path: Sequence[Grid], sizes: Sequence[int], batch: int) -> float:
    """The bytes of a chain of layers on given grids."""
    own = sum(weights_bytes(grid, *ends) for grid, ends in zip(path, pairwise(sizes), strict=True))
    between = sum(between_bytes(a, b, batch, n) for (a, b), n in zip(pairwise(path), sizes[1:-1], strict=True))
    return own + between + end_bytes(path[-1], batch, sizes[-1])


@cache
def skeleton_of_chain() -> Skeleton:
    """The MLP as captured."""
    found = zoo.build("mlp-autoddl", device="meta", batch_size=BATCH)
    return take_graph_apart(capture(found.model.train(), found.batch, found.loss))[0]


@dataclass(frozen=True, slots=True)
class Solved:
    """The least bytes on the best of all cuts into so many units."""

    units: int
    cuts: int
    bytes: float
    grids: tuple[Grid, ...]
    cpu_seconds: float


def solve_on_units(skeleton: Skeleton, mesh: Mesh, num_units: int) -> Solved:
    """Every cut into units that differs from the others, solved exactly."""
    prices, seen, started = Bytes(), set[object](), process_time()
    operators = OperatorSeconds(prices)
    best: tuple[float, tuple[Grid, ...]] = (float("inf"), ())
    for units in cuts(mesh, num_units):
        name = canonical(units, mesh)
        if name in seen:
            continue
        seen.add(name)
        space = Space(units, mesh, ReshardSeconds(units, mesh, prices), operators)
        problem = Problem(skeleton, space, Objective(), with_dominated=True)
        solution = problem.solve()
        assert solution.is_exact
        best = min(best, (solution.total, tuple(_grids_of(problem, solution.values))))
    computing = sum(prices.computing(op.call) / mesh.size for op in skeleton.operators)
    return Solved(num_units, len(seen), best[0] - computing, best[1], process_time() - started)


@dataclass(frozen=True, slots=True)
class Counted:
    """The least bytes over all axes, and those of the layouts with named axes that it became."""

    axes: int
    bytes: float
    named_bytes: float
    grids: tuple[Grid, ...]
    cpu_seconds: float
    """For the solution, and for its names."""


def solve_counted(skeleton: Skeleton, mesh: Mesh) -> Counted:
    """All axes, counted; the even cut in two gives the sum that bounds choices."""
    prices, started = Bytes(), process_time()
    operators = OperatorSeconds(prices)
    upper = float("inf")
    if len(mesh.axes) > 1:
        units = list(cuts(mesh, 2))[(len(mesh.axes) - 1) // 2]
        space = Space(units, mesh, ReshardSeconds(units, mesh, prices), operators)
        upper = Problem(skeleton, space, Objective()).solve().total
    problem = CountedProblem(skeleton, CountedSpace(mesh, operators), Objective(), upper)
    solution = problem.solve()
    assert solution.is_exact
    named = name_axes(problem, solution)
    taken = process_time() - started
    computing = sum(prices.computing(op.call) / mesh.size for op in skeleton.operators)
    found = tuple(_grids_of(problem, solution.values))
    return Counted(len(mesh.axes), solution.total - computing, named.total - computing, found, taken)


def _grids_of(problem: Problem | CountedProblem, values: Sequence[int]) -> Iterator[Grid]:
    """The grids of the layers in a solution."""
    for place, operator in enumerate(problem.skeleton.operators):
        if operator.call.op == "linear":
            choices, ways = problem.choices[place], {"d0": 1, "n": 1, "k": 1}
            for degree, pick in zip(problem.space.degrees, choices.picks[values[place]], strict=True):
                index = choices.rules[int(pick)].index
                assert index is not None, "nobody computes anything twice"
                ways[index] *= degree
            yield ways["d0"], ways["n"], ways["k"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--units", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--output", type=Path, default=RESULT)
    asked = parser.parse_args()
    share, one, other = least_attention(64, 4)
    print(f"Figure 3: {share * 384} : {megatron_share(4, 16) * 384} on {shown(one)} and {shown(other)}")
    skeleton, tables = skeleton_of_chain(), {}
    for nodes in asked.nodes:
        least, path = least_over_grids(nodes, SIZES, BATCH)
        print(f"{nodes} nodes: {least / 1e6:.2f} MB over all grids, {' '.join(map(shown, path))}")
        mesh = parse_machine(f"piz-daint:{nodes}").mesh
        rows, counted = [solve_on_units(skeleton, mesh, units) for units in asked.units], solve_counted(skeleton, mesh)
        for row in rows:
            print(
                f"  {row.units} units: {row.bytes / 1e6:.2f} MB ({row.bytes / least - 1:+.1%}) of {row.cuts} cuts, "
                f"{' '.join(map(shown, row.grids))}, {row.cpu_seconds:.2f} s"
            )
        print(
            f"  {counted.axes} axes counted: {counted.bytes / 1e6:.2f} MB ({counted.bytes / least - 1:+.1%}), "
            f"{counted.named_bytes / 1e6:.2f} MB with names, {' '.join(map(shown, counted.grids))}, "
            f"{counted.cpu_seconds:.2f} s"
        )
        units = [asdict(row) for row in rows]
        tables[nodes] = {"least": least, "grids": path, "units": units, "counted": asdict(counted)}
    result = {
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": "python -m benchmarks.autoddl_exact " + " ".join(sys.argv[1:]),
        "figure_3": [int(share * 384), int(megatron_share(4, 16) * 384), one, other],
        "figure_8": tables,
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def shown(grid: Grid) -> str:
    """A grid as the paper writes it."""
    return "×".join(map(str, grid))


if __name__ == "__main__":
    sys.exit(main())
