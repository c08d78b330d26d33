"""Rules as text: a TOML file of `[[rule]]` tables with `name`, `left` and `right`.

In a library each also has `when`, what it needs in words, and `proof`. The sides are expressions (`parser.py`).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from conjoin.errors import UsageError
from conjoin.ir import write_file
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parser import MAX_NAME, nearest, parse_expressions, print_expressions
from conjoin.rules.patterns import Rule, inputs_of

__all__ = [
    "RuleFile",
    "WrittenRule",
    "load_rules",
    "parse_expressions",
    "parse_rule",
    "parse_rules",
    "print_expressions",
    "save_rules",
    "toml_of",
]

MAX_BYTES = 4 * 2**20
"""Of a file; 700 rules take about 200 KiB."""
MAX_RULES = 20_000
MAX_DOTS = 1_000
"""Outside of strings: `tomllib` takes time with the square of the dots in a key."""
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_KEYS = ("name", "left", "right", "when", "proof", "shortcut")


@dataclass(frozen=True, slots=True)
class WrittenRule:
    """A rule as a file has it."""

    rule: Rule
    when: tuple[str, ...] = ()
    """What it needs beyond what makes the left side fit together, in words."""
    proof: str = ""
    """How it was proven, and the stamp of that: `definitions:1f3c…`."""
    shortcut: str = ""
    """Which way by other rules it spares, in words."""

    def __str__(self) -> str:
        left, right = print_expressions(self.rule.left), print_expressions(self.rule.right)
        lines = [f"name = {_quoted(self.rule.name)}", f"left = {_quoted(left)}", f"right = {_quoted(right)}"]
        if self.when:
            lines.append(f"when = [{', '.join(map(_quoted, self.when))}]")
        if self.proof:
            lines.append(f"proof = {_quoted(self.proof)}")
        if self.shortcut:
            lines.append(f"shortcut = {_quoted(self.shortcut)}")
        return "\n".join(["[[rule]]", *lines, ""])


def parse_rule(name: str, left: str, right: str) -> Rule:
    """A rule from the text of its sides.

    >>> print(parse_rule("transposes-cancel", "transpose(transpose(x))", "x"))
    transposes-cancel: transpose(transpose(x)) => x
    """
    sides = [parse_expressions(side, f"The {which} side of rule {name!r}")
             for which, side in (("left", left), ("right", right))]  # fmt: skip
    rule = Rule(name, sides[0], sides[1])
    if len(rule.left) != len(rule.right):
        raise UsageError(
            f"Rule {name!r} has {len(rule.left)} outputs on its left side and {len(rule.right)} on its right side. "
            f"Each output of one side replaces an output of the other. Write as many on both, separated by ';'."
        )
    unbound = [x for x in inputs_of(*rule.right) if x not in inputs_of(*rule.left)]
    if unbound:
        raise UsageError(
            f"The right side of rule {name!r} uses the input {unbound[0]!r}. "
            f"The left side has only {', '.join(inputs_of(*rule.left)) or 'none'}, so nothing says which tensor it is. "
            f"Use an input of the left side there{nearest(unbound[0], [*inputs_of(*rule.left), *BY_NAME])}."
        )
    return rule


@dataclass(frozen=True, slots=True)
class RuleFile:
    """All that a file of rules holds."""

    rules: tuple[WrittenRule, ...]
    operators: str = ""
    """The version of the operators for which they were proven."""

    def __str__(self) -> str:
        heading = [f"operators = {_quoted(self.operators)}\n"] if self.operators else []
        return "\n".join([*heading, *map(str, self.rules)])


def parse_rules(text: str) -> RuleFile:
    """The rules of a file's text, in its order."""
    data = toml_of(text)
    tables = _tables(data)
    found: dict[str, WrittenRule] = {}
    for number, table in enumerate(tables, 1):
        written = _written(table, number)
        name = written.rule.name
        if name in found:
            raise UsageError(
                f"Rule {number} of the file is named {name!r}. "
                f"Rule {list(found).index(name) + 1} has that name already, and a name tells which rule is meant. "
                f"Give one of them another name."
            )
        found[name] = written
    return RuleFile(tuple(found.values()), data.get("operators", ""))


def _read(path: str | Path) -> str:
    """The text of a file of rules, as much of it as one may have."""
    target = Path(path)
    try:
        found = target.stat()
        if not S_ISREG(found.st_mode):
            raise OSError("it is not a file")
        with target.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)[:200]
        raise UsageError(
            f"The file of rules {target} could not be read: {reason}. Nothing was loaded. Check the path."
        ) from None
    _check_length(len(content))
    return text


def load_rules(path: str | Path) -> RuleFile:
    """The rules of a file."""
    return parse_rules(_read(path))


def save_rules(path: str | Path, rules: RuleFile) -> None:
    """Write a file of rules, aside first, so that a half-written one never stands there."""
    write_file(path, str(rules), "rules", UsageError)


def toml_of(text: str) -> dict[str, Any]:
    """Plain data from the text of a file of rules."""
    _check_length(len(text))
    dots = _STRING.sub("", text).count(".")
    if dots > MAX_DOTS:
        raise UsageError(
            f"The file of rules has {dots:,} dots outside of strings, the limit is {MAX_DOTS:,}. "
            f"No rule needs that many. Check that it is a file of rules."
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"The file of rules is not TOML: {str(error)[:200]}. "
            f'A rule is a table [[rule]] with lines such as left = "add(a, b)". Correct the text there.'
        ) from None


def _check_length(length: int) -> None:
    if length > MAX_BYTES:
        raise UsageError(
            f"The file of rules holds more than {MAX_BYTES:,} bytes, which is the limit. No library needs that many. "
            f"Check that it is the right file, or divide it."
        )


def _tables(data: Mapping[str, Any]) -> list[Any]:
    for key in data:
        if key not in ("rule", "operators"):
            raise UsageError(
                f"The file of rules has the key {key[:MAX_NAME]!r}. Above its rules it has only 'operators'. "
                f"Remove it{nearest(key[:MAX_NAME], ('rule', 'operators'))}."
            )
    tables, operators = data.get("rule", []), data.get("operators", "")
    if not isinstance(tables, list) or not isinstance(operators, str):
        what = "'operators' as something else than a string" if isinstance(tables, list) else "'rule' as no list"
        raise UsageError(
            f"The file of rules has {what}. Each rule is a table of its own, and a version is a string. "
            f"Write [[rule]] with double brackets above each rule."
        )
    if len(tables) > MAX_RULES:
        raise UsageError(
            f"The file has {len(tables):,} rules, the limit is {MAX_RULES:,}. No library needs that many. Divide it."
        )
    return tables


def _written(table: object, number: int) -> WrittenRule:
    if not isinstance(table, dict):
        raise UsageError(f"Rule {number} of the file is no table. A rule has a name and two sides. Write [[rule]].")
    name = table.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise UsageError(
            f"Rule {number} of the file has no proper name. A name is a string of 1 to {MAX_NAME} letters and signs. "
            f'Write a line such as name = "add-commutes" below its [[rule]].'
        )
    for key in table:
        if key not in _KEYS:
            raise UsageError(
                f"Rule {name!r} has the key {key[:MAX_NAME]!r}. A rule has {', '.join(_KEYS)}. "
                f"Remove it{nearest(key[:MAX_NAME], _KEYS)}."
            )
    left, right, proof, shortcut = (_string(table, key, name) for key in ("left", "right", "proof", "shortcut"))
    when = table.get("when", [])
    if not isinstance(when, list) or not all(isinstance(words, str) and words.isprintable() for words in when):
        raise UsageError(
            f"Rule {name!r} has {str(when)[:MAX_NAME]!r} as 'when'. Conditions are a list of strings. "
            f'Write them as when = ["groups = 1"].'
        )
    return WrittenRule(parse_rule(name, left, right), tuple(when), proof, shortcut)


def _string(table: Mapping[str, Any], key: str, name: str) -> str:
    is_left_out = key in ("proof", "shortcut")
    found = table.get(key, "" if is_left_out else None)
    if not isinstance(found, str) or (is_left_out and not found.isprintable()):
        raise UsageError(
            f"Rule {name!r} has {'no text' if found is None else str(found)[:MAX_NAME]!r} as {key!r}. "
            f"It is a string that stands below [[rule]]. "
            f'Write it as {key} = "{"definitions:…" if key == "proof" else "add(a, b)"}".'
        )
    return found


def _quoted(text: str) -> str:
    """A TOML string; JSON's escapes are among TOML's, and all that is written here is printable."""
    return json.dumps(text, ensure_ascii=False)
