"""TASO's Table 2.3: candidate substitutions left after each pruning step; and what is proven of them.

    python -m benchmarks.taso_table2_3 [--sets taso multilinear models parallel] [--state DIRECTORY] [--workers 2]

The paper enumerates graphs of at most four operators over the operators of its Table 2.1 and counts 28,744 pairs,
17,346 but for names of inputs and 743 without common subgraphs. Here an operand is a value, not a graph, so that pairs
that differ only within operands are never made; on the other hand more strides, paddings and inputs are tried. Two
steps are added: what follows from smaller candidates by rewriting is dropped, and after the proofs what follows from
the rest of the library. Seconds are of the first process, not of the clock on the wall; the result is written after
each of generating, proving and deriving, and sets that are not asked for stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from conjoin import rules
from tests.devices.vocabularies import PARALLEL, PARALLEL_IMAGES, PARALLEL_TABLES

RESULTS = Path(__file__).parent / "results" / "taso_table2_3.json"
PAPER = {"initial": 28_744, "renamed": 17_346, "without_common": 743}
"""Table 2.3."""
SETS = {
    "taso": (rules.TASO, 4),
    "multilinear": ((rules.MULTILINEAR,), 5),
    "models": ((rules.MODELS,), 3),
    "parallel": ((PARALLEL, PARALLEL_IMAGES, PARALLEL_TABLES), 3),
}
_MOST_DERIVED = 30
"""Expressions looked at from each side of a rule when it is derived from others."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_set(name: str, state: Path | None, workers: int) -> Iterator[dict[str, object]]:
    """Generate, prove and prune one set of vocabularies; what is known after each of these."""
    vocabularies, most_ops = SETS[name]
    selections = [
        rules.generate(each, most_ops, directory=state, workers=workers, progress=say) for each in vocabularies
    ]
    steps = {
        "graphs": sum(selection.num_graphs for selection in selections),
        "initial": sum(selection.counts.initial for selection in selections),
        "renamed": sum(selection.counts.renamed for selection in selections),
        "without_common": sum(selection.counts.without_common for selection in selections),
        "refuted by floats": sum(selection.refuted for selection in selections),
        "not following from smaller": sum(len(selection.rules) for selection in selections),
    }
    seconds = {selection.vocabulary: round(selection.seconds, 1) for selection in selections}
    result = {
        "command": " ".join(["python -m benchmarks.taso_table2_3", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "most_ops": most_ops,
        "steps": steps,
        "seconds": seconds,
        "vocabularies": [{k: v for k, v in asdict(s).items() if k != "rules"} for s in selections],
    }
    yield {**result, "peak_mib": _peak_mib()}
    proven = rules.prove_all([rule for each in selections for rule in each.rules], rules.prove, say, workers)
    steps.update({"instances of proven": proven.instances, "proven": len(proven.rules)})
    steps["not proven"] = len(proven.unproven)
    seconds["proofs"] = round(proven.seconds, 1)
    result["reasons"] = dict(proven.reasons().most_common())
    result["unproven"] = [f"{rule}  # {reason}" for rule, reason in proven.unproven]
    yield {**result, "peak_mib": _peak_mib()}
    start = time.process_time()
    general = rules.drop_instances(proven.rules)
    steps["general"] = len(general)
    library = rules.drop_derived(general, _MOST_DERIVED, say, workers)
    steps["library"] = len(library)
    seconds["derivations"] = round(time.process_time() - start, 1)
    yield {**result, "peak_mib": _peak_mib(), "rules": [str(rule) for rule in library]}


def _peak_mib() -> list[int]:
    """Of this process, and of the largest of its workers."""
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [round(kib / 1024) for kib in usage]


def show(name: str, result: Mapping[str, Any]) -> None:
    print(f"{name}, at most {result['most_ops']} operators")
    for step, count in result["steps"].items():
        paper = f"   paper {PAPER[step]:>9,}" if name == "taso" and step in PAPER else ""
        print(f"  {step:28} {count:>12,}{paper}")
    print(f"  seconds {result['seconds']}, MiB {result['peak_mib']}, unproven {result.get('reasons', {})}", flush=True)


def save(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Put one set's result in place of what the file has of it; written aside, then renamed."""
    before = json.loads(path.read_text(encoding="utf-8"))["sets"] if path.exists() else {}
    facts = {
        "paper": PAPER,
        "sets": {**before, name: {**_where(), **result}},
    }
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def _where() -> dict[str, object]:
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    return {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--state", type=Path, help="a directory in which a run continues where it stopped")
    parser.add_argument("--workers", type=int, default=1, help="processes, at most one for each core")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    workers = min(options.workers, os.cpu_count() or 1)
    for name in options.sets:
        for result in run_set(name, options.state, workers):
            save(options.output, name, result)
        show(name, result)


if __name__ == "__main__":
    main()
