"""Expressions on concrete tensors: each operator by torch, once for every device, and nothing broadcast."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from conjoin.rules.operators import OPS
from conjoin.rules.patterns import Apply, Rule
from conjoin.rules.text import parse_expressions, parse_rule
from conjoin.rules.trials import evaluation
from conjoin.rules.trials.evaluation import Setting, Value, evaluate
from conjoin.rules.trials.references import _REFERENCES, FUNCTIONS, Misfit, reference


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def value_of(text: str, setting: Setting | None = None, **inputs: torch.Tensor | Value) -> Value:
    values = {name: x if isinstance(x, Value) else Value(x) for name, x in inputs.items()}
    (found,) = evaluate(parse_expressions(text), values, setting)
    return found


def test_every_operator_has_a_reference() -> None:
    assert {op.name for op in OPS} == set(_REFERENCES)
    assert set(FUNCTIONS) <= set(_REFERENCES)


def test_an_expression_used_twice_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Counter[str] = Counter()

    def counted(op: str, *rest: object) -> torch.Tensor:
        ran[op] += 1
        return reference(op, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluation, "reference", counted)
    value_of("add(relu(matmul(a, b)), relu(matmul(a, b)))", a=numbers(2, 2), b=numbers(2, 2))
    assert ran == {"matmul": 1, "relu": 1, "add": 1}


def test_groups_follow_from_the_shapes() -> None:
    x, weight = numbers(1, 4, 3, 3), numbers(2, 2, 1, 1)
    expected = torch.nn.functional.conv2d(x, weight, groups=2)
    assert torch.equal(value_of("conv(x, w)", x=x, w=weight).data, expected)
    with pytest.raises(Misfit, match=r"weight|groups"):
        value_of("conv[groups=1](x, w)", x=x, w=weight)


def test_named_parameters_are_taken_from_the_setting() -> None:
    (expr,) = parse_expressions("max_pool[kernel=k, stride=s, pad=p](x)")
    setting = Setting(numbers={"k": 2, "s": 3, "p": 1})
    x = numbers(1, 1, 5, 6)
    assert torch.equal(
        evaluate([expr], {"x": Value(x)}, setting)[0].data, torch.nn.functional.max_pool2d(x, 2, stride=3, padding=1)
    )
    with pytest.raises(Misfit, match="max_pool does not know kernel=k"):
        evaluate([expr], {"x": Value(x)}, Setting(numbers={"s": 3, "p": 1}))


def test_an_average_counts_its_padding() -> None:
    found = value_of("avg_pool[kernel=3](x)", x=torch.ones(1, 1, 1, 1, dtype=torch.float64))
    assert found.data.item() == pytest.approx(1 / 9)


def test_named_axes_and_parts_and_shapes() -> None:
    rule = parse_rule("r", "mul(split[axis=a, part=1](x), ones)", "x")
    split, ones = (expr for expr in rule.left[0].args if isinstance(expr, Apply))  # type: ignore[union-attr]
    setting = Setting(places={split: 1}, firsts={split: 2}, shapes={ones: (2, 1)})
    (found,) = evaluate(rule.left, {"x": Value(numbers(2, 3))}, setting)
    assert found.data.tolist() == [[3], [6]]
    with pytest.raises(Misfit, match="nothing says how large ones is"):
        evaluate(rule.left, {"x": Value(numbers(2, 3))}, Setting(places={split: 1}, firsts={split: 2}))
    with pytest.raises(Misfit, match="nothing says where x of shape"):
        evaluate(rule.left, {"x": Value(numbers(2, 3))}, Setting(places={split: 1}))


def test_a_split_of_a_concatenation_is_where_it_was_joined() -> None:
    found = value_of("split[axis=1, part=0](concat[axis=1](x, y))", x=numbers(2, 3), y=numbers(2, 1))
    assert torch.equal(found.data, numbers(2, 3))


def test_an_embedding_bag_of_any_rank() -> None:
    table, rows = numbers(3, 2), torch.tensor([[[0.0, 2.0], [1.0, 1.0]]])
    found = value_of("embedding_bag(t, i)", t=table, i=rows).data
    assert torch.equal(found, torch.nn.functional.embedding(rows.long(), table).sum(-2))


MESH = Setting(meshes={"m": 2, "n": 3})


def test_spread_and_gathered_again() -> None:
    x = numbers(4, 6)
    spread = value_of("partition[axis=1, mesh=n](partition[axis=0](x))", MESH, x=x)
    assert (spread.axes, spread.shape, tuple(spread.data.shape)) == (("m", "n"), (2, 2), (2, 3, 2, 2))
    assert torch.equal(spread.data[1, 2], x[2:, 4:])
    back = "combine[axis=0](combine[axis=1, mesh=n](s))"
    other = "combine[axis=1, mesh=n](combine[axis=0](s))"
    for text in (back, other):
        assert torch.equal(value_of(text, MESH, s=spread).data, x)
    assert torch.equal(value_of("reduce(replicate(x))", MESH, x=x).data, 2 * x)
    partial = value_of("reduce[mesh=m](s)", MESH, s=spread)
    assert partial.axes == ("n",)
    assert torch.equal(partial.data[0], x[:2, :2] + x[2:, :2])


def test_how_many_devices_there_are_must_be_known() -> None:
    with pytest.raises(Misfit, match="replicate does not know mesh=m"):
        value_of("replicate(x)", x=numbers(2))
    assert value_of("reduce(x)", x=Value(numbers(3, 2), ("m",))).data.tolist() == [9, 12]


def test_operators_run_once_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []

    def noted(op: str, params: object, args: tuple[torch.Tensor, ...], shape: tuple[int, ...] = ()) -> torch.Tensor:
        if op == "matmul":
            ran.append(tuple(args[0].shape))
        return reference(op, params, args, shape)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluation, "reference", noted)
    x, y = numbers(4, 3), numbers(3, 2)
    found = value_of("combine[axis=0](matmul(partition[axis=0](x), replicate(y)))", MESH, x=x, y=y)
    assert torch.equal(found.data, x @ y)
    assert ran == [(2, 3), (2, 3)]


def test_a_constant_is_the_same_on_every_device() -> None:
    (expr,) = parse_expressions("mul(partition[axis=0](x), ones)")
    assert isinstance(expr, Apply)
    setting = Setting(meshes={"m": 2}, shapes={expr.args[1]: (2,)})  # type: ignore[dict-item]
    (found,) = evaluate([expr], {"x": Value(numbers(4))}, setting)
    assert found.data.tolist() == [[1, 2], [3, 4]]


MISFITS = [
    ("add(a, b)", (2, 3), (1, 3)),
    ("add(a, b)", (2, 3), (3,)),
    ("matmul(a, b)", (2, 2, 3), (1, 3, 2)),
    ("matmul(a, b)", (2, 3), (2, 3)),
    ("matmul(a, b)", (3,), (3,)),
    ("scale(a, b)", (2, 3), (1,)),
    ("bias(a, b)", (2, 3), (1,)),
    ("linear(a, b)", (2, 3), (4, 2)),
    ("conv(a, b)", (1, 3, 4, 4), (2, 2, 1, 1)),
    ("conv(a, b)", (1, 1, 4, 4), (1, 1, 2, 2)),
    ("concat[axis=0](a, b)", (2, 3), (2, 4)),
    ("concat[axis=2](a, b)", (2, 3), (2, 3)),
    ("embedding(a, b)", (2, 3), (3,)),
    ("matmul(partition[axis=0](a), b)", (2, 3), (3, 2)),
    ("combine[axis=0](add(a, b))", (2, 3), (2, 3)),
    ("partition[axis=0](partition[axis=1](add(a, b)))", (2, 2), (2, 2)),
    ("partition[axis=1](add(a, b))", (2, 3), (2, 3)),
    ("relu(enlarge[kernel=1](add(a, b)))", (1, 1, 3, 3), (1, 1, 3, 3)),
]


@pytest.mark.parametrize(("text", "one", "other"), MISFITS)
def test_operands_that_do_not_fit_are_refused(text: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    with pytest.raises(Misfit):
        value_of(text, MESH, a=numbers(*one), b=numbers(*other))


def test_rows_must_be_whole() -> None:
    with pytest.raises(Misfit, match="not whole"):
        value_of("embedding(t, i)", t=numbers(3, 2), i=torch.tensor([0.5]))


def test_a_rule_on_its_inputs() -> None:
    rule: Rule = parse_rule("r", "matmul(matmul(a, b), c)", "matmul(a, matmul(b, c))")
    inputs = {name: Value(numbers(2, 2)) for name in "abc"}
    left, right = evaluate((*rule.left, *rule.right), inputs)
    assert torch.equal(left.data, right.data)
