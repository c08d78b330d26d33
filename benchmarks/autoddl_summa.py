"""AutoDDL's baseline Summa in its Figures 9 and 10: seconds of communication of GPTs against Megatron, on paper.

    python -m benchmarks.autoddl_summa                     # writes results/autoddl_summa.json

Summa (as in Optimus) splits every matrix over a mesh of r x c devices and replicates none: samples and what a weight
sums over along r, features along c. A product of M x K by K x N has the left matrix broadcast along rows and the right
one along columns, panel by panel; its two gradients broadcast one operand and reduce the result. So a device moves
3 (MK / r + KN / c) elements for each layer, the second part again in every micro-batch, and its weights are never
all-reduced. Megatron all-reduces activations four times a block and gradients of weights once a step.

No runtime here broadcasts panels, so this is arithmetic by alpha and beta of the machine's links (Table 2 of the paper;
a pipelined broadcast or reduction takes (p - 1) alpha + n beta) and not a simulation. Both baselines take the best mesh
and the fewest micro-batches, in powers of two, that fit into nine tenths of the memory: 16 bytes of a parameter and its
Adam, activations as Korthikanti et al. count them (arXiv 2205.05198, section 4), twice as much in float32. Products
run at 0.7 of the peak. Embeddings and logits are left out of both. The paper measures whole steps; it says that
Megatron is faster on 64 nodes and Summa catches up after 128, and that on two servers of A100 Summa is about ten times
slower. On 256 nodes Megatron does not fit by this count, with one sequence at a time; the paper ran it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf

from benchmarks.search_table import RESULTS, circumstances
from conjoin.machine import parse_machine

NAME = "autoddl_summa"
LAYERS_OF_A_BLOCK = ((1, 3), (1, 1), (1, 4), (4, 1))
"""What goes in and comes out, in widths: query, key and value; projection; up; down."""
EFFICIENCY, FREE = 0.7, 0.9
STORED = 16
"""Bytes of a parameter: itself, its gradient and Adam's two averages, in float32."""


@dataclass(frozen=True, slots=True)
class Case:
    """A GPT on a machine: devices of a server are one level of links, servers the other."""

    name: str
    machine: str
    servers: int
    devices: int
    """Of a server."""
    layers: int
    width: int
    heads: int
    sequences: int
    item: int
    """Bytes of a number that is sent."""
    paper: str
    length: int = 1024

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.width**2

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


CASES = (
    Case("8 layers", "piz-daint:64", 64, 1, 8, 8192, 64, 1024, 4, "Megatron is faster"),
    Case("20 layers", "piz-daint:128", 128, 1, 20, 8192, 64, 1024, 4, "about as fast"),
    Case("44 layers", "piz-daint:256", 256, 1, 44, 8192, 64, 1024, 4, "Summa is no slower"),
    Case("28 layers", "a100-2x16", 2, 16, 28, 4096, 32, 2048, 2, "Summa is ten times slower"),
)


@dataclass(frozen=True, slots=True)
class Links:
    """Latency and seconds a byte of a device, where all devices of a server send at once."""

    alpha: float
    beta: float

    def broadcast(self, count: int, size: float, panels: int = 1) -> float:
        """Or a reduction to one; pipelined, in so many panels."""
        return panels * (count - 1) * self.alpha + size * self.beta if count > 1 else 0.0

    def all_reduce(self, count: int, size: float) -> float:
        return 2 * (count - 1) * (self.alpha + size / count * self.beta) if count > 1 else 0.0


def links_of(case: Case) -> tuple[Links, Links]:
    """Between servers, and inside one."""
    (kind,) = parse_machine(case.machine).nodes
    network = next(link for link in kind.links if "network" in link.ends)
    between = Links(network.latency, case.devices / network.bandwidth)
    own = [link for link in kind.links if "0" in link.ends and case.devices > 1]
    fast = max(own, key=lambda link: link.bandwidth, default=network)
    return between, Links(fast.latency, 1 / fast.bandwidth)


def micro_batches(case: Case, split: int, per_token: float, stored_over: int) -> int | None:
    """The fewest that fit: activations of a micro-batch's tokens on one device, and what is stored of parameters."""
    memory = FREE * parse_machine(case.machine).device_types[0].memory_bytes
    left = memory - STORED * case.parameters / stored_over
    micro = 1
    while micro * split <= case.sequences:
        if case.layers * case.width * per_token * case.tokens / split / micro <= left:
            return micro
        micro *= 2
    return None


def scores(case: Case) -> float:
    """What attention keeps, beside what is linear in width."""
    return 5 * case.heads * case.length / case.width


def summa(case: Case) -> tuple[float, str]:
    """Seconds of communication on the best mesh."""
    every = case.servers * case.devices
    found = (inf, "none fits")
    for rows in (n for n in range(1, every + 1) if every % n == 0):
        columns = every // rows
        if case.heads % columns or (case.devices > 1 and columns != case.devices):
            continue
        micro = micro_batches(case, rows, case.item / 2 * (34 + scores(case)) / columns, every)
        if micro is None:
            continue
        between, inside = links_of(case)
        along_row = inside if columns <= case.devices else between
        seconds, panels, tokens = 0.0, max(rows, columns), case.tokens / micro
        for inputs, outputs in LAYERS_OF_A_BLOCK:
            left = tokens * inputs * case.width * case.item / rows
            right = inputs * outputs * case.width**2 * case.item / columns
            seconds += along_row.broadcast(columns, left, panels) + between.broadcast(rows, right, panels)
        found = min(found, (3 * micro * case.layers * seconds, f"{rows}x{columns}, {micro} micro-batches"))
    return found


def megatron(case: Case) -> tuple[float, str]:
    """Seconds of communication in the best degrees."""
    every, found = case.servers * case.devices, (inf, "none fits")
    for tp in (n for n in range(1, every + 1) if every % n == 0):
        dp = every // tp
        if case.heads % tp or (case.devices > 1 and tp != case.devices):
            continue
        micro = micro_batches(case, dp, case.item / 2 * (10 + (24 + scores(case)) / tp), tp)
        if micro is None or case.sequences % (dp * micro):
            continue
        between, inside = links_of(case)
        along = inside if tp <= case.devices else between
        moved = case.tokens / dp / micro * case.width * case.item
        activations = 4 * case.layers * micro * along.all_reduce(tp, moved)
        gradients = between.all_reduce(dp, case.parameters / tp * case.item)
        found = min(found, (activations + gradients, f"tp={tp}, dp={dp}, {micro} micro-batches"))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """What both come to, in seconds of a step."""

    model: str
    machine: str
    computing: float
    summa: float
    summa_mesh: str
    megatron: float | None
    """None where it does not fit."""
    megatron_degrees: str
    step_ratio: float | None
    """Computing and communication by Summa over the same by Megatron."""
    paper: str


def rows_of() -> Iterator[Row]:
    """All cases."""
    for case in CASES:
        peaks = dict(parse_machine(case.machine).device_types[0].peak_flops)
        peak = peaks["float32" if case.item == 4 else "float16"]
        attention = 12 * case.layers * case.length * case.width
        flops = case.tokens * (6 * case.parameters + attention)
        computing = flops / (case.servers * case.devices * EFFICIENCY * peak)
        (one, mesh), (other, degrees) = summa(case), megatron(case)
        if other == inf:
            yield Row(case.name, case.machine, computing, one, mesh, None, degrees, None, case.paper)
        else:
            ratio = (computing + one) / (computing + other)
            yield Row(case.name, case.machine, computing, one, mesh, other, degrees, ratio, case.paper)


def main() -> int:
    rows = list(rows_of())
    for row in rows:
        print(row)
    data = {**circumstances(f"python -m benchmarks.{NAME}", 0.0), "rows": [asdict(row) for row in rows]}
    (RESULTS / f"{NAME}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
