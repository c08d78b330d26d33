"""What a forward does to buffers and attributes: the graph does the same, or capture says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.runtime import to_module
from tests.frontends.counted_module import Counted, X


def reassigned_then_read(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.mean = m.mean * 0.9 + y.detach().mean(0) * 0.1
    return y - m.mean


def updated_in_place_then_read(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y * m.mean


def updated_with_lerp(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        m.mean.lerp_(y.mean(0), 0.1)
        m.steps += 1
    return (y - m.mean).square() / m.steps


def read_then_updated(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x) + m.mean
    m.mean.copy_(y.detach().mean(0))
    return y


def read_before_and_after(m: Counted, x: Tensor) -> Tensor:
    before = m.mean * 2
    m.mean.add_(1)
    return m.layer(x) * before + m.mean


def part_of_a_buffer(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        m.hidden[0] = y.mean(0)
        m.hidden[1, :2].add_(1)
    return y + m.hidden.sum(0)


def counted(m: Counted, x: Tensor) -> Tensor:
    m.steps += 1
    return m.layer(x) * m.steps


def written_by_copy(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.mean.copy_(y.detach().mean(0) + m.mean)
    m.hidden.copy_(m.mean)
    return y + m.hidden.sum(0)


def written_through_data(m: Counted, x: Tensor) -> Tensor:
    y = m.layer(x)
    m.mean.data.mul_(0.5)
    return y + m.mean


def set_and_filled(m: Counted, x: Tensor) -> Tensor:
    m.hidden.fill_(2)
    m.mean.zero_()
    m.mean += m.hidden[0]
    return m.layer(x) + m.mean


BUFFERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        reassigned_then_read, updated_in_place_then_read, updated_with_lerp, read_then_updated, read_before_and_after,
        part_of_a_buffer, counted, written_by_copy, written_through_data, set_and_filled,
    )
}  # fmt: skip


@pytest.mark.parametrize("function", BUFFERS.values(), ids=BUFFERS)
def test_buffers_change_as_they_do_in_the_plain_model(
    compare: Callable[..., Any], function: Callable[..., Any]
) -> None:
    captured = compare(Counted(function), X, steps=3)
    assert captured.graph.updates
    assert list(captured.module.state_dict()) == list(captured.plain.state_dict())


class Normed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3}], ids=str)
def test_batch_norm_statistics_over_three_steps(
    compare: Callable[..., Any], options: dict[str, Any], training: bool
) -> None:
    compare(Normed(**options).train(training), torch.randn(2, 3, 6, 6), steps=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_batch_norm_that_averages_over_all_batches(dtype: torch.dtype) -> None:
    """To a rounding of its dtype: torch rounds the statistics of the batch once less."""
    plain = Normed(momentum=None).to(dtype)
    batch = torch.randn(2, 3, 6, 6, dtype=dtype)
    module = to_module(capture(plain, batch), copy.deepcopy(plain))
    for _ in range(4):
        batch = torch.randn_like(batch)
        torch.testing.assert_close(module(batch), plain(batch), rtol=0, atol=0)
        near = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()), rtol=near, atol=near)


def test_a_norm_that_reads_its_counter_in_a_forward_of_its_own_is_refused() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = Normed(momentum=None)
    forward = model.norm.forward
    capture(model, torch.randn(2, 3, 6, 6))
    assert model.norm.forward == forward and "forward" not in vars(model.norm)
    model.norm = Own(4, momentum=None)
    with pytest.raises(CaptureError, match="tensor values"):
        capture(model, torch.randn(2, 3, 6, 6))


def test_batch_norm_used_twice_updates_twice(compare: Callable[..., Any]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x).relu())

    captured = compare(Twice(), X, steps=3)
    assert captured.module.norm.num_batches_tracked == 6


def test_a_part_in_eval_mode_stays_so(compare: Callable[..., Any]) -> None:
    model = Normed().train()
    model.norm.eval()
    captured = compare(model, torch.randn(2, 3, 6, 6), steps=2)
    assert captured.graph.training and captured.graph.updates == ()
    assert model.training and not model.norm.training


REPLACED: dict[str, Callable[[Counted], Any]] = {
    "of another dtype": lambda m: setattr(m, "mean", m.mean.double()),
    "of another shape": lambda m: setattr(m, "mean", m.mean[:2]),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_a_buffer_replaced_by_one_of_another_type_is_refused(replace: Callable[[Counted], Any]) -> None:
    def forward(m: Counted, x: Tensor) -> Tensor:
        replace(m)
        return m.layer(x)

    with pytest.raises(CaptureError, match="buffer mean: forward puts another tensor there"):
        capture(Counted(forward), X)


def test_a_loss_that_changes_its_own_buffer_is_refused() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Tensor) -> Tensor:
            self.seen.add_(1)
            return output.sum() * self.seen

    with pytest.raises(CaptureError, match=r"buffer loss.seen: a loss that changes buffers of its own"):
        capture(nn.Linear(4, 4), X, Moving())


def test_a_loss_with_parameters_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, output: Tensor) -> Tensor:
            return (output * self.scale).sum()

    with pytest.raises(CaptureError, match=r"parameter loss.scale: a loss with parameters of its own"):
        capture(nn.Linear(4, 4), X, Learned())


def test_a_loss_may_read_the_models_parameters() -> None:
    model = nn.Linear(4, 4)
    plain = copy.deepcopy(model)
    graph = capture(model, X, lambda out: out.sum() + sum(p.square().sum() for p in model.parameters()))
    module = to_module(graph, model)
    (module(X) * 1.0).backward()
    (plain(X).sum() + sum(p.square().sum() for p in plain.parameters())).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Remembering(nn.Module):
    """Tensors and numbers that are no state, changed by forward."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        self.last, self.calls = torch.zeros(3, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + (self.last if self.read else 0)
        self.last = y.detach()
        self.calls += 1
        return y


def test_attributes_that_forward_changes_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = Remembering(read=False)
    capture(model, X)
    assert "attribute last: forward changes it, the graph does not" in caplog.text
    assert "attribute calls: forward changes it, the graph does not" in caplog.text
    assert torch.equal(model.last, torch.zeros(3, 4)) and model.calls == 0


def test_an_attribute_that_is_state_is_refused() -> None:
    with pytest.raises(
        CaptureError, match="attribute last: forward reads it and replaces it, as state: use register_buffer"
    ):
        capture(Remembering(read=True), X)
