"""Conditions of rules: what sizes must satisfy beyond what makes the left side run, as text that can be computed.

    condition = size "=" size | size "<=" size | size "is odd" | size "is a multiple of" size | size "is split"
              | "groups = 1"
    size      = term ("+" term)*              term = factor (("*" | "/") factor)*
    factor    = number | "(" size ")" | ("half" | "first part" | "second part") "of" factor
              | "groups(" size "," size ")"                      how many groups channels make by so many of a kernel
              | "windows(" size "," size "," size "," size ")"   of a dim by kernel, stride and padding
              | ["kernel" | "parts" | "groups" | "vertices"] name  a named number, or the devices along a mesh axis
              | tensor "." dim                                   `x.1`, `x.-1`, `x.a`; a tensor may be any expression
              | "dims of" tensor ["before" number] ("but" dim)*  all others

Sizes are whole: `y.0 / groups(x.1, y.1) = w.0` does not hold where the groups do not come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from conjoin.errors import UsageError
from conjoin.rules.parser import parse_expressions
from conjoin.rules.patterns import Expr

ONE_GROUP = "groups = 1"
"""For every convolution of the left side that does not say its groups."""
_TOKEN = re.compile(
    r"\s*(?P<word>dims of|half of|first part of|second part of|kernel |parts |groups (?!\()|before|but)"
    r"|\s*(?P<sign>[-+*/(),])|\s*(?P<number>[0-9]+)(?![\w.])|\s*(?P<name>[A-Za-z_]\w*)"
)
_SPLIT = re.compile(r"(?P<one>.*?) (?P<relation>=|<=|is odd|is a multiple of|is split)(?: (?P<other>.*))?")


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Named:
    """A number by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class DimSize:
    """The size of a dim of a tensor."""

    tensor: Expr
    dim: int | str


@dataclass(frozen=True, slots=True)
class Others:
    """The sizes of all dims of a tensor but some at the end and some with a name."""

    tensor: Expr
    before: int
    but: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A size made of others: `+ * /`, `half`, `first`, `second`, `groups`, `windows`."""

    kind: str
    parts: tuple[Size, ...]


Size = Number | Named | DimSize | Others | Made


@dataclass(frozen=True, slots=True)
class Condition:
    """A relation of two sizes; of one where the second is None."""

    relation: str
    one: Size
    other: Size | None = None


def parse_condition(text: str) -> Condition:
    """A condition from its text.

    >>> parse_condition("x.1 is a multiple of m").relation
    'is a multiple of'
    """
    found = _SPLIT.fullmatch(text)
    if found is None or (found["other"] is None) != (found["relation"] in ("is odd", "is split")):
        raise _error(text, "it is no relation of two sizes")
    other = None if found["other"] is None else _Parser(found["other"]).size_alone()
    return Condition(found["relation"], _Parser(found["one"]).size_alone(), other)


def parse_conditions(texts: Iterable[str]) -> tuple[Condition, ...]:
    """All conditions but that on groups, which is about operators and no tensors."""
    return tuple(parse_condition(text) for text in texts if text != ONE_GROUP)


def tensors_in(texts: Iterable[str]) -> Iterator[Expr]:
    """The tensors that conditions are about."""
    for condition in parse_conditions(texts):
        sizes: list[Size | None] = [condition.one, condition.other]
        while sizes:
            size = sizes.pop()
            if isinstance(size, DimSize | Others):
                yield size.tensor
            elif isinstance(size, Made):
                sizes += size.parts


class _Parser:
    """The text of a size, read from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def size_alone(self) -> Size:
        found = self._sum()
        if self.text[self.at :].strip():
            raise _error(self.text, f"{self.text[self.at :].strip()[:40]!r} stands where it should end")
        return found

    def _peek(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.at)
        return ("", "") if match is None else (str(match.lastgroup), match[str(match.lastgroup)].strip())

    def _take(self) -> tuple[str, str]:
        found, match = self._peek(), _TOKEN.match(self.text, self.at)
        if match is None:
            raise _error(self.text, f"a size is missing at {self.text[self.at :][:40]!r}")
        self.at = match.end()
        return found

    def _sum(self) -> Size:
        found = self._product()
        while self._peek() == ("sign", "+"):
            self._take()
            found = Made("+", (found, self._product()))
        return found

    def _product(self) -> Size:
        found = self._factor()
        while self._peek() in (("sign", "*"), ("sign", "/")):
            _, sign = self._take()
            found = Made(sign, (found, self._factor()))
        return found

    def _factor(self) -> Size:
        if (tensor := self._tensor()) is not None:
            return DimSize(tensor, self._dim())
        kind, text = self._take()
        if kind == "number":
            return Number(int(text))
        if (kind, text) == ("sign", "("):
            found = self._sum()
            self._expect(")")
            return found
        if text == "dims of":
            return self._others()
        if kind == "word" and text.endswith(" of"):
            return Made(text.split()[0], (self._factor(),))
        if text in ("groups", "windows") and self._peek() == ("sign", "("):
            return Made(text, self._arguments())
        if text in ("kernel", "parts", "groups", "vertices"):
            kind, text = self._take()
            return Number(int(text)) if kind == "number" else Named(text)
        if kind == "name":
            return Named(text)
        raise _error(self.text, f"{text!r} is no size")

    def _arguments(self) -> tuple[Size, ...]:
        self._expect("(")
        found = [self._sum()]
        while self._peek() == ("sign", ","):
            self._take()
            found.append(self._sum())
        self._expect(")")
        return tuple(found)

    def _expect(self, sign: str) -> None:
        if self._take() != ("sign", sign):
            raise _error(self.text, f"{sign!r} is missing before {self.text[self.at :][:40]!r}")

    def _others(self) -> Others:
        end = re.search(r" before -?\d+| but ", self.text[self.at :] + " but ")
        assert end is not None
        stop = len(self.text) if self.at + end.start() >= len(self.text) else self.at + end.start()
        tail = re.fullmatch(r"(?: before -(\d+))?((?: but \w+)*)(.*)", self.text[stop:])
        assert tail is not None
        tensor = self.text[self.at : stop].strip()
        self.at = len(self.text) - len(tail[3])
        (found,) = parse_expressions(tensor, "A condition")
        return Others(found, int(tail[1] or 0), tuple(tail[2].split()[1::2]))

    def _tensor(self) -> Expr | None:
        """A tensor at this place that a dot follows, if there is one."""
        start = re.compile(r"\s*[A-Za-z_]\w*").match(self.text, self.at)
        if start is None:
            return None
        end, depth = start.end(), 0
        while end < len(self.text) and (depth or self.text[end] in "[("):
            depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(self.text[end], 0)
            end += 1
        if self.text[end : end + 1] != ".":
            return None
        (found,) = parse_expressions(self.text[self.at : end].strip(), "A condition")
        self.at = end + 1
        return found

    def _dim(self) -> int | str:
        match = re.compile(r"-?\d+|[A-Za-z_]\w*").match(self.text, self.at)
        if match is None:
            raise _error(self.text, f"a dim is missing at {self.text[self.at :][:40]!r}")
        self.at = match.end()
        return match[0] if match[0][0].isalpha() or match[0][0] == "_" else int(match[0])


def _error(text: str, why: str) -> UsageError:
    return UsageError(
        f"The condition {text[:200]!r} cannot be read. There, {why}. "
        f"Write it as in x.1 = y.0 or x.-1 is a multiple of m."
    )
