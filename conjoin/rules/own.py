"""Rules of a user's own file, each proven before any is used.

A rule that a trial refutes, or that neither a proof nor a derivation is found for, is refused, and the file with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from conjoin.errors import DeclarationError
from conjoin.ir import own_proof
from conjoin.rules.derivation import Deriver
from conjoin.rules.library import Entry, Library, make_entry, method_of, operators_version
from conjoin.rules.text import WrittenRule, load_rules
from conjoin.rules.verdict import Judgement, Standing, judge

_DERIVED = "derived"
"""How a rule is proven that follows from the library, and not from definitions at once."""
_SHOWN = 600


@dataclass(frozen=True, slots=True)
class OwnRules:
    """Proven rules, and the file that they are from."""

    source: str
    library: Library

    @property
    def digest(self) -> str:
        """What changes with any of the rules, with where they are from, and with what their proofs rest on."""
        return hashlib.sha256("\n".join(map(self.proof_of, self.library.entries)).encode()).hexdigest()[:16]

    def proof_of(self, entry: Entry) -> str:
        """How a plan tells why a rewrite by such a rule is right, and where the rule is from."""
        return own_proof(entry.method, entry.stamp, operators_version(), self.source)


def prove_rules(path: str | PathLike[str]) -> OwnRules:
    """The rules of a file, proven; DeclarationError tells of the first that is not, with a counterexample if any."""
    written = load_rules(Path(path)).rules
    name = Path(path).name
    source = name if name.isprintable() else "a file"
    deriver = Deriver(Library.shipped().rules)
    return OwnRules(source, Library(tuple(_proven(one, judge(one.rule, deriver, one.when or None), source)
                                          for one in written)))  # fmt: skip


def _proven(written: WrittenRule, found: Judgement, source: str) -> Entry:
    rule = found.rule
    match found.standing:
        case Standing.PROVEN:
            return make_entry(rule, written.when or found.verdict.conditions, method_of(rule))
        case Standing.DERIVED if found.verdict.proven:
            return make_entry(rule, written.when or found.verdict.conditions, method_of(rule))
        case Standing.DERIVED:
            return make_entry(rule, written.when, _DERIVED)
        case Standing.REFUTED:
            raise _refuted(found, source)
    raise DeclarationError(
        f"The rule {rule.name!r} of {source} was to be used. It is neither proven nor refuted: {found.reason}. Only "
        f"what is proven is used; leave it out, or state what it needs as 'when' and try `conjoin rules test`."
    )


def _refuted(found: Judgement, source: str) -> DeclarationError:
    held = f" It holds where {', '.join(found.verdict.conditions)}." if found.verdict.proven else ""
    how = f"State that as when = {list(found.verdict.conditions)}" if held else "Leave it out"
    return DeclarationError(
        f"The rule {found.rule.name!r} of {source} was to be used. A trial refutes it: there are tensors for which its "
        f"sides differ.{held} {how}, or correct it:\n{str(found.counterexample)[:_SHOWN]}"
    )
