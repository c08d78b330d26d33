"""Operators of a user's own: declared as ours are, and put to the same test before anything rests on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from random import Random
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from conjoin.errors import DeclarationError
from conjoin.ops.aten import Kind, NotRegistered, is_custom, operator_name, signature
from conjoin.ops.autograd_functions import define_operator
from conjoin.ops.call_cache import forget_calls
from conjoin.ops.catalog import declare
from conjoin.ops.check import CheckFailed
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.notation import NotationError, parse_notation
from conjoin.ops.spec import Args, Call, Indexed, OpSpec
from conjoin.ops.trial import CannotTry, try_out

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def register_operator(  # noqa: PLR0913 – what may be said of an operator
    operator: Any,
    index: str | Callable[[Call], str | Indexed],
    *,
    terms: str | Callable[[Call], str] = "",
    sample: Callable[[Random], Args] | Mapping[str, tuple[Any, ...]] = _NOTHING,
    dtype: Dtype | tuple[Dtype, ...] = Dtype.PROMOTE,
    flops: float | Callable[[Call, Mapping[str, int]], float] = 1.0,
    follows: Mapping[str, str] = _NOTHING,
    local: Callable[[LocalForm], Any] | None = None,
    expansion: Callable[[LocalForm], Any] | None = None,
    domain: tuple[float, float] = (-2.0, 2.0),
    constants: tuple[str, ...] = (),
    smooth: bool = True,
) -> OpSpec:
    """Declare an operator of your own, so that it may be split; a declaration that is not true is refused.

    `operator` is one of `torch.library` (`"mylib::scan"`, `torch.ops.mylib.scan`, what `custom_op` gave) or a subclass
    of `torch.autograd.Function`. What may be said of it stands in `OpSpec`: its index notation, the `terms` it is
    linear in, a `sample` of its attributes. It is tried on random calls at once: for every way to split it that follows
    the parts are run, put together and compared with the whole, values and gradients.

    >>> @torch.library.custom_op("conjoin_doctest::halved", mutates_args=())
    ... def halved(x: torch.Tensor) -> torch.Tensor:
    ...     return x / 2
    >>> register_operator(halved, "... -> ...", terms="x", smooth=False).name
    'conjoin_doctest::halved'
    """
    is_function = isinstance(operator, type) and issubclass(operator, torch.autograd.Function)
    shown = operator.__name__ if is_function else str(getattr(operator, "_qualname", operator))
    if isinstance(index, str):
        _check_notation(shown, index)
    name = _defined(operator, index, sample) if is_function else _named(operator)
    _check_kind(name)
    forget_calls()  # torch may have defined it anew, and what was found of it before is gone
    spec = OpSpec(
        name, index, sample, terms=terms, dtype=dtype, flops=flops, follows=follows, local=local, expansion=expansion,
        domain=domain, constants=constants, smooth=smooth,
    )  # fmt: skip
    _check_names(spec)
    _check_count(spec)
    _check_true(spec)
    declare(spec, sys._getframe(1).f_globals.get("__name__", ""))
    return spec


def _check_notation(shown: str, index: str) -> None:
    try:
        parse_notation(index)
    except NotationError as error:
        raise DeclarationError(
            f"The operator {shown} was declared as {index[:100]!r}. That is no index notation: {error}. Write what "
            f"each dim of each tensor stands for, as in '... k, n k -> ... n'."
        ) from None


def _named(operator: Any) -> str:
    """The name of an operator in graphs."""
    match operator:
        case str():
            return operator.removesuffix(".default")
        case OpOverload():
            return operator_name(operator)
        case OpOverloadPacket():
            return operator_name(operator.default)
        case torch._library.custom_ops.CustomOpDef():
            return operator_name(operator._opoverload)
    raise DeclarationError(
        f"A {type(operator).__name__} was given to be declared as an operator. Operators are those of torch.library "
        f"and subclasses of torch.autograd.Function. Wrap a function with torch.library.custom_op first."
    )


def _defined(function: Any, index: Any, sample: Any) -> str:
    """The operator that stands for an autograd function."""
    try:
        if not isinstance(index, str):
            raise ValueError("its notation is written by a function, and does not say how many tensors it takes")
        return define_operator(function, index, sample if isinstance(sample, Mapping) else {})
    except (ValueError, NameError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0][:200].rstrip(".")
        raise DeclarationError(
            f"The autograd function {function.__name__} was to be an operator. What it takes is not known: {reason}. "
            f"Annotate the parameters of its forward with Tensor, int, float, bool or str."
        ) from None


def _check_kind(name: str) -> None:
    try:
        known = signature(name)
    except (NotRegistered, LookupError) as error:
        raise DeclarationError(
            f"The operator {name[:80]!r} was declared. {error}. Register it before it is declared."
        ) from None
    if not is_custom(name):
        raise DeclarationError(
            f"The operator {name!r} was declared. It is torch's own or conjoin's, which are declared already. Give an "
            f"operator of yours, as 'mylib::scan'."
        )
    if known.mutates or known.random:
        what = "writes to its operands" if known.mutates else "draws random numbers"
        raise DeclarationError(
            f"The operator {name} was declared to be split. It {what}, and no part of it can be compared with the "
            f"whole. Leave it undeclared, and it runs the same on every device."
        )


def _check_names(spec: OpSpec) -> None:
    """What is said of a parameter that the operator has not would be said of nothing."""
    has = [parameter.name for parameter in signature(spec.name).parameters]
    said = {
        "terms": spec.terms.replace("+", " ").replace("*", " ").split() if isinstance(spec.terms, str) else (),
        "sample": spec.sample if isinstance(spec.sample, Mapping) else (),
        "follows": spec.follows,
        "constants": spec.constants,
    }
    for what, names in said.items():
        for name in names:
            if name not in has:
                near = get_close_matches(name, has, 1)
                raise DeclarationError(
                    f"The operator {spec.name} was declared with {what} of {name[:40]!r}. It takes {', '.join(has)}, "
                    f"and nothing of that name. {f'Did you mean {near[0]}?' if near else 'Name what it takes.'}"
                )


def _check_count(spec: OpSpec) -> None:
    """Refuse more operands than the operator takes; fewer may be meant, where a tensor may be left out."""
    if not isinstance(spec.index, str):
        return
    kinds = [parameter.kind for parameter in signature(spec.name).parameters]
    said, taken = len(parse_notation(spec.index).operands), kinds.count(Kind.TENSOR)
    if Kind.TENSORS not in kinds and said > taken:
        raise DeclarationError(
            f"The operator {spec.name} was declared as {spec.index[:100]!r}. That has {said} operand{'s' * (said > 1)} "
            f"and it takes {taken} tensor{'s' * (taken != 1)}. Write the dims of each tensor it takes, in its order."
        )


def _check_true(spec: OpSpec) -> None:
    said = repr(spec.index) if isinstance(spec.index, str) else "a function of its calls"
    said += f" with the terms {spec.terms!r}" if spec.terms else ""
    try:
        try_out(spec)
    except CheckFailed as error:
        raise DeclarationError(
            f"The operator {spec.name} was declared as {said}. That is not so: {error}. Correct the notation: an index "
            f"that must stay whole is written with '!', as in 'b t! -> b t!', and terms are products that add up to "
            f"the output, each with all its factors; one with a factor that it is not linear in is left out."
        ) from None
    except (CannotTry, NotationError) as error:
        raise DeclarationError(
            f"The operator {spec.name} was declared as {said}. It could not be put to the test: {error}. Give a sample "
            f"of its arguments, or a domain of its values; an operator of a GPU needs a kernel for the CPU, too."
        ) from None
