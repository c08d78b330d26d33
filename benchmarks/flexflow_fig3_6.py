"""FlexFlow's Figure 3.6: six DNNs on its two clusters, the plan found against data parallelism and experts' strategies.

    python -m benchmarks.flexflow_fig3_6                              # 4 and 16 P100, 4, 16 and 64 K80
    python -m benchmarks.flexflow_fig3_6 --clusters p100 --gpus 16    # writes results/flexflow_fig3_6.json and .svg

Samples a GPU are those of section 3.7.1. The expert's strategy for CNNs is one weird trick; that for RNNs puts layers
on devices of their own, which no named strategy does. What the text says of the figure is a range over all but
ResNet-101, and for NMT on 64 K80 its Figure 3.7; the paper's figures are measured, ours are predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from benchmarks.search_table import Case, open_table, options, speedups

NAME = "flexflow_fig3_6"
GPUS_PER_NODE = 4
CLUSTERS = {"p100": ("p100-cluster", (4, 16)), "k80": ("k80-cluster", (4, 16, 64))}
SAMPLES_PER_GPU = {"alexnet": 256, "inception-v3": 64, "resnet-101": 64, "rnntc": 64, "rnnlm": 64, "nmt": 64}
_ALL_BUT_RESNET = "1.3-3.3"


def published(model: str, cluster: str, gpus: int) -> str:
    """How many times as fast as the best of data parallelism and experts' strategies, as the text says it."""
    if model == "resnet-101":
        return "1.0"
    return "1.7-2.4" if (model, cluster, gpus) == ("nmt", "k80", 64) else _ALL_BUT_RESNET


def cases(models: Sequence[str], clusters: Sequence[str], gpus: Sequence[int] | None) -> Iterator[Case]:
    """Every model on every cluster and number of GPUs; a name may end in `:tiny`."""
    for cluster in clusters:
        machine, usual = CLUSTERS[cluster]
        for number in usual if gpus is None else gpus:
            for model in models:
                base = model.removesuffix(":tiny")
                batch_size, said = SAMPLES_PER_GPU[base] * number, published(base, cluster, number)
                yield Case(model, f"{machine}:{number // GPUS_PER_NODE}", batch_size, said)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, tuple(SAMPLES_PER_GPU))
    parser.add_argument("--clusters", nargs="+", choices=tuple(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--gpus", type=int, nargs="+", help="multiples of four")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(cases(chosen.models, chosen.clusters, chosen.gpus))
    table.draw("GPUs", "times as fast as the best named strategy", speedups(table.rows))
    return table.status


if __name__ == "__main__":
    sys.exit(main())
