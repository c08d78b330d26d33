"""False rules are refuted with a counterexample, true ones are not."""

from __future__ import annotations

from random import Random

import pytest
import torch

from conjoin.rules.patterns import Rule
from conjoin.rules.text import parse_rule
from conjoin.rules.trials.instances import Instance, NoInstance, Sampler
from conjoin.rules.trials.refutation import compare, refute, try_out

FALSE = {
    # from TASO's properties of concatenations and convolutions (thesis, Table 2.2), which are false for several groups
    "concat[axis=1](conv(x, y), conv(x, z))": "conv(x, concat[axis=0](y, z))",
    "conv(x, y); conv(x, z)": "split[axis=1, part=0](conv(x, concat[axis=0](y, z))); "
    "split[axis=1, part=1](conv(x, concat[axis=0](y, z)))",
    "conv(concat[axis=1](x, z), concat[axis=1](y, w))": "add(conv(x, y), conv(z, w))",
    "concat[axis=1](conv(x, y), conv(w, z))": "conv(concat[axis=1](x, w), concat[axis=0](y, z))",
    "concat[axis=a](conv(x, y), conv(z, w))": "conv(concat[axis=a](x, z), concat[axis=a](y, w))",
    # over devices
    "relu(reduce(x))": "reduce(relu(x))",
    "reduce(replicate(x))": "x",
    "bias(reduce(x), b)": "reduce(bias(x, replicate(b)))",
    "mul(reduce(x), reduce(y))": "reduce(mul(x, y))",
    "softmax[axis=a](combine[axis=a](x))": "combine[axis=a](softmax[axis=a](x))",
    "combine[axis=a](partition[axis=b](x))": "x",
    "reduce(matmul(partition[axis=-2](x), replicate(y)))": "matmul(x, y)",
    "partition[axis=a](reduce(x))": "x",
    # windows
    "conv[pad=valid](x, y)": "conv[pad=valid](x, enlarge[kernel=k](y))",
    "avg_pool[kernel=3](x)": "conv(x, pool_kernel[kernel=5])",
    "avg_pool[kernel=k](x)": "conv(x, identity_kernel[kernel=k])",
    "max_pool[kernel=3](concat[axis=2](x, y))": "concat[axis=2](max_pool[kernel=3](x), max_pool[kernel=3](y))",
    "max_pool[kernel=k](x)": "avg_pool[kernel=k](x)",
    "max_pool[kernel=k](add(x, y))": "add(max_pool[kernel=k](x), max_pool[kernel=k](y))",
    "conv[stride=s](x, y)": "conv(x, y)",
    "conv[act=relu](x, add(y, z))": "add(conv[act=relu](x, y), conv[act=relu](x, z))",
    # the rest
    "matmul(a, b)": "matmul(b, a)",
    "add(a, b)": "a",
    "sub(a, b)": "sub(b, a)",
    "concat[axis=a](x, y)": "concat[axis=a](y, x)",
    "transpose(matmul(a, b))": "matmul(transpose(a), transpose(b))",
    "mean[axis=a](mul(x, y))": "mul(mean[axis=a](x), mean[axis=a](y))",
    "gelu(add(x, y))": "add(gelu(x), gelu(y))",
    "softmax[axis=a](concat[axis=a](x, y))": "concat[axis=a](softmax[axis=a](x), softmax[axis=a](y))",
    "embedding_bag(t, i)": "mean[axis=-2](embedding(t, i))",
    "aggregate[vertices=n](bias(x, y), s, t)": "bias(aggregate[vertices=n](x, s, t), y)",
    "aggregate_mean[vertices=n](x, s, t)": "aggregate[vertices=n](x, s, t)",
    "mul(x, identity)": "x",
    "split[axis=a, part=0](x)": "split[axis=a, part=1](x)",
    "div(x, add(y, z))": "add(div(x, y), div(x, z))",
    "scale(matmul(a, b), w)": "matmul(scale(a, w), scale(b, w))",
}
TRUE = {
    "matmul(a, matmul(b, c))": "matmul(matmul(a, b), c)",
    "matmul(a, b); matmul(a, c)": "split[axis=-1, part=0](matmul(a, concat[axis=-1](b, c))); "
    "split[axis=-1, part=1](matmul(a, concat[axis=-1](b, c)))",
    "add(matmul(a, b), matmul(c, d))": "matmul(concat[axis=-1](a, c), concat[axis=-2](b, d))",
    "conv[stride=s, pad=p](x, add(y, z))": "add(conv[stride=s, pad=p](x, y), conv[stride=s, pad=p](x, z))",
    "concat[axis=1](conv[groups=1](x, y), conv[groups=1](x, z))": "conv[groups=1](x, concat[axis=0](y, z))",
    "conv[stride=s](x, y)": "conv[stride=s](x, enlarge[kernel=k](y))",
    "conv[act=f](x, y)": "conv[act=f](x, enlarge[kernel=k](y))",
    "avg_pool[kernel=k, stride=s, pad=p](x)": "conv[stride=s, pad=p](x, pool_kernel[kernel=k])",
    "conv[groups=1](x, identity_kernel[kernel=k])": "x",
    "matmul(x, identity)": "x",
    "mul(x, ones)": "x",
    "max_pool[kernel=k](concat[axis=1](x, y))": "concat[axis=1](max_pool[kernel=k](x), max_pool[kernel=k](y))",
    "x": "concat[axis=a](split[axis=a, part=0](x), split[axis=a, part=1](x))",
    "relu(x)": "combine[axis=a](relu(partition[axis=a](x)))",
    "matmul(x, y)": "reduce(matmul(partition[axis=-1](x), partition[axis=-2](y)))",
    "matmul(reduce(x), y)": "reduce(matmul(x, replicate(y)))",
    "embedding(concat[axis=1](x, y), z)": "concat[axis=-1](embedding(x, z), embedding(y, z))",
    "embedding_bag(x, z)": "sum[axis=-2](embedding(x, z))",
    "softmax[axis=b](concat[axis=a](x, y))": "concat[axis=a](softmax[axis=b](x), softmax[axis=b](y))",
    "sum[axis=0](add(x, y))": "add(sum[axis=0](x), sum[axis=0](y))",
    "div(add(x, y), z)": "add(div(x, z), div(y, z))",
    "concat[axis=0](concat[axis=1](x, y), concat[axis=1](z, w))": "concat[axis=1](concat[axis=0](x, z), "
    "concat[axis=0](y, w))",
}


def rule_of(left: str, right: str) -> Rule:
    return parse_rule("r", left, right)


@pytest.mark.parametrize(("left", "right"), FALSE.items())
def test_false_rules_are_refuted(left: str, right: str) -> None:
    found = refute(rule_of(left, right), 40)
    assert found is not None
    again = compare(found.instance)
    assert again is not None and again.reason == found.reason


@pytest.mark.parametrize(("left", "right"), TRUE.items())
def test_true_rules_survive(left: str, right: str) -> None:
    tried = try_out(rule_of(left, right), num_trials=40)
    assert tried.counterexample is None, tried.counterexample
    assert tried.num_run >= 40


def test_a_counterexample_can_be_read() -> None:
    found = refute(rule_of("concat[axis=1](conv[stride=s](x, y), conv[stride=s](x, z))", FALSE_GROUPED))
    assert found is not None
    text = str(found)
    lines = text.splitlines()
    assert lines[0].startswith("r: concat[axis=1](conv[stride=s](x, y), conv[stride=s](x, z)) => ")
    assert lines[1].startswith("  s = ")
    assert sum(line.startswith(("  x: ", "  y: ", "  z: ")) for line in lines) == 3
    assert lines[-1].endswith("on the right")
    x, y = (found.instance.inputs[name].data for name in "xy")
    assert x.shape[1] > y.shape[1], "the convolutions are grouped"


FALSE_GROUPED = "conv[stride=s](x, concat[axis=0](y, z))"


def test_one_line_says_how_the_sides_differ() -> None:
    found = refute(rule_of("add(a, b)", "a"))
    assert found is not None and found.instance.num_elements <= 4
    assert f"{found.left:.6g} on the left and {found.right:.6g} on the right" in str(found)
    shapes = refute(rule_of("conv[pad=valid](x, y)", "conv[pad=valid](x, enlarge[kernel=k](y))"))
    assert shapes is not None and "has shape" in shapes.reason
    second = refute(rule_of("a; add(a, b)", "a; b"))
    assert second is not None and second.output == 1 and second.reason.startswith("output 1 ")


def test_shapes_may_be_a_condition() -> None:
    """A kernel that is as large as it should become is not changed."""
    rule = rule_of("conv[pad=valid](x, y)", "conv[pad=valid](x, enlarge[kernel=k](y))")
    assert refute(rule, any_shapes=True) is None
    assert refute(rule, when=("y.2 = kernel k", "y.3 = kernel k")) is None
    assert refute(rule_of("add(a, b)", "a"), any_shapes=True) is not None


def test_where_the_left_side_runs_the_right_side_has_to() -> None:
    rule = rule_of("add(flatten(x), flatten(y))", "flatten(add(x, y))")
    found = refute(rule, when=())
    assert refute(rule) is None, "wherever both sides run"
    assert found is not None and "the right side does not" in found.reason
    assert refute(rule, when=("x.-1 = y.-1",)) is None
    assert refute(rule, when=("x.-1 = y.-2",)) is not None, "another condition does not help"


@pytest.mark.parametrize(
    ("left", "right", "when"),
    [
        ("concat[axis=1](conv(x, y), conv(x, z))", "conv(x, concat[axis=0](y, z))", "groups = 1"),
        ("unflatten[parts=h](flatten(x))", "x", "x.-2 = parts h"),
        ("relu(x)", "combine[axis=a](relu(partition[axis=a](x)))", "x.a is a multiple of m"),
        ("x", "concat[axis=-1](split[axis=-1, part=0](x), split[axis=-1, part=1](x))", "x.-1 is split"),
        ("avg_pool[kernel=3, pad=p](x)", "conv[pad=p](x, pool_kernel[kernel=3])", "2 * p <= kernel 3"),
    ],
)
def test_conditions_are_kept_to(left: str, right: str, when: str) -> None:
    found = refute(rule_of(left, right), 40, when=(when, "y.2 = z.2", "y.3 = z.3") if "z" in left else (when,))
    assert found is None, found


def test_the_seed_decides() -> None:
    rule = rule_of("matmul(a, b)", "matmul(b, a)")
    one, same, other = (str(refute(rule, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    refute(rule_of("add(a, b)", "add(b, a)"), num_trials=2)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("left", "right", "why"),
    [
        ("matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), y))", "same on all devices"),
        ("conv(x, y)", "bias(y, x)", "dims"),
        ("matmul(x, x)", "embedding(x, x)", "dims"),
    ],
)
def test_what_can_never_run_is_told(left: str, right: str, why: str) -> None:
    with pytest.raises(NoInstance, match=why):
        refute(rule_of(left, right))


def test_what_never_fits_is_told() -> None:
    with pytest.raises(NoInstance, match="no sizes were found"):
        refute(rule_of("conv[pad=valid](x, enlarge[kernel=2](y))", "conv(x, y)"), num_trials=10)


def instances_of(left: str, right: str) -> list[Instance]:
    sampler, random = Sampler(rule_of(left, right)), Random(0)
    drawn = (sampler.draw(random, 2 + trial // 25) for trial in range(100))
    return [instance for instance in drawn if instance is not None]


def test_instances_of_convolutions_are_of_all_kinds() -> None:
    drawn = instances_of("conv[stride=s, pad=p](x, y)", "conv[stride=s, pad=p](x, y)")
    shapes = [(one.inputs["x"].shape, one.inputs["y"].shape) for one in drawn]
    groups = [x[1] // y[1] for x, y in shapes]
    assert {1, 2, 3} <= set(groups)
    assert any(y[1] == 1 and x[1] == y[0] > 1 for x, y in shapes), "depthwise"
    assert {one.setting.numbers["s"] for one in drawn} == {1, 2, 3}
    assert {one.setting.numbers["p"] for one in drawn} == {0, 1, 2}
    assert any(x[2] != x[3] for x, _ in shapes) and any(y[2] != y[3] for _, y in shapes)
    assert any(y[2] % 2 == 0 for _, y in shapes), "even kernels where padding is a number"
    assert any((x[2] - y[2]) % one.setting.numbers["s"] for one, (x, y) in zip(drawn, shapes, strict=True)), "uneven"


def test_instances_have_all_ranks_and_uneven_parts() -> None:
    drawn = instances_of("concat[axis=a](x, y)", "concat[axis=a](x, y)")
    places = {next(iter(one.setting.places.values())) for one in drawn}
    assert {len(one.inputs["x"].shape) for one in drawn} == {1, 2, 3}
    assert places == {0, 1, 2}
    assert any(place < len(one.inputs["x"].shape) - 1 for one in drawn for place in one.setting.places.values())
    assert any(one.inputs["x"].shape != one.inputs["y"].shape for one in drawn)
    assert any(1 in one.inputs["x"].shape for one in drawn)
    data = [one.inputs["x"].data for one in drawn]
    assert {bool((x == x.round()).all()) for x in data} == {True, False}


def test_instances_of_parallel_rules_have_one_to_three_devices() -> None:
    drawn = instances_of("matmul(reduce(x), y)", "reduce(matmul(x, replicate(y)))")
    assert {one.setting.meshes["m"] for one in drawn} == {1, 2, 3}
    assert all(one.inputs["x"].axes == ("m",) and one.inputs["y"].axes == () for one in drawn)


def test_rows_of_tables_exist() -> None:
    for one in instances_of("embedding(t, concat[axis=a](i, j))", "embedding(t, concat[axis=a](i, j))"):
        rows = one.inputs["t"].shape[0]
        assert all(bool(((one.inputs[n].data >= 0) & (one.inputs[n].data < rows)).all()) for n in "ij")
