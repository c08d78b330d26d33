"""What is told when a strategy cannot be had: what was asked, why it cannot be, and the nearest that can."""

from __future__ import annotations

import pytest

from conjoin.errors import ConjoinError, StrategyError, UsageError
from conjoin.machine import Machine
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.search.models import captured

CASES = [
    ("megatorn", UsageError, "Did you mean megatron?"),
    ("", UsageError, "The strategies are single, data-parallel"),
    ("megatron:tq=2", UsageError, "Did you mean tp?"),
    ("megatron:sp=2", UsageError, "Write sp."),
    ("megatron:tp", UsageError, "Write tp=2."),
    ("megatron:tp=0", UsageError, "A degree is a whole number from 1, of at most 7 digits."),
    ("megatron:tp=two", UsageError, "tp='two'"),
    ("megatron:tp=2,tp=4", UsageError, "tp twice"),
    ("single:dp=2", UsageError, "takes no keys"),
    ("megatron:tp=3", StrategyError, "The nearest degree that fits is tp=2."),
    ("megatron:tp=4,dp=4", StrategyError, "The nearest degree that fits is dp=2."),
    ("megatron:dp=5", StrategyError, "The nearest degree that fits is dp=4."),
    ("megatron:tp=2,dp=2", StrategyError, "Multiply one degree by 2."),
    ("data-parallel:dp=2", StrategyError, "Multiply one degree by 4."),
    ("sbp3d:m=2,n=3", StrategyError, "The nearest degree that fits is n=2."),
    ("data-parallel", StrategyError, "It has 4 samples"),
    ("megatron:tp=1", StrategyError, "Use a batch of at least 8, or a lower dp."),
    ("spatial", StrategyError, "None of its 2 inputs is an image"),
    ("one-weird-trick", StrategyError, "0 convolutions and 4 fully connected layers"),
    ("table-parallel", StrategyError, "0 lookups in tables"),
    ("expert", StrategyError, "None of its 8 operators multiplies data with a matrix for each of several experts"),
    ("single", StrategyError, "on 8 devices"),
]


@pytest.mark.parametrize(("strategy", "kind", "words"), CASES, ids=[strategy or "none" for strategy, _, _ in CASES])
def test_a_strategy_that_cannot_be_had(strategy: str, kind: type[ConjoinError], words: str) -> None:
    with pytest.raises(kind) as error:
        make_plan(captured("mlp-autoddl"), Machine("local", 1, 8, "cpu"), strategy)
    assert words in str(error.value), str(error.value)
    assert_three_sentences(error.value)


@pytest.mark.parametrize(
    ("strategy", "num_devices", "words"),
    [
        ("megatron:tp=64", 64, "None of its 4 layers with weights, of at most 64 features"),
        ("reduction", 128, "none sums 128 terms or more"),
        ("sbp3d:m=1,n=1,k=128", 128, "they have at most 64 features"),
    ],
)
def test_layers_that_are_too_narrow(strategy: str, num_devices: int, words: str) -> None:
    with pytest.raises(StrategyError) as error:
        make_plan(captured("mlp-autoddl"), Machine("local", 1, num_devices, "cpu"), strategy)
    assert words in str(error.value), str(error.value)
    assert_three_sentences(error.value)


def test_images_that_are_too_small() -> None:
    with pytest.raises(StrategyError, match="They are 20 long there") as error:
        make_plan(captured("lenet"), Machine("local", 1, 32, "cpu"), "spatial:h=32")
    assert_three_sentences(error.value)
