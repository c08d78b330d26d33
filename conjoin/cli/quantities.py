"""Times and sizes as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conjoin.errors import UsageError

_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SIZES = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * (i + 1)) for i, letter in enumerate("KMGT")},
    **{f"{letter}B": 10 ** (3 * (i + 1)) for i, letter in enumerate("KMGT")},
}
_QUANTITY = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]*)")


def parse_seconds(text: str) -> float:
    """A time in seconds.

    >>> parse_seconds("90s"), parse_seconds("2m"), parse_seconds("0")
    (90.0, 120.0, 0.0)
    """
    number, unit = _parse(text)
    if unit not in _TIMES:
        raise UsageError(
            f"The time {text[:40]!r} was given. A time is a number with a unit, {', '.join(filter(None, _TIMES))}. "
            f"Write 60s, or 5m."
        )
    return number * _TIMES[unit]


def parse_bytes(text: str) -> int:
    """A size in bytes.

    >>> parse_bytes("40GiB"), parse_bytes("1.5kb")
    (42949672960, 1500)
    """
    number, unit = _parse(text)
    factor = {name.lower(): factor for name, factor in _SIZES.items()}.get(unit.lower(), 0)
    if number * factor < 1:
        shown = text.strip()[:12] if not unit else "40"
        raise UsageError(
            f"The size {text[:40]!r} was given. A size is at least one byte, a number with a unit: "
            f"{', '.join(_SIZES)}. Write {shown}GiB."
        )
    return int(number * factor)


def parse_fixed(texts: Sequence[str]) -> dict[str, str]:
    """Layouts of tensors, each as NAME=LAYOUT.

    >>> parse_fixed(["fc.weight=d0:S(0)", "input:x={}"])
    {'fc.weight': 'd0:S(0)', 'input:x': '{}'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, layout = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise UsageError(
                f"The layout {text[:60]!r} was to be fixed. A tensor is named before an equals sign, its layout stands "
                f"after it. Write fc.weight=d0:S(0), or fc.weight={{}} for the whole."
            )
        if found.get(name, layout) != layout:
            raise UsageError(
                f"The tensor {name[:60]!r} was given two layouts, {found[name][:40]} and {layout[:40]}. "
                f"It can have one. Leave one of them out."
            )
        found[name] = layout
    return found


def parse_sizes(length: int | None, texts: Sequence[str] | None) -> dict[str, int]:
    """Sizes of a model, each as NAME=N; its length has an option of its own.

    >>> parse_sizes(8192, ["layers=4"])
    {'length': 8192, 'layers': 4}
    """
    found = {} if length is None else {"length": length}
    for text in texts or ():
        name, equals, number = (part.strip() for part in text.partition("="))
        if not (name.isidentifier() and equals and re.fullmatch("[1-9][0-9]{0,8}", number)):
            raise UsageError(
                f"The size {text[:60]!r} was given. A size has a name, an equals sign and a whole number. Write "
                f"layers=4, or length=8192."
            )
        if found.get(name, int(number)) != int(number):
            raise UsageError(
                f"The size {name} was given as {found[name]} and as {number}. A model has one of each. Leave one out."
            )
        found[name] = int(number)
    return found


def _parse(text: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text.strip())
    return (float(found[1]), found[2]) if found else (-1.0, "?")
