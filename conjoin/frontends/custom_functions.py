"""`torch.autograd.Function`s in a model: export traces their forward and forgets their backward, so that is checked.

Every call is noted while the model is traced. Afterwards each is run on random numbers of the same shapes: if its own
backward gives what differentiating its forward gives (an analytic derivative, as in published models), the graph is
right as it is. If not (a straight-through estimator, a reversed gradient), the model is refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conjoin.frontends.problems import HIDDEN, Problem
from conjoin.ir import Source

_MAX_ELEMENTS = 2**22
_TOLERANCE = 1e-6
"""Relative, in float64: rounding is a billion times smaller, a different derivative far larger."""


@dataclass(frozen=True, slots=True)
class CustomCall:
    """One call of a custom function: the class, its arguments (tensors by type only), the user's line."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]
    source: Source | None


class _Context:
    """Stands in for the context a forward is given, when it is run to be differentiated."""

    def __init__(self, num_inputs: int) -> None:
        self.needs_input_grad = (True,) * num_inputs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *_: Any) -> None: ...
    def mark_non_differentiable(self, *_: Any) -> None: ...
    def save_for_forward(self, *_: Any) -> None: ...
    def set_materialize_grads(self, _: bool) -> None: ...


@dataclass(slots=True)
class Watch:
    """The calls noted so far."""

    calls: list[CustomCall] = field(default_factory=list)

    def problems(self) -> tuple[Problem, ...]:
        """The calls whose backward is not the derivative of their forward, one problem a class."""
        found: dict[type, Problem] = {}
        for call in self.calls:
            if call.function not in found and not _is_derivative(call):
                found[call.function] = Problem(
                    f"autograd function {call.function.__name__}",
                    call.source,
                    "its backward is not the derivative of its forward, and a graph would forget it: "
                    "wrap it with torch.library.custom_op and register_autograd, which keeps it whole",
                )
        return tuple(found.values())


@contextmanager
def watch_custom_functions() -> Iterator[Watch]:
    """Note every call of a custom autograd function made inside."""
    watch = Watch()
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            watch.calls.append(CustomCall(cls, args, _user_source()))
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield watch
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _user_source() -> Source | None:
    own = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(HIDDEN)]
    return Source(own[-1].filename, own[-1].lineno or 0) if own else None


def _random_like(value: Any, domain: tuple[float, float], generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = tuple(int(size) for size in value.shape)
    if value.is_floating_point():
        low, high = domain
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).requires_grad_()
    return torch.ones(shape, dtype=value.dtype)


def _forward(call: CustomCall, args: list[Any]) -> Any:
    """The forward alone, as ordinary differentiable code."""
    function: Any = call.function
    separate = function.setup_context is not torch.autograd.Function.setup_context
    return function.forward(*args) if separate else function.forward(_Context(len(args)), *args)


def _gradients(outputs: Any, inputs: list[Tensor]) -> list[Tensor]:
    made = [o for o in (outputs if isinstance(outputs, tuple | list) else (outputs,)) if isinstance(o, Tensor)]
    weights = (torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).reshape(o.shape) for o in made)
    total = sum((o * weight).sum() for o, weight in zip(made, weights, strict=True) if o.requires_grad)
    if not isinstance(total, Tensor):
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _is_derivative(call: CustomCall) -> bool:
    """Compare its own backward with the derivative of its forward on random numbers; False when it cannot be run.

    Numbers where the forward is not finite (the root of a negative one) say nothing; other numbers are tried too.
    """
    if sum(a.numel() for a in call.args if isinstance(a, Tensor)) > _MAX_ELEMENTS:
        return False
    verdicts = [_agrees(call, domain) for domain in _DOMAINS]
    return True in verdicts and False not in verdicts


_DOMAINS = ((-2.0, 2.0), (0.1, 1.0))


def _agrees(call: CustomCall, domain: tuple[float, float]) -> bool | None:
    generator = torch.Generator().manual_seed(0)
    args = [_random_like(arg, domain, generator) for arg in call.args]
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    try:
        with torch.enable_grad():
            own = _gradients(call.function.apply(*args), inputs)  # type: ignore[no-untyped-call]
            derived = _gradients(_forward(call, args), inputs)
    except Exception:  # a stranger's function on made-up numbers may fail in any way; unproven means refused
        return False
    if not all(bool(gradient.isfinite().all()) for gradient in derived):
        return None
    return all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in zip(own, derived, strict=True))
