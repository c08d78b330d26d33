"""Random concrete instances of a rule: sizes, parameters and tensors on which both sides can run.

Sizes are drawn in the frame of a proof, in which dims that must be alike are one. A rule that has no such frame (some
dims cannot fit whatever the sizes, as far as the prover sees) gets one in which contradictions are overlooked; whether
both sides run is then found by running them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from random import Random

import torch

from conjoin.rules.definitions.affine import Affine
from conjoin.rules.definitions.dims import Dim, Dims, IllFormed, NotCovered
from conjoin.rules.definitions.proving import Frame, with_groups
from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Input, Rule, inputs_of, operators_in, walk
from conjoin.rules.trials.evaluating import Setting, Value
from conjoin.rules.trials.lenient_dims import LenientDims
from conjoin.rules.trials.references import FUNCTIONS, Shape

_DRAWS = 300
"""Of sizes until all conditions on them hold; a draw takes some microseconds."""
_PARTIAL = ("div", "sqrt", "rsqrt")
"""Operators that are not defined for all numbers."""
_MOVING = ("concat", "split", "transpose", "partition", "combine", "replicate")
"""Operators that only move elements: what they are applied to may be rows of a table."""


class NoInstance(Exception):
    """A rule whose sides cannot both run, whatever the sizes."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A rule with everything it leaves open chosen."""

    frame: Frame
    sizes: Mapping[str, int]
    """Of all dims of the frame, by their names."""
    setting: Setting
    inputs: Mapping[str, Value]

    @property
    def rule(self) -> Rule:
        return self.frame.rule

    @property
    def num_elements(self) -> int:
        """How large it is."""
        return sum(value.data.numel() for value in self.inputs.values())


class _Rejected(Exception):
    """Sizes that do not fit together."""


class Sampler:
    """Draws instances of a rule; the frames are made once."""

    is_framed: bool
    """Whether the prover sees how the sizes can fit together."""

    def __init__(self, rule: Rule, same_outputs: bool = True) -> None:
        """With `same_outputs=False` nothing makes both sides have the same shapes."""
        frames, self.is_framed = _frames(rule, same_outputs)
        self.plans = tuple(map(_Plan, frames))
        self.signed = not any(expr.op in _PARTIAL for expr in operators_in(*rule.outputs))

    def draw(self, random: Random, largest: int) -> Instance | None:
        """An instance with sizes up to about `largest`; None where no fitting sizes were found."""
        plan = random.choice(self.plans)
        for _ in range(_DRAWS):
            try:
                return self._instance(plan, random, largest)
            except _Rejected:
                continue
        return None

    def _instance(self, plan: _Plan, random: Random, largest: int) -> Instance:
        sizes = _Sizes(plan, random, largest)
        sizes.check()
        is_whole, signed = random.random() < 0.5, self.signed or random.random() < 0.25
        rows = _rows(sizes)
        inputs = {}
        for name in plan.inputs:
            axes = tuple(sorted(plan.frame.devices[Input(name)]))
            shape = (*(sizes.of(plan.frame.named[axis]) for axis in axes), *sizes.shape(Input(name)))
            inputs[name] = Value(_tensor(random, shape, rows.get(name), is_whole, signed), axes)
        return Instance(plan.frame, sizes.by_name(), sizes.setting(), inputs)


def _frames(rule: Rule, same_outputs: bool) -> tuple[list[Frame], bool]:
    """Frames of the rule for any groups and for one group; where the first has none, those that are lenient."""
    wanted = dict.fromkeys((rule, with_groups(rule, 1)))
    strict = [_frame(one, Dims(), same_outputs) for one in wanted]
    found = [frame for frame in strict if isinstance(frame, Frame)]
    is_framed = isinstance(strict[0], Frame)
    if not is_framed:
        lenient = (_frame(one, LenientDims(), same_outputs) for one in _with_axes(rule))
        found += [frame for frame in lenient if isinstance(frame, Frame)]
    if not found:
        raise NoInstance(str(strict[0]))
    return found, is_framed


def _frame(rule: Rule, dims: Dims, same_outputs: bool) -> Frame | str:
    """The frame of a rule, or why there is none."""
    try:
        frame = Frame(rule, dims)
        frame.build(same_outputs)
    except (IllFormed, NotCovered) as error:
        return str(error)
    return frame


def _with_axes(rule: Rule) -> Iterator[Rule]:
    """The rule, and where it has operators on images the rule with each choice of its named axes."""
    yield rule
    exprs = operators_in(*rule.outputs)
    names = sorted({axis for expr in exprs if isinstance(axis := expr.param("axis"), str) and axis})
    if names and len(names) <= 2 and any(BY_NAME[expr.op].kind == "image" for expr in exprs):
        for places in product(range(4), repeat=len(names)):
            chosen = dict(zip(names, places, strict=True))
            yield replace(rule, left=_choose_axes(rule.left, chosen), right=_choose_axes(rule.right, chosen))


def _choose_axes(exprs: Iterable[Expr], chosen: Mapping[str, int]) -> tuple[Expr, ...]:
    def changed(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        params = tuple((n, chosen.get(str(v), v) if n == "axis" else v) for n, v in expr.params)
        return Apply(expr.op, params, tuple(map(changed, expr.args)))

    return tuple(map(changed, exprs))


class _Plan:
    """What is the same in all instances that are drawn in a frame."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.exprs = operators_in(*frame.rule.outputs)
        self.inputs = inputs_of(*frame.rule.outputs)
        every = [dim.find() for dim in frame.dims.every]
        self.halves = {id(dim.half.find()) for dim in every if dim.half}
        self.windows = {id(dim.window[0].find()) for dim in every if dim.window}
        self.small = {id(dim.window[1].find()) for dim in every if dim.window and dim.window[1]}
        self.meshes = {name: dim.find() for name, dim in frame.named.items() if " " not in name}
        self.small |= {id(dim) for dim in self.meshes.values()}
        self.leading: dict[int, Dim] = {}
        """Dims that stand for any number of them."""
        self.others: set[int] = set()
        self.is_counted = False
        """Whether dims are counted from the beginning, so that there are no others before them."""
        for expr, tensor in frame.tensors.items():
            labels = frame.ranks[expr].labels
            self.is_counted |= frame.ranks[expr].exact is None and any(label.isdecimal() for label in labels)
            for label, dim in zip(labels, tensor.dims, strict=True):
                if label == "…":
                    self.leading[id(dim.find())] = dim
                else:
                    self.others.add(id(dim.find()))


class _Sizes:
    """One choice of all sizes of a frame."""

    def __init__(self, plan: _Plan, random: Random, largest: int) -> None:
        self.plan, self.frame, self.random, self.largest = plan, plan.frame, random, largest
        self._found: dict[int, int] = {}
        self._open: set[int] = set()
        self.numbers = self._numbers()
        most = 0 if plan.is_counted else min(largest, 2)
        self._leading = {
            key: (self.of(dim),) if key in plan.others else self._several(most) for key, dim in plan.leading.items()
        }
        self._found.update((key, prod(shape)) for key, shape in self._leading.items())

    def of(self, dim: Dim) -> int:
        """The size of a dim."""
        dim = dim.find()
        if id(dim) in self._found:
            return self._found[id(dim)]
        if id(dim) in self._open:  # as many windows as there are elements: guess, and see whether it comes out
            self._found[id(dim)] = self.random.randint(1, self.largest)
            return self._found[id(dim)]
        self._open.add(id(dim))
        size = self._new(dim)
        if self._found.setdefault(id(dim), size) != size:
            raise _Rejected
        return size

    def _new(self, dim: Dim) -> int:
        if dim.known is not None:
            return dim.known
        if dim.sum:
            return self.of(dim.sum[0]) + self.of(dim.sum[1])
        if dim.product:
            return self.of(dim.product[0]) * self.of(dim.product[1])
        if dim.half:
            return 2 * self.of(dim.half) + 1
        if dim.window:
            return self._num_windows(*dim.window)
        low, high = 1, self.largest
        if id(dim) in self.plan.halves:
            low, high = 0, min(self.largest - 1, 2)
        elif id(dim) in self.plan.windows:
            high = self.largest + 3
        elif id(dim) in self.plan.small:
            high = min(self.largest, 3)
        return self.random.randint(low, max(low, high))

    def _num_windows(self, whole: Dim, kernel: Dim | None, stride: Affine, padding: Affine) -> int:
        size, step = self.of(whole), stride.value(self.numbers)
        if kernel is None:
            return -(-size // step)
        count = (size + 2 * padding.value(self.numbers) - self.of(kernel)) // step + 1
        if count < 1:
            raise _Rejected
        return count

    def _numbers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, dim in self.frame.named.items():
            kind, _, word = name.partition(" ")
            if word and not word.isdecimal():
                found[word] = self.of(dim) if kind in ("kernel", "parts") or word not in found else found[word]
        for expr in self.plan.exprs:
            for name, value in expr.params:
                if isinstance(value, str) and value not in ("same", "valid") and name in ("stride", "pad"):
                    found.setdefault(value, self.random.choice((1, 1, 2, 3) if name == "stride" else (0, 1, 1, 2)))
        return found

    def by_name(self) -> Mapping[str, int]:
        return {dim.name: self.of(dim) for dim in self.frame.dims.every}

    def check(self) -> None:
        """Refuse sizes of which some condition does not hold."""
        dims = self.frame.dims
        if any(self.of(one) != self.of(other) for one, other in dims.equations):
            raise _Rejected
        if any(self.of(small) > self.of(large) for small, large in dims.not_larger):
            raise _Rejected
        for expr in self.plan.exprs:
            pad = self.numbers.get(str(expr.param("pad")), expr.param("pad"))
            kernel = self.numbers.get(str(expr.param("kernel")), expr.param("kernel"))
            if isinstance(pad, int) and isinstance(kernel, int) and 2 * pad > kernel:
                raise _Rejected  # torch pools have at most half a window of padding

    def _several(self, most: int) -> Shape:
        return tuple(self.random.randint(1, 3) for _ in range(self.random.randint(0, most)))

    def shape(self, expr: Expr) -> Shape:
        """The shape of an expression on each device."""
        found: list[int] = []
        for label, dim in zip(self.frame.ranks[expr].labels, self.frame.tensors[expr].dims, strict=True):
            found += self._leading[id(dim.find())] if label == "…" else [self.of(dim)]
        return tuple(found)

    def _place(self, expr: Apply) -> int:
        """Which dim the axis of an application is."""
        on = expr.args[0] if BY_NAME[expr.op].kind == "reduce" else expr
        rank = self.frame.ranks[on]
        place = rank.place(expr.param("axis"))
        if rank.exact is not None:
            return place
        first = self.frame.tensors[on].dims[0]
        return place - 1 + len(self._leading[id(first.find())])

    def setting(self) -> Setting:
        """Everything that the expressions leave open."""
        exprs = self.plan.exprs
        meshes = {name: self.of(dim) for name, dim in self.plan.meshes.items()}
        names = {str(expr.param("act", "none")) for expr in exprs} - {"none", *FUNCTIONS}
        functions = {name: self.random.choice(("none", "relu", "tanh")) for name in sorted(names)}
        places = {expr: self._place(expr) for expr in exprs if expr.param("axis") != ""}
        firsts = {expr: self._first(expr) for expr in exprs if expr.op == "split"}
        shapes = {expr: self.shape(expr) for expr in exprs if not expr.args}
        return Setting(self.numbers, functions, meshes, places, firsts, shapes)

    def _first(self, expr: Apply) -> int:
        rank = self.frame.ranks[expr]
        dim = self.frame.tensors[expr.args[0]].dims[rank.place(expr.param("axis"))]
        return self.of(self.frame.dims.split(dim)[0])


def _rows(sizes: _Sizes) -> Mapping[str, int]:
    """The inputs that are rows of a table, and how many rows there are."""
    found: dict[str, int] = {}
    for expr in sizes.plan.exprs:
        if expr.op in ("embedding", "embedding_bag"):
            table, indices = expr.args
            count = sizes.shape(table)[0]
            for name in _moved(indices):
                found[name] = min(count, found.get(name, count))
    return found


def _moved(expr: Expr) -> Iterator[str]:
    """The inputs whose elements an expression only moves."""
    if all(isinstance(e, Input) or e.op in _MOVING for e in walk(expr)):
        yield from inputs_of(expr)


def _tensor(random: Random, shape: Sequence[int], rows: int | None, is_whole: bool, signed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    if rows is not None:
        return torch.randint(0, rows, tuple(shape), generator=generator).double()
    if is_whole:
        return torch.randint(-3 if signed else 1, 4, tuple(shape), generator=generator).double()
    made = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    return made * 4 - 2 if signed else made + 0.25
