"""Make `rules.toml`: rules over devices, as Unity generates them (section 4).

    python -m tests.devices.device_rules [--workers 2] [--state DIRECTORY]

No search uses them, for layouts give what they would (`test_device_rules.py`): they are a judge of layouts that shares
nothing with them. They are generated together with the library's vocabularies, so that what follows from rules of the
library is left out. Some minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from conjoin.rules import (
    Library,
    Rule,
    RuleFile,
    WrittenRule,
    load_rules,
    make_entry,
    make_library,
    method_of,
    operators_in,
    save_rules,
)
from conjoin.rules.library_build import SIZES
from conjoin.rules.operators import BY_NAME
from tests.devices.chains import generate_chains
from tests.devices.vocabularies import VOCABULARIES

RULES = Path(__file__).parent / "rules.toml"


def is_over_devices(rule: Rule) -> bool:
    return any(BY_NAME[expr.op].parallel for expr in operators_in(*rule.outputs))


def rules_over_devices() -> tuple[Rule, ...]:
    """All of them, those about one function for every function."""
    written = load_rules(RULES).rules
    return Library(tuple(make_entry(one.rule, one.when, method_of(one.rule)) for one in written)).rules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="a directory in which a run continues where it stopped")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    sizes = (*SIZES, *((vocabulary, 3) for vocabulary in VOCABULARIES))
    made = make_library(sizes, options.state, options.workers, more=generate_chains())
    kept = [entry for entry in made.library.entries if is_over_devices(entry.rule)]
    save_rules(RULES, RuleFile(tuple(WrittenRule(entry.rule, entry.conditions) for entry in kept)))
    print(f"{len(kept)} rules over devices")


if __name__ == "__main__":
    main()
