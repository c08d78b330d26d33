"""The stamps of the library of rules, by which a plan that applies a rule that is no longer held for true is found out.

Rules are proven, and their library made, in `conjoin.rules`; here only its file is read, and of that only the stamps.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parent.parent / "rules" / "library.toml"
"""The library that ships."""
STAMPED = re.compile(r"(?P<method>[a-z][a-z-]*):(?P<stamp>[0-9a-f]{16})")
"""The proof of a rule of the library: how it was proven, and what that is stamped with."""
_OWN = re.compile(STAMPED.pattern + r" for (?P<version>[0-9a-f]{16}) in .+")


def own_proof(method: str, stamp: str, version: str, source: str) -> str:
    """The proof of a rule of a user's own: as one of the library, for which operators, and where the rule is from.

    >>> own_proof("definitions", "0123456789abcdef", "3fa081c4508eaae6", "mine.toml")
    'definitions:0123456789abcdef for 3fa081c4508eaae6 in mine.toml'
    """
    return f"{method}:{stamp} for {version} in {source}"


def is_own(proof: str) -> bool:
    """Whether a proof is that of a rule of a user's own."""
    return _OWN.fullmatch(proof) is not None


@cache
def library_stamps() -> frozenset[str]:
    """The stamps of all rules: each is bound to a rule, its conditions and the version of operators and rewriting."""
    return frozenset(rule["proof"].rpartition(":")[2] for rule in _library()["rule"])


def _library() -> dict[str, Any]:
    return tomllib.loads(LIBRARY.read_text(encoding="utf-8"))


def library_digest() -> str:
    """What changes with any rule of the library, and with what its proofs rest on."""
    return hashlib.sha256("".join(sorted(library_stamps())).encode()).hexdigest()[:16]


def is_held_for_true(proof: str) -> bool:
    """Whether a rewrite was by a rule that the library still has as it was applied, or by none.

    A rule of a user's own was proven, and applied, for the operators and the rewriting of then: as the library's are.
    """
    own = _OWN.fullmatch(proof)
    if own is not None:
        return bool(own["version"] == _library()["operators"])
    stamped = STAMPED.fullmatch(proof)
    return stamped is None or stamped["stamp"] in library_stamps()
