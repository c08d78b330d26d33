"""The joint search against the searches of the papers, on every model of the zoo, with the same space, costs and time.

    python -m benchmarks.search_zoo                   # writes results/search_zoo.json
    python -m benchmarks.search_zoo --models bert-large --searches mcmc
    python -m benchmarks.search_zoo --searches --output bounds.json        # how far from its bound the joint one ends

Models run on four V100 of one node; language models with more than a billion parameters on 64 H100, where they fit.
Each search has the same budget, and begins with the same named strategies. The joint search is not to be slower than
any of them by more than a thousandth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import zoo
from benchmarks.search_table import Case, Row, open_table, options

NAME = "search_zoo"
MACHINE, LARGE_MACHINE = "p3.8xlarge:1", "dgx-h100:8"
LARGE = ("gpt-1.3b", "gpt-2.6b", "gpt-6.7b", "gpt-13b", "gpt-175b", "gpt-autoddl", "llama", "moe")
"""How the names of language models begin that have more than a billion parameters."""
SEARCHES = ("unity", "mcmc", "coordinate")
JOINT = "joint"
_SAME = 1.001


def cases(models: Sequence[str], searches: Sequence[str], batch_size: int) -> Iterator[Case]:
    """Every model by every search."""
    for model in models:
        machine = LARGE_MACHINE if model.startswith(LARGE) and not model.endswith(":tiny") else MACHINE
        for search in (JOINT, *searches):
            yield Case(model, machine, batch_size, "not slower", "adam", search=search)


def slower(rows: Sequence[Row]) -> list[str]:
    """Where another search found a faster plan."""
    seconds = {(row.model, row.search): row.seconds for row in rows if not row.error}
    return [
        f"{model}: {search} {found * 1e3:.4g} ms, joint {seconds[model, JOINT] * 1e3:.4g} ms"
        for (model, search), found in seconds.items()
        if (model, JOINT) in seconds and seconds[model, JOINT] > _SAME * found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, zoo.names())
    parser.add_argument("--searches", nargs="*", default=list(SEARCHES), help="beside the joint one")
    parser.add_argument("--batch", type=int, default=64, help="samples in a step")
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(cases(chosen.models, chosen.searches, chosen.batch))
    behind = slower(table.rows)
    print("\n".join(behind) or "nowhere slower")
    table.write(slower=behind)
    return int(bool(behind)) or table.status


if __name__ == "__main__":
    sys.exit(main())
