"""Random forwards of views, writes, buffers and switched gradients: the graph computes what the plain model does."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.runtime import to_module

NUM_SEEDS, CHUNK, NUM_STEPS = 60, 10, 9
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
Made = list[Tensor]


def pick(made: Made, index: int) -> Tensor:
    return made[index % len(made)]


def add_to(m: nn.Module, made: Made, i: int, j: int) -> None:
    pick(made, i).add_(pick(made, j))


def write_part(m: nn.Module, made: Made, i: int, j: int) -> None:
    pick(made, i)[i % 3].mul_(1.5)


def copy_part(m: nn.Module, made: Made, i: int, j: int) -> None:
    pick(made, i)[:2, j % 3 :] = pick(made, j)[:2, j % 3 :].clone()


def note(m: nn.Module, made: Made, i: int, j: int) -> None:
    m.total.add_(pick(made, i).detach().mean(0))


def replace_buffer(m: nn.Module, made: Made, i: int, j: int) -> None:
    m.total = m.total * 0.5 + pick(made, j).detach()[0]


def put_into_buffer(m: nn.Module, made: Made, i: int, j: int) -> None:
    m.table[i % 3] = pick(made, j).detach()[0]


def step_in_place(m: nn.Module, made: Made, i: int, j: int) -> None:
    pick(made, i).clamp_(-2, 2).add_(0.25)


MAKERS: tuple[Callable[[nn.Module, Made, int, int], Tensor], ...] = (
    lambda m, made, i, j: m.layer(pick(made, i)),
    lambda m, made, i, j: pick(made, i) * pick(made, j),
    lambda m, made, i, j: pick(made, i) + 1,
    lambda m, made, i, j: pick(made, i).tanh(),
    lambda m, made, i, j: pick(made, i).double(),
    lambda m, made, i, j: pick(made, i).contiguous(),
    lambda m, made, i, j: pick(made, i).clone(),
    lambda m, made, i, j: pick(made, i).detach(),
    lambda m, made, i, j: pick(made, i).view(4, 3).view(3, 4),
    lambda m, made, i, j: pick(made, i).reshape(12).reshape(3, 4),
    lambda m, made, i, j: pick(made, i).flip(0),
    lambda m, made, i, j: nn.functional.dropout(pick(made, i), 0.5),
    lambda m, made, i, j: nn.functional.dropout(pick(made, i), 0.5, training=False),
    lambda m, made, i, j: pick(made, i) + m.total,
    lambda m, made, i, j: pick(made, i) * m.table,
    lambda m, made, i, j: torch.cat([pick(made, i)[:1], pick(made, j)[1:]]),
)
WRITERS = (add_to, write_part, copy_part, note, replace_buffer, put_into_buffer, step_in_place)


class Random(nn.Module):
    """A forward drawn from a seed: the same calls every time it is run."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.full((4,), 0.5))
        self.register_buffer("table", torch.ones(3, 4))
        self.calls = [
            (
                draw.choice(MAKERS),
                draw.choice([*WRITERS, None, None]),
                draw.randrange(9),
                draw.randrange(9),
                draw.random() < 0.25,
            )
            for _ in range(NUM_STEPS)
        ]

    def forward(self, x: Tensor) -> Tensor:
        made = [self.layer(x)]
        for make, write, i, j, stopped in self.calls:
            with torch.set_grad_enabled(not stopped):
                made.append(make(self, made, i, j))
                if write is not None:
                    write(self, made, i, j)
        return torch.stack([tensor * (n + 1) for n, tensor in enumerate(made)]).sum()


def tensors(net: nn.Module) -> list[tuple[str, Tensor]]:
    return [*net.named_buffers(), *((f"{name}.grad", parameter.grad) for name, parameter in net.named_parameters())]


def run(net: nn.Module) -> Tensor:
    torch.manual_seed(1)
    loss = net(X)
    loss.backward()
    return loss.detach()


def draw_differentiable(seed: int) -> tuple[Random, Random, list[Tensor]]:
    """The first forward from this seed on that torch itself can differentiate: some write over what backward needs."""
    while True:
        model = Random(seed).double()
        plain = copy.deepcopy(model)
        try:
            return model, plain, [run(plain) for _ in range(2)]
        except RuntimeError:
            seed += NUM_SEEDS


def check(seed: int) -> None:
    model = Random(seed).double()
    plain = copy.deepcopy(model)
    try:
        want = [run(plain) for _ in range(2)]
    except RuntimeError:  # what a write destroyed is needed for a gradient: the plain model fails too
        return
    try:
        graph = capture(model, X)
    except CaptureError as error:
        assert "past those gradients" in str(error)
        return
    module = to_module(graph, model)
    got = [run(module) for _ in range(2)]
    torch.testing.assert_close(got, want)
    for (name, mine), (_, theirs) in zip(tensors(module), tensors(plain), strict=True):
        torch.testing.assert_close(mine, theirs, msg=f"seed {seed}: {name}")


@pytest.mark.parametrize("start", range(0, NUM_SEEDS, CHUNK))
def test_graph_equals_the_plain_model(start: int) -> None:
    for seed in range(start, start + CHUNK):
        check(seed)
