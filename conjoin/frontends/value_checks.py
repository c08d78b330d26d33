"""Branches on values of which one side only raises: `assert (x > 0).all()`, `if x.isnan().any(): raise …`.

A trace has no values, and such a branch needs none: where it does not raise it always goes one way. Which way is read
from the byte code of whoever asks. Where somebody in the model may catch what is raised, the branch is one like others.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

from conjoin.frontends.problems import HIDDEN

_STEP = str(Path(__file__).with_name("torch_export.py"))
"""Where a model is called: who calls capture is beyond it."""
_LIBRARIES = tuple(path for path in HIDDEN if path != "<")
"""Code without a file is the user's here: what it catches counts."""
_ENDS = ("JUMP", "RETURN", "YIELD", "SEND", "FOR_ITER")


def answer_of_check(frame: FrameType | None) -> tuple[bool, str] | None:
    """What a check that asks for a truth value goes on with, and its line where that is the user's; None where it is
    no mere check."""
    frames = list(_frames_of_model(frame))
    asking = next((i for i, each in enumerate(frames) if _tested_at(each) or not _is_hidden(each)), len(frames))
    if asking == len(frames) or any(map(_catches, frames[asking:])):
        return None
    asker = frames[asking]
    answer, line = _tested_at(asker), "" if _is_hidden(asker) else f"{asker.f_code.co_filename}:{asker.f_lineno}"
    return None if answer is None else (answer == "True", line)


def _frames_of_model(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code.co_filename != _STEP:
        yield frame
        frame = frame.f_back


def _is_hidden(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _tested_at(frame: FrameType) -> str | None:
    """`True` or `False`: what a frame goes on with without raising, where it tests a value just now."""
    return _branch(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _branch(code: CodeType, offset: int) -> str | None:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOT_TAKEN")]
    at = next((i for i, step in enumerate(steps) if step.offset == offset), len(steps) - 1)
    if steps[at].opname == "CALL" and any(step.argval == "item" for step in steps[max(at - 2, 0) : at]):
        at += 1
    at += steps[at].opname == "TO_BOOL"
    jump = steps[at]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    target = next(i for i, step in enumerate(steps) if step.offset >= jump.argval)
    jumps, stays = (_only_raises(steps, start) for start in (target, at + 1))
    return None if jumps == stays else str(jump.opname.endswith("IF_TRUE") == stays)


def _only_raises(steps: list[dis.Instruction], start: int) -> bool:
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if any(end in step.opname for end in _ENDS):
            return False
    return False


def _catches(frame: FrameType) -> bool:
    """Whether a frame of the user's, where it is, may go on after something was raised; `with` is taken not to."""
    if _is_hidden(frame):
        return False
    entries = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]  # typeshed has it not
    handlers = [entry.target for entry in entries if entry.start <= frame.f_lasti < entry.end]
    names = {step.offset: step.opname for step in dis.get_instructions(frame.f_code)}
    after = {offset: following for offset, following in zip(names, list(names.values())[1:], strict=False)}
    return any(names[each] == "PUSH_EXC_INFO" and after[each] != "WITH_EXCEPT_START" for each in handlers)
