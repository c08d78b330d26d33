"""The one place that touches torch's private operator schemas: names, signatures and lookup of ATen overloads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from conjoin.ops.call_cache import call_cache
from conjoin.ops.composites import COMPOSITES
from conjoin.plugins import load_plugins

CAST = "_to_copy"
"""The one operator that changes a dtype."""


class Kind(Enum):
    """What a parameter of an operator takes."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator, as its schema states it."""

    name: str
    kind: Kind
    default: object
    has_default: bool
    keyword_only: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of one overload, and whether it writes to its inputs or draws random numbers."""

    name: str
    parameters: tuple[Parameter, ...]
    num_outputs: int
    returns_list: bool
    """One list of tensors: its items are the outputs."""
    mutates: bool
    random: bool

    def position(self, name: str) -> int:
        """Where the parameter of that name stands, or -1."""
        return next((i for i, parameter in enumerate(self.parameters) if parameter.name == name), -1)


OPAQUE = "conjoin::opaque::"
"""How the name of a declared operator begins in a call of it that its declaration does not cover."""
PLACEMENT_PARAMETERS = frozenset({"device", "layout", "pin_memory", "generator", "non_blocking"})
"""Parameters that say where or when, not what: a graph leaves them to whoever runs it."""


def operator_name(op: OpOverload) -> str:
    """The name of an overload in graphs: `linear`, `sum.dim_IntList`, `mylib::scan`.

    >>> operator_name(torch.ops.aten.linear.default), operator_name(torch.ops.aten.sum.dim_IntList)
    ('linear', 'sum.dim_IntList')
    """
    namespace, _, name = op._schema.name.partition("::")
    full = name if namespace == "aten" else f"{namespace}::{name}"
    return full if op._overloadname == "default" else f"{full}.{op._overloadname}"


class NotRegistered(LookupError, NotImplementedError):
    """An operator that torch does not have, here and now; a file may have stated what it takes and gives."""


def find_operator(name: str) -> Callable[..., Any]:
    """The overload, or our own composite, of that name; LookupError when there is none.

    A user's own is looked up every time: where it is defined anew, the one of before is gone.

    >>> find_operator("sum.dim_IntList")
    <OpOverload(op='aten.sum', overload='dim_IntList')>
    """
    return _find(name) if is_custom(name) else _find_once(name)


@call_cache(None)
def _find_once(name: str) -> Callable[..., Any]:
    return _find(name)


def _find(name: str) -> Callable[..., Any]:
    if name in COMPOSITES:
        return COMPOSITES[name]
    namespace, _, rest = name.removeprefix(OPAQUE).rpartition("::")
    base, _, overload = rest.partition(".")
    if not all(part.isidentifier() for part in (base, overload or "default", namespace or "aten")):
        raise LookupError(f"{name!r} is not an operator name")
    found = _overload(namespace or "aten", base, overload or "default")
    if found is None and namespace and load_plugins(name):
        found = _overload(namespace, base, overload or "default")
    if found is None:
        hint = "; --import names a module that registers it" if namespace else ""
        raise NotRegistered(f"torch {torch.__version__} has no operator {name!r}{hint}")
    if not isinstance(found, OpOverload):
        raise LookupError(f"{name!r} is not an operator overload")
    return found


def _overload(namespace: str, base: str, overload: str) -> Any:
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError:
        return None


_KINDS = {
    "Tensor": Kind.TENSOR, "Optional[Tensor]": Kind.TENSOR,
    "List[Tensor]": Kind.TENSORS, "List[Optional[Tensor]]": Kind.TENSORS, "Optional[List[Tensor]]": Kind.TENSORS,
}  # fmt: skip


def _freeze(value: object) -> object:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


@call_cache(None)
def signature(name: str) -> Signature:
    """The signature of an operator by name; of one that is not registered the one that was stated.

    >>> [p.name for p in signature("linear").parameters]
    ['input', 'weight', 'bias']
    """
    try:
        return registered_signature(name)
    except NotRegistered:
        if name not in _STATED:
            raise
        return _STATED[name][0]


_STATED: dict[str, tuple[Signature, str]] = {}
"""What files have said of operators that are not registered, and the module that registers them; by name, as torch
keeps those that are."""


def state_signature(stated: Signature, module: str) -> None:
    """Let an operator that is not registered be known by what a file says; ValueError where it is otherwise here."""
    try:
        known = signature(stated.name)
    except NotRegistered:
        _STATED[stated.name] = stated, module
        return
    if known != stated:
        raise ValueError(f"{stated.name} is known here with other parameters or outputs than are stated")


def is_custom(name: str) -> bool:
    """Whether an operator is neither torch's own nor ours."""
    return "::" in name.removeprefix(OPAQUE) and name not in COMPOSITES


def registering_module(name: str) -> str:
    """The module whose import registers an operator; empty where that cannot be told, as of one written in C++."""
    full_name = name.partition(".")[0]
    if name in _STATED:
        return _STATED[name][1]
    if full_name in _MADE_HERE:
        return _MADE_HERE[full_name]
    if full_name in OPDEFS:
        return str(OPDEFS[full_name]._init_fn.__module__)
    dump: str = torch._C._dispatch_dump(full_name)
    file = dump.partition("debug: registered at ")[2].partition("\n")[0].rpartition(":")[0]
    named = (key for key, module in list(sys.modules.items()) if file and getattr(module, "__file__", None) == file)
    return next((key for key in named if not key.startswith("torch.")), "")


_MADE_HERE: dict[str, str] = {}
"""Operators that stand for somebody's autograd function, and the module of that."""


def state_module(name: str, module: str) -> None:
    """Let an operator be known as registered by a module, whoever told torch of it."""
    _MADE_HERE[name] = module


def registered_signature(name: str) -> Signature:
    """The signature of an operator that is registered, or of our own; LookupError of any other."""
    op = find_operator(name)
    if not isinstance(op, OpOverload):
        return _composite_signature(name, op)
    schema: Any = op._schema
    parameters = tuple(
        Parameter(
            argument.name,
            _KINDS.get(str(argument.type), Kind.ATTRIBUTE),
            _freeze(argument.default_value),
            argument.has_default_value(),
            argument.kwarg_only,
        )
        for argument in schema.arguments
    )
    random = torch.Tag.nondeterministic_seeded in op.tags
    returns_list = [str(result.type) for result in schema.returns] == ["List[Tensor]"]
    return Signature(name, parameters, len(schema.returns), returns_list, schema.is_mutable, random)


def _composite_signature(name: str, function: Callable[..., Any]) -> Signature:
    """Read the parameters off a Python function whose annotations name tensors as `Tensor` or `Tensor | None`."""
    parameters = tuple(
        Parameter(
            parameter.name,
            Kind.TENSOR if "Tensor" in str(parameter.annotation) else Kind.ATTRIBUTE,
            None if parameter.default is inspect.Parameter.empty else parameter.default,
            parameter.default is not inspect.Parameter.empty,
            False,
        )
        for parameter in inspect.signature(function).parameters.values()
    )
    num_outputs = max(str(inspect.signature(function).return_annotation).count("Tensor"), 1)
    return Signature(name, parameters, num_outputs, returns_list=False, mutates=False, random=False)
