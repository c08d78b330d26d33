"""What is sent to another process of this host: by name where that process can import it, by value where it cannot.

Functions and classes of a script, a notebook or another function's body exist in this process alone. Their code is
sent, with the names that it mentions; the other process keeps them in a module of the same name, so that what it sends
back is found again here. Tensors are sent by value, those that share memory as such, and arrive on the CPU.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Iterator
from enum import Enum
from operator import attrgetter
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, TypeVar

import torch

from conjoin.errors import UsageError

_MADE_WITH = ("__module__", "__qualname__", "__slots__", "__orig_bases__")
"""What a class has to be told when it is made."""
_LEFT_OUT = {*_MADE_WITH, "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "_abc_impl"}
_OF_THE_CLASS = (GetSetDescriptorType, MemberDescriptorType)
"""What a class makes for itself."""


def pack(what: str, value: Any) -> bytes:
    """A value as bytes; what cannot be sent is refused under the name given for it."""
    held = io.BytesIO()
    try:
        torch.save(value, held, pickle_module=sys.modules[__name__], pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"{what} cannot be sent to another process: {str(error)[:300]}. Ranks are processes of their own and get "
            f"copies. Leave out what is tied to this process, such as open files and locks, and make it there."
        ) from error
    return held.getvalue()


def unpack(what: str, parcel: bytes) -> Any:
    """What `pack` was given."""
    try:
        return torch.load(io.BytesIO(parcel), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UsageError(
            f"{what} did not arrive in another process: {type(error).__name__}, {str(error)[:300]}. It names what only "
            f"the process that sent it can find. Put that into a module that can be imported."
        ) from error


class Pickler(pickle.Pickler):
    """Sends by value what the other process cannot import."""

    def reducer_override(self, value: Any) -> Any:
        """How a value is sent, where pickle has no way of its own or one that relies on names."""
        match value:
            case FunctionType():
                return NotImplemented if _is_found(value) else _reduce_function(value)
            case type():
                return _reduce_class(value) if _is_sent(value) else NotImplemented
            case ModuleType():
                return importlib.import_module, (value.__name__,)
            case CellType():
                return _make_cell, (), _content(value), None, None, _fill_cell
            case property():
                return property, (value.fget, value.fset, value.fdel, value.__doc__)
            case classmethod() | staticmethod():
                return type(value), (value.__func__,)
            case TypeVar():
                return TypeVar, (value.__name__, *value.__constraints__)
            case MappingProxyType():
                return _make_view, (dict(value),)
        return _constant_of_dataclasses(value) or NotImplemented


def _constant_of_dataclasses(value: Any) -> str | None:
    """The name of one of the marks that a dataclass compares with `is`."""
    if type(value).__module__ != dataclasses.__name__:
        return None
    return next((name for name, held in vars(dataclasses).items() if held is value), None)


def _is_importable(module: str | None) -> bool:
    """Whether another process with the same search path has a module of this name, not only `sys.modules` here."""
    package = (module or "__main__").partition(".")[0]
    if package == "__main__":
        return False
    return any(finder.find_spec(package, None) for finder in sys.meta_path)


def _is_found(function: FunctionType) -> bool:
    if not _is_importable(function.__module__):
        return False
    try:
        found: Any = attrgetter(function.__qualname__)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return False
    return found is function


def _is_sent(kind: type) -> bool:
    here_only = "<locals>" in kind.__qualname__ or not _is_importable(kind.__module__)
    return here_only and not issubclass(kind, Enum)  # an enumeration cannot be made and then filled


def _reduce_function(function: FunctionType) -> tuple[Any, ...]:
    held = function.__globals__
    module = str(held.get("__name__", function.__module__))
    names = {} if _is_importable(module) else {name: held[name] for name in _mentioned(function.__code__) & held.keys()}
    made = (module, marshal.dumps(function.__code__), function.__name__, function.__closure__)
    kept = {name: getattr(function, name) for name in ("__module__", "__qualname__", "__kwdefaults__", "__doc__")}
    state = (names, function.__defaults__, {**kept, **vars(function)})
    return _make_function, made, state, None, None, _fill_function


def _mentioned(code: CodeType) -> set[str]:
    """The global names that code reads, in functions inside it too."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_mentioned(inner) for inner in _codes_in(code)))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _module(name: str) -> ModuleType:
    """A module, played by an empty one where it cannot be imported."""
    if name not in sys.modules and not _is_importable(name):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name])["__builtins__"] = builtins  # what is written in C looks for it when it imports
    return importlib.import_module(name)


def _make_function(module: str, code: bytes, name: str, closure: tuple[CellType, ...] | None) -> FunctionType:
    return FunctionType(marshal.loads(code), vars(_module(module)), name, None, closure)


def _fill_function(function: FunctionType, state: tuple[dict[str, Any], Any, dict[str, Any]]) -> None:
    names, function.__defaults__, attributes = state
    function.__globals__.update(names)
    for name, value in attributes.items():
        setattr(function, name, value)


def _reduce_class(kind: type) -> tuple[Any, ...]:
    given = {name: vars(kind)[name] for name in _MADE_WITH if name in vars(kind)}
    made = (type(kind), kind.__name__, kind.__bases__, {"__qualname__": kind.__qualname__, **given})
    state = {
        name: value
        for name, value in vars(kind).items()
        if name not in _LEFT_OUT and not isinstance(value, _OF_THE_CLASS)
    }
    return _make_class, made, state, None, None, _fill_class


def _make_class(metaclass: Any, name: str, bases: tuple[type, ...], given: dict[str, Any]) -> type:
    made: type = metaclass(name, bases, given)
    if made.__qualname__ == name:
        setattr(_module(made.__module__), name, made)
    return made


def _fill_class(kind: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        type.__setattr__(kind, name, value)


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _make_cell() -> CellType:
    return CellType()


def _make_view(held: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(held)


def _fill_cell(cell: CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value
