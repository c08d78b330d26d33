"""Unity's Figures 15b and 16: what deciding about graph and layouts together is worth, on 96 V100 of Summit.

    python -m benchmarks.unity_joint                       # writes results/unity_joint.json
    python -m benchmarks.unity_joint --models xdl dlrm

`joint` against two searches that first take the graph which is fastest on one device: `sequential` then finds its
layouts as `joint` does, so that space, costs and time are the same (the paper's figure 15b, up to 1.4), and
`taso-then-flexflow` by random changes from the named strategies, as the two papers together do (figure 14).

Of the paper's three examples, (a) undoes the fusion of a product and a ReLU: `relu-bias-to-bias` makes one kernel of
both, which is faster on one device but cannot have its sums on several. (b) is the product with concatenated
embeddings taken apart and (c) the bag of embeddings as embeddings and a sum. All are substitutions, and the row says
which ones the plan has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.search_table import Case, Row, open_table, options
from benchmarks.unity_fig14 import PUBLISHED, cases

NAME = "unity_joint"
GPUS = 96
SEARCHES = ("joint", "sequential", "taso-then-flexflow")


def all_of(models: Sequence[str], gpus: int) -> Iterator[Case]:
    """Every model by all searches."""
    for case in cases(models, (gpus,)):
        for search in SEARCHES:
            yield replace(case, search=search, paper="up to 1.4" if search == "sequential" else "")


def ratios(rows: Sequence[Row], other: str) -> dict[str, float]:
    """How many times as fast the plan is that was found jointly."""
    seconds = {(row.model, row.search): row.seconds for row in rows if not row.error}
    joint = {model: each for (model, search), each in seconds.items() if search == "joint"}
    return {model: round(seconds[model, other] / joint[model], 4) for model in joint if (model, other) in seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, tuple(PUBLISHED))
    parser.add_argument("--gpus", type=int, default=GPUS, help="a multiple of six")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(all_of(chosen.models, chosen.gpus))
    found = {other: ratios(table.rows, other) for other in SEARCHES[1:]}
    for other, by_model in found.items():
        for model, ratio in by_model.items():
            print(f"{model:<17} joint is {ratio:.3f} times as fast as {other}")
    table.write(joint_over=found)
    return table.status


if __name__ == "__main__":
    sys.exit(main())
