"""The papers' rewrites: each follows from the library, by rules that were generated without knowing of it."""

from __future__ import annotations

import pytest

from conjoin.rules import Deriver, Library, parse_rule, prove
from conjoin.rules.patterns import Rule

MERGED = "conv[groups=1](x, concat[axis=0](enlarge[kernel=k](y), z))"
PRODUCTS = "matmul(a, concat[axis=-1](b, c))"
DERIVED = {
    "TASO 2.8b: two pools and an addition are one depthwise convolution": (
        "add(avg_pool[kernel=3](x), avg_pool[kernel=3](y))", "conv[groups=g](add(x, y), pool_kernel[kernel=3])",
    ),
    "TASO 2.8c: convolutions of different kernels are merged": (
        "conv[groups=1](x, y); conv[groups=1](x, z)",
        f"split[axis=1, part=0]({MERGED}); split[axis=1, part=1]({MERGED})",
    ),
    "TASO 2.2b: products that share an input are merged": (
        "matmul(a, b); matmul(a, c)", f"split[axis=-1, part=0]({PRODUCTS}); split[axis=-1, part=1]({PRODUCTS})",
    ),
    "TASO 2.5: a product of transposed matrices": ("matmul(a, b)", "transpose(matmul(transpose(b), transpose(a)))"),
    "Unity 16b: a concatenation before a product": (
        "matmul(concat[axis=-1](x, y), concat[axis=-2](v, w))", "add(matmul(x, v), matmul(y, w))",
    ),
    "Unity 16c: a bag of rows": ("embedding_bag(t, i)", "sum[axis=-2](embedding(t, i))"),
    "Unity 16a: an activation undone for a reduction over devices": (
        "conv[act=relu, groups=1](x, w)",
        "relu(reduce(conv[groups=1](partition[axis=1](x), partition[axis=1](w))))",
    ),
}  # fmt: skip
PROVEN = {
    "TASO 2.9: convolutions as groups of one": (
        "concat[axis=1](conv(x, y), conv(z, w))", "conv(concat[axis=1](x, z), concat[axis=0](y, w))",
    ),
    "Unity 11b: an addition over two devices": (
        "add(x, y)", "reduce[mesh=2](partition[axis=a, mesh=2](concat[axis=a](x, y)))",
    ),
}  # fmt: skip
"""True, and not within what is enumerated."""


@pytest.fixture(scope="module")
def deriver() -> Deriver:
    return Deriver(Library.shipped().rules)


@pytest.mark.parametrize("name", DERIVED)
def test_the_library_has_it(name: str, deriver: Deriver) -> None:
    goal = parse_rule(name, *DERIVED[name])
    steps = deriver.derive(goal)
    assert steps, "a chain of rules of the library"
    before = goal.left
    for step in steps:
        assert prove(Rule(step.rule, before, step.result)).proven
        before = step.result
    assert before == goal.right


@pytest.mark.parametrize("name", PROVEN)
def test_it_is_true(name: str) -> None:
    assert prove(parse_rule(name, *PROVEN[name])).proven
