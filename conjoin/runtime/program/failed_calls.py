"""Whose call failed in the middle of a step: what an operator of the model raises gets the user's line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch import fx

from conjoin.errors import ConjoinError
from conjoin.ir import Source

Called = tuple[str, Source | None]
"""An operator, and the user's line that calls it."""

CALL = "call"
"""Under this name nodes of a program say for which call of the model they are made."""
CALLS = "__calls__"
"""Under this name generated code keeps by line the call of the model that stands there."""
_MADE = re.compile(r"\s+(\w+)(?: : [^=]+)? = ")
_PACKAGE = Path(__file__).parents[2]
_OURS, _OPERATORS, _TORCHS = str(_PACKAGE), str(_PACKAGE / "ops"), str(Path(torch.__file__).parent)


def calls_by_line(program: fx.Graph, text: str) -> dict[int, Called]:
    """The call of the model that each line of a program's text is for."""
    calls = {node.name: node.meta[CALL] for node in program.nodes if CALL in node.meta}
    made = ((number, _MADE.match(line)) for number, line in enumerate(text.splitlines(), 1))
    return {number: calls[found[1]] for number, found in made if found and found[1] in calls}


def add_call(error: BaseException) -> None:
    """Note the call of the model on an error that came through it; Python prints notes below the error."""
    call = _call_of(error)
    if call is not None and not isinstance(error, ConjoinError):
        error.add_note(f"in {_told(call)}, a call of the model")


def place_of_failure(error: BaseException) -> str | None:
    """Where a model's own code failed, or an operator that it calls; None where the fault may be ours.

    It is not ours where the last that ran in Python was the user's code, an operator, or the backward pass itself.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [frame.f_code.co_filename for frame, _ in frames]
    ours = [i for i, name in enumerate(names) if name.startswith(_OURS) and not name.startswith(_OPERATORS)]
    within = range(1 + max(ours, default=-1), len(frames))
    own = [i for i in within if not names[i].startswith((_OURS, _TORCHS, "<"))]
    if own:
        return f"at {names[own[-1]]}:{frames[own[-1]][1]}"
    call = _call_of(error)
    if call is not None and any(CALLS in frames[i][0].f_globals for i in within):
        return f"in {_told(call)}"
    return "in the backward pass" if within and ours == [0] else None


def _told(call: Called) -> str:
    operator, source = call
    return operator if source is None else f"{operator} at {source}"


def _call_of(error: BaseException) -> Called | None:
    """The innermost call of the model that an error came through."""
    found: Called | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        found = frame.f_globals.get(CALLS, {}).get(number, found)
    return found
