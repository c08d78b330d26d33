"""Unity's Figure 14: seven DNNs on Summit, the plan found against data parallelism and the best named strategy.

    python -m benchmarks.unity_fig14                          # 6, 24, 96 and 192 GPUs
    python -m benchmarks.unity_fig14 --gpus 96 --models mlp   # writes results/unity_fig14.json and .svg

Samples a GPU and optimizers are those of section 6.1. What the paper compares with is the best of data parallelism,
strategies of experts, TASO followed by FlexFlow, Megatron and DeepSpeed, all measured; here it is the best named
strategy, and all is predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.search_table import Case, open_table, options, speedups

NAME = "unity_fig14"
GPUS_PER_NODE = 6
GPUS = (6, 24, 96, 192)


@dataclass(frozen=True, slots=True)
class Published:
    """A DNN of section 6.1, and by how much Unity is faster than the best of what it is compared with."""

    samples_per_gpu: int
    speedup: str
    optimizer: str = "sgd"


PUBLISHED = {
    "resnext-50": Published(64, "1.0"),
    "inception-v3": Published(64, "1.3"),
    "bert-large": Published(4, "1.0", "adam"),
    "dlrm": Published(1024, "up to 3.6"),
    "xdl": Published(1024, "1.9"),
    "candle-uno": Published(256, "up to 1.6"),
    "mlp": Published(256, "2.0"),
}


def cases(models: Sequence[str], gpus: Sequence[int]) -> Iterator[Case]:
    """Every model on every number of GPUs; a name may end in `:tiny`."""
    for number in gpus:
        for model in models:
            known = PUBLISHED[model.removesuffix(":tiny")]
            nodes, batch_size = number // GPUS_PER_NODE, known.samples_per_gpu * number
            yield Case(model, f"summit:{nodes}", batch_size, known.speedup, known.optimizer)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, tuple(PUBLISHED))
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS), help="multiples of six")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(cases(chosen.models, chosen.gpus))
    table.draw("GPUs", "times as fast as the best named strategy", speedups(table.rows))
    return table.status


if __name__ == "__main__":
    sys.exit(main())
