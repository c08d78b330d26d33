"""Strategies that a program registers by name: a function that drafts layouts, or a request under a shorter name."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from conjoin.errors import ConjoinError, StrategyError, UsageError
from conjoin.machine import Mesh
from conjoin.plugins import load_plugins
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts
from conjoin.search.request import OPTIONS, Keys, Request, parse_request
from conjoin.search.strategies.megatron import STORED, stored_in_pieces
from conjoin.search.strategies.table import ALIASES, PIPELINE, PIPELINE_KEYS, STRATEGIES, Strategy

Drafter = Callable[[Facts, Mesh, Request], Draft]
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_BATCH = "dp"
OWN: dict[str, Strategy] = {}
"""What programs have registered, by name."""
SHORT: dict[str, str] = {}
"""Names that stand for a request."""


def register_strategy(
    name: str,
    strategy: str | Drafter,
    *,
    degrees: Iterable[str] = (),
    flags: Iterable[str] = (),
    joins: Iterable[str] = (),
) -> None:
    """Let a strategy be asked for by a name, as `--strategy NAME:tp=2`.

    It is a request, whose name is then short for it, or a function of the facts of a graph, the mesh and the request
    that gives a `Draft`: how each of its groups of axes runs through the graph. `degrees` and `flags` are the keys it
    takes. It `joins` strategies that say how the batch is split and weights are stored, as in `fsdp+NAME:tp=2`; where
    these store weights in pieces, the draft needs a flow of the role `dp`.

    >>> register_strategy("doctest-large", "zero3+megatron:tp=2,sp+recompute=selective")
    >>> print(read_request("doctest-large+micro=4"))
    megatron:tp=2,fsdp,sp+recompute=selective+micro=4
    """
    _check_name(name)
    if isinstance(strategy, str):
        if [*degrees, *flags, *joins]:
            raise UsageError(
                f"The strategy {name} was registered as short for {strategy[:60]!r}, with keys of its own. A short "
                f"name takes none: what it stands for says all. Leave degrees, flags and joins out."
            )
        SHORT[name] = _expanded(strategy)
        try:
            read_request(name)
        except UsageError:
            del SHORT[name]
            raise
        return
    if not callable(strategy):
        raise UsageError(
            f"The strategy {name} was registered as a {type(strategy).__name__}. A strategy is a request, as "
            f"'fsdp+megatron:tp=2', or a function that gives a Draft. Pass one of these."
        )
    wanted = tuple(joins)
    unknown = [other for other in wanted if other not in ("data-parallel", *STORED)]
    if unknown:
        raise UsageError(
            f"The strategy {name} was registered to be joined with {unknown[0][:40]!r}. Only strategies that say how "
            f"the batch is split and weights are stored are joined so: data-parallel, {', '.join(STORED)}. Name some "
            f"of these."
        )
    joined = {other: frozenset({other}) if other in STORED else frozenset[str]() for other in wanted}
    more = tuple(key for other in wanted for key in STRATEGIES[other].keys.degrees)
    keys = Keys(tuple(dict.fromkeys((*degrees, *more))), (*flags, *(o for o in wanted if o in STORED)), joins=joined)
    OWN[name] = Strategy(name, keys, _guarded(name, strategy))


def known_strategies() -> Mapping[str, Strategy]:
    """All strategies, ours first."""
    return {**STRATEGIES, **OWN}


def read_request(strategy: str) -> Request:
    """What is asked for by a strategy's name; UsageError where it is not understood.

    >>> print(read_request("zero3:8 + megatron:tp=2,sp + recompute=full"))
    megatron:tp=2,dp=8,fsdp,sp+recompute=full
    """
    names = {_name_of(part) for part in strategy.split("+")}
    if not names <= {*STRATEGIES, PIPELINE, *ALIASES, *OWN, *SHORT, *OPTIONS}:
        load_plugins(strategy[:60])
    known = {**{name: found.keys for name, found in known_strategies().items()}, PIPELINE: PIPELINE_KEYS}
    return parse_request(_expanded(strategy), known, {**ALIASES, **SHORT})


def _expanded(strategy: str) -> str:
    """A request with what its short names stand for in their places."""
    return "+".join(_written_out(part.strip()) for part in strategy.split("+"))


def _written_out(part: str) -> str:
    name = _name_of(part)
    if name not in SHORT:
        return part
    rest = part.removeprefix(name)
    if rest and not rest.startswith("@"):
        raise UsageError(
            f"The strategy {name} was given {rest[:40]!r}. It is short for {SHORT[name]}, and takes no keys. Write it "
            f"alone, or that with other keys."
        )
    return SHORT[name] + rest


def _name_of(part: str) -> str:
    return re.split("[:@=]", part.strip(), maxsplit=1)[0].strip()


def _place_of(error: Exception) -> str:
    """Where a user's function failed: the innermost line of the file that it stands in."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"A strategy was to be registered as {str(name)[:40]!r}. A name is up to 40 small letters, digits, - and "
            f"_, and begins with a letter. Give it such a name."
        )
    if name in STRATEGIES or name in ALIASES or name in OPTIONS:
        raise UsageError(
            f"A strategy was to be registered as {name!r}. Conjoin has one of that name, and plans that say it would "
            f"mean another thing. Give it another name."
        )


def _guarded(name: str, draft: Drafter) -> Drafter:
    """The function of a user: what goes wrong in it is told under its name, and weights are stored as asked."""

    def drafted(facts: Facts, mesh: Mesh, request: Request) -> Draft:
        try:
            made = draft(facts, mesh, request)
        except ConjoinError:
            raise
        except Exception as error:  # a user's function may raise anything; it is told, never swallowed
            raise StrategyError(
                f"The strategy {name} was asked for {facts.graph.name}. Its function failed{_place_of(error)} with "
                f"{type(error).__name__}: {str(error)[:200]}. The error is in the program that registered it, not in "
                f"conjoin."
            ) from error
        if not isinstance(made, Draft):
            raise StrategyError(
                f"The strategy {name} was asked for {facts.graph.name}. Its function gave a {type(made).__name__} "
                f"instead of a Draft. Return conjoin.search.Draft(request, flows)."
            )
        return made if request.flags.isdisjoint(STORED) else _stored(name, facts, mesh, made)

    return drafted


def _stored(name: str, facts: Facts, mesh: Mesh, draft: Draft) -> Draft:
    """Weights in pieces over the devices that split the batch, as what the strategy is joined with says."""
    batch = [flow for flow in draft.flows if flow.group.role == _BATCH]
    others = [flow for flow in draft.flows if flow.group.role != _BATCH and flow.group.degree > 1]
    if len(batch) != 1 or len(others) > 1:
        raise StrategyError(
            f"The strategy {name} was joined with one that stores weights in pieces. It has {len(batch)} flows of the "
            f"role {_BATCH}, over whose devices they would be, and {len(others)} others. Such a strategy needs one "
            f"flow of that role, and one other at most."
        )
    return stored_in_pieces(facts, mesh, replace(draft, storage={}), batch[0].group, others)
