"""`rules`: list, show, test, prove and why, on the library that ships; mistakes in three sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from conjoin.rules import SHIPPED, Library
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
MINE = """
[[rule]]
name = "associative"
left = "matmul(matmul(a, b), matmul(c, d))"
right = "matmul(a, matmul(b, matmul(c, d)))"

[[rule]]
name = "commutative"
left = "matmul(a, b)"
right = "matmul(b, a)"
"""


def test_list_names_every_rule(run: Run) -> None:
    lines = run("rules", "list").out.splitlines()
    assert len(lines) == len(Library.shipped().entries) + 2 and all(" => " in line for line in lines[:-2])
    facts = json.loads(run("rules", "list", "--json").out)
    assert [entry["name"] for entry in facts] == [line.split(":")[0] for line in lines[:-2]]


def test_show_tells_both_sides_and_the_proof(run: Run) -> None:
    name = Library.shipped().entries[0].name
    shown = run("rules", "show", name).out
    assert shown.splitlines()[0] == name and re.search(r"stamp [0-9a-f]{16}", shown)
    assert json.loads(run("rules", "show", name, "--json").out)["method"] == "definitions"
    assert "none of that name" in run("rules", "show", "nothing").refused()


def test_test_decides(run: Run, folder: Path) -> None:
    (folder / "mine.toml").write_text(MINE)
    shown = run("rules", "test", "mine.toml")
    assert shown.code == 1 and shown.out.splitlines()[-1] == "2 rules: 1 derived, 1 refuted"
    found = json.loads(run("rules", "test", "mine.toml", "--json").out)
    assert [one["standing"] for one in found] == ["derived", "refuted"]
    assert found[0]["derivation"][-1]["result"] == ["matmul(a, matmul(b, matmul(c, d)))"]
    assert "on the left and" in found[1]["counterexample"]


def test_malformed_rules_are_refused(run: Run, folder: Path) -> None:
    (folder / "mine.toml").write_text('[[rule]]\nname = "a"\nleft = "matmull(a, b)"\nright = "a"\n')
    assert "matmul" in run("rules", "test", "mine.toml").refused()
    assert "nowhere.toml" in run("rules", "test", "nowhere.toml").refused()


def test_prove_makes_a_library(run: Run, folder: Path) -> None:
    (folder / "mine.toml").write_text(MINE)
    shown = run("rules", "prove", "mine.toml", "-o", "proven.toml")
    assert shown.code == 1 and "NOT PROVEN  commutative" in shown.out and "1 of 2 rules proven" in shown.out
    assert [entry.name for entry in Library.load(folder / "proven.toml").entries] == ["associative"]
    assert "no directory" in run("rules", "prove", "mine.toml", "-o", "missing/proven.toml").refused()
    told = json.loads(run("rules", "prove", "mine.toml", "--json").out)
    assert (told["proven"], told["rules"], told["saved"]) == (1, 2, None)
    assert "commutative" in told["unproven"][0]["rule"]


def test_an_edited_library_is_refused(run: Run, folder: Path) -> None:
    text = SHIPPED.read_text()
    edited = text.replace('left = "', 'left = "relu(x); ', 1).replace('right = "', 'right = "relu(x); ', 1)
    (folder / "edited.toml").write_text(edited)
    assert "is not what was proven" in run("rules", "list", "--library", "edited.toml").refused()


BRANCHES = """\
import torch
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 2, 1, bias=False)
        self.wide = nn.Conv2d(3, 2, 3, padding=1, bias=False)

    def forward(self, x):
        alike = torch.cat((self.one(x), self.two(x)), 1)
        return alike.sum() + torch.cat((self.one(x), self.wide(x)), 1).square().sum()


def make():
    return Branches(), torch.randn(2, 3, 5, 5)
"""


def test_why_counts_places_and_tells_near_misses(run: Run, folder: Path) -> None:
    (folder / "mine.toml").write_text(
        '[[rule]]\nname = "merge"\nleft = "concat[axis=1](conv[groups=1](x, y), conv[groups=1](x, z))"\n'
        'right = "conv[groups=1](x, concat[axis=0](y, z))"\n'
    )
    assert run("rules", "prove", "mine.toml", "-o", "library.toml").code == 0
    (folder / "branches.py").write_text(BRANCHES)
    ask = ("rules", "why", "branches.py:make", "merge", "--library", "library.toml")
    shown, told = run(*ask), json.loads(run(*ask, "--json").out)
    assert shown.code == 0 and "applies at 1 place" in shown.out, shown.err
    assert told["applies"] == 1 and len(told["not_at"]) == shown.out.count("not at") > 0
