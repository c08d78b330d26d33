"""Schedules in files: a small TOML table that people can read, write and compare."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from conjoin.errors import ScheduleError
from conjoin.schedules.check import check
from conjoin.schedules.makers import MAX_MICRO_BATCHES, MAX_STAGES
from conjoin.schedules.schedule import Kind, Row, Schedule, chain

FORMAT, VERSION = "conjoin-schedule", 1
MAX_BYTES = 1 << 26
KEYS = ("format", "version", "name", "micro_batches", "owners", "edges", "rows")
_ROW = re.compile(r"([FBIW])(\d{1,6})\.(\d{1,6})|([SR])(\d{1,6})([<>])(\d{1,6})\.(\d{1,6})", re.ASCII)


def dump_schedule(schedule: Schedule) -> str:
    """The text of a file that holds a schedule.

    >>> from conjoin.schedules import gpipe
    >>> print(dump_schedule(gpipe(2, 1)))
    format = "conjoin-schedule"
    version = 1
    name = "gpipe"
    micro_batches = 1
    owners = [0, 1]
    edges = [[0, 1]]
    rows = [
        "F0.0 B0.0",
        "F1.0 B1.0",
    ]
    """
    name = re.sub(r'[^ -~]|["\\]', "?", schedule.name)
    edges = ", ".join(f"[{source}, {target}]" for source, target in schedule.edges)
    rows = "".join(f'    "{" ".join(map(str, each))}",\n' for each in schedule.rows)
    return (
        f'format = "{FORMAT}"\nversion = {VERSION}\nname = "{name}"\nmicro_batches = {schedule.num_micro_batches}\n'
        f"owners = {list(schedule.owners)}\nedges = [{edges}]\nrows = [\n{rows}]\n"
    )


def load_schedule(text: str, rendezvous: bool = False) -> Schedule:
    """The schedule in a text, proven by `check` (sends may be buffered unless `rendezvous` is asked for)."""
    if len(text) > MAX_BYTES:
        raise ScheduleError(
            f"The schedule is a text of {len(text):,} characters. The limit is {MAX_BYTES:,}. "
            f"Describe fewer micro-batches."
        )
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ScheduleError(f"The schedule is not TOML: {error}. It cannot be read. Correct it there.") from None
    unknown = next((key for key in data if key not in KEYS), None)
    missing = next((key for key in KEYS if key not in data and key not in ("name", "edges")), None)
    if unknown is not None or missing is not None:
        what = f"has an unknown key {unknown!r:.60}" if unknown is not None else f"lacks {missing}"
        raise ScheduleError(f"The schedule {what}. Its keys are {', '.join(KEYS)}. Correct it.")
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ScheduleError(
            f"The file says format {data['format']!r:.60} and version {data['version']!r:.60}. "
            f"What is read here is {FORMAT!r}, version {VERSION}. Give a file of that kind."
        )
    owners = _numbers("owners", data["owners"], MAX_STAGES, MAX_STAGES)
    edges = _edges(data["edges"]) if "edges" in data else chain(len(owners))
    num = _number("micro_batches", data["micro_batches"], MAX_MICRO_BATCHES)
    rows = data["rows"]
    if not isinstance(rows, list) or len(rows) > MAX_STAGES or not all(isinstance(each, str) for each in rows):
        raise _refusal("rows", rows, "a list of texts such as 'F0.0 B0.0', one for each owner")
    name = data.get("name", "")
    if not isinstance(name, str) or len(name) > 200:
        raise _refusal("name", name, "a text of at most 200 characters")
    schedule = Schedule(owners, num, tuple(map(read_rows, rows)), edges, name)
    check(schedule, rendezvous=rendezvous)
    return schedule


def read_rows(text: str) -> tuple[Row, ...]:
    """The rows of an owner, as they are written.

    >>> read_rows("F0.0 B0.0")[1]
    Row(kind=<Kind.BACKWARD: 'B'>, stage=0, micro_batch=0, peer=None)
    """
    return tuple(map(_row, text.split()))


def _row(text: str) -> Row:
    match = _ROW.fullmatch(text)
    if match is None or (match[4] == "S") != (match[6] == ">"):
        raise _refusal("row", text, "as F0.3, B0.3, I0.3, W0.3, S0>1.3 or R1<0.3: kind, stage, micro-batch")
    if match[1]:
        return Row(Kind(match[1]), int(match[2]), int(match[3]))
    return Row(Kind(match[4]), int(match[5]), int(match[8]), int(match[7]))


def _edges(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or len(value) > 16 * MAX_STAGES:
        raise _refusal("edges", value, "a list of pairs of stages")
    pairs = [_numbers("edge", each, MAX_STAGES, 2) for each in value]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise _refusal("edge", wrong, "a pair of stages")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _numbers(key: str, value: Any, most: int, count: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > count:
        raise _refusal(key, value, f"a list of at most {count:,} numbers")
    return tuple(_number(key, each, most) for each in value)


def _number(key: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _refusal(key, value, f"a number from 0 to {most:,}")
    return value


def _refusal(key: str, value: Any, wanted: str) -> ScheduleError:
    return ScheduleError(f"The schedule has {key} {value!r:.60}. It must be {wanted}. Correct it.")
