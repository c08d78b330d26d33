"""Whether searches keep their budget: models of the zoo on one device, a node and many, with little time.

    python -m benchmarks.search_budgets                               # writes results/search_budgets.json
    python -m benchmarks.search_budgets --models nasnet-a vit-b-16 --seconds 5

Seconds are of the process, from captured graph to plan. A search may take a tenth and two seconds more than its budget.
One that comes to no plan has failed: the models that are tried where none is named fit on each of the machines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import zoo
from benchmarks.search_table import Case, Row, open_table, options

NAME = "search_budgets"
MACHINES = {"dgx-h100:1x1": 8, "dgx-h100:1": 32, "dgx-h100:16": 512}
"""And the samples of a step on each."""
MODELS = ("inception-v3", "gpt-125m", "resnet-50", "bert-base", "nmt", "dlrm", "nasnet-a", "vit-b-16", "lenet", "mlp")
PART, SECONDS = 0.1, 2.0


def cases(models: Sequence[str], machines: Sequence[str], budget: float) -> Iterator[Case]:
    """Every model on every machine."""
    for model in models:
        for machine in machines:
            yield Case(model, machine, MACHINES[machine], budget=budget)


def is_kept(row: Row, budget: float) -> bool:
    """Whether a search came to a plan within its budget."""
    return not row.error and row.search_cpu_seconds <= (1 + PART) * budget + SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, MODELS)
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--seconds", type=float, default=5.0, help="of the process, for each search")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.models) - set(zoo.names()))
    if unknown:
        parser.error(f"the zoo has no {', '.join(unknown)}; it has {', '.join(zoo.names())}")
    table = open_table(chosen, NAME, arguments)
    table.fill(cases(chosen.models, chosen.machines, chosen.seconds))
    late = [f"{row.model} on {row.machine}" for row in table.rows if not is_kept(row, chosen.seconds)]
    print("every search kept its budget" if not late else f"TOO LATE, OR NO PLAN: {', '.join(late)}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
