"""Rules made to be taken for true: each is refuted, and proven at most under conditions that exclude where it is false.

The judge is torch: `at` says where a rule is false, and both sides are computed there with plain operators, without the
references of the trials. The trials have to find such a place themselves, whatever the prover thinks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.rules import (
    Deriver,
    Rule,
    Standing,
    Verdict,
    judge,
    library_build,
    parse_rule,
    prove,
    refute,
    trials,
    verdict,
)
from conjoin.rules.definitions import dims, proof
from conjoin.rules.parameters import parameters
from conjoin.rules.parser import parse_expressions
from conjoin.rules.patterns import Expr, Input
from tests.cases import each_of

RULES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "adversarial.toml").read_text("utf-8"))["rule"]
FALSE = [one for one in RULES if "at" in one]
Value = Tensor | list[Tensor]
"""A tensor, or one for each device."""


def rule_of(one: Mapping[str, Any]) -> Rule:
    return parse_rule(one["name"], one["left"], one["right"])


def padding(params: Mapping[str, Any], kernel: int) -> int:
    return {"same": kernel // 2, "valid": 0}.get(params["pad"], params["pad"])


def conv(p: Mapping[str, Any], x: Tensor, w: Tensor) -> Tensor:
    groups = x.shape[1] // w.shape[1] if p["groups"] == "?" else p["groups"]
    made = functional.conv2d(x, w, None, p["stride"], [padding(p, n) for n in w.shape[2:]], 1, groups)
    return activated(p, made)


def activated(p: Mapping[str, Any], made: Tensor) -> Tensor:
    return made if p["act"] == "none" else getattr(torch, p["act"])(made)


def enlarged(w: Tensor, kernel: int) -> Tensor:
    rows, columns = ((kernel - n) // 2 for n in w.shape[2:])
    if min(rows, columns) < 0 or any((kernel - n) % 2 for n in w.shape[2:]):
        raise RuntimeError("no kernel becomes smaller, or has more zeros on one side")
    return functional.pad(w, (columns, columns, rows, rows))


def same(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(p: Mapping[str, Any], x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise RuntimeError("nothing is broadcast")
        return function(x, y)

    return run


PLAIN: Mapping[str, Callable[..., Tensor]] = {
    **{name: same(getattr(torch, name)) for name in ("add", "sub", "mul", "div")},
    "relu": lambda p, x: x.relu(),
    "exp": lambda p, x: x.exp(),
    "neg": lambda p, x: -x,
    "scale": lambda p, x, s: x * s,
    "bias": lambda p, x, b: activated(p, x + b.expand(x.shape[-1])),
    "gain": lambda p, x, g: x * g.expand(x.shape[-1]),
    "matmul": lambda p, x, y: torch.matmul(x, y),
    "linear": lambda p, x, w: functional.linear(x, w),
    "transpose": lambda p, x: x.transpose(-1, -2),
    "swap": lambda p, x: x.transpose(-3, -2),
    "flatten": lambda p, x: x.flatten(-2),
    "unflatten": lambda p, x: x.unflatten(-1, (p["parts"], -1)),
    "conv": conv,
    "enlarge": lambda p, w: enlarged(w, p["kernel"]),
    "avg_pool": lambda p, x: functional.avg_pool2d(x, p["kernel"], p["stride"], padding(p, p["kernel"])),
    "max_pool": lambda p, x: functional.max_pool2d(x, p["kernel"], p["stride"], padding(p, p["kernel"])),
    "concat": lambda p, x, y: torch.cat([x, y], p["axis"]),
    "sum": lambda p, x: x.sum(p["axis"]),
    "mean": lambda p, x: x.mean(p["axis"]),
    "softmax": lambda p, x: x.softmax(p["axis"]),
}


class Plain:
    """Both sides at one place, by plain torch."""

    def __init__(self, at: Mapping[str, Any]) -> None:
        self.at, self.num_devices = at, at.get("num_devices", 1)
        generator = torch.Generator().manual_seed(7)
        self.inputs: dict[str, Value] = {}
        for name, shape in at["shapes"].items():
            made = torch.rand([self.num_devices, *shape], generator=generator, dtype=torch.float64) * 3 - 1.2
            self.inputs[name] = list(made) if name in at.get("devices", ()) else made[0]

    def side(self, which: str) -> list[Tensor]:
        found = (self.of(expr) for expr in parse_expressions(self.at[which]))
        return [torch.stack(value) if isinstance(value, list) else value for value in found]

    def of(self, expr: Expr) -> Value:
        if isinstance(expr, Input):
            return self.inputs[expr.name]
        p, args = dict(parameters(expr)), [self.of(arg) for arg in expr.args]
        if expr.op in ("partition", "combine", "replicate", "reduce"):
            return self.over_devices(expr.op, p, args[0])
        if not args:
            return self.constant(expr.op, self.at["constants"][str(expr)])
        if expr.op == "split":
            first = self.at["firsts"][str(expr)]
            return self.each(lambda x: x.tensor_split([first], p["axis"])[p["part"]], args)
        return self.each(lambda *own: PLAIN[expr.op](p, *own), args)

    def each(self, function: Callable[..., Tensor], args: list[Value]) -> Value:
        if not any(isinstance(arg, list) for arg in args):
            return function(*args)
        return [function(*(a[i] if isinstance(a, list) else a for a in args)) for i in range(self.num_devices)]

    def over_devices(self, op: str, p: Mapping[str, Any], x: Value) -> Value:
        if isinstance(x, list):
            return torch.cat(x, p["axis"]) if op == "combine" else torch.stack(x).sum(0)
        if op == "replicate":
            return [x] * self.num_devices
        if x.shape[p["axis"]] % self.num_devices:
            raise RuntimeError("a dim does not divide over the devices")
        return list(x.chunk(self.num_devices, p["axis"]))

    def constant(self, op: str, shape: list[int]) -> Tensor:
        if op == "pool_kernel":
            return torch.full(shape, 1 / (shape[2] * shape[3]), dtype=torch.float64)
        return torch.nn.init.dirac_(torch.zeros(shape, dtype=torch.float64))


def test_there_are_enough_of_all_kinds() -> None:
    assert len(RULES) >= 80 and len(FALSE) >= 80
    assert all(one["wrong"] for one in RULES)


@each_of(FALSE, lambda one: one["name"])
def test_it_is_false_where_it_says(one: Mapping[str, Any]) -> None:
    plain = Plain(one["at"])
    left = plain.side("left")
    try:
        right = plain.side("right")
    except (RuntimeError, KeyError, IndexError):  # the left side runs and the right side does not
        return
    differ = (a.shape != b.shape or not torch.allclose(a, b) for a, b in zip(left, right, strict=True))
    assert any(differ)


@each_of(RULES, lambda one: one["name"])
def test_it_is_not_proven_without_a_condition_that_makes_it_true(one: Mapping[str, Any]) -> None:
    found = prove(rule_of(one))
    assert not found.proven or (found.conditions and refute(rule_of(one), 25, when=found.conditions) is None)


@pytest.fixture
def credulous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prover that proves everything, and whose sizes nobody can ask for."""

    def refuse(*_: object) -> None:
        raise AssertionError("trials ask the prover")

    for place in (verdict, library_build):
        monkeypatch.setattr(place, "prove", lambda rule: Verdict(True))
    for name in ("__init__", "build"):
        monkeypatch.setattr(proof.Frame, name, refuse)
    monkeypatch.setattr(dims.Dims, "unify", refuse)


@pytest.mark.usefixtures("credulous")
@each_of(FALSE, lambda one: one["name"])
def test_it_is_refuted_whatever_the_prover_thinks(one: Mapping[str, Any]) -> None:
    assert refute(rule_of(one), 40, when=()) is not None


@pytest.mark.usefixtures("credulous")
@pytest.mark.parametrize("one", FALSE[::11], ids=lambda one: one["name"])
def test_it_is_in_no_library_whatever_the_prover_thinks(one: Mapping[str, Any]) -> None:
    assert library_build.refuted_by(rule_of(one))
    assert judge(rule_of(one), Deriver([])).standing is Standing.REFUTED


def test_trials_know_nothing_of_proofs() -> None:
    for file in Path(trials.__file__).parent.glob("*.py"):
        assert "rules.definitions" not in file.read_text("utf-8"), file.name


@pytest.mark.parametrize("act", ["transpose", "swap", "flatten", "neg", "add", "concat", "reduce"])
def test_no_operator_but_a_function_is_an_activation(act: str) -> None:
    with pytest.raises(UsageError, match="act="):
        parse_rule("r", f"conv[act={act}](x, y)", "conv(x, y)")
