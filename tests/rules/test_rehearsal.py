"""Rehearsals find what is wrong with a rewrite, whoever made it, and nothing wrong with those that are right."""

from __future__ import annotations

import time

import pytest

from conjoin.ir import Replacement, Value
from conjoin.rules.graphs.matching import find_matches
from conjoin.rules.graphs.rehearsal import rehearse
from conjoin.rules.graphs.rewriting import replacement_of
from conjoin.rules.text import parse_rule
from tests.rules.rewrite_cases import graph_of


def change(leaves: str, old: str, new: str) -> Replacement:
    """Calls, numbered through, of which the last ones of both halves take each other's places."""
    calls = [*old.strip().splitlines(), *new.strip().splitlines()]
    graph = graph_of("\n".join([leaves, *calls]), f"%{len(calls) - 1}")
    before, after = graph.nodes[: len(old.strip().splitlines())], graph.nodes[len(old.strip().splitlines()) :]
    return Replacement(before, after, ((Value(before[-1]), Value(after[-1])),))


WRONG = {
    "a mean over another dim of the same size": (
        "input:x f32[32,64,128]\nparam:w f32[64,128] trainable",
        "%0: f32[32,64,64] = linear(input:x, param:w)\n%1: f32[32,64] = mean.dim(%0, dim=[2])",
        "%2: f32[32,128] = mean.dim(input:x, dim=[1])\n%3: f32[32,64] = linear(%2, param:w)",
        "result is off",
    ),
    "a softmax over another dim": (
        "input:x f32[64,64]",
        "%0: f32[64,64] = t(input:x)\n%1: f32[64,64] = softmax.int(%0, dim=-1)",
        "%2: f32[64,64] = softmax.int(input:x, dim=-1)\n%3: f32[64,64] = t(%2)",
        "result is off",
    ),
    "a sum of bools": (
        "input:x f32[64,32]\ninput:a b1[64,32]\ninput:b b1[64,32]",
        "%0: f32[64,32] = mul.Tensor(input:x, input:a)\n%1: f32[64,32] = mul.Tensor(input:x, input:b)\n"
        "%2: f32[64,32] = add.Tensor(%0, %1)",
        "%3: b1[64,32] = add.Tensor(input:a, input:b)\n%4: f32[64,32] = mul.Tensor(input:x, %3)",
        "result is off",
    ),
    "small integers that wrap": (
        "input:a i8[64]\ninput:b f32[64]",
        "%0: f32[64] = mul.Tensor(input:b, input:a)\n%1: f32[64] = mul.Tensor(%0, input:a)",
        "%2: i8[64] = mul.Tensor(input:a, input:a)\n%3: f32[64] = mul.Tensor(input:b, %2)",
        "result is off",
    ),
    "a gradient that stops": (
        "input:x f32[64]\ninput:y f32[64]",
        "%0: f32[64] = mul.Tensor(input:x, input:y)",
        "%1: f32[64] = detach(input:y)\n%2: f32[64] = mul.Tensor(input:x, %1)",
        "gradient is off",
    ),
    "scores that are scaled too late for half precision": (
        "input:q f16[4,16,64]\ninput:k f16[4,64,16]",
        "%0: f16[4,16,64] = mul.Tensor(input:q, 0.125)\n%1: f16[4,16,16] = matmul(%0, input:k)",
        "%2: f16[4,16,16] = matmul(input:q, input:k)\n%3: f16[4,16,16] = mul.Tensor(%2, 0.125)",
        "times as large",
    ),
    "a piece of what has roots only in part": (
        "input:x f32[64]",
        "%0: f32[32] = narrow(input:x, dim=0, start=0, length=32)\n%1: f32[32] = abs(%0)\n%2: f32[32] = sqrt(%1)",
        "%3: f32[64] = sqrt(input:x)\n%4: f32[32] = narrow(%3, dim=0, start=0, length=32)",
        "no number where there was one",
    ),
    "another seventh decimal": (
        "input:x f32[64]",
        "%0: f32[64] = mul.Tensor(input:x, 0.3333333)",
        "%1: f32[64] = div.Tensor(input:x, 3)",
        "result is off",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    leaves, old, new, reason = WRONG[name]
    assert reason in rehearse(change(leaves, old, new))


RIGHT = {
    "large layers": (
        "input:x bf16[8,1024,4096]\nparam:w bf16[16384,4096] trainable\nparam:u bf16[4096,16384] trainable",
        "%0: bf16[8,1024,16384] = linear(input:x, param:w)\n%1: bf16[8,1024,4096] = linear(%0, param:u)",
        "%2: bf16[4096,4096] = matmul(param:u, param:w)\n%3: bf16[8,1024,4096] = linear(input:x, %2)",
    ),
    "three layers as one": (
        "input:x f16[8,1024,768]\nparam:w f16[2304,768] trainable",
        "%0: f16[8,1024,2304] = linear(input:x, param:w)\n"
        "%1: f16[8,1024,768] = slice.Tensor(%0, dim=2, start=768, end=1536, step=1)",
        "%2: f16[768,768] = narrow(param:w, dim=0, start=768, length=768)\n%3: f16[8,1024,768] = linear(input:x, %2)",
    ),
    "heads": (
        "input:x f32[8,512,768]",
        "%0: f32[8,512,12,64] = view(input:x, size=[8, 512, 12, 64])\n"
        "%1: f32[8,12,512,64] = transpose.int(%0, dim0=1, dim1=2)\n%2: f32[8,12,512,64] = relu(%1)",
        "%3: f32[8,512,768] = relu(input:x)\n%4: f32[8,512,12,64] = reshape(%3, shape=[8, 512, 12, 64])\n"
        "%5: f32[8,12,512,64] = permute(%4, dims=[0, 2, 1, 3])",
    ),
    "a token before many": (
        "input:x f32[64,1,768]\ninput:y f32[64,196,768]",
        "%0: f32[64,197,768] = cat([input:x, input:y], dim=1)\n%1: f32[64,197,768] = tanh(%0)",
        "%2: f32[64,1,768] = tanh(input:x)\n%3: f32[64,196,768] = tanh(input:y)\n"
        "%4: f32[64,197,768] = cat([%2, %3], dim=1)",
    ),
    "a large table": (
        "input:i i64[64,128]\nparam:a f32[50257,512] trainable\nparam:b f32[50257,256] trainable",
        "%0: f32[64,128,512] = embedding(param:a, input:i)\n%1: f32[64,128,256] = embedding(param:b, input:i)\n"
        "%2: f32[64,128,768] = cat([%0, %1], dim=2)",
        "%3: f32[50257,768] = cat([param:a, param:b], dim=1)\n%4: f32[64,128,768] = embedding(%3, input:i)",
    ),
    "a convolution by groups": (
        "input:x f32[64,128,56,56]\nparam:w f32[128,1,3,3] trainable\nparam:v f32[128,1,3,3] trainable",
        "%0: f32[64,128,56,56] = conv2d(input:x, param:w, padding=[1, 1], groups=128)\n"
        "%1: f32[64,128,56,56] = conv2d(input:x, param:v, padding=[1, 1], groups=128)\n"
        "%2: f32[64,128,56,56] = add.Tensor(%0, %1)",
        "%3: f32[128,1,3,3] = add.Tensor(param:w, param:v)\n"
        "%4: f32[64,128,56,56] = conv2d(input:x, %3, padding=[1, 1], groups=128)",
    ),
    "scores that are scaled sooner": (
        "input:q f16[4,16,64]\ninput:k f16[4,64,16]",
        "%0: f16[4,16,16] = matmul(input:q, input:k)\n%1: f16[4,16,16] = mul.Tensor(%0, 0.125)",
        "%2: f16[4,16,64] = mul.Tensor(input:q, 0.125)\n%3: f16[4,16,16] = matmul(%2, input:k)",
    ),
    "bools that are moved": (
        "input:x b1[64,32]",
        "%0: b1[32,64] = t(input:x)\n%1: b1[64,32] = t(%0)",
        "%2: b1[64,32] = permute(input:x, dims=[0, 1])",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_at_any_size(name: str) -> None:
    """Seconds of this process: measured under 0.1, of which none goes into the sizes of the model."""
    made, start = change(*RIGHT[name]), time.process_time()
    assert rehearse(made) == "" and time.process_time() - start < 2.0


def test_what_cannot_be_made_small_is_not_taken_on_trust() -> None:
    """One element before very many: the ratio is kept."""
    leaves, size = "input:x f32[1]\ninput:y f32[199999999]", 200000000
    old, new = (f"%{i}: f32[{size}] = cat([input:{a}, input:{b}])" for i, a, b in ((0, "x", "y"), (1, "y", "x")))
    assert "too large" in rehearse(change(leaves, old, new))


def test_calls_that_do_not_run_are_no_rewrite() -> None:
    leaves, old = "input:x f32[64]", "%0: f32[64] = relu(input:x)"
    made = change(leaves, old, "%1: f32[64] = reshape(input:x, shape=[64])")
    wrong = change("input:x f32[6,4]", "%0: f32[4,6] = t(input:x)", "%1: f32[4,6] = reshape(input:x, shape=[4, 6])")
    assert "off" in rehearse(made) and rehearse(wrong) != ""


def test_the_change_of_a_match_is_what_is_rehearsed() -> None:
    leaves = "input:x f64[3,4]\nparam:a f64[5,4] trainable\nparam:p f64[5] trainable\n"
    graph = graph_of(leaves + "%0: f64[3,5] = linear(input:x, param:a, param:p)\n%1: f64[3,5] = relu(%0)", "%1")
    for right, reason in (("bias[act=relu](linear(x, y), z)", ""), ("bias(linear(x, y), z)", "off")):
        (match,) = find_matches(graph, parse_rule("r", "relu(bias(linear(x, y), z))", right))
        assert reason in rehearse(replacement_of(match)) and bool(rehearse(replacement_of(match))) == bool(reason)


def test_what_is_replaced_may_be_made_again_by_the_new_calls() -> None:
    calls = "%0: f32[64,32] = t(input:x)\n%1: f32[64,32] = relu(%0)\n%2: f32[32,64] = t(%0)\n%3: f32[64,32] = t(%2)"
    given, read, back, again = graph_of(f"input:x f32[32,64]\n{calls}", "%3").nodes
    kept = Replacement((read,), (given, back, again), ((Value(given), Value(again)),))
    assert rehearse(kept) == ""
    assert "result is off" in rehearse(Replacement((read,), (given, read), ((Value(given), Value(read)),)))
