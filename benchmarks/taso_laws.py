"""TASO's verifier (sections 2.4, 2.9.6): rules proven from laws, and laws checked, with times next to the paper's.

    python -m benchmarks.taso_laws                 # sizes up to 2, one question of redundancy 1 s: a minute
    python -m benchmarks.taso_laws --full          # all sizes up to 4x4x4x4, 10 s a question, as in the paper
    python -m benchmarks.taso_laws --rules FILE    # also prove a library of rules from the laws
    python -m benchmarks.taso_laws --generated 2   # also prove what the generator finds with as many operators a side

Prints a table and writes results/taso_laws.json. Seconds are of the process, so that other work counts for little.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import z3

from conjoin.rules import VOCABULARIES, Rule, generate, load_rules, parse_rule, prove
from tests.devices import vocabularies as devices
from tests.laws.law_checks import LARGEST, check_law, find_contradiction, find_counterexample, find_redundant
from tests.laws.law_proofs import prove_by_laws, proven_lemmas
from tests.laws.laws import SOURCES, Law, laws

RESULTS = Path(__file__).parent / "results" / "taso_laws.json"
QUICK_LARGEST, QUICK_MILLISECONDS, FULL_MILLISECONDS = 2, 1000, 10_000
_RELU = "conv[act=relu]"
FALSE = Law(
    parse_rule("conv-relu-linear", f"{_RELU}(x, add(y, z))", f"add({_RELU}(x, y), {_RELU}(x, z))"),
    source="",
    comment="TASO's example of a wrong property",
)
_JOINED = "matmul(x, concat[axis=-1](y, z))"
_MERGED = "conv[groups=1, act=relu](x, concat[axis=0](enlarge[kernel=k](y), z))"
TYPICAL = (
    ("associativity (fig. 2.2a)", "matmul(matmul(x, y), z)", "matmul(x, matmul(y, z))"),
    (
        "one product for two (fig. 2.2b)",
        "matmul(x, y); matmul(x, z)",
        f"split[axis=-1, part=0]({_JOINED}); split[axis=-1, part=1]({_JOINED})",
    ),
    ("one product for a sum", "add(matmul(x, y), matmul(z, y))", "matmul(add(x, z), y)"),
    ("transposed product", "matmul(x, y)", "transpose(matmul(transpose(y), transpose(x)))"),
    (
        "two poolings, one convolution",
        "add(avg_pool[kernel=3](x), avg_pool[kernel=3](y))",
        "conv(add(x, y), pool_kernel[kernel=3])",
    ),
    (
        "merged convolutions",
        "relu(conv[groups=1](x, y)); relu(conv[groups=1](x, z))",
        f"split[axis=1, part=0]({_MERGED}); split[axis=1, part=1]({_MERGED})",
    ),
    (
        "square of a sum",
        "mul(add(x, y), add(x, y))",
        "add(add(mul(x, x), mul(x, y)), add(mul(y, x), mul(y, y)))",
    ),
    ("rows on devices", "matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), replicate(y)))"),
    (
        "two layers, one sum over devices",
        "linear(relu(linear(x, y)), z)",
        "reduce(linear(relu(linear(replicate(x), partition[axis=0](y))), partition[axis=1](z)))",
    ),
    ("relu on devices (Unity, fig. 11a)", "relu(x)", "combine[axis=a](relu(partition[axis=a](x)))"),
)


@contextmanager
def timed(what: str, into: dict[str, Any]) -> Iterator[None]:
    """Note the seconds of the process and of the clock that something took."""
    process, clock = time.process_time(), time.perf_counter()
    yield
    into[what] = {"seconds": round(time.process_time() - process, 2), "wall": round(time.perf_counter() - clock, 2)}
    print(f"{what}: {into[what]['seconds']:.1f} s of the process, {into[what]['wall']:.1f} s", flush=True)


def check_proofs(known: Sequence[Law], result: dict[str, Any]) -> None:
    """Laws against definitions, for all sizes."""
    with timed("laws proven from definitions", result):
        checks = {law.name: check_law(law) for law in known}
    wrong = [name for name, check in checks.items() if not check.proven]
    result["not proven from definitions"] = wrong
    result["laws with conditions on shapes"] = sum(bool(check.needs) for check in checks.values())
    print(f"  {len(known)} laws, not proven: {wrong}; {FALSE.name}: proven = {check_law(FALSE).proven}")


def check_sizes(known: Sequence[Law], largest: int, result: dict[str, Any]) -> None:
    """Laws by symbolic execution at small sizes."""
    for source in SOURCES:
        what = f"laws of {source} compared at all sizes up to {largest}"
        with timed(what, result):
            found = {law.name: find_counterexample(law, largest) for law in known if law.source == source}
        result[what]["obligations"] = sum(check.obligations for check in found.values())
        result[what]["counterexamples"] = [name for name, check in found.items() if check.counterexample]
        print(f"  {result[what]['obligations']:,} obligations, wrong: {result[what]['counterexamples']}", flush=True)
    false = find_counterexample(FALSE, largest)
    assert false.counterexample is not None
    result["counterexample of the false law"] = {name: list(shape) for name, shape in false.counterexample[1].items()}
    print(f"  {FALSE.name}: {result['counterexample of the false law']}")


def check_each_other(known: Sequence[Law], milliseconds: int, result: dict[str, Any]) -> None:
    """Laws against each other."""
    taso = [law for law in known if law.source == "taso"]
    for name, some in (("taso", taso), ("all", known)):
        with timed(f"consistency of {name} laws", result):
            found = find_contradiction(some, milliseconds)
        result[f"contradiction from {name} laws"] = found.proven
        print(f"  contradiction found: {found.proven} ({found.reason})")
        with timed(f"redundancy of {name} laws", result):
            redundant = {law.name: verdict.laws for law, verdict in find_redundant(some, milliseconds)}
        result[f"redundant among {name} laws"] = {key: list(used) for key, used in redundant.items()}
        for key, used in redundant.items():
            print(f"  {key} follows from {', '.join(used)}")


def generated(most_ops: int) -> list[Rule]:
    """What the generator finds over all vocabularies, before any proof: some hold only sometimes."""
    every = (*VOCABULARIES, *devices.VOCABULARIES)
    found = (generate(vocabulary, most_ops, progress=lambda *_: None) for vocabulary in every)
    rules = [rule for selection in found for rule in selection.rules]
    return [replace(rule, name=f"{number}: {rule}") for number, rule in enumerate(rules)]


def prove_rules(rules: Sequence[Rule], what: str, result: dict[str, Any]) -> None:
    """Rules from the laws."""
    with timed(what, result):
        found = {rule.name: prove_by_laws(rule) for rule in rules}
    failed = [name for name, verdict in found.items() if not verdict.proven]
    defined = {rule.name for rule in rules if prove(rule).proven}
    contradicted = [name for name in found if name not in failed and name not in defined]
    result[what] |= {"rules": len(rules), "not proven": failed, "of them by definitions": len(defined & set(failed))}
    result[what]["proven by laws alone"] = contradicted
    each = result[what]["seconds"] / len(rules) * 1e3
    print(f"  {len(rules) - len(failed)} of {len(rules)} proven, {each:.0f} ms each;")
    print(f"  by definitions {len(defined)}; by laws and not by definitions {len(contradicted)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the paper's sizes and times")
    parser.add_argument("--rules", type=Path, help="a file of rules to prove from the laws")
    parser.add_argument("--generated", type=int, default=0, help="operators a side of rules to generate and prove")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    known, result = laws(), dict[str, Any]()
    with timed("lemmas proven", result):
        print(f"  {', '.join(lemma.name for lemma in proven_lemmas())}")
    prove_rules([parse_rule(*rule) for rule in TYPICAL], "typical rules", result)
    if arguments.rules:
        prove_rules([written.rule for written in load_rules(arguments.rules).rules], "rules of the file", result)
    if arguments.generated:
        prove_rules(generated(arguments.generated), f"generated rules of {arguments.generated} operators", result)
    check_proofs(known, result)
    check_each_other(known, FULL_MILLISECONDS if arguments.full else QUICK_MILLISECONDS, result)
    check_sizes(known, LARGEST if arguments.full else QUICK_LARGEST, result)
    result |= {
        "laws": {source: sum(law.source == source for law in known) for source in SOURCES},
        "paper": "743 rules from 43 laws in less than 10 minutes; redundancy 10 s a question, less than 10 minutes; "
        "about 1,000,000 obligations up to 4x4x4x4 in an hour on 128 cores",
        "command": "python -m benchmarks.taso_laws" + " --full" * arguments.full,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, one thread, cores shared with other work",
        "versions": {"python": platform.python_version(), "z3": z3.get_version_string(), "numpy": numpy.__version__},
    }
    arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
