"""AutoDDL's Figure 4: eight strategies of one Transformer in the order in which they are predicted and measured.

    python -m benchmarks.autoddl_fig4                      # writes results/autoddl_fig4.json

The paper measures communication of eight strategies on 32 nodes of Piz Daint and on two servers of eight GPUs, and says
that its model captures the order on both. Here the measured steps are those of BERT-tiny on an emulated cluster (two
nodes of two ranks, Gloo) with links of two speeds, at which sending is nearly all of a step; `benchmarks.prediction`
measured them, and this table reads its results. The eight strategies split products and keep whole what is stored, as
those of the paper do; a second row has all that were measured. A pair counts as `reversed` where the order differs, and
`far` is how far apart the measured steps of the worst such pair are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.search_table import RESULTS, circumstances

NAME = "autoddl_fig4"
MODEL = "bert-tiny"
EIGHT = (
    "data-parallel:dp=4", "megatron:tp=2,dp=2", "megatron:tp=2,dp=2@d0,n0", "megatron:tp=4,dp=1",
    "sbp3d:m=2,n=2,k=1", "sbp3d:m=2,n=1,k=2", "sbp3d:m=1,n=2,k=2", "reduction:k=4",
)  # fmt: skip
FAR = 0.05
"""Steps that are measured closer than this may come in either order: the cluster's own noise is as large."""


@dataclass(frozen=True, slots=True)
class Row:
    """Some strategies at one speed of links, the fastest as measured first."""

    mbit: float
    strategies: tuple[str, ...]
    measured_ms: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    pairs: int
    reversed: int
    far: float
    """Of the reversed pair that is farthest apart as measured, how much slower the slower one is."""
    tau: float
    """Kendall's: 1 where all pairs are in the same order."""


def rank(mbit: float, rows: Sequence[Mapping[str, Any]]) -> Row:
    """Compare the two orders of strategies, pair by pair."""
    rows = sorted(rows, key=lambda row: float(row["measured_ms"]))
    pairs = list(combinations(rows, 2))
    wrong = [(fast, slow) for fast, slow in pairs if fast["predicted_ms"] > slow["predicted_ms"]]
    far = max((slow["measured_ms"] / fast["measured_ms"] - 1 for fast, slow in wrong), default=0.0)
    names, measured, predicted = (
        tuple(row[name] for row in rows) for name in ("strategy", "measured_ms", "predicted_ms")
    )
    return Row(
        mbit, names, tuple(round(ms, 1) for ms in measured), tuple(round(ms, 1) for ms in predicted), len(pairs),
        len(wrong), round(far, 4), round(1 - 2 * len(wrong) / len(pairs), 4),
    )  # fmt: skip


def rows_of(measured: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """The eight and then all, at every speed."""
    of_model = [row for row in measured if row["model"] == MODEL]
    for mbit in sorted({row["mbit"] for row in of_model}):
        here = [row for row in of_model if row["mbit"] == mbit]
        yield rank(mbit, [row for row in here if row["strategy"] in EIGHT])
        yield rank(mbit, here)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=RESULTS / "prediction.json", help="what was measured")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    measured = json.loads(chosen.measured.read_text(encoding="utf-8"))
    rows = list(rows_of(measured["rows"]))
    for row in rows:
        print(
            f"{row.mbit:g} Mbit/s, {len(row.strategies)} strategies: {row.reversed} of {row.pairs} pairs reversed, the "
            f"worst {row.far:.1%} apart; tau {row.tau:.3f}"
        )
        for line in zip(row.strategies, row.measured_ms, row.predicted_ms, strict=True):
            print("  {:<32} measured {:7.1f} ms  predicted {:7.1f} ms".format(*line))
    told = circumstances(f"python -m benchmarks.{NAME}", 0.0)
    where = {name: measured[name] for name in ("commands", "date", "machine", "torch")}
    data = {**told, "costs": "calibrated on the cluster", "measured": where, "rows": [asdict(row) for row in rows]}
    chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(any(row.far > FAR for row in rows if len(row.strategies) == len(EIGHT)))


if __name__ == "__main__":
    sys.exit(main())
