"""FlexFlow's Figures 3.6 and 3.11: eight DNNs on its three clusters, the plan found against named strategies.

    python -m benchmarks.flexflow_fig3_6                              # P100, K80 and Summit's V100
    python -m benchmarks.flexflow_fig3_6 --clusters p100 --gpus 16    # writes results/flexflow_fig3_6.json and .svg

Samples a GPU are those of section 3.7.1; for Summit, those of Unity. The expert's strategy for CNNs is one weird trick;
that for RNNs has the whole model on every node, and there operators of the same depth on the same device, which no
named strategy does: the best of all ways to deal depths out in a row is taken (`placements.py`). What the text says of
Figure 3.6 is a range over all but ResNet-101, and for NMT on 64 K80 its Figure 3.7; of Figure 3.11 it is the largest.
The paper's figures are measured, ours are predicted; `dp waits` is the part of data parallelism's step that any plan
could save which computes no less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.placements import by_depth
from benchmarks.search_table import Case, open_table, options, speedups

NAME = "flexflow_fig3_6"

@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine of the chapter, how many of its GPUs are used, and what runs on it with how many samples a GPU."""

    machine: str
    gpus_per_node: int
    gpus: tuple[int, ...]
    samples_per_gpu: dict[str, int]


_SIX = {"alexnet": 256, "inception-v3": 64, "resnet-101": 64, "rnntc": 64, "rnnlm": 64, "nmt": 64}
_RNNS = ("rnntc", "rnnlm", "nmt")
_TWO = {"dlrm": 1024, "candle-uno": 256}
CLUSTERS = {
    "p100": Cluster("p100-cluster", 4, (4, 16), _SIX),
    "k80": Cluster("k80-cluster", 4, (4, 16, 64), _SIX),
    "summit": Cluster("summit", 6, (6, 24, 96), _TWO),
}
_ALL_BUT_RESNET = "1.3-3.3"
_LARGEST = {"dlrm": "up to 10", "candle-uno": "up to 7.8"}


def published(model: str, cluster: str, gpus: int) -> str:
    """How many times as fast as the best of data parallelism and experts' strategies, as the text says it."""
    if model in _LARGEST:
        return _LARGEST[model]
    if model == "resnet-101":
        return "1.0"
    return "1.7-2.4" if (model, cluster, gpus) == ("nmt", "k80", 64) else _ALL_BUT_RESNET


def cases(models: Sequence[str], clusters: Sequence[str], gpus: Sequence[int] | None) -> Iterator[Case]:
    """Every model on every cluster that it ran on and number of GPUs; a name may end in `:tiny`."""
    for name in clusters:
        cluster = CLUSTERS[name]
        for number in cluster.gpus if gpus is None else gpus:
            for model in models:
                base = model.removesuffix(":tiny")
                if base in cluster.samples_per_gpu:
                    machine = f"{cluster.machine}:{number // cluster.gpus_per_node}"
                    yield Case(
                        model, machine, cluster.samples_per_gpu[base] * number, published(base, name, number),
                        expert=by_depth if base in _RNNS else None,
                    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, (*_SIX, *_TWO))
    parser.add_argument("--clusters", nargs="+", choices=tuple(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--gpus", type=int, nargs="+", help="multiples of four, or of six on Summit")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(cases(chosen.models, chosen.clusters, chosen.gpus))
    table.draw("GPUs", "times as fast as the best named strategy", speedups(table.rows))
    return table.status


if __name__ == "__main__":
    sys.exit(main())
