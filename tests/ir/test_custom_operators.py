"""Plans with operators that torch does not come with: read without them, run with them, nothing imported unasked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import ConjoinError, GraphError, PlanError, UsageError
from conjoin.ir import load_plan, plan_from_json, plan_to_json, plan_to_text
from tests.ir.wording import assert_three_sentences

HERE, ELSEWHERE = "conjoin_tests_here", "conjoin_tests_elsewhere"
REGISTERS = f"""\
import torch
from torch import Tensor


@torch.library.custom_op("{ELSEWHERE}::scale", mutates_args=())
def scale(x: Tensor, factors: list[Tensor], by: float = 3.0) -> Tensor:
    return x * by * factors[0]


@scale.register_fake
def _(x: Tensor, factors: list[Tensor], by: float = 3.0) -> Tensor:
    return torch.empty_like(x)


scale.register_autograd(lambda ctx, grad: (grad * ctx.by * ctx.factor, [None], None), setup_context=lambda ctx, inputs,
    output: (setattr(ctx, "by", inputs[2]), setattr(ctx, "factor", inputs[1][0])))
"""


@torch.library.custom_op(f"{HERE}::scale", mutates_args=())
def scale(x: Tensor, factors: list[Tensor], by: float = 3.0) -> Tensor:
    return x * by * factors[0]


@scale.register_fake
def _(x: Tensor, factors: list[Tensor], by: float = 3.0) -> Tensor:
    return torch.empty_like(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return scale(self.fc(x), [x], 2.0).sum()


@cache
def planned() -> str:
    """A plan of one device with an operator of this module, as its file has it."""
    torch.manual_seed(0)
    return plan_to_text(conjoin.plan(Scaled(), torch.randn(2, 4), "local:1", loss=lambda y: y, strategy="single"))


def document(name: str = "fresh", module: str = "registers_it") -> dict[str, Any]:
    """The same plan, but for an operator of another name: that is an edit, and meant."""
    data: dict[str, Any] = json.loads(planned().replace(f"{HERE}::", f"{name}::").replace(__name__, module))
    return {**data, "computes": None}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file beside a module that leaves a trace when it is imported, and that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "registers_it.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    found = tmp_path / "plan.json"
    found.write_text(json.dumps(document()), encoding="utf-8")
    return found


def test_a_plan_states_its_operators() -> None:
    (stated,) = document()["operators"]
    assert stated == {
        "name": "fresh::scale",
        "module": "registers_it",
        "takes": [
            {"name": "x", "kind": "tensor"},
            {"name": "factors", "kind": "tensors"},
            {"name": "by", "kind": "attribute", "default": 3.0},
        ],
        "outputs": 1,
    }
    usual = conjoin.plan(nn.Linear(2, 2), torch.zeros(1, 2), "local:1", strategy="single")
    assert "operators" not in plan_to_json(usual)


def test_a_plan_is_shown_without_its_operators(path: Path) -> None:
    plan = load_plan(path)
    assert json.loads(plan_to_text(plan)) == document(), "all of it is kept"
    text = conjoin.explanation_text(conjoin.explain(plan))
    assert "custom       fresh::scale of registers_it\n" in text and "= fresh::scale(%" in text and "by=2.0" in text
    assert conjoin.diff_plans(plan, load_plan(path)).equal
    found = conjoin.simulate_plan(plan, "p3.8xlarge:1x1")
    known = conjoin.simulate_plan(plan_from_json(document(HERE, __name__)), "p3.8xlarge:1x1")
    assert 0 < found.seconds == known.seconds
    assert "registers_it" not in sys.modules


def test_a_graph_is_read_without_its_operators_too(tmp_path: Path) -> None:
    graph = plan_from_json(document()).graph
    conjoin.save_graph(graph, tmp_path / "graph.json")
    assert conjoin.load_graph(tmp_path / "graph.json") == graph
    assert conjoin.inspect(graph).opaque == ("fresh::scale",)


def test_what_is_not_registered_does_not_run(path: Path) -> None:
    with pytest.raises(GraphError, match=r"lacks its operators fresh::scale here.*registered by registers_it") as told:
        conjoin.load(path, Scaled())
    assert_three_sentences(told.value)


def test_what_the_user_imports_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "registers_elsewhere.py").write_text(REGISTERS, encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(document(ELSEWHERE, "registers_elsewhere")), encoding="utf-8")
    stated = load_plan(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json", imports=["registers_elsewhere"])
    assert plan == stated
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(2, 4)
    step = conjoin.load(plan, model)
    loss = step(x)
    loss.backward()
    torch.testing.assert_close(loss, 2 * (model.fc(x) * x).sum())
    torch.testing.assert_close(step.get_parameter("fc.bias").grad, 2 * x.sum(0))
    wrong = document(ELSEWHERE, "registers_elsewhere")
    wrong["operators"][0]["takes"][2]["default"] = 4.0
    with pytest.raises(PlanError, match="is known here with other parameters") as told:
        plan_from_json(wrong)
    assert_three_sentences(told.value)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "kind": lambda stated: stated["takes"][0].update(kind="tensor!"),
    "parameter": lambda stated: stated["takes"][0].update(name="a b"),
    "twice": lambda stated: stated["takes"][1].update(name="x"),
    "more": lambda stated: stated["takes"][0].update(more=1),
    "default": lambda stated: stated["takes"][2].update(default={"word": "os.system"}),
    "outputs": lambda stated: stated.update(outputs=0),
    "truth": lambda stated: stated.update(outputs=True),
    "many": lambda stated: stated.update(outputs=10**9),
    "random": lambda stated: stated.update(random=1),
    "no name": lambda stated: stated.pop("name"),
    "own": lambda stated: stated.update(name="linear"),
    "ours": lambda stated: stated.update(name="conjoin::reduce"),
    "long": lambda stated: stated.update(name="a" * 300 + "::b"),
    "dots": lambda stated: stated.update(name="a::b.c.d::e"),
    "module": lambda stated: stated.update(module="os; import this"),
    "dunder": lambda stated: stated.update(module="__main__"),
    "unknown": lambda stated: stated.update(source="print()"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_wrong_statement_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    data = document("wrong")
    change(data["operators"][0])
    with pytest.raises(PlanError) as told:
        plan_from_json(data)
    assert_three_sentences(told.value)


@pytest.mark.parametrize("operators", [None, {}, [None], ["wrong::scale"], 3])
def test_operators_that_are_none(operators: Any) -> None:
    with pytest.raises(PlanError):
        plan_from_json({**document("wrong"), "operators": operators})


NO_MODULES = ("", "a b", "a..b", "a-b", "../a", "__main__", "a" * 300, "no_such", "raises_it", "registers_it")


@pytest.mark.parametrize("name", NO_MODULES)
def test_a_module_that_cannot_be_imported(path: Path, name: str) -> None:
    (path.parent / "raises_it.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(UsageError) as told:
        load_plan(path, imports=[name])
    assert_three_sentences(told.value)


def test_an_operator_that_nobody_states(path: Path) -> None:
    data = document("unstated")
    del data["operators"]
    with pytest.raises(ConjoinError, match="has no operator 'unstated::scale'; --import names a module") as told:
        plan_from_json(data)
    assert_three_sentences(told.value)
