"""TASO's Table 2.3: candidate substitutions left after each pruning step; and what is proven of them.

    python -m benchmarks.taso_table2_3 [--sets taso multilinear models parallel] [--state DIRECTORY] [--workers 2]

The paper enumerates graphs of at most four operators over the operators of its Table 2.1 and counts 28,744 pairs,
17,346 but for names of inputs and 743 without common subgraphs. Here an operand is a value, not a graph, so that pairs
that differ only within operands are never made; on the other hand more strides, paddings and inputs are tried. Two
steps are added: what follows from smaller candidates by rewriting is dropped, and after the proofs what follows from
the rest of the library. Seconds are of the first process, not of the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

import numpy as np

from conjoin import rules

RESULTS = Path(__file__).parent / "results" / "taso_table2_3.json"
PAPER = {"initial": 28_744, "renamed": 17_346, "without_common": 743}
"""Table 2.3."""
SETS = {
    "taso": (rules.TASO, 4),
    "multilinear": ((rules.MULTILINEAR,), 5),
    "models": ((rules.MODELS,), 3),
    "parallel": ((rules.PARALLEL, rules.PARALLEL_IMAGES, rules.PARALLEL_TABLES), 3),
}
_MOST_DERIVED = 30
"""Expressions looked at from each side of a rule when it is derived from others."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_set(name: str, state: Path | None, workers: int) -> dict[str, object]:
    """Generate, prove and prune one set of vocabularies."""
    vocabularies, most_ops = SETS[name]
    selections = [
        rules.generate(each, most_ops, directory=state, workers=workers, progress=say) for each in vocabularies
    ]
    proven = rules.prove_all([rule for selection in selections for rule in selection.rules], rules.prove, say)
    start = time.process_time()
    general = rules.drop_instances(proven.rules)
    library = rules.drop_derived(general, _MOST_DERIVED, say)
    steps = {
        "graphs": sum(selection.num_graphs for selection in selections),
        "initial": sum(selection.counts.initial for selection in selections),
        "renamed": sum(selection.counts.renamed for selection in selections),
        "without_common": sum(selection.counts.without_common for selection in selections),
        "refuted by floats": sum(selection.refuted for selection in selections),
        "not following from smaller": sum(len(selection.rules) for selection in selections),
        "instances of proven": proven.instances,
        "proven": len(proven.rules),
        "not proven": len(proven.unproven),
        "general": len(general),
        "library": len(library),
    }
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "most_ops": most_ops,
        "steps": steps,
        "seconds": {
            **{selection.vocabulary: round(selection.seconds, 1) for selection in selections},
            "proofs": round(proven.seconds, 1),
            "derivations": round(time.process_time() - start, 1),
        },
        "peak_mib_so_far": [round(kib / 1024) for kib in usage],
        "reasons": dict(proven.reasons().most_common()),
        "vocabularies": [{k: v for k, v in asdict(s).items() if k != "rules"} for s in selections],
        "rules": [str(rule) for rule in library],
        "unproven": [f"{rule}  # {reason}" for rule, reason in proven.unproven],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--state", type=Path, help="a directory in which the enumeration continues where it stopped")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = {name: run_set(name, options.state, options.workers) for name in options.sets}
    for name, result in found.items():
        print(f"{name}, at most {result['most_ops']} operators")
        for step, count in result["steps"].items():  # type: ignore[attr-defined]
            paper = f"   paper {PAPER[step]:>9,}" if name == "taso" and step in PAPER else ""
            print(f"  {step:28} {count:>12,}{paper}")
        print(f"  seconds {result['seconds']}, MiB {result['peak_mib_so_far']}, unproven {result['reasons']}")
    facts = {
        "command": " ".join(["python -m benchmarks.taso_table2_3", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }
    aside = options.output.with_suffix(".tmp")
    aside.write_text(json.dumps({**facts, "paper": PAPER, "sets": found}, indent=1) + "\n")
    aside.replace(options.output)


if __name__ == "__main__":
    main()
