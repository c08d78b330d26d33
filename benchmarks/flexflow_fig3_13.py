"""FlexFlow's Figure 3.13: how good the best plan is after so much time of the search, for NMT on 16 P100.

    python -m benchmarks.flexflow_fig3_13                    # writes results/flexflow_fig3_13.json and .svg
    python -m benchmarks.flexflow_fig3_13 --model nmt:tiny --budget 5

The thesis shows its random walk with full and with delta simulation: they end after 16 and 6 minutes, and below 8
minutes the walk with full simulation has the worse plan. Here are the same walk (`mcmc`), whose changes are timed by
delta simulation, and the joint search. The walk with full simulation is not run: it would propose the same changes,
each for as many times longer as Table 3.4 of `flexflow_table3_4.py` measured on 16 devices where both pay for what was
never priced (`unwarmed`), so its curve is the walk's, stretched by that from the end of its starts on.

Seconds are of the process: those of the clock on the wall, at which plans are noted, by the part of it that the process
had. Steps are predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plotting import Point, draw
from benchmarks.search_table import RESULTS, captured, circumstances
from conjoin.cost import CostModel
from conjoin.machine import parse_machine
from conjoin.search import Wish, find_plan

NAME = "flexflow_fig3_13"
MACHINE, GPUS, SAMPLES_PER_GPU = "p100-cluster:4", 16, 64
PAPER = {"full": "ends after 16 min", "delta": "ends after 6 min, and has the better plan below 8 min"}
WALK, STRETCHED, JOINT = "random walk, delta simulation", "random walk, full simulation (reckoned)", "joint search"
_WALL = 40.0
_CHANGED = "random changes"
"""How plans of the walk are called; those before are where it starts."""
Curve = list[tuple[float, float, str]]
"""Seconds of the process, of a step, and whose plan it is."""


def measured_quotient(path: Path = RESULTS / "flexflow_table3_4.json") -> float:
    """By how much longer a change takes in full, on this many devices."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return float(next(r["unwarmed_speedup"] for r in rows if (r["model"], r["devices"]) == ("nmt", GPUS)))


def searched(model: str, search: str, budget: float) -> tuple[Curve, str]:
    """What a search had found when, and why it stopped."""
    wish = Wish(search, _WALL * budget, "sgd", cpu_budget=budget)
    found = find_plan(captured(model, SAMPLES_PER_GPU * GPUS), parse_machine(MACHINE), CostModel(), wish)
    part = found.cpu_seconds / max(found.search_seconds, 1e-9)
    curve = [(round(one.elapsed * part, 3), one.seconds, one.name) for one in found.history]
    return [*curve, (round(found.cpu_seconds, 3), found.seconds_per_step, found.plan.strategy)], found.stopped.value


def stretched(curve: Curve, quotient: float) -> Curve:
    """The same plans, each change of the walk later by the quotient.

    >>> stretched([(1.0, 9.0, "fsdp"), (2.0, 8.0, "random changes from fsdp")], 3.0)
    [(1.0, 9.0, 'fsdp'), (4.0, 8.0, 'random changes from fsdp')]
    """
    begun = max((at for at, _, name in curve if not name.startswith(_CHANGED)), default=0.0)
    return [(at if at <= begun else begun + quotient * (at - begun), seconds, name) for at, seconds, name in curve]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nmt")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the process for each search")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    quotient = measured_quotient()
    walk, walk_stopped = searched(chosen.model, "mcmc", chosen.budget)
    joint, joint_stopped = searched(chosen.model, "joint", chosen.budget)
    curves = {WALK: walk, STRETCHED: stretched(walk, quotient), JOINT: joint}
    for name, curve in curves.items():
        print(f"{name}: " + ", ".join(f"{1e3 * seconds:.4g} ms after {at:.1f} s" for at, seconds, _ in curve))
    given = sys.argv[1:] if arguments is None else arguments
    told = circumstances(" ".join((f"python -m benchmarks.{NAME}", *given)), chosen.budget)
    data = {
        **told, "model": chosen.model, "devices": MACHINE, "paper": PAPER, "full_over_delta": quotient,
        "stopped": {WALK: walk_stopped, JOINT: joint_stopped}, "curves": curves,
    }  # fmt: skip
    chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    points = [Point(name, at, 1e3 * s, f"{who}: {1e3 * s:.4g} ms") for name, c in curves.items() for at, s, who in c]
    picture = draw(points, "seconds of the search", "milliseconds of the best step", joined=True)
    chosen.output.with_suffix(".svg").write_text(picture, encoding="utf-8")
    return int(joint[-1][1] > 1.005 * walk[-1][1])


if __name__ == "__main__":
    sys.exit(main())
