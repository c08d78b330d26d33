"""How patterns are matched, with whatever: expressions, classes of an e-graph, the generator's terms, a graph's calls.

Each of these says only how one of its own opens up: as which operators it reads, and what the operands then are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.patterns import Apply, Parameter

Pattern = TypeVar("Pattern", bound=Hashable)
Subject = TypeVar("Subject")
State = TypeVar("State")
Pairs = tuple[tuple[Pattern, Subject], ...]
Opened = Callable[[Pattern, Subject, State], Iterable[tuple[Pairs[Pattern, Subject], State]]]
"""For every way to read a subject as a pattern the operands of both, and the state after it; an input has none."""
_DISTINCT = ("axis", "mesh")
"""Two names of dims are two dims, and two names of mesh axes two axes."""


def matches(
    pairs: Pairs[Pattern, Subject],
    bound: Mapping[Pattern, Subject],
    state: State,
    opened: Opened[Pattern, Subject, State],
    unlike: Callable[[Pattern, Subject, Subject, State], None] | None = None,
) -> Iterator[tuple[Mapping[Pattern, Subject], State]]:
    """Every way in which patterns become what they are paired with, one after the other.

    The same pattern stands for the same everywhere; `unlike` is told of one that would stand for two things.
    """
    if not pairs:
        yield bound, state
        return
    (pattern, subject), *rest = pairs
    known = bound.get(pattern)
    if known is None:
        here = {**bound, pattern: subject}
        for operands, after in opened(pattern, subject, state):
            yield from matches((*operands, *rest), here, after, opened, unlike)
    elif known == subject:
        yield from matches(tuple(rest), bound, state, opened, unlike)
    elif unlike is not None:
        unlike(pattern, known, subject, state)


def named(name: str, value: Parameter) -> str:
    """Names of dims, of mesh axes and of numbers are kept apart."""
    return f"{name if name in _DISTINCT else ''}:{value}"


def match_parameters(
    pattern: Apply,
    values: Iterable[object],
    known: Mapping[str, object],
    is_same: Callable[[str, Parameter, object], bool] = lambda name, wanted, value: wanted == value,
) -> Mapping[str, object] | None:
    """What names of parameters stand for, when those of an application are values; None where they cannot be."""
    params = dict(known)
    for (name, wanted), value in zip(parameters(pattern), values, strict=False):
        if wanted == "?":
            continue  # whatever fits
        if is_any(name, wanted):
            if (name, value) == ("pad", "same"):
                return None  # as much as the kernel asks for, in each dim: no number
            if params.setdefault(named(name, wanted), value) != value:
                return None
        elif not is_same(name, wanted, value):
            return None
    return params if _are_apart(params) else None


def _are_apart(params: Mapping[str, object]) -> bool:
    for kind in _DISTINCT:
        values = [value for name, value in params.items() if name.startswith(f"{kind}:")]
        if len(set(values)) < len(values):
            return False
    return True
