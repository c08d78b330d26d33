"""Optimizer steps measured on this host."""

from __future__ import annotations

import pytest
import torch

from conjoin.cost import OPTIMIZERS, measure_update


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_measured(name: str) -> None:
    found = measure_update(name, torch.float32, 3, 1000, "cpu")
    assert found.key == f"update {name} f32 3 tensors 1000 elements"
    assert found.forward > 0


def test_more_elements_take_longer() -> None:
    small, large = (measure_update("adamw", torch.float32, 1, count, "cpu").forward for count in (2**8, 2**22))
    assert large > 3 * small
