"""Rules of a user's own file: proven before use, named in the plan with where they are from; others are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import DeclarationError, PlanError, UsageError
from conjoin.ir import plan_from_json
from conjoin.rules import operators_version
from conjoin.search import Remembered, Wish
from tests.ir.wording import assert_three_sentences

ASSOCIATIVE = '[[rule]]\nname = "my-order"\nleft = "matmul(matmul(a, b), c)"\nright = "matmul(a, matmul(b, c))"\n'
FALSE = '[[rule]]\nname = "swapped"\nleft = "matmul(a, b)"\nright = "matmul(b, a)"\n'
NARROW = """\
[[rule]]
name = "one-conv"
left = "concat[axis=1](conv(x, y), conv(x, z))"
right = "conv(x, concat[axis=0](y, z))"
"""
"""Of TASO's properties the one that is false for grouped convolutions."""
UNPROVEN = '[[rule]]\nname = "twice"\nleft = "relu(mul(relu(x), relu(x)))"\nright = "mul(relu(x), relu(x))"\n'


class Low(nn.Module):
    """Two products that take less the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 64)), nn.Parameter(torch.randn(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.a) @ self.b).square().mean()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> conjoin.api.OwnRules:
    path = tmp_path_factory.mktemp("rules") / "mine.toml"
    path.write_text(ASSOCIATIVE)
    return conjoin.prove_rules(path)


def test_a_proven_rule_is_used_and_its_plan_is_loaded_again(own: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, ask = Low(), torch.randn(1 << 17, 16), {"loss": lambda y: y, "wish": Wish(budget=math.inf, steps=12)}
    plan = conjoin.plan(model, x, "dgx-h100:1x1", rules=own, **ask)  # type: ignore[arg-type]
    (applied,) = plan.substitutions
    stamp = own.library.entries[0].stamp
    assert applied.name == "my-order"
    assert applied.proof == f"definitions:{stamp} for {operators_version()} in mine.toml"
    assert conjoin.verify_plan(plan, model, x, loss=lambda y: y, num_steps=1).passed
    plan.save(tmp_path / "plan.json")
    assert conjoin.load_plan(tmp_path / "plan.json") == plan
    data = json.loads((tmp_path / "plan.json").read_text().replace(operators_version(), "0" * 16))
    with pytest.raises(PlanError, match="operators have changed since that rule was proven") as told:
        conjoin.ir.check_plan(plan_from_json(data))
    assert_three_sentences(told.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FALSE, r"A trial refutes it.*Leave it out.*\n.*\n  a: "),
        (NARROW, r"A trial refutes it.*It holds where groups = 1.*State that as when = \['groups = 1'"),
        (UNPROVEN, "neither proven nor refuted: .* were not found equal"),
    ],
    ids=["refuted", "refuted for some", "unproven"],
)
def test_what_is_not_proven_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DeclarationError, match=told) as caught:
        conjoin.plan(nn.Linear(2, 2), torch.zeros(1, 2), "local:1", rules=path)
    assert "mine.toml was to be used" in str(caught.value)


def test_a_rule_that_states_its_conditions_is_proven(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    needs = ["groups = 1", *(f"{x}.{d} is odd" for x in "yz" for d in (2, 3)), "y.2 = z.2", "y.3 = z.3"]
    path.write_text(f"{NARROW}when = {json.dumps(needs)}\n")
    (entry,) = conjoin.prove_rules(path).library.entries
    assert entry.conditions == tuple(needs)


def test_rules_go_with_a_search_and_are_part_of_the_question(own: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="together with rules for a search") as told:
        conjoin.plan(nn.Linear(2, 2), torch.zeros(1, 2), "local:1", strategy="single", rules=own)
    assert_three_sentences(told.value)
    with pytest.raises(UsageError, match="Substitutions were given as str") as told:
        conjoin.search_plan(None, "local:1", Wish(rules="mine.toml"))  # type: ignore[arg-type]
    assert_three_sentences(told.value)
    graph, machine = conjoin.capture(nn.Linear(2, 2), torch.zeros(1, 2)), conjoin.Machine("one", 1, 1, "cpu")
    memory = Remembered(tmp_path)
    paths = {memory._path(graph, machine, wish, "") for wish in (Wish(), Wish(rules=own))}
    assert len(paths) == 2
