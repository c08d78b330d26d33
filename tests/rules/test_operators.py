"""Every rule operator's definition, a sum over elements of its operands, says what torch computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import prod
from operator import add, attrgetter, floordiv, mul, sub
from random import Random

import pytest
import torch

from conjoin.rules.definitions.affine import Affine, number
from conjoin.rules.definitions.dims import Dim
from conjoin.rules.definitions.proof import Frame
from conjoin.rules.definitions.sums import Access, Atom, Factor, Function, Guard, Largest, Size, Sum
from conjoin.rules.operators import BY_NAME, OPS, RuleOp
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule
from conjoin.rules.text import parse_rule
from conjoin.rules.trials import references
from conjoin.rules.trials.evaluation import Value, evaluate
from conjoin.rules.trials.instances import Instance, Sampler
from conjoin.rules.trials.references import FUNCTIONS, Misfit

CHOICES: Mapping[str, tuple[Parameter, ...]] = {
    "axis": ("a", -1),
    "part": (0, 1),
    "stride": ("s",),
    "pad": ("same", "valid", "p"),
    "act": ("none", "f"),
    "groups": ("?", 1, "g", 2),
    "kernel": ("k", 3),
    "mesh": ("m",),
    "parts": ("h", 2),
    "vertices": ("v", 3),
}
INSTANCES = 5
POSITIONS = 24


class Interpreter:
    """The numbers that sums are when all sizes and elements are known; loops over indices under their guards."""

    def __init__(self, framed: Framed) -> None:
        setting = framed.instance.setting
        self.sizes = {**{dim.name: size for dim, size in framed.sizes.items()}, **setting.numbers}
        self.functions = setting.functions
        inputs = framed.instance.inputs
        self.tensors = {name: framed.in_digits(Input(name), value) for name, value in inputs.items()}

    def of(self, value: Sum, known: Mapping[str, int]) -> float:
        total = 0.0
        for term in value.terms:
            for place in self.places(term.bound, term.guard, known):
                total += float(term.coefficient) * prod(self.factor(factor, place) for factor in term.factors)
        return total

    def places(self, bound: tuple[str, ...], guard: Guard, known: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
        """All numbers for the bound indices under which the guard holds."""
        if not bound:
            if all(atom.holds(known) for atom in guard):
                yield known
            return
        ranges = {name: found for name in bound if (found := self.range(name, guard, known)) is not None}
        assert ranges, f"no index of {bound} has bounds"
        name = next(iter(ranges))
        for index in ranges[name]:
            yield from self.places(tuple(b for b in bound if b != name), guard, {**known, name: index})

    def range(self, name: str, guard: Guard, known: Mapping[str, int]) -> range | None:
        low, high = [], []
        for atom in guard:
            if name in atom.expr.symbols and atom.expr.symbols <= {name, *known}:
                c, rest = self.line(atom, name, known)
                if atom.exact or c > 0:
                    low.append(-(rest // c))
                if atom.exact or c < 0:
                    high.append(rest // -c if c < 0 else -rest // c)
        return range(max(low), min(high) + 1) if low and high else None

    def line(self, atom: Atom, name: str, known: Mapping[str, int]) -> tuple[int, int]:
        zero, one = (atom.expr.value({**known, name: index}) for index in (0, 1))
        return one - zero, zero

    def factor(self, factor: Factor, known: Mapping[str, int]) -> float:
        match factor:
            case Access():
                return self.access(factor, known)
            case Function("is row", (index, row)):
                return float(self.of(index, known) == self.of(row, known))
            case Function("one over", (arg,)):
                return 1 / self.of(arg, known)
            case Function("at least one", (arg,)):
                return max(1.0, self.of(arg, known))
            case Function(name, (arg,)):
                chosen = self.functions.get(name, name)
                value = torch.tensor(self.of(arg, known), dtype=torch.float64)
                return float(value if chosen == "none" else FUNCTIONS[chosen](value))
            case Largest(bound, guard, arg):
                return max(self.of(arg, place) for place in self.places(bound, guard, known))
            case Size(size, inverse):
                return float(Fraction(size.value(known)) ** (-1 if inverse else 1))
        raise AssertionError(factor)

    def access(self, access: Access, known: Mapping[str, int]) -> float:
        place = tuple(i.value(known) if isinstance(i, Affine) else int(self.access(i, known)) for i in access.indices)
        if access.tensor == "#":
            return float(place[0])
        data = self.tensors[access.tensor]
        assert len(place) == data.dim() and all(0 <= i < n for i, n in zip(place, data.shape, strict=True)), access
        return float(data[place])


class Framed:
    """An instance in the frame of a proof: the sizes of all its dims that follow from the shapes of tensors."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.frame = instance, Frame(instance.rule)
        self.frame.build()
        self.sizes: dict[Dim, int] = {}
        for expr, shape in instance.shapes.items():
            self.measure(expr, shape)
        numbers = {**instance.setting.numbers, **instance.setting.meshes}
        for name, dim in self.frame.named.items():
            self.sizes |= {dim.find(): numbers[word] for word in (name.split()[-1],) if word in numbers}
        for _ in self.frame.dims.every:
            for dim in self.frame.dims.every:
                self.complete(dim.find())

    def places(self, expr: Expr) -> list[list[int]]:
        """For each dim of the frame the positions that it stands for."""
        labels, ranks = self.frame.ranks[expr].labels, self.instance.shaping.ranks
        axes = {label: label if label.isidentifier() else int(label) for label in labels if label != "…"}
        known = {label: ranks.place(expr, axis) for label, axis in axes.items()}
        rest = [i for i in range(ranks.rank(expr)) if i not in known.values()]
        return [[known[label]] if label in known else rest for label in labels]

    def measure(self, expr: Expr, shape: tuple[int, ...]) -> None:
        for places, dim in zip(self.places(expr), self.frame.tensors[expr].dims, strict=True):
            self.sizes[dim.find()] = prod(shape[place] for place in places)

    def complete(self, dim: Dim) -> None:
        """What a size says of those it is made of, and they of it."""
        if dim.known is not None:
            self.sizes[dim] = dim.known
        if dim.half is not None and dim in self.sizes:
            self.sizes[dim.half.find()] = self.sizes[dim] // 2
        for pair, make, left in ((dim.sum, add, sub), (dim.product, mul, floordiv)):
            one, other = (part.find() for part in pair or (dim, dim))
            if pair and one in self.sizes and other in self.sizes:
                self.sizes[dim] = make(self.sizes[one], self.sizes[other])
            elif pair and dim in self.sizes:
                self.sizes |= {other: left(self.sizes[dim], self.sizes[one])} if one in self.sizes else {}
                self.sizes |= {one: left(self.sizes[dim], self.sizes[other])} if other in self.sizes else {}

    def digits_of(self, expr: Expr) -> list[list[int]]:
        """For each dim of an expression the sizes of its digits."""
        dims = self.frame.dims
        return [[self.sizes[d.find()] for d in dims.digits(dim)] for dim in self.frame.tensors[expr].dims]

    def in_digits(self, expr: Expr, value: Value) -> torch.Tensor:
        """The data of a value with one dim for each device axis and each digit."""
        num = len(value.axes)
        order = [*range(num), *(num + place for places in self.places(expr) for place in places)]
        shape = [*value.data.shape[:num], *(size for digits in self.digits_of(expr) for size in digits)]
        assert value.data.numel() == prod(shape), f"{expr} has shape {value.shape}"
        return value.data.permute(order).reshape(shape)


def check(instance: Instance, random: Random) -> None:
    """The definition and torch give the same elements, at some positions of an instance."""
    (expr,) = instance.rule.left
    (value,) = evaluate([expr], instance.inputs, instance.setting)
    framed = Framed(instance)
    digits, interpreter = framed.digits_of(expr), Interpreter(framed)
    assert value.axes == tuple(sorted(framed.frame.devices[expr]))
    data = framed.in_digits(expr, value)
    places = list(product(*map(range, data.shape)))
    for place in random.sample(places, min(POSITIONS, len(places))):
        devices = {axis: number(i) for axis, i in zip(value.axes, place, strict=False)}
        rest = iter(place[len(devices) :])
        index = tuple(tuple(number(next(rest)) for _ in dim) for dim in digits)
        found = interpreter.of(framed.frame.tensors[expr].at(index, devices), interpreter.sizes)
        assert found == pytest.approx(float(data[place]), rel=1e-9, abs=1e-9, nan_ok=True), f"{expr} at {place}"


def applications(op: RuleOp) -> Iterator[Apply]:
    args = tuple(Input(f"x{i}") for i in range(op.num_args))
    for values in product(*(CHOICES[name] for name, _ in op.params)):
        yield Apply(op.name, tuple(zip((name for name, _ in op.params), values, strict=True)), args)


def check_expression(expr: Expr) -> int:
    """Compare on random sizes; how many instances there were."""
    random, ran = Random(0), 0
    rule = Rule("", (expr,), (expr,))
    sampler = Sampler(rule, Frame(rule).build())
    for trial in range(INSTANCES):
        instance = sampler.draw(random, 1 + trial)
        if instance is None:
            continue
        try:
            check(instance, random)
        except Misfit:  # torch does not pool with more padding than half a window
            assert "pad" in str(expr)
            continue
        ran += 1
    return ran


def check_operator(op: RuleOp) -> int:
    """Compare for all kinds of parameters."""
    return sum(map(check_expression, applications(op)))


@pytest.mark.parametrize("op", OPS, ids=attrgetter("name"))
def test_every_definition_is_what_torch_computes(op: RuleOp) -> None:
    assert check_operator(op) >= INSTANCES - 1


@pytest.mark.parametrize(
    "text",
    [
        "embedding(combine[axis=0](x), i)",
        "embedding_bag(combine[axis=0](x), i)",
        "linear(x, combine[axis=0](w))",
        "sum[axis=-1](combine[axis=-1](x))",
        "mean[axis=-1](combine[axis=-1](x))",
        "softmax[axis=a](combine[axis=a](x))",
        "conv[groups=g](combine[axis=1](x), combine[axis=0](w))",
    ],
)
def test_dims_that_lie_on_several_devices_are_counted_through(text: str) -> None:
    assert check_expression(parse_rule("", text, text).left[0]) >= INSTANCES - 1


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ("sub", "add"),
        ("relu", "gelu"),
        ("max_pool", "avg_pool"),
        ("sum", "mean"),
        ("identity", "ones"),
        ("partition", "replicate"),
        ("split", "softmax"),
    ],
)
def test_a_wrong_definition_is_noticed(wrong: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = replace(BY_NAME[wrong], define=BY_NAME[instead].define)
    monkeypatch.setitem(BY_NAME, wrong, op)
    with pytest.raises(AssertionError):
        check_operator(op)


def test_a_convolution_that_reads_its_kernel_backwards_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(params: references.Params, args: tuple[torch.Tensor, ...], shape: references.Shape) -> torch.Tensor:
        return references._conv(params, (args[0], args[1].flip(-1)), shape)

    monkeypatch.setitem(references._REFERENCES, "conv", flipped)
    with pytest.raises(AssertionError):
        check_operator(BY_NAME["conv"])


def test_padding_that_an_average_leaves_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition counts padding; torch does so only when asked."""

    def uncounted(params: references.Params, args: tuple[torch.Tensor, ...], shape: references.Shape) -> torch.Tensor:
        kernel, stride = int(params["kernel"]), int(params["stride"])
        pad = references._padding(params, kernel)
        return torch.nn.functional.avg_pool2d(args[0], kernel, stride, pad, count_include_pad=False)

    monkeypatch.setitem(references._REFERENCES, "avg_pool", uncounted)
    with pytest.raises(AssertionError):
        check_operator(BY_NAME["avg_pool"])
