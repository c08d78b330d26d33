"""A branch on values that does nothing but raise is no part of the program; any other is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.runtime import to_module

CHECKS = {
    "assert": "assert not torch.isnan(h).any(), f'no number in {name}'",
    "assert of several": "assert (h > -1e9).all() and (h < 1e9).all() and not h.isnan().any()",
    "raise": "if (h.abs() > 1e9).any():\n        raise ValueError(name)",
    "raise, or else": "if h.sum() < 1e9:\n        h = h * 2\n    else:\n        raise ValueError(name)",
    "either of two": "if h.isnan().any() or h.isinf().any(): raise ValueError(name)",
    "the number itself": "assert (h < 1e9).all().item()",
    "inside with": "with torch.no_grad():\n        assert h.isfinite().all()",
    "torch's own": "torch._assert(h.isfinite().all(), name)",
}
BRANCHES = {
    "goes on": "if h.sum() > 0: h = h * 2",
    "caught": "try:\n        if h.sum() > 0: raise ValueError(name)\n    except ValueError:\n        h = h * 2",
    "caught in the end": "try:\n        assert h.sum() > 0\n    finally:\n        return h.sum()",
    "compared later": "n = h.sum().item()\n    if n > 0: raise ValueError(name)",
    "returns": "if h.sum() > 0: return h.sum()",
    "raises if": "if h.sum() > 0:\n        if len(name) > 99: raise ValueError(name)\n        h = h * 2",
    "skips": "for x in h:\n        if x.sum() > 0: continue\n        h = h * 2",
}


def made(lines: str) -> nn.Module:
    """A model with these lines in it; as text, since pytest rewrites what it sees of assertions."""
    space = {"torch": torch}
    exec(f"def see(h, name='h'):\n    {lines}\n    return h.square().mean()", space)
    see: Callable[[Tensor], Tensor] = space["see"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return see(self.linear(x))

    return Model()


@pytest.mark.parametrize("kind", CHECKS)
def test_what_only_raises_is_no_part_of_the_program(kind: str) -> None:
    model = made(CHECKS[kind])
    planned = to_module(capture(model, (torch.randn(2, 4),)), model)
    x = torch.randn(2, 4)
    torch.testing.assert_close(planned(x), model(x))


@pytest.mark.parametrize("kind", BRANCHES)
def test_what_goes_on_either_way_is_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(made(BRANCHES[kind]), (torch.randn(2, 4),))


def test_checks_that_are_left_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Checked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("no number")
            return super().forward(x).sum()

    capture(Checked(4, 3), (torch.randn(2, 4),))
    assert f"check at {__file__}:" in caplog.text


def test_a_check_is_not_among_the_lines_that_are_in_the_way() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("no number")
            return super().forward(x).mean() * (2 if x.sum() > 0 else 3)

    with pytest.raises(CaptureError, match=r"x\.sum\(\) > 0") as refused:
        capture(Branching(4, 3), (torch.randn(2, 4),))
    assert "isnan" not in str(refused.value)


def test_variances_that_are_learned_may_be_those_of_a_loss() -> None:
    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mean, spread = self.linear(x).chunk(2, -1)
            return F.gaussian_nll_loss(mean, y, F.softplus(spread))

    model = Density()
    planned = to_module(capture(model, (torch.randn(2, 4), torch.randn(2, 3))), model)
    x, y = torch.randn(2, 4), torch.randn(2, 3)
    torch.testing.assert_close(planned(x, y), model(x, y))
