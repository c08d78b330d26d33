"""Every rule operator's definition, a sum over elements of its operands, says what torch computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import prod
from operator import attrgetter
from random import Random

import pytest
import torch

from conjoin.rules.definitions.affine import Affine, number
from conjoin.rules.definitions.sums import Access, Atom, Factor, Function, Guard, Largest, Size, Sum
from conjoin.rules.operators import BY_NAME, OPS, RuleOp
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule
from conjoin.rules.text import parse_rule
from conjoin.rules.trials import references
from conjoin.rules.trials.evaluating import Value, evaluate
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
}
INSTANCES = 5
POSITIONS = 24


class Interpreter:
    """The numbers that sums are when all sizes and elements are known; loops over indices under their guards."""

    def __init__(self, instance: Instance) -> None:
        self.sizes = {**instance.sizes, **instance.setting.numbers}
        self.functions = instance.setting.functions
        self.tensors = {name: in_digits(instance, Input(name), value) for name, value in instance.inputs.items()}

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


def digits_of(instance: Instance, expr: Expr) -> list[list[int]]:
    """For each dim of an expression the sizes of its digits."""
    frame = instance.frame
    return [[instance.sizes[d.find().name] for d in frame.dims.digits(dim)] for dim in frame.tensors[expr].dims]


def in_digits(instance: Instance, expr: Expr, value: Value) -> torch.Tensor:
    """The data of a value with one dim for each device axis and each digit."""
    devices = value.data.shape[: len(value.axes)]
    return value.data.reshape([*devices, *(size for digits in digits_of(instance, expr) for size in digits)])


def check(instance: Instance, random: Random) -> None:
    """The definition and torch give the same elements, at some positions of an instance."""
    (expr,) = instance.rule.left
    (value,) = evaluate([expr], instance.inputs, instance.setting)
    digits, interpreter = digits_of(instance, expr), Interpreter(instance)
    assert value.axes == tuple(sorted(instance.frame.devices[expr]))
    assert prod(value.shape) == prod(size for dim in digits for size in dim), f"{expr} has shape {value.shape}"
    data = in_digits(instance, expr, value)
    places = list(product(*map(range, data.shape)))
    for place in random.sample(places, min(POSITIONS, len(places))):
        devices = {axis: number(i) for axis, i in zip(value.axes, place, strict=False)}
        rest = iter(place[len(devices) :])
        index = tuple(tuple(number(next(rest)) for _ in dim) for dim in digits)
        found = interpreter.of(instance.frame.tensors[expr].at(index, devices), interpreter.sizes)
        assert found == pytest.approx(float(data[place]), rel=1e-9, abs=1e-9, nan_ok=True), f"{expr} at {place}"


def applications(op: RuleOp) -> Iterator[Apply]:
    args = tuple(Input(f"x{i}") for i in range(op.num_args))
    for values in product(*(CHOICES[name] for name, _ in op.params)):
        yield Apply(op.name, tuple(zip((name for name, _ in op.params), values, strict=True)), args)


def check_expression(expr: Expr) -> int:
    """Compare on random sizes; how many instances there were."""
    random, ran = Random(0), 0
    sampler = Sampler(Rule("", (expr,), (expr,)))
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
