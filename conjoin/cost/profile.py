"""Profiles: measurements of one device as text that can be shipped, with where they come from; JSON lines, compressed.

The first line is an object that says device, torch version, date, command and what was fitted; every further line is
one measurement, `[key, forward, backward, host forward, host backward, spread]` in seconds, or an absence,
`[key, "reason"]`. Nothing in a profile is evaluated; sizes are bounded before and after decompression.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from typing import Any

from conjoin.cost.curves import Knots
from conjoin.cost.measurement import Absence, Measurement, Outcome
from conjoin.cost.medians import Fit, HostTime
from conjoin.cost.transfers import is_damaged
from conjoin.errors import UsageError
from conjoin.machine import reason_of, write_aside

FORMAT = "conjoin.profile"
VERSION = 2
MAX_BYTES = 2**23
MAX_TEXT_BYTES = 2**26
MAX_LINES = 200_000
MAX_CLASSES, MAX_KNOTS = 20_000, 200
MAX_DOUBLINGS, MAX_LOG_SECONDS = 8, 200
"""How far a curve may correct an estimate: of what was measured on an H200 the most is 4.2 doublings; and log2 of the
sizes it may do so at."""
MAX_OVERHEAD_SECONDS = 1.0
"""Of the start of a kernel, or of the host's time for one call: microseconds on every device that there is."""
MAX_ERROR = 1e3
_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one device, and where they come from."""

    device: str
    torch: str
    date: str
    command: str
    fit: Fit
    outcomes: tuple[Outcome, ...]


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile, aside first and then renamed; numbers are rounded to four digits."""
    words = {"device": profile.device, "torch": profile.torch, "date": profile.date, "command": profile.command}
    header = {"format": FORMAT, "version": VERSION, **words, "fit": asdict(profile.fit)}
    lines = [json.dumps(header), *(json.dumps(_line(outcome)) for outcome in profile.outcomes)]
    packed = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
    try:
        write_aside(Path(path), packed)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The profile of {profile.device} could not be written to {str(path)!r}. "
            f"The reason is: {reason_of(error)}. Choose another path."
        ) from None


def _line(outcome: Outcome) -> list[Any]:
    match outcome:
        case Measurement(key, forward, backward, host_forward, host_backward, spread):
            return [key, *(float(f"{x:.4g}") for x in (forward, backward, host_forward, host_backward, spread))]
        case Absence(key, reason):
            return [key, reason]


class _OtherVersion(Exception):
    """A profile of a format that is not read any more, or not yet."""


def load_profile(path: str | Path) -> Profile:
    """Read a profile, from a stranger too: within limits, every number checked."""
    try:
        lines = _read_text(Path(path)).splitlines()
        if len(lines) > MAX_LINES:
            raise ValueError(f"it has {len(lines):,} lines, the limit is {MAX_LINES:,}")
        return _read_profile(lines)
    except _OtherVersion as error:
        raise UsageError(
            f"The profile {str(path)!r} was to be read. It is of version {str(error)[:20]}, and this release of "
            f"conjoin reads version {VERSION}. Measure it again: `python benchmarks/operator_profile.py measure`."
        ) from None
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)[:200]
        raise UsageError(
            f"The profile {str(path)!r} was to be read. It is not a profile of version {VERSION}, or is damaged: "
            f"{reason}. Check the path, or write the profile again."
        ) from None


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ValueError("there is no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it holds {path.stat().st_size:,} bytes, the limit is {MAX_BYTES:,}")
    with gzip.open(path, "rb") as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"it holds more than {MAX_TEXT_BYTES:,} bytes of text")
    return content.decode()


def _read_profile(lines: list[str]) -> Profile:
    match json.loads(lines[0]) if lines else None:
        case {"format": "conjoin.profile", "version": int(version)} if version != VERSION:
            raise _OtherVersion(version)
        case {
            "format": "conjoin.profile", "version": int(), "device": str(device), "torch": str(torch),
            "date": str(date), "command": str(command), "fit": dict(fit),
        }:  # fmt: skip
            outcomes = tuple(map(_read_line, lines[1:]))
            return Profile(device[:200], torch[:200], date[:200], command[:1000], _read_fit(fit), outcomes)
    raise ValueError("its first line does not say what it is")


def _read_line(line: str) -> Outcome:
    match json.loads(line):
        case [str(key), str(reason)]:
            return Absence(key, reason)
        case [str(key), *numbers] if len(numbers) == 5 and not is_damaged(key):
            return Measurement(key, *map(_number, numbers))
    raise ValueError(f"{line[:60]} is not a measurement")


def _read_fit(fit: dict[str, Any]) -> Fit:
    match fit.pop("efficiency", None):
        case list(pairs) if len(pairs) <= 1000:
            efficiency = tuple(map(_read_efficiency, pairs))
        case _:
            raise ValueError("its efficiencies are not a list")
    curves, host = (fit.pop(name, None) for name in ("curves", "host"))
    if set(fit) != {"overhead_seconds", "host_forward", "host_backward", "error"}:
        raise ValueError("its fit is incomplete")
    limits = {"error": MAX_ERROR}
    numbers = {name: _within(value, limits.get(name, MAX_OVERHEAD_SECONDS)) for name, value in fit.items()}
    times = tuple(map(_read_host, _listed(host)))
    return Fit(efficiency, curves=tuple(map(_read_curve, _listed(curves))), host=times, **numbers)


def _read_efficiency(told: Any) -> tuple[str, float]:
    match told:
        case [str(name), value]:
            return name[:100], _positive(value)
    raise ValueError(f"{_shown(told)} is not an efficiency")


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_CLASSES:
        raise ValueError("its curves or host times are not a list, or too long")
    return value


def _read_curve(told: Any) -> tuple[str, Knots]:
    match told:
        case [str(name), [_, *_] as knots] if len(knots) <= MAX_KNOTS:
            line = tuple(map(_read_knot, knots))
            if all(one[0] <= other[0] for one, other in pairwise(line)):
                return name[:200], line
    raise ValueError(f"{_shown(told)} is not a curve")


def _read_knot(told: Any) -> tuple[float, float]:
    match told:
        case [x, y] if abs(_number(x)) <= MAX_LOG_SECONDS and abs(_number(y)) <= MAX_DOUBLINGS:
            return _number(x), _number(y)
    raise ValueError(f"{_shown(told)} is not a point of a curve")


def _read_host(told: Any) -> HostTime:
    match told:
        case [str(name), int(count), forward, backward] if type(count) is int and 0 <= count <= MAX_CLASSES:
            times = (_within(seconds, MAX_OVERHEAD_SECONDS) for seconds in (forward, backward))
            return HostTime(name[:200], count, *times)
    raise ValueError(f"{_shown(told)} is not a time of the host")


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and type(value) is not bool else nan
    except OverflowError:
        number = nan
    if not isfinite(number):
        raise ValueError(f"{_shown(value)} is not a number")
    return number


def _within(value: object, most: float) -> float:
    number = _number(value)
    if not 0 <= number <= most:
        raise ValueError(f"{number:g} is not between 0 and {most:g}")
    return number


def _shown(value: object) -> str:
    return repr(value)[:60]


def _positive(value: object) -> float:
    number = _number(value)
    if not 0 < number < 1e3:
        raise ValueError(f"{number} is not an efficiency")
    return number


@cache
def shipped_profiles() -> tuple[Profile, ...]:
    """The profiles that come with the package."""
    return tuple(load_profile(path) for path in sorted(_FOLDER.glob("*.jsonl.gz")))


def merge_outcomes(*sources: Iterable[Outcome]) -> dict[str, Outcome]:
    """Outcomes by key; what a later source measured replaces what an earlier one says, an absence does not."""
    merged: dict[str, Outcome] = {}
    for outcome in (outcome for source in sources for outcome in source):
        if isinstance(outcome, Measurement) or outcome.key not in merged:
            merged[outcome.key] = outcome
    return merged
