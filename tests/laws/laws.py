"""The laws of the operators as a table: `laws.toml`, read and checked.

A law is an equation between two expressions that the papers take for granted and prove rules from (TASO, table 2.2;
Unity, section 4). Here each is checked against the definitions of its operators (`law_checks.py`); `law_proofs.py`
proves rules from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conjoin.errors import UsageError
from conjoin.rules.patterns import Expr, Parameter, Rule, operators_in
from conjoin.rules.text import parse_expressions, parse_rule, toml_of

SOURCES = ("taso", "parallel", "more")
"""Of a law: TASO's table; the operators over devices; operators that TASO has not."""
_KEYS = {"name", "source", "left", "right", "comment", "needs", "apart", "each", "hints"}
_PLACE = re.compile(r"\bf\b")
"""Where the operators of `each` stand."""


@dataclass(frozen=True, slots=True)
class Law:
    """An equation that holds wherever both sides have a meaning."""

    rule: Rule
    source: str
    """One of `SOURCES`; "" for a lemma, which follows from the others."""
    comment: str
    needs: tuple[str, ...] = ()
    """What shapes must satisfy for one side where the other has a meaning without it."""
    apart: tuple[tuple[Parameter, Parameter], ...] = ()
    """Dims or mesh axes that are not the same."""
    hints: tuple[Expr, ...] = ()
    """Terms to look at when it is proven."""

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def left(self) -> Expr:
        return self.rule.left[0]

    @property
    def right(self) -> Expr:
        return self.rule.right[0]

    @property
    def operators(self) -> frozenset[str]:
        return frozenset(expr.op for expr in operators_in(*self.rule.outputs))

    def __str__(self) -> str:
        return f"{self.left} = {self.right}"


@cache
def laws() -> tuple[Law, ...]:
    """All laws.

    >>> sum(law.source == "taso" for law in laws())
    43
    """
    return tuple(law for law in _shipped() if law.source)


@cache
def lemmas() -> tuple[Law, ...]:
    """What is proven from the laws and then used like them."""
    return tuple(law for law in _shipped() if not law.source)


@cache
def _shipped() -> tuple[Law, ...]:
    return read_laws((Path(__file__).parent / "laws.toml").read_text("utf-8"))


def read_laws(text: str) -> tuple[Law, ...]:
    """Laws and lemmas from the text of a table, those for several operators once for each."""
    data = toml_of(text)
    found: dict[str, Law] = {}
    for kind in ("law", "lemma"):
        for table in data.get(kind, []):
            for law in _each(table, kind):
                if law.name in found:
                    raise _malformed(law.name, "Another law has that name", "Give it one of its own")
                found[law.name] = law
    return tuple(found.values())


def _each(table: Mapping[str, Any], kind: str) -> Iterator[Law]:
    name = str(table.get("name", ""))
    unknown, missing = sorted(set(table) - _KEYS), sorted({"name", "left", "right", "comment"} - set(table))
    if unknown or missing:
        why = f"It has the key {unknown[0]!r}" if unknown else f"It lacks the key {missing[0]!r}"
        raise _malformed(name, why, f"A law has {', '.join(sorted(_KEYS))}")
    if kind == "law" and table.get("source") not in SOURCES:
        raise _malformed(name, f"Its source is {table.get('source')!r}", f"It is one of {', '.join(SOURCES)}")
    for op in table.get("each", [""]):
        yield _law(table, f"{name}:{op}" if op else name, str(op))


def _law(table: Mapping[str, Any], name: str, op: str) -> Law:
    def text(value: str) -> str:
        return _PLACE.sub(op, value) if op else value

    rule = parse_rule(name, text(table["left"]), text(table["right"]))
    if len(rule.left) != 1:
        raise _malformed(name, f"It has {len(rule.left)} outputs", "Write a law for each")
    return Law(
        rule=rule,
        source=table.get("source", ""),
        comment=table["comment"],
        needs=tuple(table.get("needs", ())),
        apart=tuple((_value(one), _value(other)) for one, other in table.get("apart", ())),
        hints=tuple(parse_expressions(text(hint))[0] for hint in table.get("hints", ())),
    )


def _value(word: str) -> Parameter:
    return int(word) if word.lstrip("-").isdecimal() else word


def _malformed(name: str, why: str, change: str) -> UsageError:
    return UsageError(f"The law {name!r} cannot be read. {why}. {change}.")
