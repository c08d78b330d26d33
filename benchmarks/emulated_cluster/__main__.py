"""`python -m benchmarks.emulated_cluster`: the step time and peak memory of a plan on an emulated cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.run_plan import OPTIMIZERS, Figures, Training, losses_alone, run_plan
from conjoin import capture
from conjoin.cli import load_workload
from conjoin.errors import ConjoinError
from conjoin.ir import load_plan
from conjoin.runtime import check_made_for
from conjoin.search import make_plan

_SEED = 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated_cluster", description=__doc__)
    parser.add_argument("plan", metavar="PLAN", help="a plan file (.json), or a strategy as data-parallel")
    parser.add_argument("model", metavar="MODEL", help="zoo name, file.py:function or module:function")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each node")
    parser.add_argument("--mbit", type=float, default=200, help="rate of each node's link, each way")
    parser.add_argument("--delay-us", type=float, default=200, help="delay between nodes, one way")
    parser.add_argument("--batch", type=int, help="samples in the batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the whole run")
    parser.add_argument("--ahead", action="store_true", help="ranks go before other work on this host; takes root")
    parser.add_argument("--check", action="store_true", help="compare the losses with one device")
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> None:
    given = _parser().parse_args()
    try:
        _run(given)
    except ConjoinError as error:
        sys.exit(str(error))


def _run(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    model, batch, loss = load_workload(given.model, given.batch)
    graph = capture(model, batch, loss)
    training = Training(model, batch, given.optimizer, num_steps=given.steps)
    cluster = Cluster(given.nodes, given.ranks, given.mbit * 125e3, given.delay_us * 1e-6, ahead_of_others=given.ahead)
    is_file = given.plan.endswith(".json")
    plan = load_plan(given.plan) if is_file else make_plan(graph, cluster.machine, given.plan)
    check_made_for(plan, graph)
    with cluster:
        figures = run_plan(cluster, plan, training, given.timeout)
    off = None
    if given.check:
        pairs = zip(losses_alone(graph, training), figures.losses, strict=True)
        off = max(abs(ours - alone) / abs(alone) for alone, ours in pairs)
    _show(cluster, figures, off, given.json)


def _show(cluster: Cluster, figures: Figures, off: float | None, as_json: bool) -> None:
    if as_json:
        facts = {"seconds_per_step": figures.seconds_per_step, "peak_bytes": figures.peak_bytes, "loss_off_by": off}
        print(json.dumps({**facts, **asdict(figures)}, indent=1))
        return
    seconds = sorted(figures.step_seconds)
    print(f"{cluster.machine}")
    spread = f"{1e3 * seconds[0]:.1f} to {1e3 * seconds[-1]:.1f}"
    print(f"step         {1e3 * figures.seconds_per_step:.1f} ms (median; {spread})")
    for rank, memory in enumerate(figures.memory):
        kept = f"parameters {memory.parameters:,}, gradients {memory.gradients:,}, state {memory.optimizer_state:,}"
        print(f"rank {rank:<7} peak {memory.peak:,} bytes ({kept})")
    traffic = figures.traffic
    print(
        f"switch       {traffic.num_bytes:,} bytes in {traffic.num_frames:,} frames, {traffic.num_late} late, "
        f"{traffic.processor_seconds:.2f} s of a core{'' if traffic.real_time else ', without real-time priority'}"
    )
    print(f"losses       {figures.losses[0]:.6f} to {figures.losses[-1]:.6f}")
    if off is not None:
        print(f"one device   largest relative difference of a loss {off:.1e}")


if __name__ == "__main__":
    main()
