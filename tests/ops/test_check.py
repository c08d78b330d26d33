"""Every checker must fail on a false declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from conjoin.ops import (
    Call,
    CheckFailed,
    Copies,
    Dtype,
    Indexed,
    LocalForm,
    OpSpec,
    Partial,
    ShardingRule,
    Split,
    TensorType,
    bind_args,
    check_expansion,
    check_rule,
    find_spec,
    output_types,
    random_call,
    random_cuts,
    random_tensors,
    run_whole,
    sharding_rules,
    space_of,
    types_on_meta,
)
from conjoin.ops.notation import Window


def declared(op: str) -> OpSpec:
    spec = find_spec(op)
    assert spec is not None
    return spec


def refute(spec: OpSpec, index: str | None, seeds: int = 12) -> str:
    """What the checker says of the rules that split an index (None: that let partial sums pass) on random calls."""
    for seed in range(seeds):
        rng = Random(seed)
        call = random_call(declared(spec.name), rng)
        space = space_of(spec, call)
        for rule in sharding_rules(spec, call):
            if rule.index != index or (index is None and Partial() not in rule.operands):
                continue
            cuts = (0, 1, 2) if index is None else random_cuts(space.sizes[index], 2, rng)
            try:
                check_rule(spec, call, rule, random_tensors(declared(spec.name), call, seed), cuts)
            except (CheckFailed, RuntimeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
    return "true"


def _softmax_without_whole(call: Call) -> str:
    names = " ".join(f"d{i}" for i in range(len(call.tensors[0].shape)))
    return f"{names} -> {names}"


def _conv_off_by_one(call: Call) -> Indexed:
    """The true notation with one more padding before the first element; the sizes stay the true ones."""
    true = space_of(declared("conv1d"), call)
    window = next(dim for dim in true.notation.operands[0].dims if isinstance(dim, Window))
    index = declared("conv1d").index
    assert callable(index)
    true_index = index(call)
    assert isinstance(true_index, Indexed)
    return Indexed(
        true_index.text.replace(f"-{window.padding},", f"-{window.padding + 1},"),
        (("g", call["groups"]), ("y", true.sizes["y"])),
    )


def _summed(call: Call) -> str:
    return f"{' '.join(f'd{i}' for i in range(len(call.tensors[0].shape)))} -> "


def _local_arange_from_zero(form: LocalForm) -> Any:
    lo, hi = form.pieces.get("k", (0, form.space.sizes["k"]))
    return form.emit("arange", hi - lo)


FALSE: dict[str, tuple[OpSpec, str | None]] = {
    "softmax over a dim that is not whole": (replace(declared("softmax.int"), index=_softmax_without_whole), "d0"),
    "relu called linear": (replace(declared("relu"), terms="self"), None),
    "abs called linear": (replace(declared("abs"), terms="self"), None),
    "add of a product": (replace(declared("mul.Tensor"), terms="self + other"), None),
    "linear without its bias as a term": (replace(declared("linear"), terms="input weight"), "k"),
    "maximum over a summed dim": (
        replace(declared("max"), index=_summed),
        "d0",
    ),
    "mean called a sum": (replace(declared("mean"), index=_summed), "d0"),
    "sum called a mean": (
        replace(declared("sum"), index=lambda call: _summed(call).replace("d0", "d0~")),
        "d0",
    ),
    "window with padding off by one": (replace(declared("conv1d"), index=_conv_off_by_one), "y"),
    "max pool padded with zeros": (replace(declared("max_pool1d"), pad_value=0.0), "y"),
    "groups that do not shrink": (replace(declared("conv1d"), follows={}), "g"),
    "a view to the whole shape": (replace(declared("view"), follows={}), "a0"),
    "padding row that does not move": (replace(declared("embedding"), follows={}), "v"),
    "a causal mask that does not move": (replace(declared("scaled_dot_product_attention"), local=None), "l"),
    "a diagonal that does not move": (replace(declared("tril"), local=None), "m"),
    "a range that starts over": (replace(declared("arange"), local=_local_arange_from_zero), "k"),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_declaration_is_caught(name: str) -> None:
    spec, index = FALSE[name]
    assert refute(declared(spec.name), index) == "true", "the true declaration passes"
    said = refute(spec, index)
    assert said != "true"
    assert not said.startswith("CheckFailed") or f"{spec.name} [" in said


def test_a_false_declaration_of_addresses_is_caught() -> None:
    """An embedding whose rows are not known to be addressed looks local rows up at global addresses."""
    spec, call = declared("embedding"), Call("embedding", bind_args("embedding", (f(6, 2), i(4)), {}))
    false = replace(spec, index="v d, ... -> ... d")
    rule = next(rule for rule in sharding_rules(false, call) if rule.index == "v")
    tensors = [torch.randn(6, 2, dtype=torch.float64), torch.tensor([0, 5, 2, 3])]
    check_rule(spec, call, rule, tensors, (0, 3, 6))
    with pytest.raises((CheckFailed, IndexError)):
        check_rule(false, call, rule, tensors, (0, 3, 6))


def f(*shape: int) -> TensorType:
    return TensorType(shape, torch.float64)


def i(*shape: int) -> TensorType:
    return TensorType(shape, torch.int64)


def test_a_false_rule_says_how_far_it_is_off() -> None:
    spec, call = declared("mm"), Call("mm", (f(2, 4), f(4, 3)))
    tensors = [torch.ones(2, 4, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)]
    whole = ShardingRule("k", (Split(1), Split(0)), (Copies(),))
    with pytest.raises(CheckFailed, match="copies differ"):
        check_rule(spec, call, whole, tensors, (0, 1, 4))
    with pytest.raises(CheckFailed, match=r"output 0: off by 2"):
        check_rule(spec, call, replace(whole, outputs=(Copies(),)), tensors, (0, 2, 4))


def test_a_gradient_that_is_lost_is_caught() -> None:
    """Values agree, the gradient of one part does not flow."""

    def local(form: LocalForm) -> Any:
        return form.emit("detach", form.run())

    spec, call = replace(declared("relu"), local=local), Call("relu", (f(4),))
    rule = next(rule for rule in sharding_rules(spec, call) if rule.index == "d0")
    with pytest.raises(CheckFailed, match="gradient 0"):
        check_rule(spec, call, rule, [torch.ones(4, dtype=torch.float64, requires_grad=True)], (0, 2, 4))


def test_a_wrong_dtype_is_seen() -> None:
    true, call = declared("eq.Scalar"), Call("eq.Scalar", (f(3), 0))
    false = replace(true, dtype=Dtype.FIRST)
    want = tuple(TensorType(tuple(o.shape), o.dtype) for o in run_whole(call, [torch.zeros(3, dtype=torch.float64)]))
    assert output_types(true, call) == want == types_on_meta(call)
    assert output_types(false, call) != want


def _unnormalised(form: LocalForm) -> Any:
    return form.emit("exp", form["self"])


def _half_of_it(form: LocalForm) -> Any:
    return form.run(), form.run()


@pytest.mark.parametrize("expansion", [_unnormalised, _half_of_it], ids=["other values", "other outputs"])
def test_a_false_expansion_is_caught(expansion: Callable[[LocalForm], Any]) -> None:
    call = Call("softmax.int", (f(2, 3), 1, None))
    tensors: list[Tensor] = [torch.rand(2, 3, dtype=torch.float64)]
    check_expansion(replace(declared("softmax.int"), expansion=lambda form: form.run()), call, tensors)
    with pytest.raises(CheckFailed, match=r"softmax\.int expanded"):
        check_expansion(replace(declared("softmax.int"), expansion=expansion), call, tensors)


def test_a_false_batch_norm_is_caught() -> None:
    """Statistics of the batch without the running ones moved."""
    spec = declared("_native_batch_norm_legit_functional")
    call = random_call(spec, Random(1))
    assert spec.expansion is not None
    true = spec.expansion

    def stale(form: LocalForm) -> Any:
        outputs = true(form)
        return *outputs[:3], form["running_mean"], form["running_var"]

    with pytest.raises(CheckFailed, match="output 3"):
        check_expansion(replace(spec, expansion=stale), call, random_tensors(spec, call, 0))
