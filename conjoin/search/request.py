"""How a strategy is asked for: `NAME[:degrees][@axes]`, such as `megatron:tp=2,dp=4,sp` or `megatron:tp=2@d0,n0`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from conjoin.errors import UsageError
from conjoin.machine import Mesh

_MAX_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Request:
    """A strategy with the degrees and flags that were given; what was left out is decided by the strategy.

    >>> print(Request("megatron", {"tp": 2, "dp": 4}, frozenset({"sp"})))
    megatron:tp=2,dp=4,sp
    """

    name: str
    degrees: Mapping[str, int]
    flags: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()
    """The axes of the mesh from the outermost to the innermost, as degrees are dealt; empty as the machine has them."""

    def __str__(self) -> str:
        words = [f"{key}={degree}" for key, degree in self.degrees.items()] + sorted(self.flags)
        where = f"@{','.join(self.order)}" if self.order else ""
        return f"{self.name}{':' if words else ''}{','.join(words)}{where}"

    def filled(self, degrees: Mapping[str, int]) -> Request:
        """The same with every degree."""
        return replace(self, degrees=degrees)

    def mesh(self, mesh: Mesh) -> Mesh:
        """The mesh with its axes in the order asked for."""
        if not self.order:
            return mesh
        if sorted(self.order) != sorted(mesh.names):
            raise UsageError(
                f"The strategy {self.name} was given the axes {', '.join(self.order)[:80]}. The mesh is "
                f"{str(mesh) or 'one device'}, and each of its axes must be named once. "
                f"Write them from the outermost to the innermost, as @{','.join(mesh.names)}."
            )
        return Mesh(tuple(axis for name in self.order for axis in mesh.axes if axis.name == name))


@dataclass(frozen=True, slots=True)
class Keys:
    """The degrees and flags that a strategy takes."""

    degrees: tuple[str, ...]
    flags: tuple[str, ...] = ()


def parse_request(text: str, known: Mapping[str, Keys]) -> Request:
    """Read a request; UsageError names the nearest strategy or key.

    >>> parse_request("spatial:w=2", {"spatial": Keys(("h", "w"))}).degrees
    {'w': 2}
    """
    asked, _, axes = text.strip().partition("@")
    name, _, rest = asked.partition(":")
    if name not in known:
        raise UsageError(
            f"There is no strategy named {name[:40]!r}. The strategies are {', '.join(known)}. {nearest(name, known)}"
        )
    degrees: dict[str, int] = {}
    flags: set[str] = set()
    for word in filter(None, (word.strip() for word in rest.split(","))):
        key, equals, number = (part.strip() for part in word.partition("="))
        _check_key(name, key, bool(equals), known[name])
        if key in degrees or key in flags:
            raise UsageError(
                f"The strategy {name} was given {key} twice. A key has one meaning. Leave one of them out."
            )
        if equals:
            degrees[key] = _parse_degree(name, key, number)
        else:
            flags.add(key)
    order = tuple(filter(None, (axis.strip() for axis in axes.split(","))))
    return Request(name, degrees, frozenset(flags), order)


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names what was probably meant.

    >>> nearest("megatorn", ["fsdp", "megatron"])
    'Did you mean megatron?'
    """
    names = tuple(known)
    near = get_close_matches(word, names, n=1, cutoff=0.4) or names[:1]
    return f"Did you mean {near[0]}?" if near else "It takes none."


def _check_key(name: str, key: str, is_degree: bool, keys: Keys) -> None:
    right, wrong = (keys.degrees, keys.flags) if is_degree else (keys.flags, keys.degrees)
    if key in right:
        return
    forms = [*(f"{degree}=N" for degree in keys.degrees), *keys.flags]
    listed = f"The keys of {name} are {', '.join(forms)}." if forms else f"The strategy {name} takes no keys."
    if key in wrong:
        form = key if is_degree else f"{key}=2"
        raise UsageError(f"The strategy {name} was given {key!r} in the wrong form. {listed} Write {form}.")
    hint = nearest(key, (*keys.degrees, *keys.flags)) if forms else f"Write {name} alone."
    raise UsageError(f"The strategy {name} was given an unknown key {key[:40]!r}. {listed} {hint}")


def _parse_degree(name: str, key: str, number: str) -> int:
    if number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS and int(number) > 0:
        return int(number)
    raise UsageError(
        f"The strategy {name} was given {key}={number[:40]!r}. A degree is a whole number from 1. Write {key}=2."
    )
