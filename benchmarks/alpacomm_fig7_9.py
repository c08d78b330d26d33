"""AlpaComm's Figures 7 and 9: what hiding transfers is worth in a pipeline of two stages, by playing schedules.

    python -m benchmarks.alpacomm_fig7_9        # writes results/alpacomm_fig7_9.json

GPT 2.6B (32 layers of 2560, 1,024 tokens, float16) on two hosts of four V100, one stage each: a micro-batch of one
sample computes 2 × 1.3e9 × 1,024 flops forward at `EFFICIENCY` of the peak and sends 1,024 × 2560 × 2 bytes; backwards
take twice a forward. Only the ratio of the two counts, so that the size of a micro-batch does not. Of the
U-Transformer the paper gives no size of what crosses: its transfer is what makes blocking 1.5 times as slow as no
transfers at all ("Signal", Figure 7), and the other ratios follow. `blocking` is 1F1B whose owners wait at every send
and receive, `overlap` the same with transfers beside computing, `eager` starts with more forwards, `delayed` runs
weight gradients as late as pays, `found` is the best schedule there is in the memory of eager. Signal is no bound:
weight gradients that are delayed fill its bubble.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.alpacomm import write_result
from conjoin.comm import Grid, plan_transfer
from conjoin.ops import Split
from conjoin.schedules import (
    Memory,
    Problem,
    Times,
    chain,
    check,
    eager_one_f_one_b,
    find_schedule,
    least_weight_delay,
    one_each,
    one_f_one_b,
    play,
    with_transfers,
)

EFFICIENCY = 39 / 125
"""Of the peak of a V100 in float16: 39 of 125 TFLOPS, what Megatron-LM sustains on one (Shoeybi et al. 2019)."""
NETWORKS = {"p3.8xlarge": 10e9 / 8, "summit": 25e9}
"""Bytes a second between hosts, as the presets of these names have it."""
STAGES = 2
MICRO_BATCHES = (4, 16, 64)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step by schedule, in seconds of a forward."""

    name: str
    micro_batches: int
    transfer: float
    blocking: float
    overlap: float
    eager: float
    delayed: float
    found: float
    proven: bool
    signal: float
    paper: str

    def shown(self) -> str:
        steps = (self.blocking, self.overlap, self.eager, self.delayed)
        gains = (*(one / other for one, other in pairwise(steps)), self.blocking / self.delayed)
        shares = (self.signal / self.eager, self.signal / self.delayed, self.signal / self.found)
        numbers = "".join(f"{gain:9.2f}" for gain in gains) + "".join(f"{share:9.1%}" for share in shares)
        return f"{self.name:26}{self.micro_batches:4}{self.transfer:9.3f}{numbers}   {self.paper}"


HEADER = (
    f"{'':26}{'M':>4}{'c/tF':>9}{'overlap':>9}{'eager':>9}{'delayed':>9}{'in all':>9}{'eager/Si':>9}{'delay/Si':>9}"
    f"{'found/Si':>9}   paper"
)


def played(name: str, micro_batches: int, transfer: float, paper: str) -> Row:
    """One pipeline by all schedules."""
    times = Times.alike(STAGES, chain(STAGES), (1, 1, 1), transfer)
    plain = one_f_one_b(STAGES, micro_batches)
    eager = eager_one_f_one_b(STAGES, micro_batches)
    late = eager_one_f_one_b(STAGES, micro_batches, least_weight_delay(STAGES, micro_batches, times))
    room = Memory.in_flight(STAGES, check(eager).held)
    best = find_schedule(Problem.of(one_each(STAGES), micro_batches, times, room), max_steps=300)
    blocked = with_transfers(plain, times, blocking=True)
    return Row(
        name, micro_batches, transfer, play(blocked, times, blocking=True).seconds, play(plain, times).seconds,
        play(eager, times).seconds, play(late, times).seconds, best.seconds, best.proven,
        play(plain, Times.alike(STAGES, chain(STAGES))).seconds, paper,
    )  # fmt: skip


def gpt_transfer(network: float) -> float:
    """The transfer of a sample over its forward: both stages have their samples split over data-parallel pairs."""
    source, target = Grid.of_hosts(1, 4), Grid.of_hosts(1, 4, 4, 1)
    rows = (("d0", Split(0)),)
    plan = plan_transfer((2, 1024, 2560), 2, (rows, source), (rows, target))
    forward = 2 * 2 * 1.3e9 * 1024 / (4 * 125e12 * EFFICIENCY)
    return plan.seconds(network) / forward


def signal_transfer(headroom: float) -> float:
    """The transfer that makes blocking so many times as slow as no transfer, with many micro-batches."""
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        times = Times.alike(STAGES, chain(STAGES), (1, 1, 1), middle)
        blocked = with_transfers(one_f_one_b(STAGES, 64), times, blocking=True)
        still = play(one_f_one_b(STAGES, 64), Times.alike(STAGES, chain(STAGES))).seconds
        slow = play(blocked, times, blocking=True).seconds / still
        low, high = (middle, high) if slow < headroom else (low, middle)
    return round(low, 3)


def rows() -> list[Row]:
    found = []
    for machine, network in NETWORKS.items():
        paper = "1.1x in all, over 97 % of Signal" if machine == "p3.8xlarge" else ""
        found += [played(f"GPT 2.6B, {machine}", count, gpt_transfer(network), paper) for count in MICRO_BATCHES]
    transfer = signal_transfer(1.5)
    few, many = "overlap 3 % behind eager", "overlap 1.30x, eager 1.15x more; 1.5x in all, over 97 % of Signal"
    said = dict(zip(MICRO_BATCHES, (few, "", many), strict=True))
    found += [played("U-Transformer, p3.8xlarge", count, transfer, said[count]) for count in MICRO_BATCHES]
    found += [played(f"c = {part} tF", 64, part, "") for part in (0.1, 0.25, 0.5, 1.0)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    found = rows()
    print(HEADER, *(row.shown() for row in found), sep="\n")
    write_result("alpacomm_fig7_9", found, arguments, __doc__ or "", efficiency=EFFICIENCY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
