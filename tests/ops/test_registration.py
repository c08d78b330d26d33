"""Operators of a user's own: a true declaration lets them be split, a false one is refused with where it is wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import DeclarationError
from conjoin.ops import (
    Call,
    Dtype,
    LocalForm,
    TensorType,
    find_function,
    find_operator,
    find_spec,
    register_operator,
    sharding_rules,
)
from tests.ir.wording import assert_three_sentences

SCAN = "conjoin_tests::scan"


@torch.library.custom_op(SCAN, mutates_args=())
def scan(x: Tensor, decay: Tensor) -> Tensor:
    """h[t] = decay h[t-1] + x[t]."""
    states = [x[:, 0]]
    for t in range(1, x.shape[1]):
        states.append(decay * states[-1] + x[:, t])
    return torch.stack(states, 1)


@scan.register_fake
def _(x: Tensor, decay: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    decay, states = ctx.saved_tensors
    total, of_x, of_decay = torch.zeros_like(gradient[:, 0]), [], torch.zeros_like(decay)
    for t in reversed(range(gradient.shape[1])):
        total = decay * total + gradient[:, t]
        of_x.append(total)
        of_decay = of_decay + ((total * states[:, t - 1]).sum(0) if t else 0)
    return torch.stack(of_x[::-1], 1), of_decay


scan.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1], output))


@torch.library.custom_op("conjoin_tests::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return 2 * x


centred.register_fake(torch.empty_like)
centred.register_autograd(lambda ctx, gradient: gradient - gradient.mean(0))


@torch.library.custom_op("conjoin_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return torch.rand_like(x)


noisy.register_fake(torch.empty_like)


@torch.library.custom_op("conjoin_tests::overwriting", mutates_args=("x",))
def overwriting(x: Tensor) -> None:
    x.zero_()


@torch.library.custom_op("conjoin_tests::doubled", mutates_args=())
def doubled(x: Tensor, times: int) -> Tensor:
    return x.double() * times


doubled.register_fake(lambda x, times: torch.empty_like(x, dtype=torch.float64))


def test_a_true_declaration_lets_an_operator_be_split() -> None:
    spec = register_operator(scan, "b t! c, c -> b t! c", terms="x")
    assert find_spec(SCAN) is spec
    call = Call(SCAN, (TensorType((4, 5, 6), torch.float32), TensorType((6,), torch.float32)))
    assert sorted(map(str, sharding_rules(spec, call))) == [
        "B, B -> B", "I, I -> I", "P, B -> P", "S(0), B -> S(0)", "S(2), S(0) -> S(2)",
    ]  # fmt: skip


@pytest.mark.parametrize("operator", [SCAN, torch.ops.conjoin_tests.scan, torch.ops.conjoin_tests.scan.default, scan])
def test_an_operator_is_named_in_any_way(operator: Any) -> None:
    assert register_operator(operator, "b t! c, c -> b t! c", smooth=False).name == SCAN


@torch.library.custom_op("conjoin_tests::energy", mutates_args=())
def energy(x: Tensor, w: Tensor) -> Tensor:
    """The sum over time and channels of squares, weighted: linear in the weights, not in x."""
    return torch.einsum("btc,ck->bk", x.square(), w)


energy.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))


def test_a_term_without_its_factor_is_left_out() -> None:
    """Summed indices may be split all the same, and what is in both operands with them."""
    spec = register_operator(energy, "b t c, c k -> b k", smooth=False)
    call = Call("conjoin_tests::energy", (TensorType((4, 5, 6), torch.float32), TensorType((6, 3), torch.float32)))
    assert sorted(map(str, sharding_rules(spec, call))) == [
        "B, B -> B", "B, S(1) -> S(1)", "I, I -> I", "S(0), B -> S(0)", "S(1), B -> P", "S(2), S(0) -> P",
    ]  # fmt: skip


def wrong_part(form: LocalForm) -> Any:
    return form.emit("mul.Scalar", form.run(), 2 if form.pieces else 1)


FALSE: dict[str, tuple[Callable[[], object], str]] = {
    "split time": (lambda: register_operator(scan, "b t c, c -> b t c"), r"split t at \[.*\]: output 0: off by"),
    "split channels": (lambda: register_operator(scan, "b t! c, e -> b t! c"), "RuntimeError|output 0"),
    "sums pass decay": (
        lambda: register_operator(scan, "b t! c, c -> b t! c", terms="x decay"), r"\[B, P -> P\].*off by"
    ),
    "a factor is missing": (
        lambda: register_operator(energy, "b t c, c k -> b k", terms="w", smooth=False),
        r"\[S\(1\), P -> P\] split t at .* off by .* one with a factor that it is not linear in is left out",
    ),
    "summed": (lambda: register_operator(scan, "b t! c, c -> b t!"), r"gives f64\[.*its declaration says f64\["),
    "order": (lambda: register_operator(scan, "b t! c, c -> t! b c"), "its declaration says"),
    "dtype": (lambda: register_operator(scan, "b t! c, c -> b t! c", dtype=Dtype.INT64), "its declaration says i64"),
    "local": (
        lambda: register_operator(scan, "b t! c, c -> b t! c", local=wrong_part), "split . at .*: output 0: off by"
    ),
    "expansion": (
        lambda: register_operator(scan, "b t! c, c -> b t! c", expansion=lambda form: form["x"]),
        "expanded: output 0: off by",
    ),
    "gradient": (lambda: register_operator(centred, "b c -> b c", terms="x"), "split b at .*: gradient 0: off by"),
}  # fmt: skip


@pytest.mark.parametrize("case", FALSE.values(), ids=FALSE.keys())
def test_a_false_declaration_is_refused_with_a_counterexample(case: tuple[Callable[[], object], str]) -> None:
    declare, told = case
    register_operator(scan, "b t! c, c -> b t! c")
    before = find_spec(SCAN)
    with pytest.raises(DeclarationError, match=told) as caught:
        declare()
    assert_three_sentences(caught.value)
    assert find_spec(SCAN) is before and find_spec("conjoin_tests::centred") is None


def test_the_gradient_that_was_refused_is_right_for_another_split() -> None:
    assert register_operator(centred, "b! c -> b! c", terms="x").name == "conjoin_tests::centred"


def ones(rng: Random) -> tuple[Any, ...]:
    return TensorType((1, 3, 2), torch.float64), TensorType((2,), torch.float64)


UNTRIED: dict[str, tuple[Callable[[], object], str]] = {
    "random": (lambda: register_operator(noisy, "... -> ..."), "gives other values when it is called again"),
    "writing": (lambda: register_operator(overwriting, "... -> ..."), "It writes to its operands"),
    "no sample": (lambda: register_operator(doubled, "b -> b"), "could not be put to the test"),
    "no operator": (lambda: register_operator(torch.relu, "... -> ..."), "was given to be declared as an operator"),
    "torch's": (lambda: register_operator("relu", "... -> ..."), "torch's own or conjoin's"),
    "unknown": (lambda: register_operator("conjoin_tests::no_such", "... -> ..."), "has no operator"),
    "no notation": (lambda: register_operator(scan, "b t c"), "has no '->'"),
    "never split": (lambda: register_operator(scan, "b t! c, c -> b t! c", sample=ones), "the index b was never"),
    "no such term": (lambda: register_operator(scan, "b t! c, c -> b t! c", terms="y"), "takes x, decay, and nothing"),
    "no such attribute": (
        lambda: register_operator(doubled, "b -> b", sample={"tims": (2,)}), "sample of 'tims'.* Did you mean times?"
    ),
    "no such constant": (lambda: register_operator(centred, "b! c -> b! c", constants=("z",)), "with constants of 'z'"),
    "operands": (lambda: register_operator(centred, "b c, c -> b c"), "That has 2 operands and it takes 1 tensor"),
    "ranks": (lambda: register_operator(scan, "b, c -> b c"), "could not be put to the test"),
}


@pytest.mark.parametrize("case", UNTRIED.values(), ids=UNTRIED.keys())
def test_what_cannot_be_tried_is_refused(case: tuple[Callable[[], object], str]) -> None:
    with pytest.raises(DeclarationError, match=case[1]) as caught:
        case[0]()
    assert_three_sentences(caught.value)


def test_attributes_are_drawn_from_a_sample_and_other_dtypes_are_tried() -> None:
    made = {"sample": {"times": (2, 3)}, "smooth": False}
    with pytest.raises(DeclarationError, match=r"gives f64\[\d+\], and its declaration says f32"):
        register_operator(doubled, "b -> b", **made)
    assert register_operator(doubled, "b -> b", dtype=Dtype.FLOAT64, **made)


class Straight(torch.autograd.Function):
    """The sign of a layer's outputs, with the gradient of the layer itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return torch.sign(x @ weight.T) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return ctx.scale * gradient @ weight, ctx.scale * gradient.T @ x, None


class Binary(nn.Module):
    """A straight-through layer, then one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(6, 4)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(Straight.apply(x, self.weight, 0.5)).square().mean()


def test_an_autograd_function_is_kept_whole_and_split() -> None:
    torch.manual_seed(0)
    model, x = Binary(), torch.randn(8, 4)
    with pytest.raises(conjoin.CaptureError, match=r"declare it with conjoin\.register_operator"):
        conjoin.capture(model, x)
    name = register_operator(Straight, "b k!, n k! -> b n", sample={"scale": (0.5, 2.0)}).name
    graph = conjoin.capture(model, x)
    assert name in [node.op for node in graph.nodes] and graph.nodes[0].args[2] == 0.5
    step = conjoin.to_module(graph, model)
    ours, plain = (torch.autograd.grad(run(x), list(model.parameters())) for run in (step, model))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, plain, strict=True))
    for strategy in ("data-parallel", "fsdp"):
        plan = conjoin.plan(model, x, "local:2", loss=lambda y: y, strategy=strategy)
        (node,) = (node for node in plan.graph.nodes if node.op == name)
        assert str(node.types[0]) == "f32[8,6]{d0:S(0)}"
        assert conjoin.verify_plan(plan, model, x, loss=lambda y: y, num_steps=2).passed


def test_a_function_whose_types_nobody_knows() -> None:
    class Vague(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, how) -> Tensor:  # type: ignore[no-untyped-def]
            return x * how

    with pytest.raises(DeclarationError, match="nothing says of what type how is") as caught:
        register_operator(Vague, "... -> ...")
    assert_three_sentences(caught.value)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay, self.fc = nn.Parameter(torch.rand(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return late(self.fc(x), self.decay).square().mean()


@torch.library.custom_op("conjoin_tests::late", mutates_args=())
def late(x: Tensor, decay: Tensor) -> Tensor:
    return x * decay


late.register_fake(lambda x, decay: torch.empty_like(x))
late.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_an_operator_that_takes_no_tensor_may_be_declared() -> None:
    @torch.library.custom_op("conjoin_tests::counted", mutates_args=())
    def counted(n: int) -> Tensor:
        return torch.arange(float(n))

    counted.register_fake(lambda n: torch.empty(n))
    register_operator(counted, "-> 1", sample={"n": (1,)})


def test_what_was_thought_before_it_was_declared_is_forgotten() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(4, 3, 6)
    ask: Any = {"loss": lambda y: y, "strategy": "data-parallel"}
    opaque = conjoin.plan(model, x, "local:2", **ask)
    assert "opaque" not in str(opaque.graph) and "conjoin_tests::late" in conjoin.inspect(opaque.graph).opaque
    with pytest.raises(conjoin.ConjoinError, match=r"all samples at once: nobody declared it by conjoin\.reg"):
        conjoin.plan(model, x, "local:2", **{**ask, "strategy": "fsdp+micro=2"})
    register_operator(late, "b t c, c -> b t c", terms="x decay")
    plan = conjoin.plan(model, x, "local:2", **ask)
    (before,), (after,) = ([n for n in p.graph.nodes if n.op.endswith("late")] for p in (opaque, plan))
    assert (str(before.types[0]), str(after.types[0])) == ("f32[4,3,6]", "f32[4,3,6]{d0:S(0)}")
    assert conjoin.inspect(plan.graph).opaque == ()
    assert conjoin.verify_plan(plan, model, x, loss=lambda y: y, num_steps=2).passed


def test_an_operator_that_is_defined_anew_is_the_new_one() -> None:
    """As when a file is imported again, or a cell of a notebook is run again."""

    def define(factor: float) -> Any:
        @torch.library.custom_op("conjoin_anew::scaled", mutates_args=())
        def scaled(x: Tensor) -> Tensor:
            return x * factor

        scaled.register_fake(torch.empty_like)
        return scaled

    for factor in (2.0, 3.0):
        scaled = define(factor)
        conjoin.register_operator(scaled, "... -> ...", terms="x", smooth=False)
        gc.collect()
        assert find_operator("conjoin_anew::scaled")(torch.ones(2)).tolist() == [factor, factor]
        assert find_function("conjoin_anew::scaled")(torch.ones(2)).tolist() == [factor, factor]
