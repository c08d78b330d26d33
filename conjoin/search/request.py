"""How a strategy is asked for: `NAME[:keys][@axes]`, or several joined by `+`, as `hsdp:8,4+megatron:tp=8,sp+micro=4`.

Degrees have names (`tp=2`) or stand in the order of the strategy's keys. What is asked of the batch and of Megatron
becomes one request: `fsdp+megatron:tp=2` is `megatron:tp=2,fsdp`. What is run again in the backward pass
(`recompute=`), of which blocks parameters stay gathered for it (`keep=`), what lies on the host (`offload=`), how many
micro-batches make up a step (`micro=`) or a part of it (`part=`), of what batch norm takes its statistics
(`statistics=`) and in how many chunks products go that collectives are next to (`chunks=`) may be asked of every
strategy, by a part or among its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from conjoin.errors import UsageError
from conjoin.ir import MAX_CHUNKS
from conjoin.machine import Mesh

_MAX_DIGITS = 7
_MODES = ("none", "selective", "full", "every-2")
_STATISTICS = ("all", "rank")
OFFLOADS = ("activations", "optimizer", "both", "inputs")
OPTIONS = ("recompute", "keep", "offload", "micro", "part", "statistics", "chunks")
_EVERY, _KEPT = re.compile(r"every-[1-9]\d{0,3}"), re.compile(r"(every-)?[1-9]\d{0,3}")


@dataclass(frozen=True, slots=True)
class Request:
    """A strategy with the degrees and flags that were given; what was left out is decided by the strategy.

    >>> print(Request("megatron", {"tp": 2, "dp": 4}, frozenset({"sp"}), recompute="full", micro=2))
    megatron:tp=2,dp=4,sp+recompute=full+micro=2
    """

    name: str
    degrees: Mapping[str, int]
    flags: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()
    """The axes of the mesh from the outermost to the innermost, as degrees are dealt; empty as the machine has them."""
    recompute: str = ""
    """Which blocks are run again in the backward pass: none, selective, full, every-2, ...; empty as the model asks."""
    keep: str = ""
    """Of which blocks parameters stay gathered between passes: the last so many, or every-2, ...; empty for none."""
    offload: str = ""
    """What lies on the host: activations for the backward pass, optimizer state, or both; empty for nothing."""
    micro: int = 1
    """Micro-batches of a step."""
    part: int = 1
    """Micro-batches of what works on samples apart, where the rest of a step takes the batch as a whole."""
    statistics: str = "all"
    """Of what batch norm takes its statistics: of the batch on all ranks, or of the piece of it on each rank."""
    asks_micro: bool = field(default=False, compare=False)
    """Whether their number was said, be it one."""
    schedule: str = ""
    """In which order the stages of a pipeline run them."""
    chunks: int = 1
    """In how many chunks products go that collectives are next to."""

    def __str__(self) -> str:
        words = [f"{key}={degree}" for key, degree in self.degrees.items()] + sorted(self.flags)
        words += [f"schedule={self.schedule}"] if self.schedule else []
        again = f"+recompute={self.recompute}" if self.recompute else ""
        again += f"+keep={self.keep}" if self.keep else ""
        again += f"+offload={self.offload}" if self.offload else ""
        parts = f"+micro={self.micro}" if self.micro > 1 else ""
        parts += f"+part={self.part}" if self.part > 1 else ""
        own = f"+statistics={self.statistics}" if self.statistics != "all" else ""
        cut = f"+chunks={self.chunks}" if self.chunks > 1 else ""
        where = f"@{','.join(self.order)}" if self.order else ""
        return f"{self.name}{':' if words else ''}{','.join(words)}{again}{parts}{own}{cut}{where}"

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
    joins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Strategies that may be asked for beside it, each with the flags that stand for them."""

    @property
    def splits_batch(self) -> bool:
        return not {"dp", "shard"}.isdisjoint(self.degrees)


def parse_request(text: str, known: Mapping[str, Keys], aliases: Mapping[str, str] | None = None) -> Request:
    """Read a request; UsageError names the nearest strategy or key.

    >>> print(parse_request("image:4 + micro=2", {"spatial": Keys(("h", "w"))}, {"image": "spatial"}))
    spatial:h=4+micro=2
    """
    parts = [_parse_part(part, known, aliases or {}) for part in text.strip().split("+")]
    named = [part for part in parts if part.name]
    if not named:
        raise UsageError(
            f"The strategy {text[:60]!r} was asked for. It says how to run a strategy, and names none. "
            f"Write {next(iter(known))}+{text[:60]}, or another of {', '.join(known)}."
        )
    made = named[0] if len(named) == 1 else _together(named, known)
    _check_once(made.name, "axes", sum(bool(part.order) for part in parts))
    for option in OPTIONS:
        _check_once(made.name, option, sum(_asks(part, option) for part in parts))
    asked = [f"{name}=" for name in ("micro", "offload", "chunks") if any(_asks(part, name) for part in parts)]
    if asked and any(part.part > 1 for part in parts):
        raise UsageError(
            f"The strategy {text[:60]!r} was asked for. What runs in micro-batches by part= goes one by one, keeps "
            f"only what it was given, and cannot be combined with {' and '.join(asked)}. Leave one of them out."
        )
    return replace(
        made,
        order=max(part.order for part in parts),
        asks_micro=any(part.asks_micro for part in parts),
        **{option: max(getattr(part, option) for part in parts) for option in OPTIONS},
    )


def _parse_part(text: str, known: Mapping[str, Keys], aliases: Mapping[str, str]) -> Request:
    """What stands between two `+`; one that names no strategy has no name."""
    asked, _, axes = text.strip().partition("@")
    name, _, rest = asked.partition(":")
    if name.partition("=")[0].strip() in OPTIONS:
        name, rest = "", asked
    elif name not in known and name not in aliases:
        raise UsageError(
            f"There is no strategy named {name[:40]!r}. The strategies are {', '.join((*known, *aliases))}, and those "
            f"of your own whose module was imported, as by --import. {nearest(name, (*known, *aliases))}"
        )
    made = Request(aliases.get(name, name), {}, order=tuple(filter(None, (axis.strip() for axis in axes.split(",")))))
    for word in filter(None, (word.strip() for word in rest.split(","))):
        made = _with_word(made, word, known[made.name] if name else Keys(()))
    return made


def _with_word(request: Request, word: str, keys: Keys) -> Request:
    """The request with one more key; a number alone is the first degree that is not given yet."""
    name, (key, equals, given) = request.name or "option", (part.strip() for part in word.partition("="))
    if key in OPTIONS:
        _check_once(name, key, 1 + _asks(request, key))
        asks_micro = request.asks_micro or key == "micro"
        return replace(request, asks_micro=asks_micro, **{key: _parse_option(name, key, given)})
    if key == "schedule" and equals and "pp" in keys.degrees:
        _check_once(name, key, 1 + bool(request.schedule))
        return replace(request, schedule=given)
    if key.isdigit() and not equals:
        key, equals, given = next((degree for degree in keys.degrees if degree not in request.degrees), key), "=", key
    _check_key(name, key, bool(equals), keys)
    _check_once(name, key, 1 + (key in request.degrees or key in request.flags))
    if equals:
        return request.filled({**request.degrees, key: _parse_degree(name, key, given)})
    return replace(request, flags=request.flags | {key})


def _asks(part: Request, option: str) -> bool:
    return bool(getattr(part, option) != getattr(Request("", {}), option))


def _check_once(name: str, key: str, times: int) -> None:
    if times > 1:
        raise UsageError(f"The strategy {name} was given {key} twice. A key has one meaning. Leave one of them out.")


def _together(named: Sequence[Request], known: Mapping[str, Keys]) -> Request:
    """Several strategies as one: the one that takes the others beside it, with the flags that stand for them."""
    names = [part.name for part in named]
    for one in named:
        joins, others = known[one.name].joins, [part for part in named if part is not one]
        batch = [part for part in others if not known[part.name].joins]  # how it is split, and weights are stored
        if len(set(names)) == len(names) and all(part.name in joins for part in others) and len(batch) < 2:
            for key in {key for part in named for key in part.degrees}:
                _check_once(one.name, key, sum(key in part.degrees for part in named))
            degrees = {key: degree for part in (one, *others) for key, degree in part.degrees.items()}
            flags = one.flags.union(*(part.flags | joins[part.name] for part in others))
            return replace(one, degrees=degrees, flags=flags)
    claims = [name for name in names if known[name].splits_batch]
    why = f"{' and '.join(claims)} split the batch, which only one can" if len(claims) > 1 else "They cannot be joined"
    pairs = [f"{other}+{one}" for one, keys in known.items() for other in keys.joins]
    raise UsageError(
        f"The strategies {' and '.join(names)} were asked for together. {why}. "
        f"Leave one of them out, or write one of {', '.join(pairs)}."
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names what was probably meant.

    >>> nearest("megatorn", ["fsdp", "megatron"])
    'Did you mean megatron?'
    """
    names = tuple(known)
    near = get_close_matches(word.lower(), names, n=1, cutoff=0.4) or names[:1]
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


def _parse_option(name: str, key: str, given: str) -> Any:
    match key:
        case "recompute":
            return _parse_mode(name, given)
        case "keep":
            return _parse_keep(name, given)
        case "offload":
            return _parse_offload(name, given)
        case "statistics":
            return _parse_statistics(name, given)
        case "chunks":
            return _parse_chunks(name, given)
    return _parse_degree(name, key, given)


def _parse_degree(name: str, key: str, number: str) -> int:
    if number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS and int(number) > 0:
        return int(number)
    raise UsageError(
        f"The strategy {name} was given {key}={number[:40]!r}. A degree is a whole number from 1, of at most "
        f"{_MAX_DIGITS} digits. Write {key}=2."
    )


def _parse_mode(name: str, mode: str) -> str:
    """What is run again; every block is all of them."""
    if mode in _MODES or _EVERY.fullmatch(mode):
        return "full" if mode == "every-1" else mode
    raise UsageError(
        f"The strategy {name} was given recompute={mode[:40]!r}. What is run again in the backward pass is none, "
        f"selective, full, or every so many blocks one, as every-2. {nearest(mode, _MODES)}"
    )


def _parse_keep(name: str, given: str) -> str:
    if _KEPT.fullmatch(given):
        return given
    raise UsageError(
        f"The strategy {name} was given keep={given[:40]!r}. Parameters of the last so many blocks may stay gathered "
        f"between the passes, or those of every so many blocks one. Write keep=2, or keep=every-2."
    )


def _parse_chunks(name: str, given: str) -> int:
    if given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS and 1 <= int(given) <= MAX_CHUNKS:
        return int(given)
    raise UsageError(
        f"The strategy {name} was given chunks={given[:40]!r}. Products go with the collectives next to them in a "
        f"whole number of chunks from 1 to {MAX_CHUNKS}. Write chunks=4."
    )


def _parse_offload(name: str, given: str) -> str:
    if given in OFFLOADS:
        return given
    raise UsageError(
        f"The strategy {name} was given offload={given[:40]!r}. What can lie on the host are activations, the state of "
        f"the optimizer, both of these, or inputs. {nearest(given, OFFLOADS)}"
    )


def _parse_statistics(name: str, given: str) -> str:
    if given in _STATISTICS:
        return given
    raise UsageError(
        f"The strategy {name} was given statistics={given[:40]!r}. Batch norm takes its statistics over the batch of "
        f"all ranks, or each rank over its own piece. Write statistics=all or statistics=rank."
    )
