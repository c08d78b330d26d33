"""FlexFlow's Figure 3.9: Inception-v3 and NMT on four K80, the plan found against placements of whole operators.

    python -m benchmarks.flexflow_fig3_9                     # writes results/flexflow_fig3_9.json
    python -m benchmarks.flexflow_fig3_9 --models nmt --moves 20

The thesis compares with placements that ColocRL learned (Mirhoseini et al. 2017, in 12 to 27 hours), which are printed
in that paper as pictures only. So the opponent is the best placement that we find in its space, every layer with all
its work on one device: from everything on one device, from layers in a row with equal work, from the experts' placement
by depth and from layers of the same depth dealt out, the best goes on by random moves of single layers as long as the
timeline gets shorter. What is learned may be worse than that or, with more moves, better; a row has both the start
and the end. `bound` is what no placement can be faster than: with work in the order of what reads it, the longest way
through the model, or all work shared evenly.

The thesis has 64 samples a GPU and measures; here a step of all 256 samples is predicted for both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import process_time

from benchmarks.placements import Placements, in_a_row
from benchmarks.search_table import RESULTS, Named, captured, circumstances
from conjoin.cost import CostModel
from conjoin.machine import parse_machine
from conjoin.search import Wish, find_plan, layer_depths
from conjoin.sim import Skeleton

NAME = "flexflow_fig3_9"
MACHINE, BATCH, OPTIMIZER = "k80-cluster:1", 256, "sgd"
PAPER = "3.4-3.8"
MODELS = ("inception-v3", "nmt")
_WALL = 40.0
_SEED = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The plan found and the best placement."""

    model: str
    found: str
    seconds: float
    search_cpu_seconds: float
    one_device: Named
    best_start: Named
    placement: Named
    moves: int
    bound: float
    speedup: float
    """Of the plan found over the placement."""
    paper: str = PAPER


def layers_of(skeleton: Skeleton) -> list[int]:
    """The layer of every operator: those with the same matrices are one, and what follows joins what it reads first."""
    number_of, found = dict[tuple[int, ...], int](), list[int]()
    matrices = {root for root in skeleton.parameters if len(skeleton.roots[root].type.shape) > 1}
    for operator in skeleton.operators:
        own = tuple(root for root in operator.reads if root in matrices)
        makers = [skeleton.roots[root].maker for root in operator.reads if skeleton.roots[root].maker >= 0]
        if own or not makers:
            found.append(number_of.setdefault(own, len(number_of)))
        else:
            found.append(found[makers[0]])
    return found


def starts(skeleton: Skeleton, seconds: Sequence[float], layers: Sequence[int], devices: int) -> Iterator[list[int]]:
    """Devices of all layers: all on one, in a row with equal work, by depth in all ways, and dealt out."""
    count, depth_of = max(layers) + 1, layer_depths(skeleton)
    work, depth = [0.0] * count, [len(layers)] * count
    for operator, layer in enumerate(layers):
        work[layer] += seconds[operator]
        depth[layer] = min(depth[layer], depth_of[operator])
    yield [0] * count
    before = [sum(work[:layer]) + work[layer] / 2 for layer in range(count)]
    yield [min(devices - 1, int(devices * passed / sum(work))) for passed in before]
    if max(depth) < 2 * devices:
        yield from ([way[layer] for layer in depth] for way in in_a_row(max(depth) + 1, devices))
    yield [sum(depth[other] == depth[layer] for other in range(layer)) % devices for layer in range(count)]


def bound_of(skeleton: Skeleton, seconds: Sequence[float], devices: int) -> float:
    """What a placement takes at least."""
    longest = list[float]()
    for number, operator in enumerate(skeleton.operators):
        makers = [skeleton.roots[root].maker for root in operator.reads if skeleton.roots[root].maker >= 0]
        longest.append(seconds[number] + max((longest[maker] for maker in makers), default=0.0))
    return max(max(longest), sum(seconds) / devices)


def best_placement(placements: Placements, moves: int) -> tuple[Named, Named, Named, float]:
    """All on one device, the best start, what moves make of it, and the bound."""
    skeleton, seconds, devices = placements.skeleton, placements.seconds(), placements.num_devices
    movable, layers = tuple(placements.movable()), layers_of(skeleton)

    def judge(name: str, device_of: Sequence[int]) -> Named:
        return placements.judge(name, {number: device_of[layers[number]] for number in movable})

    judged = [(judge("start", ways), ways) for ways in starts(skeleton, seconds, layers, devices)]
    start, current = min(judged, key=lambda one: (not one[0].fits, one[0].seconds))
    best, rng = start, Random(_SEED)
    for _ in range(moves):
        tried = list(current)
        tried[rng.randrange(len(tried))] = rng.randrange(devices)
        now = judge("moved", tried)
        if now.fits and now.seconds < best.seconds:
            best, current = now, tried
    return judged[0][0], start, best, bound_of(skeleton, seconds, devices)


def row_of(model: str, budget: float, moves: int) -> Row:
    """Both, on the same graph and machine."""
    machine, costs = parse_machine(MACHINE), CostModel()
    graph = captured(model, BATCH)
    began = process_time()
    found = find_plan(graph, machine, costs, Wish("joint", _WALL * budget, OPTIMIZER, cpu_budget=budget))
    took = process_time() - began
    one, start, best, bound = best_placement(Placements(graph, machine, costs, OPTIMIZER), moves)
    return Row(
        model, found.plan.strategy, found.seconds_per_step, round(took, 1), one, start, best, moves, bound,
        round(best.seconds / found.seconds_per_step, 3),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of the zoo; a name may end in `:tiny`")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of the process for a search")
    parser.add_argument("--moves", type=int, default=60, help="of single layers that are tried for a placement")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    given, rows = sys.argv[1:] if arguments is None else arguments, list[Row]()
    for model in chosen.models:
        rows.append(row_of(model, chosen.budget, chosen.moves))
        print(rows[-1], flush=True)
        told = circumstances(" ".join((f"python -m benchmarks.{NAME}", *given)), chosen.budget)
        data = {**told, "machine_of_steps": MACHINE, "batch_size": BATCH, "rows": [asdict(row) for row in rows]}
        chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(any(row.speedup < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
