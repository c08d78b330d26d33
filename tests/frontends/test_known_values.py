"""Branches on tensors made of constants alone are taken while tracing; those on inputs are refused as ever."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F

import conjoin
from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.runtime import to_module


class Translator(nn.Module):
    """torch's own encoder-decoder, which asks of a mask whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return (self.body(source, target, tgt_mask=mask) - target).square().mean()


class Branching(nn.Module):
    """Reads a number, made in some way, and goes on by it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(6, 6)
        self.register_buffer("limit", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.arange(6.0)
        if self.how == "written in a view":
            made[2:].mul_(3)
        elif self.how == "written twice":
            made = torch.tensor(5.0).add_(1).add_(6).reshape(1)
        elif self.how == "an input is written in":
            made[3:].copy_(x[0, 3:])
        elif self.how == "a draw is written in":
            made.normal_()
        elif self.how == "a buffer":
            made = made + self.limit
        elif self.how == "not set":
            made = torch.empty(6)
        elif self.how == "a shape":
            made = torch.full((x.shape[0],), 4.0)
        scale = 2.0 if made.sum() > 12 else -1.0
        return (self.linear(x) * scale).mean() + made.max().item() + F.gaussian_nll_loss(x, x, torch.ones_like(x))


def test_an_encoder_decoder_of_torch_is_captured() -> None:
    torch.manual_seed(0)
    model, batch = Translator(), (torch.randn(4, 5, 16), torch.randn(4, 6, 16))
    planned = to_module(capture(model, batch), model)
    for _ in range(2):
        batch = tuple(torch.randn_like(x) for x in batch)
        torch.testing.assert_close(planned(*batch), model(*batch))


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self.linear(x).unbind(-1)
        found = Normal(mean, F.softplus(spread) + 0.1)
        return kl_divergence(found, Normal(0.0, 1.0)).mean() - found.log_prob(y).mean()


def test_a_distribution_is_captured_without_its_checks() -> None:
    model = Density()
    planned = to_module(capture(model, (torch.randn(4, 6), torch.randn(4))), model)
    x, y = torch.randn(4, 6), torch.randn(4)
    torch.testing.assert_close(planned(x, y), model(x, y))


class Counting(nn.Module):
    """Puts features where tokens ask for them and checks that there are as many, as models of text and images do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(10, 4), nn.Linear(3, 4)

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        asked, found = (tokens == 9).unsqueeze(-1), self.features(images)
        torch._check_tensor_all(asked.sum() * found.shape[-1] == found.numel())
        return self.words(tokens).masked_scatter(asked.expand(-1, -1, 4), found).square().mean()


def test_what_torch_checks_of_values_is_no_part_of_the_program() -> None:
    model, tokens = Counting(), torch.tensor([[9, 1, 2], [3, 9, 4]])
    planned = to_module(capture(model, (tokens, torch.randn(2, 3))), model)
    images, moved = torch.randn(2, 3), tokens.flip(1)
    torch.testing.assert_close(planned(moved, images), model(moved, images))


@pytest.mark.parametrize("how", ["", "written in a view", "written twice", "a shape"])
def test_a_branch_on_constants_is_taken_as_the_model_takes_it(how: str) -> None:
    model = Branching(how)
    planned = to_module(capture(model, (torch.randn(3, 6),)), model)
    x = torch.randn(3, 6)
    torch.testing.assert_close(planned(x), model(x))


@pytest.mark.parametrize("how", ["an input is written in", "a draw is written in", "a buffer", "not set"])
def test_what_may_differ_from_batch_to_batch_is_refused(how: str) -> None:
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(Branching(how), (torch.randn(3, 6),))


class Decorrelated(nn.Module):
    """Features that should vary apart from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.linear(x).T
        return torch.cov(features).square().sum() + torch.corrcoef(features).triu(1).square().sum()


def test_covariances_are_captured() -> None:
    model = Decorrelated()
    planned = to_module(capture(model, (torch.randn(5, 6),)), model)
    x = torch.randn(5, 6)
    torch.testing.assert_close(planned(x), model(x))


class Flow(nn.Module):
    """A density of which the prior is a distribution of torch's with a full covariance."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept, moved = x.chunk(2, 1)
        scale = self.scale(kept).tanh()
        prior = MultivariateNormal(torch.zeros(4, dtype=x.dtype), 2 * torch.eye(4, dtype=x.dtype))
        return -(prior.log_prob(torch.cat([kept, moved * scale.exp()], 1)) + scale.sum(1)).mean()


def test_a_triangular_system_is_solved_column_by_column() -> None:
    model, batch = Flow().double(), torch.randn(8, 4, dtype=torch.float64)
    plan = conjoin.plan(model, batch, "local:2", strategy="data-parallel+micro=2")
    assert all(node.types[0].layout for node in plan.graph.nodes if node.op == "linalg_solve_triangular")
    assert conjoin.verify_plan(plan, model, batch).passed
