"""The text form of expressions: `matmul(a, concat[axis=-1](b, c))`.

    expressions = expression (";" expression)*
    expression  = name ["[" parameter ("," parameter)* "]"] ["(" expression ("," expression)* ")"]
    parameter   = name "=" (name | number | "?")

A name alone is an operator without operands (`identity`) or else an input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from conjoin.errors import UsageError
from conjoin.rules.operators import BY_NAME, FUNCTIONS, RuleOp
from conjoin.rules.patterns import Apply, Expr, Input, Parameter

MAX_DEPTH = 40
"""Of nested operators; the papers' deepest rule has 6."""
MAX_SIZE = 400
"""Of operators and inputs written in one side of a rule."""
MAX_NAME = 200
MAX_NUMBER = 10**6
_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>-?[0-9]+)|(?P<sign>[\[\](),;=?]))")
_LEAST: Mapping[str, int] = {
    "stride": 1, "pad": 0, "groups": 1, "kernel": 1, "part": 0, "mesh": 2, "parts": 1, "vertices": 1,
}  # fmt: skip
"""The smallest number a parameter may be; one that is not here and is not an axis has to be a name."""


def parse_expressions(text: str, place: str = "The expression") -> tuple[Expr, ...]:
    """Expressions from their text; `place` begins the message where it is malformed.

    >>> (expr,) = parse_expressions("relu(concat[axis=a](x, y))")
    >>> print(expr)
    relu(concat[axis=a](x, y))
    """
    return _Parser(text, place).expressions()


def print_expressions(exprs: Iterable[Expr]) -> str:
    """The text of expressions, which `parse_expressions` reads back."""
    return "; ".join(map(str, exprs))


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name nearest to one that is unknown, as the end of a sentence; nothing where none is near."""
    found = get_close_matches(name, list(known), 1)
    return f"; the nearest name is {found[0]!r}" if found else ""


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    column: int


class _Parser:
    """One text, read from left to right."""

    def __init__(self, text: str, place: str) -> None:
        self.text, self.place = text, place
        self.column, self.size = 0, 0
        self.token = _Token("", 0)
        self._advance()

    def expressions(self) -> tuple[Expr, ...]:
        found = [self._expression(0)]
        while self._accept(";"):
            found.append(self._expression(0))
        if self.token.text:
            raise self._error(f"there is {self.token.text!r} where it should end or go on with ';'")
        return tuple(found)

    def _advance(self) -> None:
        rest = self.text[self.column :].strip()
        if not rest:
            self.token = _Token("", len(self.text))
            return
        match = _TOKEN.match(self.text, self.column)
        if match is None:
            self.token = _Token(rest[0], self.text.index(rest[0], self.column))
            raise self._error(f"the sign {rest[0]!r} has no meaning here")
        word = match.group().strip()
        self.token, self.column = _Token(word, match.end() - len(word)), match.end()

    def _accept(self, sign: str) -> bool:
        if self.token.text != sign:
            return False
        self._advance()
        return True

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._error(f"{sign!r} is missing before {self.token.text or 'the end'!r}")

    def _name(self, what: str) -> str:
        word = self.token.text
        if not word or not (word[0].isalpha() or word[0] == "_") or len(word) > MAX_NAME:
            raise self._error(f"{what} is missing before {word[:MAX_NAME] or 'the end'!r}")
        self._advance()
        return word

    def _expression(self, depth: int) -> Expr:
        start = self.token
        self.size += 1
        if depth > MAX_DEPTH or self.size > MAX_SIZE:
            raise self._error(f"more than {MAX_DEPTH} operators are nested or more than {MAX_SIZE} names written")
        name = self._name("an operator or input")
        if name not in BY_NAME:
            if self.token.text in ("[", "("):
                raise self._error(f"no operator is called {name!r}", start, nearest(name, BY_NAME))
            return Input(name)
        op = BY_NAME[name]
        params = self._params(op, start)
        args = self._args(depth)
        if len(args) != op.num_args:
            raise self._error(f"{name} has {len(args)} operands and takes {op.num_args}", start)
        return Apply(name, params, args)

    def _args(self, depth: int) -> tuple[Expr, ...]:
        if not self._accept("("):
            return ()
        found = [self._expression(depth + 1)]
        while self._accept(","):
            found.append(self._expression(depth + 1))
        self._expect(")")
        return tuple(found)

    def _params(self, op: RuleOp, start: _Token) -> tuple[tuple[str, Parameter], ...]:
        """In the order in which the operator declares them, without those at their defaults."""
        given: dict[str, Parameter] = {}
        if self._accept("["):
            self._param(op, given)
            while self._accept(","):
                self._param(op, given)
            self._expect("]")
        for name, default in op.params:
            if default == "" and name not in given:
                raise self._error(f"{op.name} lacks its parameter {name!r}", start)
        return tuple((name, given[name]) for name, default in op.params if given.get(name, default) != default)

    def _param(self, op: RuleOp, given: dict[str, Parameter]) -> None:
        at, known = self.token, [name for name, _ in op.params]
        name = self._name("a parameter")
        if name not in known or name in given:
            why = "is given twice" if name in given else f"is none of {op.name}, which has {', '.join(known) or 'none'}"
            raise self._error(f"the parameter {name!r} {why}", at, "" if name in given else nearest(name, known))
        self._expect("=")
        at, word = self.token, self.token.text
        value = self._value(name)
        if value is None:
            raise self._error(f"{name}={word[:MAX_NAME]} is not possible for {op.name}", at)
        given[name] = value
        self._advance()

    def _value(self, name: str) -> Parameter | None:
        """The value that the token is for a parameter; None where it cannot be."""
        word = self.token.text
        if word == "?":
            return word if name == "groups" else None
        if word[:1].isalpha() or word[:1] == "_":
            no_function = name == "act" and word in BY_NAME and word not in FUNCTIONS
            return word if name != "part" and len(word) <= MAX_NAME and not no_function else None
        if not word.lstrip("-").isdecimal() or len(word) > len(str(MAX_NUMBER)):
            return None
        number = int(word)
        if name == "axis":
            return number
        most = 1 if name == "part" else MAX_NUMBER
        return number if name in _LEAST and _LEAST[name] <= number <= most else None

    def _error(self, why: str, at: _Token | None = None, hint: str = "") -> UsageError:
        column = (at or self.token).column
        begin = max(column - 20, 0)
        excerpt = self.text[begin : column + 20].strip()
        return UsageError(
            f"{self.place} cannot be read at column {column + 1}, near {excerpt!r}. "
            f"There, {why}{hint}. "
            f"Write it as in matmul(a, concat[axis=-1](b, c))."
        )
