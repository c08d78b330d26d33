"""A user's `torch.autograd.Function` as an operator of torch: whole in a graph, with its own backward.

The operator's kernel is the function itself. Its schema is read off `forward`: what annotations leave open is a tensor
as far as the notation has operands, and behind them of the type of its default or of its sample.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from conjoin.ops.aten import state_module
from conjoin.ops.notation import parse_notation

Function = type[torch.autograd.Function]
_METHOD: FunctionType = torch.autograd.Function.__dict__["apply"].__func__
_apply = FunctionType(_METHOD.__code__, _METHOD.__globals__, "apply", _METHOD.__defaults__, _METHOD.__closure__)
"""As torch has it: while a model is captured, other code stands in its place."""
_OPERATORS: dict[Function, Callable[..., Any]] = {}
_Library: Any = torch.library.Library
_LIBRARIES: dict[str, Any] = {}
"""Operators are there for as long as the library that defined them is."""


def operator_of(function: Function) -> Callable[..., Any] | None:
    """The operator that stands for an autograd function in graphs, where one was registered."""
    return _OPERATORS.get(function)


def operator_name_of(function: Function) -> str:
    """How the operator of a function is called: `my_package_layers::Scan`."""
    namespace = re.sub(r"\W", "_", function.__module__)
    return f"{namespace}::{function.__name__}"


def define_operator(function: Function, index: str, sample: Mapping[str, tuple[Any, ...]]) -> str:
    """Define an operator whose kernel is an autograd function, and name it; ValueError where its schema is not known.

    A function that is defined anew, as in a notebook, takes the place of the one before.
    """
    name, schema = operator_name_of(function), _schema(function, index, sample)
    namespace, _, base = name.partition("::")
    former: Any = _LIBRARIES.pop(name, None)
    if former is not None:
        former._destroy()
    library = _LIBRARIES[name] = _Library(namespace, "FRAGMENT")
    library.define(f"{base}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    apply = partial(_apply, function)

    def without_gradient(*args: Any) -> Any:
        with torch.no_grad():
            return apply(*args)

    library.impl(base, without_gradient, "CompositeExplicitAutograd")
    library.impl(base, lambda *args: apply(*args), "Autograd")
    torch.library.register_fake(name, without_gradient, lib=library)
    _OPERATORS[function] = getattr(getattr(torch.ops, namespace), base).default
    state_module(name, function.__module__)
    return name


def _schema(function: Function, index: str, sample: Mapping[str, tuple[Any, ...]]) -> str:
    """The schema of a function's forward, without its context."""
    notation = parse_notation(index)
    separate = function.setup_context is not torch.autograd.Function.setup_context
    given = list(inspect.signature(function.forward, eval_str=True).parameters.values())[0 if separate else 1 :]
    parameters = [_typed(p, i < len(notation.operands), sample) for i, p in enumerate(given)]
    outputs = len(notation.outputs)
    returns = Tensor if outputs == 1 else tuple[(Tensor,) * outputs]  # type: ignore[misc] # of so many

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return str(torch.library.infer_schema(prototype, mutates_args=()))


def _typed(parameter: inspect.Parameter, is_operand: bool, sample: Mapping[str, tuple[Any, ...]]) -> inspect.Parameter:
    if parameter.kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise ValueError(f"its forward takes any number of arguments as {parameter.name}")
    plain = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if parameter.annotation is not inspect.Parameter.empty:
        return plain
    if is_operand:
        return plain.replace(annotation=Tensor | None if parameter.default is None else Tensor)
    known = [*sample.get(parameter.name, ()), parameter.default]
    kinds = [type(value) for value in known if isinstance(value, bool | int | float | str)]
    if not kinds:
        raise ValueError(f"nothing says of what type {parameter.name} is: annotate it in forward")
    return plain.replace(annotation=kinds[0])
