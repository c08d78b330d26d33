"""Proofs from definitions: what is true is proven with the conditions it needs, what is false is not."""

from __future__ import annotations

import pytest

from conjoin.rules import parse_rule, prove, refute

CONV = "conv[stride=s, groups=1]"
TRUE = {
    "matmul is associative": ("matmul(a, matmul(b, c))", "matmul(matmul(a, b), c)"),
    "matmul distributes": ("matmul(a, add(b, c))", "add(matmul(a, b), matmul(a, c))"),
    "a product of products": ("transpose(matmul(a, b))", "matmul(transpose(b), transpose(a))"),
    "a square is a sum": ("mul(add(a, b), add(a, b))", "add(add(mul(a, a), mul(a, b)), add(mul(b, a), mul(b, b)))"),
    "columns are merged": (
        "matmul(a, b); matmul(a, c)",
        "split[axis=-1, part=0](matmul(a, concat[axis=-1](b, c))); "
        "split[axis=-1, part=1](matmul(a, concat[axis=-1](b, c)))",
    ),
    "inner dims are merged": (
        "add(matmul(a, b), matmul(c, d))", "matmul(concat[axis=-1](a, c), concat[axis=-2](b, d))",
    ),
    "functions of parts": ("relu(concat[axis=a](x, y))", "concat[axis=a](relu(x), relu(y))"),
    "parts of a whole": ("x", "concat[axis=a](split[axis=a, part=0](x), split[axis=a, part=1](x))"),
    "conv is linear": (f"{CONV}(x, add(y, z))", f"add({CONV}(x, y), {CONV}(x, z))"),
    "grouped conv is linear": (
        "conv[stride=s, groups=g](x, add(y, z))", "add(conv[stride=s, groups=g](x, y), conv[stride=s, groups=g](x, z))",
    ),
    "features are merged": (f"concat[axis=1]({CONV}(x, y), {CONV}(x, z))", f"{CONV}(x, concat[axis=0](y, z))"),
    "groups are merged": (
        "concat[axis=1](conv[groups=g](x, y), conv[groups=h](w, z))",
        "conv[groups=k](concat[axis=1](x, w), concat[axis=0](y, z))",
    ),
    "kernels are enlarged": (f"{CONV}(x, y)", f"{CONV}(x, enlarge[kernel=k](y))"),
    "pooling by a kernel": ("avg_pool[kernel=k, stride=s](x)", "conv[stride=s, groups=g](x, pool_kernel[kernel=k])"),
    "the identity kernel": ("conv[groups=1](x, identity_kernel[kernel=k])", "x"),
    "the identity matrix": ("matmul(x, identity)", "x"),
    "pooling of parts": (
        "max_pool[kernel=k](concat[axis=1](x, y))", "concat[axis=1](max_pool[kernel=k](x), max_pool[kernel=k](y))",
    ),
    "columns of a table": (
        "embedding(concat[axis=1](x, y), i)", "concat[axis=-1](embedding(x, i), embedding(y, i))",
    ),
    "a bag is a sum": ("embedding_bag(x, i)", "sum[axis=-2](embedding(x, i))"),
    "aggregation after a layer": (
        "linear(aggregate_weighted[vertices=n](x, s, t, a), w)",
        "aggregate_weighted[vertices=n](linear(x, w), s, t, a)",
    ),
    "means over edges after a layer": (
        "linear(aggregate_mean[vertices=n](x, s, t), w)", "aggregate_mean[vertices=n](linear(x, w), s, t)",
    ),
    "two layers between aggregations": (
        "aggregate[vertices=n](linear(linear(aggregate[vertices=n](x, s, t), w), v), s, t)",
        "linear(aggregate[vertices=n](aggregate[vertices=n](linear(x, w), s, t), s, t), v)",
    ),
    "softmax along another dim": (
        "softmax[axis=b](concat[axis=a](x, y))", "concat[axis=a](softmax[axis=b](x), softmax[axis=b](y))",
    ),
    "means of multiples": ("mean[axis=a](scale(x, w))", "scale(mean[axis=a](x), w)"),
    "elementwise over devices": ("relu(x)", "combine[axis=a](relu(partition[axis=a](x)))"),
    "rows over devices": ("matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), replicate(y)))"),
    "inner dims over devices": ("matmul(x, y)", "reduce(matmul(partition[axis=-1](x), partition[axis=-2](y)))"),
    "partial sums pass products": ("matmul(reduce(x), y)", "reduce(matmul(x, replicate(y)))"),
    "groups over devices": (
        "conv[groups=g](x, w)", "combine[axis=1](conv[groups=h](partition[axis=1](x), partition[axis=0](w)))",
    ),
    "a square is a product": ("square(x)", "mul(x, x)"),
    "a difference of squares": ("sub(square(x), square(y))", "mul(add(x, y), sub(x, y))"),
    "relu twice": ("relu(relu(x))", "relu(x)"),
    "relu of the largest": ("relu(max_pool[kernel=k](x))", "max_pool[kernel=k](relu(x))"),
    "windows of windows": (
        "add(avg_pool[kernel=k](x), avg_pool[kernel=k](avg_pool[kernel=k](x)))",
        "avg_pool[kernel=k](add(x, avg_pool[kernel=k](x)))",
    ),
    "the mean of a repetition": ("mean[axis=a](concat[axis=a](x, x))", "mean[axis=a](x)"),
    "a mean of means": ("mean[axis=-1](mean[axis=-1](x))", "mean[axis=-1](flatten(x))"),
    "a gain moves into a layer": ("linear(gain(x, g), w)", "linear(x, gain(w, g))"),
    "exchanges of three dims": ("swap(transpose(swap(x)))", "transpose(swap(transpose(x)))"),
    "heads of an activation": ("unflatten[parts=h](relu(x))", "relu(unflatten[parts=h](x))"),
    "heads over devices": (
        "partition[axis=-2](unflatten[parts=h](x))", "unflatten[parts=g](partition[axis=-1](x))",
    ),
    "heads one after the other": ("concat[axis=-1](flatten(x), flatten(y))", "flatten(concat[axis=-2](x, y))"),
    "parts of heads": ("split[axis=-1, part=1](flatten(x))", "flatten(split[axis=-2, part=1](x))"),
    "groups from all devices": ("combine[axis=1](conv(x, w))", "conv(combine[axis=1](x), combine[axis=0](w))"),
    "a sum over two devices": ("add(x, y)", "reduce[mesh=2](partition[axis=a, mesh=2](concat[axis=a](x, y)))"),
}  # fmt: skip
FALSE = {
    "a bias before aggregation": ("aggregate[vertices=n](bias(x, y), s, t)", "bias(aggregate[vertices=n](x, s, t), y)"),
    "a function before": ("aggregate[vertices=n](relu(x), s, t)", "relu(aggregate[vertices=n](x, s, t))"),
    "edges the other way": ("aggregate[vertices=n](x, s, t)", "aggregate[vertices=n](x, t, s)"),
    "weights beside means": ("aggregate_mean[vertices=n](x, s, t)", "aggregate[vertices=n](x, s, t)"),
    "matmul commutes": ("matmul(a, b)", "matmul(b, a)"),
    "another function of a part": ("relu(concat[axis=a](x, y))", "concat[axis=a](relu(x), gelu(y))"),
    "features of groups": (
        "concat[axis=1](conv[groups=g](x, y), conv[groups=g](x, z))", "conv[groups=g](x, concat[axis=0](y, z))",
    ),
    "pooling along a part": (
        "max_pool[kernel=k](concat[axis=2](x, y))", "concat[axis=2](max_pool[kernel=k](x), max_pool[kernel=k](y))",
    ),
    "softmax along the parts": (
        "softmax[axis=a](concat[axis=a](x, y))", "concat[axis=a](softmax[axis=a](x), softmax[axis=a](y))",
    ),
    "a function of partial sums": ("relu(reduce(x))", "reduce(relu(x))"),
    "copies are summed up": ("reduce(replicate(x))", "x"),
    "an operand that is not copied": ("matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), y))"),
    "channels of groups over devices": (
        "conv[groups=g](x, w)", "reduce(conv[groups=g](partition[axis=1](x), partition[axis=1](w)))",
    ),
    "a difference over two devices": ("sub(x, y)", "reduce[mesh=2](partition[axis=a, mesh=2](concat[axis=a](x, y)))"),
    "relu of what is negative": ("relu(neg(x))", "neg(relu(x))"),
    "relu of an average": ("relu(avg_pool[kernel=k](x))", "avg_pool[kernel=k](relu(x))"),
    "the largest of a difference": ("max_pool[kernel=k](neg(x))", "neg(max_pool[kernel=k](x))"),
    "the square of a sum": ("square(add(x, y))", "add(square(x), square(y))"),
    "the mean of two": ("mean[axis=a](concat[axis=a](x, y))", "mean[axis=a](x)"),
    "dims flattened in another order": ("flatten(transpose(x))", "flatten(x)"),
    "softmax over heads": ("softmax[axis=-1](flatten(x))", "flatten(softmax[axis=-1](x))"),
    "a gain moves past a layer": ("linear(gain(x, g), w)", "gain(linear(x, w), g)"),
    "conv with an activation is linear": (
        "conv[act=relu, groups=1](x, add(y, z))", "add(conv[act=relu, groups=1](x, y), conv[act=relu, groups=1](x, z))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_is_proven_both_ways(name: str) -> None:
    rule = parse_rule(name, *TRUE[name])
    assert prove(rule).proven, prove(rule).reason
    assert prove(rule.reversed()).proven


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_is_not_proven(name: str) -> None:
    found = prove(parse_rule(name, *FALSE[name]))
    assert not found.proven and found.reason


def test_a_rule_for_one_group_says_so() -> None:
    found = prove(parse_rule("features", "concat[axis=1](conv(x, y), conv(x, z))", "conv(x, concat[axis=0](y, z))"))
    assert found.proven and found.conditions[0] == "groups = 1"


def test_as_many_parts_as_there_were_dims() -> None:
    found = prove(parse_rule("parts", "unflatten[parts=h](flatten(x))", "x"))
    assert found.proven and "x.-2 = parts h" in found.conditions


def test_kernels_padded_alike_are_odd() -> None:
    found = prove(parse_rule("enlarged", f"{CONV}(x, y)", f"{CONV}(x, enlarge[kernel=k](y))"))
    assert {"y.2 is odd", "y.3 is odd", "kernel k is odd"} <= set(found.conditions)


def test_parts_that_are_added_are_of_one_size() -> None:
    left = "add(concat[axis=a](x, y), concat[axis=a](z, w))"
    found = prove(parse_rule("parts", left, "concat[axis=a](add(x, z), add(y, w))"))
    assert found.proven and "x.a = z.a" in found.conditions


def test_sizes_that_do_not_exist_prove_nothing() -> None:
    left = "conv[act=relu](x, conv(x, pool_kernel[kernel=3]))"
    found = prove(parse_rule("none", left, "conv[act=relu](concat[axis=1](x, x), avg_pool[kernel=3](x))"))
    assert not found.proven


def test_dims_divided_alike_may_be_split_in_different_places() -> None:
    """Channels and features are both divided into groups: a rule that splits both has to say that it does so alike."""
    left = "conv[stride=s](split[axis=1, part=1](x), split[axis=0, part=1](y))"
    rule = parse_rule("split twice", left, "split[axis=1, part=1](conv[stride=s](x, y))")
    assert not prove(rule).proven
    assert refute(rule, any_shapes=True) is not None
