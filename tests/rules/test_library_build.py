"""A library is made of all operators that models have, keeps what is of use, and survives being killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from random import Random

import pytest
import torch

from conjoin.rules import (
    OPS,
    Apply,
    Entry,
    Input,
    Rule,
    Verdict,
    Vocabulary,
    certify,
    edge_candidates,
    library_build,
    make_library,
    operators_in,
    parse_rule,
)
from conjoin.rules.definitions.proof import prove
from conjoin.rules.generator.forks import forked
from conjoin.rules.generator.vocabulary import Typed, choose
from conjoin.rules.library_build import SIZES, _is_of_use
from conjoin.rules.parser import print_expressions

UNUSED = {"tanh", "sigmoid", "sqrt"}
"""Functions of which no more is known than of `gelu` and `silu`: rules about these hold for them as well."""
SMALL = Vocabulary(
    "small",
    (Typed("x", "m k"), Typed("y", "m k"), Typed("z", "k m"), Typed("s", "")),
    (*map(choose, ("add", "scale", "transpose", "matmul")), choose("concat", axis=-1)),
    {"m": 2, "k": 3},
    {"m": 4, "k": 5},
)
FEWER = Vocabulary("fewer", SMALL.inputs[:2], SMALL.choices[:3], SMALL.sizes, SMALL.other_sizes)


def quiet(line: str) -> None:
    """No progress in tests."""


def test_every_operator_is_in_a_vocabulary() -> None:
    used = {choice.op for vocabulary, _ in SIZES for choice in vocabulary.choices}
    used |= {constant.expr.op for vocabulary, _ in SIZES for constant in vocabulary.constants}
    used |= {expr.op for rule in edge_candidates() for expr in operators_in(*rule.outputs)}
    assert {op.name for op in OPS if not op.parallel} - used == UNUSED


def test_what_only_moves_inputs_is_of_use_where_it_is_small() -> None:
    assert _is_of_use(parse_rule("commutes", "add(x, y)", "add(y, x)"))
    assert _is_of_use(parse_rule("associates", "add(x, add(y, z))", "add(y, add(x, z))"))
    left, right = (
        f"linear(relu(concat[axis=-1]({a})), concat[axis=-1]({b}))" for a, b in (("x, y", "z, w"), ("y, x", "w, z"))
    )
    assert not _is_of_use(parse_rule("moves", left, right))
    zero = Apply("sub", (), (Input("x"), Input("x")))
    assert not _is_of_use(Rule("zeros", (zero,), (Apply("neg", (), (zero,)),)))


@pytest.mark.parametrize(
    ("left", "right", "is_of_use"),
    [
        ("add(x, matmul(x, y))", "matmul(x, add(y, identity))", True),
        ("conv[groups=1](x, identity_kernel[kernel=r])", "x", True),
        ("transpose(identity)", "identity", True),
        ("mul(concat[axis=0](identity_kernel[kernel=r], x), concat[axis=0](identity_kernel[kernel=r], y))",
         "concat[axis=0](identity_kernel[kernel=r], mul(x, y))", False),
        ("split[axis=a, part=0](add(concat[axis=a](x, y), concat[axis=a](z, y)))",
         "split[axis=b, part=0](add(concat[axis=b](x, y), concat[axis=b](z, y)))", False),
        ("transpose(transpose(x))", "x", True),
    ],
)  # fmt: skip
def test_what_no_graph_has_is_of_use_where_it_says_what_a_constant_is(left: str, right: str, is_of_use: bool) -> None:
    assert _is_of_use(parse_rule("", left, right)) is is_of_use


def test_a_library_made_in_pieces_is_the_same(tmp_path: Path) -> None:
    """Killed at random moments, by a signal that nobody can catch, and begun again where it was."""
    whole = make_library(((FEWER, 2),), progress=quiet)
    random, delay, kills = Random(5), 0.05, 0
    while True:
        process = multiprocessing.get_context("fork").Process(
            target=make_library, args=(((FEWER, 2),), tmp_path), kwargs={"progress": quiet, "workers": 1 + kills % 2}
        )
        process.start()
        process.join(delay * random.uniform(0.5, 1.5))
        if process.exitcode is not None:
            break
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills, delay = kills + 1, delay * 2.5
        time.sleep(0.01)
    assert process.exitcode == 0 and kills >= 2
    again = make_library(((FEWER, 2),), tmp_path, progress=quiet)
    assert again.library == whole.library and again.refuted == ()


FALSE = parse_rule("", "matmul(x, y)", "matmul(y, x)")


def wrongly_proven(rule: Rule) -> Verdict:
    """A prover that believes what is false."""
    believed = {print_expressions(FALSE.left), print_expressions(FALSE.right)}
    given = {print_expressions(rule.left), print_expressions(rule.right)}
    return Verdict(True) if given == believed else prove(rule)


@pytest.fixture
def wrong_prover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_build, "prove", wrongly_proven)


def test_what_is_refuted_is_in_no_library(wrong_prover: None) -> None:
    """Nor is anything dropped because it follows from that: half of what is true would."""
    true = make_library(((SMALL, 1),), progress=quiet)
    made = make_library(((SMALL, 1),), progress=quiet, more=(FALSE,))
    assert made.library == true.library and true.refuted == ()
    (told,) = made.refuted
    assert "matmul(x, y) => matmul(y, x): refuted, " in told


def test_what_is_refuted_gets_no_stamp(wrong_prover: None) -> None:
    assert "refuted" in str(certify(FALSE))
    assert "not found equal" in str(certify(parse_rule("", "sub(x, y)", "sub(y, x)")))
    assert isinstance(certify(parse_rule("", "add(x, y)", "add(y, x)")), Entry)


def test_processes_compute_after_this_one_has() -> None:
    """Threads do not outlive a fork: a process that waits for those of torch would wait for ever."""
    x, w = torch.randn(4, 8, 32, 32), torch.randn(8, 8, 3, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = torch.conv2d(x, w).sum().item()
        found = forked(lambda _: torch.conv2d(x, w).sum().item(), range(8), 2)
    finally:
        torch.set_num_threads(before)
    assert found == pytest.approx([wanted] * 8, rel=1e-3)
