"""Operators as the functions of torch that users call: the same kernels, and less of the host's time for a call.

An overload is called through its schema, which takes the host two to ten microseconds more than the function that torch
has for it. Where such a function takes the same arguments in the same order, it is called instead; the tests compare
what the dispatcher is then asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conjoin.ops.aten import find_operator, is_custom, signature
from conjoin.ops.call_cache import call_cache
from conjoin.ops.catalog import find_spec

_OTHER_OVERLOADS = ("Scalar", "correction")
"""Torch's functions take another overload with these arguments."""
_OTHER_PARAMETERS = frozenset({"device", "generator", "memory_format", "values", "hx"})
"""Torch's functions take these in other places or forms, or (hx) warn of what users cannot change."""


def find_function(name: str) -> Callable[..., Any]:
    """What runs an operator: the function of torch that takes the same arguments, or else the operator itself.

    >>> find_function("relu"), find_function("slice.Tensor")
    (<built-in method relu of type object at ...>, <OpOverload(op='aten.slice', overload='Tensor')>)
    """
    return find_operator(name) if is_custom(name) else _find_once(name)


@call_cache(None)
def _find_once(name: str) -> Callable[..., Any]:
    found, (base, _, overload) = find_operator(name), name.partition(".")
    other = overload.startswith(_OTHER_OVERLOADS) or any(
        p.name in _OTHER_PARAMETERS for p in signature(name).parameters
    )
    if other or "::" in name or base.startswith("_") or find_spec(name) is None:
        return found
    if base == "expand":
        return torch.Tensor.expand
    own: Callable[..., Any] | None = getattr(torch._C._VariableFunctions, base, None)
    if own is None:
        own = getattr(torch._C._nn, base, None)
    elif own is not getattr(torch, base, None):  # generated code would find another under its name
        own = None
    return own or found
