"""The library: rules with the stamps of their proofs, indexed by what stands at the root of their left side.

A stamp is bound to the rule's text, to how it was proven and to the version of the operators: a rule that was edited,
or operators that were declared or defined differently when it was proven, are noticed when the library is loaded.
Plans name the stamps of the rules they were made by, so that a plan by a rule that is not in the library any more is
noticed too, when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from conjoin.errors import UsageError
from conjoin.ir import LIBRARY, STAMPED
from conjoin.rules.definitions.affine import Affine, symbol
from conjoin.rules.definitions.declarations import ask
from conjoin.rules.definitions.dims import Dim, Dims, IllFormed, NotCovered
from conjoin.rules.definitions.functions import INTERPRETED
from conjoin.rules.definitions.proof import Frame, prove
from conjoin.rules.definitions.sums import Access, Factor, Function, Guard, Largest, Size, Sum, replace_in, substitute
from conjoin.rules.operators import BY_NAME, FUNCTIONS, RuleOp
from conjoin.rules.parser import print_expressions
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, operators_in
from conjoin.rules.text import RuleFile, WrittenRule, load_rules, save_rules

SHIPPED = LIBRARY
"""Made by `conjoin rules generate`."""
_REWRITING = 2
"""Raised when rules are matched or applied otherwise than before, because that was wrong: plans made until then name
stamps that no library has any more."""
FOR_ANY_FUNCTION, FOR_THIS_FUNCTION = "definitions", "functions"
"""What proofs are called: from definitions alone, or also from what is known of the rule's one function."""
_GENERIC: Mapping[str, tuple[Parameter, ...]] = {
    "part": (0, 1),
    "pad": ("same", "valid", "p"),
    "act": ("none", "f"),
    "groups": ("?", 1, "g"),
}
"""Parameters that decide what a definition is; of any other one value stands for all."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A rule of the library."""

    rule: Rule
    conditions: tuple[str, ...]
    """What it needs beyond what makes the left side fit together, in words."""
    method: str
    """How it was proven."""
    stamp: str
    shortcut: str = ""
    """Which way by other rules it spares a search; empty where there is none."""

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def root(self) -> str:
        """The operator of the left side's first output; "" where that is an input."""
        first = self.rule.left[0]
        return first.op if isinstance(first, Apply) else ""


def make_entry(rule: Rule, conditions: Iterable[str], method: str) -> Entry:
    """An entry for a rule that was just proven."""
    known = tuple(conditions)
    return Entry(rule, known, method, stamp_of(rule, known, method, operators_version()))


def method_of(rule: Rule) -> str:
    """How a rule that is proven is proven: for any function in place of its own, or from what is known of that one."""
    written = _functions_in(rule)
    if len(written) != 1 or not written <= INTERPRETED:
        return FOR_ANY_FUNCTION
    unknown = next(name for name in FUNCTIONS if name not in INTERPRETED)
    return FOR_ANY_FUNCTION if prove(_about_function(rule, unknown)).proven else FOR_THIS_FUNCTION


def stamp_of(rule: Rule, conditions: tuple[str, ...], method: str, version: str) -> str:
    """What a proof of these words is stamped with."""
    sides = [print_expressions(rule.left), print_expressions(rule.right)]
    return _digest([rule.name, *sides, conditions, method, version])


@dataclass(frozen=True)
class Library:
    """Proven rules."""

    entries: tuple[Entry, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, and those about `relu` also about every other function where the proof knows nothing of it."""
        return tuple(rule for entry in self.entries for rule in of_each_function(entry))

    @cached_property
    def by_root(self) -> Mapping[str, tuple[Entry, ...]]:
        """The entries by the operator that the first output of their left side ends with."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.root, []).append(entry)
        return {root: tuple(entries) for root, entries in found.items()}

    @staticmethod
    @cache
    def shipped() -> Library:
        """The library that comes with conjoin."""
        return Library.load(SHIPPED)

    @staticmethod
    def load(path: str | Path) -> Library:
        """A library from its file; one rule whose stamp does not fit and none is loaded."""
        file, version = load_rules(path), operators_version()
        if file.operators != version and file.rules:
            raise UsageError(
                f"The library {path} was proven for version {file.operators[:40] or '(none)'} of the operators. "
                f"They are at version {version} now, so that the proof of {file.rules[0].rule.name!r} and of all other "
                f"rules may not hold. Run `conjoin rules prove` to prove them again."
            )
        return Library(tuple(_checked(written, str(path), version) for written in file.rules))

    def save(self, path: str | Path) -> None:
        """Write it, aside first, so that a half-written one never stands there."""
        rules = (WrittenRule(e.rule, e.conditions, f"{e.method}:{e.stamp}", e.shortcut) for e in self.entries)
        save_rules(path, RuleFile(tuple(rules), operators_version()))


def of_each_function(entry: Entry) -> Iterator[Rule]:
    """A rule about one function for each of them, under its own name where it is another one than is written."""
    rule, written = entry.rule, _functions_in(entry.rule)
    yield rule
    activated = any(expr.param("act") in FUNCTIONS for expr in operators_in(*rule.outputs))
    for name in FUNCTIONS if len(written) == 1 and not activated and entry.method == FOR_ANY_FUNCTION else ():
        if name not in written:
            yield _about_function(rule, name)


def _functions_in(rule: Rule) -> set[str]:
    return {expr.op for expr in operators_in(*rule.outputs) if expr.op in FUNCTIONS}


def _about_function(rule: Rule, name: str) -> Rule:
    left, right = (tuple(_with_function(expr, name) for expr in side) for side in (rule.left, rule.right))
    return Rule(f"{rule.name}:{name}", left, right)


def _with_function(expr: Expr, name: str) -> Expr:
    if isinstance(expr, Input):
        return expr
    args = tuple(_with_function(arg, name) for arg in expr.args)
    return replace(expr, op=name if expr.op in FUNCTIONS else expr.op, args=args)


def _checked(written: WrittenRule, path: str, version: str) -> Entry:
    match = STAMPED.fullmatch(written.proof)
    if match is None:
        raise UsageError(
            f"Rule {written.rule.name!r} of the library {path} has the proof {written.proof[:40]!r}. "
            f"A proof is a method and a stamp, such as definitions:0123456789abcdef, and no rule is used without one. "
            f"Run `conjoin rules prove` to prove it."
        )
    method, stamp = match["method"], match["stamp"]
    expected = stamp_of(written.rule, written.when, method, version)
    if stamp != expected:
        raise UsageError(
            f"Rule {written.rule.name!r} of the library {path} is not what was proven. "
            f"Its stamp is {stamp}, and its text, conditions and method give {expected}. "
            f"Run `conjoin rules prove` to prove it as it is, or undo the change."
        )
    return Entry(written.rule, written.when, method, stamp, written.shortcut)


@cache
def operators_version() -> str:
    """What changes when an operator is added, declared or defined differently, and not with how that is written.

    Also when rules are applied differently: what a stamp promises is that a plan by the rule is right.
    """
    return find_operators_version()


def find_operators_version() -> str:
    """The version, not remembered."""
    ops = BY_NAME.values()
    declared = [[op.name, op.num_args, op.kind, op.params, op.parallel, list(_definitions(op))] for op in ops]
    return _digest([_REWRITING, sorted(declared)])


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def _definitions(op: RuleOp) -> Iterator[str]:
    """What an operator is on inputs of any sizes, for each kind of parameters."""
    choices = [_GENERIC.get(name, (name[0],)) for name, _ in op.params]
    args = tuple(Input(f"x{i}") for i in range(op.num_args))
    for values in product(*choices):
        params = tuple(zip((name for name, _ in op.params), values, strict=True))
        expr = Apply(op.name, params, args)
        try:
            yield _definition(expr)
        except (IllFormed, NotCovered) as error:
            yield type(error).__name__


def _definition(expr: Apply) -> str:
    frame = Frame(Rule("", (expr,), (expr,)))
    frame.build()
    dims, tensor = frame.dims, frame.tensors[expr]
    names = {dim.name: symbol(f"d{i}") for i, dim in enumerate(dims.every)}
    index = tuple(
        tuple(symbol(f"o{i}.{j}") for j, _ in enumerate(dims.digits(dim))) for i, dim in enumerate(tensor.dims)
    )
    devices = {axis: symbol(f"at {axis}") for axis in frame.devices[expr]}
    sizes = [dims.size(dim) for dim in (*(d for arg in expr.args for d in frame.tensors[arg].dims), *tensor.dims)]
    facts = frozenset(dims.facts())
    windowed = (dim for dim in dims.every if dim.window and not dim.parent)
    declared = BY_NAME[expr.op].declared
    return " | ".join(
        [
            str(ask(declared, frame.call(expr))) if declared else "",
            ", ".join(str(size.replace(names)) for size in sizes),
            ", ".join(f"{names[dim.name]} = {_window(dims, dim, names)}" for dim in windowed),
            _guard(frozenset(atom.replace(names) for atom in facts)),
            _normal(Sum(tuple(substitute(term, names) for term in tensor.at(index, devices).terms))),
        ]
    )


def _window(dims: Dims, dim: Dim, names: Mapping[str, Affine]) -> str:
    assert dim.window is not None
    whole, kernel, stride, padding = dim.window
    size = dims.size(kernel).replace(names) if kernel else "same"
    return f"windows of {size} in {dims.size(whole).replace(names)} by {stride} after {padding}"


def _normal(value: Sum, depth: int = 0) -> str:
    """The text of a sum with summed indices named by their order, and all that has no order sorted."""
    terms: list[str] = []
    for term in value.terms:
        bound = {name: symbol(f"b{depth}.{i}") for i, name in enumerate(term.bound)}
        plain = substitute(term, bound)
        factors = sorted(_factor(factor, depth) for factor in plain.factors)
        terms.append(f"{term.coefficient} Σ{len(bound)} [{_guard(plain.guard)}] {' · '.join(factors)}")
    return f"({' + '.join(sorted(terms))})"


def _factor(factor: Factor, depth: int) -> str:
    match factor:
        case Access(tensor, indices):
            return f"{tensor}[{', '.join(_index(index, depth) for index in indices)}]"
        case Function(name, args):
            return f"{name}({', '.join(_normal(arg, depth + 1) for arg in args)})"
        case Largest(bound, _, _):
            names = {name: symbol(f"m{depth}.{i}") for i, name in enumerate(bound)}
            plain = replace_in(factor, names)
            assert isinstance(plain, Largest)
            return f"max{len(bound)} [{_guard(plain.guard)}] {_normal(plain.arg, depth + 1)}"
        case Size(size, inverse):
            return f"{'1 / ' if inverse else ''}({size})"


def _index(index: Affine | Access, depth: int) -> str:
    return _factor(index, depth) if isinstance(index, Access) else str(index)


def _guard(guard: Guard) -> str:
    return ", ".join(sorted(map(str, guard)))
