"""The language, translation, mixture-of-experts, U-shaped and plain dense models: sizes, shapes, training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.workloads import build_tiny, inputs_and_targets, loss_of
from zoo import bert, gpt, llama, mlp, moe, nmt, rnn, u_transformer
from zoo.workload import Entry, Workload, build_entry

FAMILIES = (mlp, rnn, nmt, bert, gpt, llama, moe, u_transformer)
ENTRIES: dict[str, Entry] = {name: entry for family in FAMILIES for name, entry in family.MODELS.items()}

EXACT_PARAMETERS = {
    "mlp": 16 * (8192 * 8192 + 8192),
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "gpt-125m": 124_439_808,
    "gpt-350m": 354_823_168,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "moe-8x7b": 46_702_792_704,
}
STATED_PARAMETERS = {
    "gpt-1.3b": 1.3e9,
    "gpt-2.6b": 2.6e9,
    "gpt-6.7b": 6.7e9,
    "gpt-13b": 13e9,
    "gpt-175b": 175e9,
    "gpt-autoddl-8l": 6.8e9,
    "gpt-autoddl-20l": 16.5e9,
    "gpt-autoddl-44l": 35.8e9,
    "gpt-autoddl-large": 5.8e9,
    "u-transformer": 2.1e9,
}
OUTPUT_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "mlp": ((2, 8192),),
    "mlp-autoddl": ((2, 512),),
    "rnntc": ((2, 2),),
    "rnnlm-2step": ((2, 2, 10000),),
    "rnnlm-fused": ((2, 40, 10000),),
    "nasrnn-taso": ((2, 5, 10000),),
    "nmt": ((2, 40, 20480),),
    "bert-large": ((2, 512, 30522), (2, 2)),
    "gpt-350m": ((2, 1024, 50257),),
    "gpt-1.3b": ((2, 2048, 50257),),
    "gpt-2.6b": ((2, 1024, 51200),),
    "llama-7b": ((2, 2048, 32000),),
    "llama-8b": ((2, 8192, 128256),),
    "moe-8x7b": ((2, 4096, 32000), ()),
    "u-transformer": ((2, 4, 32, 32),),
}


def tiny(name: str, seed: int = 0, batch_size: int | None = None) -> Workload:
    return build_tiny(ENTRIES[name], seed, batch_size)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ENTRIES)
def test_full_size_is_the_published_one_and_built_without_memory(name: str) -> None:
    """At its own batch size; of models whose output shapes are given two samples are taken through."""
    workload = build_entry(ENTRIES[name], tiny=False, batch_size=None, device="meta", seed=0)
    assert all(tensor.is_meta and tensor.shape[0] == ENTRIES[name].batch_size for tensor in workload.batch)
    assert all(tensor.is_meta for tensor in (*workload.model.parameters(), *workload.model.buffers()))
    count = num_parameters(workload.model)
    assert count == EXACT_PARAMETERS.get(name, count)
    assert count == pytest.approx(STATED_PARAMETERS.get(name, count), rel=0.01 if name == "gpt-175b" else 0.025)
    if name in OUTPUT_SHAPES:
        two = tuple(torch.cat([x, x])[:2] for x in workload.batch)
        inputs, targets = inputs_and_targets(workload._replace(batch=two))
        output = workload.model(*inputs)
        shapes = tuple(tuple(tensor.shape) for tensor in (output if isinstance(output, tuple) else (output,)))
        assert shapes == OUTPUT_SHAPES[name]
        assert workload.loss(output, *targets).shape == ()


def test_sizes_are_given_of_models_that_there_are() -> None:
    assert {*EXACT_PARAMETERS, *STATED_PARAMETERS, *OUTPUT_SHAPES} <= set(ENTRIES)


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
def test_a_seed_decides_weights_and_data_and_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = tiny(name, seed=1), tiny(name, seed=1), tiny(name, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.batch, again.batch, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


def test_unrolled_and_fused_language_models_are_the_same_function() -> None:
    unrolled, fused = tiny("rnnlm"), tiny("rnnlm-fused", seed=3)
    fused.model.embedding.load_state_dict(unrolled.model.embedding.state_dict())
    fused.model.head.load_state_dict(unrolled.model.head.state_dict())
    for layer, cell in zip(fused.model.layers, unrolled.model.recurrent.cells, strict=True):
        layer.load_state_dict({f"{key}_l0": value for key, value in cell.state_dict().items()})
    tokens, _ = unrolled.batch
    torch.testing.assert_close(unrolled.model(tokens), fused.model(tokens))


@pytest.mark.parametrize("name", ["gpt-125m", "llama-7b", "llama-8b", "rnnlm", "nasrnn", "nasrnn-taso", "nmt"])
def test_no_position_sees_a_later_one(name: str) -> None:
    workload = tiny(name)
    workload.model.eval()
    inputs, _ = inputs_and_targets(workload)
    tokens = inputs[-1]
    changed = torch.cat((tokens[:, :-1], (tokens[:, -1:] + 1) % 32), dim=1)
    before, after = workload.model(*inputs), workload.model(*inputs[:-1], changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = llama.Rotary(llama.LlamaConfig(1, 16, 24, 2, 2, 32, 12)).double()
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64).expand(1, 1, 12, 8) for _ in range(2))
    scores = (rotary(query) @ rotary(key).transpose(2, 3))[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-5, atol=1e-5)


def test_bert_masks_the_same_number_of_words_in_every_sample() -> None:
    torch.manual_seed(0)
    _, _, words, _ = bert.pretraining_batch(5, bert.BertConfig(layers=1, width=4, heads=1))
    assert (words >= 0).sum(dim=1).tolist() == [77] * 5


def naive_experts(layer: moe.MoeLayer, x_BLD: Tensor, choices: int) -> Tensor:
    """Run every expert on every token and keep the chosen ones."""
    probability = torch.softmax(layer.router.score(x_BLD), dim=2)
    gates, chosen = torch.topk(probability, choices, dim=2)
    every_EBLD = layer.experts(x_BLD.expand(probability.shape[2], *x_BLD.shape))
    index = chosen.unsqueeze(3).expand(*chosen.shape, x_BLD.shape[2])
    answers = every_EBLD.movedim(0, 2).gather(2, index)
    return (gates / gates.sum(dim=2, keepdim=True)).unsqueeze(3).mul(answers).sum(dim=2)


@pytest.mark.parametrize("gated", [True, False])
def test_routing_with_room_for_all_equals_running_the_chosen_experts(gated: bool) -> None:
    torch.manual_seed(0)
    config = moe.MoeConfig(width=6, expert_width=10, experts=4, choices=2, gated=gated, capacity_factor=2.0)
    layer, x_BLD = moe.MoeLayer(config).double(), torch.randn(3, 8, 6, dtype=torch.float64)
    nn.init.normal_(layer.router.score.weight)
    torch.testing.assert_close(layer(x_BLD)[0], naive_experts(layer, x_BLD, 2))


def test_routing_without_room_drops_the_last_tokens() -> None:
    torch.manual_seed(0)
    config = moe.MoeConfig(width=6, expert_width=10, experts=4, choices=2, gated=True, capacity_factor=0.75)
    router, x_BLD = moe.Router(config).double(), torch.randn(1, 1, 6, dtype=torch.float64).expand(2, 8, 6)
    dispatch_BLEC, combine_BLEC, _ = router(x_BLD)
    assert config.capacity(8) == 3 and dispatch_BLEC.shape == (2, 8, 4, 3)
    assert dispatch_BLEC.sum(dim=1).max() == 1
    assert dispatch_BLEC.sum(dim=(2, 3)).tolist() == [[2.0] * 3 + [0.0] * 5] * 2
    torch.testing.assert_close(combine_BLEC.sum(dim=(2, 3))[0, :3], torch.ones(3, dtype=torch.float64))


def test_balanced_routing_has_an_imbalance_of_one() -> None:
    probability = torch.eye(4, dtype=torch.float64).repeat(2, 1).expand(3, 8, 4)
    torch.testing.assert_close(moe._imbalance(probability, probability > 0).item(), 1.0)
