"""The stamps of the library of rules, by which a plan that applies a rule that is no longer held for true is found out.

Rules are proven, and their library made, in `conjoin.rules`; here only its file is read, and of that only the stamps.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).parent.parent / "rules" / "library.toml"
"""The library that ships."""
STAMPED = re.compile(r"(?P<method>[a-z][a-z-]*):(?P<stamp>[0-9a-f]{16})")
"""The proof of a rule of the library: how it was proven, and what that is stamped with."""


@cache
def library_stamps() -> frozenset[str]:
    """The stamps of all rules: each is bound to a rule, its conditions and the version of operators and rewriting."""
    rules = tomllib.loads(LIBRARY.read_text(encoding="utf-8"))["rule"]
    return frozenset(rule["proof"].rpartition(":")[2] for rule in rules)


def library_digest() -> str:
    """What changes with any rule of the library, and with what its proofs rest on."""
    return hashlib.sha256("".join(sorted(library_stamps())).encode()).hexdigest()[:16]


def is_held_for_true(proof: str) -> bool:
    """Whether a rewrite was not by the library, or by a rule that the library still has as it was applied."""
    stamped = STAMPED.fullmatch(proof)
    return stamped is None or stamped["stamp"] in library_stamps()
