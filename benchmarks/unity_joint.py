"""Unity's Figures 15b and 16: what deciding about graph and layouts together is worth, on 96 V100 of Summit.

    python -m benchmarks.unity_joint                       # writes results/unity_joint.json
    python -m benchmarks.unity_joint --models xdl dlrm

`joint` against `sequential`, which first takes the graph that is fastest on one device and then finds the layouts of
that graph as `joint` does: space, costs and time are the same. The paper's figure goes up to 1.4. Of its three
examples, (b) is the product with concatenated embeddings taken apart and (c) the bag of embeddings as embeddings and a
sum; both are substitutions, and the row says which ones the plan has. (a) undoes the fusion of a product and a ReLU:
here operators are not fused in the graph (compilers fuse what a rank runs, after its layouts are known), so that there
is nothing to undo, and reduction parallelism is open to every product.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.search_table import Case, Row, open_table, options
from benchmarks.unity_fig14 import PUBLISHED, cases

NAME = "unity_joint"
GPUS = 96
SEARCHES = ("joint", "sequential")


def both(models: Sequence[str], gpus: int) -> Iterator[Case]:
    """Every model by both searches."""
    for case in cases(models, (gpus,)):
        for search in SEARCHES:
            yield replace(case, search=search, paper="up to 1.4")


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """How many times as fast the plan is that was found jointly."""
    seconds = {(row.model, row.search): row.seconds for row in rows if not row.error}
    models = dict.fromkeys(model for model, _ in seconds)
    return {
        model: seconds[model, "sequential"] / seconds[model, "joint"]
        for model in models
        if all((model, search) in seconds for search in SEARCHES)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, tuple(PUBLISHED))
    parser.add_argument("--gpus", type=int, default=GPUS, help="a multiple of six")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(both(chosen.models, chosen.gpus))
    found = ratios(table.rows)
    for model, ratio in found.items():
        print(f"{model:<17} joint is {ratio:.3f} times as fast as sequential")
    table.write(joint_over_sequential={model: round(ratio, 4) for model, ratio in found.items()})
    return table.status


if __name__ == "__main__":
    sys.exit(main())
