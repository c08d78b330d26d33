"""`torch.autograd.Function`s in a model: export traces their forward and forgets their backward, so that is checked.

Every call is noted while the model is traced. Afterwards each is run on random numbers of the same shapes, or of
smaller ones where there are very many: if its own backward gives what differentiating its forward gives (an analytic
derivative, as in published models), the graph is right as it is. If not (a straight-through estimator, a reversed
gradient), or where it cannot be told, the model is refused. One that a user declared (`conjoin.register_operator`) is
an operator of the graph, with its own backward.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from conjoin.frontends.problems import HIDDEN, Problem
from conjoin.frontends.torch_private import replaced_apply
from conjoin.ir import Source
from conjoin.ops import operator_of

_MAX_ELEMENTS = 2**20
"""About a second for most functions."""
_TOLERANCE = 1e-6
"""Relative, in float64: rounding is a billion times smaller, a different derivative far larger."""


@dataclass(frozen=True, slots=True)
class CustomCall:
    """One call of a custom function: the class, its arguments (tensors by type only), the user's line."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]
    source: Source | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind have one verdict: the class, types of tensors, and all else by what it is."""
        return (self.function, *map(_what, self.args))


def _what(argument: Any) -> object:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.dtype
    return repr(argument) if isinstance(argument, bool | int | float | str | None) else id(argument)


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
        kinds: dict[tuple[object, ...], CustomCall] = {}
        for call in self.calls:
            kinds.setdefault(call.kind, call)
        for call in kinds.values():
            objection = None if call.function in found else _objection(call)
            if objection is not None:
                found[call.function] = Problem(
                    f"autograd function {call.function.__name__}",
                    call.source,
                    f"{objection}, and a graph would forget it: "
                    "declare it with conjoin.register_operator, which keeps it whole and lets it be split",
                )
        return tuple(found.values())


@contextmanager
def watch_custom_functions() -> Iterator[Watch]:
    """Note every call of a custom autograd function made inside."""
    watch = Watch()

    def apply(original: Callable[..., Any], cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        operator = operator_of(cls)
        if operator is not None and not kwargs:
            return operator(*args)
        if not cls.__module__.startswith("torch."):
            watch.calls.append(CustomCall(cls, args, _user_source()))
        return original(cls, *args, **kwargs)

    with replaced_apply(apply):
        yield watch


def _user_source() -> Source | None:
    own = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(HIDDEN)]
    return Source(own[-1].filename, own[-1].lineno or 0) if own else None


def _shapes(call: CustomCall) -> dict[int, tuple[int, ...]]:
    """The shapes of the tensors given to a call, by position; the longest dims are halved until they are few enough.

    Dims of one length stay so: they may stand for the same thing.
    """
    shapes = {i: tuple(map(int, arg.shape)) for i, arg in enumerate(call.args) if isinstance(arg, Tensor)}
    while sum(map(prod, shapes.values())) > _MAX_ELEMENTS:
        longest = max(max(shape, default=0) for shape in shapes.values())
        halved = {longest: (longest + 1) // 2}
        shapes = {i: tuple(halved.get(size, size) for size in shape) for i, shape in shapes.items()}
    return shapes


def _random_like(value: Tensor, shape: tuple[int, ...], domain: tuple[float, float], generator: torch.Generator) -> Any:
    if value.is_floating_point():
        low, high = domain
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn * (high - low) + low).requires_grad_()
    return torch.ones(shape, dtype=value.dtype, device="cpu")


def _forward(call: CustomCall, args: list[Any]) -> Any:
    """The forward alone, as ordinary differentiable code."""
    function: Any = call.function
    separate = function.setup_context is not torch.autograd.Function.setup_context
    return function.forward(*args) if separate else function.forward(_Context(len(args)), *args)


def _gradients(outputs: Any, inputs: list[Tensor]) -> list[Tensor]:
    made = [o for o in (outputs if isinstance(outputs, tuple | list) else (outputs,)) if isinstance(o, Tensor)]
    weights = (torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype, device="cpu").reshape(o.shape) for o in made)
    total = sum((o * weight).sum() for o, weight in zip(made, weights, strict=True) if o.requires_grad)
    if not isinstance(total, Tensor):
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _objection(call: CustomCall) -> str | None:
    """Compare its own backward with the derivative of its forward on random numbers; why they are not the same.

    Numbers where the forward is not finite (the root of a negative one) say nothing; other numbers are tried too.
    """
    try:
        verdicts = [_agrees(call, domain) for domain in _DOMAINS]
    except Exception as error:  # a stranger's function on made-up numbers may fail in any way; unproven means refused
        what = (str(error).splitlines() or [""])[0][:120].rstrip(".")
        return f"its backward could not be tried on random numbers ({type(error).__name__}: {what})"
    if False in verdicts:
        return "its backward is not the derivative of its forward"
    return None if True in verdicts else "its forward gives no finite number to try its backward on"


_DOMAINS = ((-2.0, 2.0), (0.1, 1.0))


def _agrees(call: CustomCall, domain: tuple[float, float]) -> bool | None:
    generator, shapes = torch.Generator().manual_seed(0), _shapes(call)
    args = [_random_like(a, shapes[i], domain, generator) if i in shapes else a for i, a in enumerate(call.args)]
    inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    with torch.enable_grad():
        own = _gradients(call.function.apply(*args), inputs)  # type: ignore[no-untyped-call]
        derived = _gradients(_forward(call, args), inputs)
    if not all(bool(gradient.isfinite().all()) for gradient in derived):
        return None
    return all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in zip(own, derived, strict=True))
