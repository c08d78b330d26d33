"""DLRM, XDL and CANDLE Uno: sizes, shapes, training."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.workloads import build_tiny, inputs_and_targets, loss_of
from zoo import recommendation
from zoo.workload import Workload, build_entry

ENTRIES = recommendation.MODELS

# Tables, then dense layers with their biases (XDL and the pair model have none).
CRITEO_ROWS = 33_762_577
PARAMETERS = {
    "dlrm": CRITEO_ROWS * 64 + (14 * 512 + 513 * 512 + 513 * 64) + (416 * 1024 + 2 * 1025 * 1024 + 1025),
    "dlrm-cat": CRITEO_ROWS * 64 + (14 * 512 + 513 * 512 + 513 * 64) + (1729 * 1024 + 2 * 1025 * 1024 + 1025),
    "xdl": 4 * 1_000_000 * 64 + 2 * 256 * 256 + 256 * 2,
    "candle-uno": (942 + 5270 + 2048 + 3) * 1000 + 6 * 1001 * 1000 + 3001 * 1000 + 2 * 1001 * 1000 + 1001,
    "candle-uno-pair": (942 + 2 * (5270 + 2048) + 5 * 7 * 4192 + 5 * 4192 + 2 + 3 * 4192 + 1) * 4192,
}
OUTPUT_SHAPES = {"dlrm": (2,), "dlrm-cat": (2,), "xdl": (2, 2), "candle-uno": (2,), "candle-uno-pair": (2,)}


def tiny(name: str, seed: int = 0, batch_size: int | None = None) -> Workload:
    return build_tiny(ENTRIES[name], seed, batch_size)


@pytest.mark.parametrize("name", ENTRIES)
def test_full_size_has_the_parameters_its_layers_add_up_to(name: str) -> None:
    model, batch, _ = build_entry(ENTRIES[name], tiny=False, batch_size=None, device="meta", seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(tensor.is_meta and tensor.shape[0] == ENTRIES[name].batch_size for tensor in batch)


@pytest.mark.parametrize("name", ENTRIES)
def test_full_size_has_the_expected_output_shape(name: str) -> None:
    workload = build_entry(ENTRIES[name], tiny=False, batch_size=2, device="meta", seed=0)
    inputs, targets = inputs_and_targets(workload)
    output = workload.model(*inputs)
    assert output.shape == OUTPUT_SHAPES[name]
    assert workload.loss(output, *targets).shape == ()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("batch_size", [2, 4])
def test_tiny_gives_every_parameter_a_finite_gradient(name: str, batch_size: int) -> None:
    workload = tiny(name, batch_size=batch_size)
    loss = loss_of(workload)
    loss.backward()
    assert loss.dtype == torch.float64 and loss.isfinite()
    for parameter_name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", ENTRIES)
def test_a_seed_decides_weights_and_data(name: str) -> None:
    first, again, other = tiny(name, seed=1), tiny(name, seed=1), tiny(name, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.batch, again.batch, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


def test_dot_interaction_lists_each_pair_once() -> None:
    features = [torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    joined = recommendation.DotInteraction(4, 2)(features)
    expected = [(features[i] * features[j]).sum(dim=1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(joined, torch.cat((features[0], torch.stack(expected, dim=1)), dim=1))


def test_a_bag_is_the_sum_of_its_rows() -> None:
    tables = recommendation.Tables((5, 7), 3).double()
    indices = recommendation.random_indices(4, (5, 7), 2)
    sums = tables(indices)
    for table, (bag, result) in enumerate(zip(tables.bags, sums, strict=True)):
        torch.testing.assert_close(result, bag.weight[indices[:, table]].sum(dim=1))
