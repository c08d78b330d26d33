"""Expressions on concrete tensors, by torch.

A tensor with values of its own on each device has the devices as leading dims, and an operator runs once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, walk
from conjoin.rules.trials.references import FUNCTIONS, Misfit, Params, Shape, reference


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor, or one for each device along some mesh axes."""

    data: Tensor
    axes: tuple[str, ...] = ()
    """Mesh axes in order of their names; the first dims of the data count devices along them."""

    @property
    def shape(self) -> Shape:
        """What each device has."""
        return tuple(self.data.shape[len(self.axes) :])


@dataclass(frozen=True, slots=True)
class Setting:
    """What an expression leaves open."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """Named strides, paddings, kernel sizes and groups."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Named activations."""
    meshes: Mapping[str, int] = field(default_factory=dict)
    """How many devices there are along each mesh axis."""
    places: Mapping[Apply, int] = field(default_factory=dict)
    """Which dim an application's axis is, where it has a name."""
    firsts: Mapping[Apply, int] = field(default_factory=dict)
    """How long the first part of a split is, where no concatenation tells."""
    shapes: Mapping[Apply, Shape] = field(default_factory=dict)
    """Of operators without operands."""


def evaluate(exprs: Iterable[Expr], inputs: Mapping[str, Value], setting: Setting | None = None) -> tuple[Value, ...]:
    """The values of expressions, each distinct one computed once; Misfit where operands do not fit."""
    roots, found = tuple(exprs), dict[Expr, Value]()
    for expr in walk(*roots):
        if isinstance(expr, Input):
            found[expr] = inputs[expr.name]
        else:
            found[expr] = _apply(expr, found, setting or Setting())
    return tuple(found[root] for root in roots)


def _apply(expr: Apply, found: Mapping[Expr, Value], setting: Setting) -> Value:
    args, params = [found[arg] for arg in expr.args], _numbers(expr, found, setting)
    if BY_NAME[expr.op].parallel:
        return _over_devices(expr.op, str(params["mesh"]), params, args[0])
    # A constant is the same on all devices and on none in particular.
    placed = [arg for arg, of in zip(args, expr.args, strict=True) if isinstance(of, Input) or of.args]
    if len({arg.axes for arg in placed}) > 1:
        raise Misfit(f"the operands of {expr.op} differ in the mesh axes on which they have values of their own")
    axes = placed[0].axes if placed else ()
    counts = placed[0].data.shape[: len(axes)] if placed else ()
    data = [arg.data if arg.axes == axes else arg.data.expand(*counts, *arg.data.shape) for arg in args]
    return Value(_each(data, len(axes), lambda *one: reference(expr.op, params, one, _shape(expr, setting))), axes)


def _each(data: Sequence[Tensor], num_axes: int, function: Callable[..., Tensor]) -> Tensor:
    """A function run once for every position in the first dims."""
    if num_axes == 0:
        return function(*data)
    counts = data[0].shape[:num_axes]
    results = [function(*(one[place] for one in data)) for place in product(*map(range, counts))]
    return torch.stack(results).reshape(*counts, *results[0].shape)


def _over_devices(op: str, axis: str, params: Params, arg: Value) -> Value:
    """An operator that spreads a tensor over devices along an axis, or gathers it."""
    spreads = op in ("partition", "replicate")
    if spreads == (axis in arg.axes):
        raise Misfit(f"{op} along {axis} of a tensor that is {'not ' * (not spreads)}spread along it already")
    data, others = arg.data, tuple(name for name in arg.axes if name != axis)
    if not spreads:
        data = data.movedim(arg.axes.index(axis), len(others))
    result = _each([data], len(others), lambda one: reference(op, params, [one]))
    if not spreads:
        return Value(result, others)
    axes = tuple(sorted((*others, axis)))
    return Value(result.movedim(len(others), axes.index(axis)), axes)


def _numbers(expr: Apply, values: Mapping[Expr, Value], setting: Setting) -> Params:
    """The parameters of an application with names replaced by what they stand for."""
    found = {name: expr.param(name, default) for name, default in BY_NAME[expr.op].params}
    for name, value in found.items():
        if name in ("stride", "pad", "kernel", "groups", "parts", "vertices"):
            found[name] = setting.numbers.get(str(value), value)
        elif name == "act":
            found[name] = setting.functions.get(str(value), value)
        elif name == "axis":
            found[name] = setting.places.get(expr, value)
    spreads = expr.op in ("partition", "replicate")
    named = [f"{name}={value}" for name, value in found.items() if _is_open(name, value, setting, spreads)]
    if named:
        raise Misfit(f"{expr.op} does not know {', '.join(named)}")
    if expr.op == "split":
        found["first"] = _first(expr, values, int(found["axis"]), setting)
    if spreads:
        found["devices"] = setting.meshes[str(found["mesh"])]
    return found


def _is_open(name: str, value: Parameter, setting: Setting, spreads: bool) -> bool:
    known = {"pad": ("same", "valid"), "groups": ("?",), "act": ("none", *FUNCTIONS)}
    if name == "mesh":
        return spreads and str(value) not in setting.meshes
    return isinstance(value, str) and value not in known.get(name, ())


def _first(expr: Apply, values: Mapping[Expr, Value], axis: int, setting: Setting) -> int:
    """How long the first part of a split is: as it was chosen, or as long as what was joined there."""
    (whole,) = expr.args
    if expr in setting.firsts:
        return setting.firsts[expr]
    rank = len(values[whole].shape)
    if isinstance(whole, Apply) and whole.op == "concat":
        joined = int(_numbers(whole, values, setting)["axis"])
        if joined % rank == axis % rank:
            return values[whole.args[0]].shape[axis]
    raise Misfit(f"nothing says where {whole} of shape {values[whole].shape} is split along dim {axis}")


def _shape(expr: Apply, setting: Setting) -> Shape:
    if expr.args:
        return ()
    if expr not in setting.shapes:
        raise Misfit(f"nothing says how large {expr} is")
    return setting.shapes[expr]
