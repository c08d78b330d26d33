"""The rewrites that the papers show in figures, by number: each follows from rules that were generated without knowing
of it, those of the library and, over devices, of `tests/devices`."""

from __future__ import annotations

import pytest

from conjoin.rules import Deriver, Library, Standing, judge, parse_rule, prove
from tests.devices.device_rules import rules_over_devices

RULES = (*Library.shipped().rules, *rules_over_devices())
MERGED = "conv[groups=1](x, concat[axis=0](enlarge[kernel=k](y), z))"
PRODUCTS = "matmul(a, concat[axis=-1](b, c))"
LINEARS = "linear(x, concat[axis=-2](v, w))"
PAIR = "conv(concat[axis=1](x, z), concat[axis=0](y, w))"
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
    "TASO 2.2b, as today's models have it": (
        "linear(x, v); linear(x, w)", f"split[axis=-1, part=0]({LINEARS}); split[axis=-1, part=1]({LINEARS})",
    ),
    "TASO 2.5: a product of transposed matrices": ("matmul(a, b)", "transpose(matmul(transpose(b), transpose(a)))"),
    "Unity 16b: a concatenation before a product": (
        "matmul(concat[axis=-1](x, y), concat[axis=-2](v, w))", "add(matmul(x, v), matmul(y, w))",
    ),
    "Unity 16b: lookups joined before a product": (
        "matmul(concat[axis=-1](embedding_bag(t, i), embedding_bag(u, j)), concat[axis=-2](v, w))",
        "add(matmul(embedding_bag(t, i), v), matmul(embedding_bag(u, j), w))",
    ),
    "Unity 11a: rows of an activation on each device": ("relu(x)", "combine[axis=-2](relu(partition[axis=-2](x)))"),
    "Unity 11b: an addition over two devices": (
        "add(x, y)", "reduce[mesh=2](partition[axis=a, mesh=2](concat[axis=a](x, y)))",
    ),
    "Unity 10: two layers by Megatron": (
        "linear(gelu(linear(x, v)), w)",
        "reduce(linear(gelu(linear(replicate(x), partition[axis=-2](v))), partition[axis=-1](w)))",
    ),
    "Unity 16c: a bag of rows": ("embedding_bag(t, i)", "sum[axis=-2](embedding(t, i))"),
    "Unity 16a: a product and its activation": (
        "relu(matmul(x, y))", "relu(reduce(matmul(partition[axis=-1](x), partition[axis=-2](y))))",
    ),
    "Unity 16a: an activation undone for a reduction over devices": (
        "conv[act=relu, groups=1](x, w)",
        "relu(reduce(conv[groups=1](partition[axis=1](x), partition[axis=1](w))))",
    ),
}  # fmt: skip
CONDITIONED = {
    "TASO 2.9: convolutions as groups of one": (
        "concat[axis=1](conv(x, y), conv(z, w))", "conv(concat[axis=1](x, z), concat[axis=0](y, w))",
    ),
    "TASO 2.9: two times 16 groups are 32": (
        "concat[axis=1](conv[groups=16](x, y), conv[groups=16](z, w))",
        "conv[groups=32](concat[axis=1](x, z), concat[axis=0](y, w))",
    ),
    "TASO 2.9: a pair of convolutions, apart again": (
        "conv(x, y); conv(z, w)",
        f"split[axis=1, part=0]({PAIR}); split[axis=1, part=1]({PAIR})",
    ),
}  # fmt: skip
"""False where one kernel has more features per group than the other."""


@pytest.fixture(scope="module")
def deriver() -> Deriver:
    return Deriver(RULES)


@pytest.mark.parametrize("name", DERIVED)
def test_the_library_has_it(name: str, deriver: Deriver) -> None:
    goal = parse_rule(name, *DERIVED[name])
    found = judge(goal, deriver)
    assert found.standing is Standing.DERIVED, "a chain of rules of the library, each proven again where it is applied"
    assert found.derivation and found.derivation[-1].result == goal.right
    assert {step.rule for step in found.derivation} <= {rule.name for rule in RULES}


@pytest.mark.parametrize("name", CONDITIONED)
def test_what_is_false_for_some_shapes_is_refuted_and_holds_under_its_conditions(name: str, deriver: Deriver) -> None:
    goal = parse_rule(name, *CONDITIONED[name])
    assert judge(goal, deriver).standing is Standing.REFUTED
    conditions = prove(goal).conditions
    assert any(" / " in one and one.startswith("y.0") for one in conditions), "equal features per group"
    assert judge(goal, deriver, conditions).standing in (Standing.DERIVED, Standing.PROVEN)
