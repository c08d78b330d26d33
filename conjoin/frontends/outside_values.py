"""What forward reads from clocks and from the system's entropy: a graph would keep it as it was at capture.

Nothing in a trace tells such a number from one that is written there. Where the source of a model names a clock or a
source of entropy at all, the forward pass is watched for calls of it, which takes longer, but not what torch does of
its own in a call; where it does not, nothing is done.
"""

from __future__ import annotations

import datetime
import linecache
import os
import random
import re
import sys
import time
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from conjoin.frontends.problems import HIDDEN, find_user_line

_NAMED = re.compile(
    r"\b(time|time_ns|perf_counter\w*|monotonic\w*|process_time\w*|now|today|utcnow|urandom|uuid[14]|token_\w+"
    r"|randbits|randbelow|SystemRandom|Random|RandomState|default_rng|getpid)\s*\("
)
_CLOCKS = frozenset((
    time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
    time.process_time,
))  # fmt: skip
_DATES = ("now", "today", "utcnow")
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_MAKERS = tuple(f"{_LIBRARY}{name}.py" for name in ("random", "secrets", "uuid", "datetime"))
"""Python's own modules that call a source of entropy or a clock for whoever calls them."""


class OutsideValues:
    """Gathers what the user's own lines read from outside, in words, while a forward pass is entered."""

    def __init__(self, model: nn.Module, loss: Any, outermost: CodeType) -> None:
        self.told: dict[str, None] = {}
        self._is_named = any(map(_is_named, _files(model, loss)))
        self._outermost = outermost
        self._seeded: dict[int, random.Random] = {}
        self._watches = False

    def __enter__(self) -> None:
        self._watches = self._is_named and sys.getprofile() is None
        if self._watches:
            sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        if self._watches:
            sys.setprofile(None)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function of torch gives. Where nothing of the user's is called within, it is not looked into."""
        if not self._watches or not _is_torchs(func):
            return func(*args, **kwargs)
        sys.setprofile(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        what = _outside(called, frame, self._seeded)
        if what and (line := _line_of_caller(frame, self._outermost)):
            read = f"{what} at {line}: the graph keeps what it read; give it with the batch, or draw with torch"
            self.told[read] = None


def _is_torchs(func: Any) -> bool:
    """Whether this is a function of torch itself, in C or in Python; operators and what takes functions may be made by
    others."""
    if type(func).__module__ != "builtins":
        return False
    code = getattr(func, "__code__", None)
    return code is None or code.co_filename.startswith(HIDDEN)


def _outside(called: Any, frame: FrameType, seeded: dict[int, random.Random]) -> str | None:
    """What a function of C reads from outside; `seeded` gathers generators that begin alike in every call."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, ModuleType):
        if called in _CLOCKS:
            return f"the clock (time.{name})"
        return f"os.{name}" if name in ("urandom", "getpid") else None
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in _DATES:
        return f"the clock ({owner.__name__}.{name})"
    if isinstance(owner, random.Random) and not isinstance(owner, random.SystemRandom) and not _is_shared(owner):
        if name == "seed" and frame.f_locals.get("a") is not None:
            seeded[id(owner)] = owner
        return None if id(owner) in seeded else "a generator (random.Random)"
    return None


def _is_shared(generator: random.Random) -> bool:
    """Whether this is the one of `random.random`, of which `generator_states` tells."""
    return generator is getattr(random.random, "__self__", None)


def _line_of_caller(frame: FrameType | None, outermost: CodeType) -> str | None:
    """The user's line that asks, perhaps through Python's own modules for this; None where it is Python that asks."""
    while frame is not None and frame.f_code.co_filename in _MAKERS:
        frame = frame.f_back
    if frame is None or _is_pythons(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(HIDDEN):
        return None
    place = find_user_line(frame, outermost)
    return f"{place[0]}:{place[1]}" if place else None


def _files(model: nn.Module, loss: Any) -> set[str]:
    """Where the code of a model and its loss stands, and what a user's own file calls by name."""
    kinds = {type(part) for part in (*model.modules(), loss)}
    held = [value for part in model.modules() for value in vars(part).values() if isinstance(value, FunctionType)]
    functions = [value for value in (*held, loss) if isinstance(value, FunctionType)]
    found = {value.__code__.co_filename for value in functions}
    for name in {value.__module__ for value in (*kinds, *functions)}:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or file.startswith(HIDDEN):
            continue
        found.add(file)
        if not _is_pythons(file) and _INSTALLED not in file:
            found |= set(filter(None, map(_file_of, vars(module).values())))
    return {file for file in found if not _is_pythons(file) and not file.startswith(HIDDEN)}


def _is_pythons(file: str) -> bool:
    return file.startswith(_LIBRARY) and _INSTALLED not in file


def _file_of(value: Any) -> str | None:
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    if isinstance(value, type):
        value = sys.modules.get(value.__module__)
    return getattr(value, "__file__", None) if isinstance(value, ModuleType) else None  # not of a built-in one


def _is_named(file: str) -> bool:
    return any(map(_NAMED.search, linecache.getlines(file)))
