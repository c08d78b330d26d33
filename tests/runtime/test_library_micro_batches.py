"""Models of a library in micro-batches: masks, position tables and class tokens that come without the batch.

The judge is the model itself, called with the whole batch in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import cut_in_micro_batches
from conjoin.machine import Machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_pipeline, make_plan

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WORDS = 8, 5, 40
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 16, **NO_DROPOUT,
}  # fmt: skip
IMAGES = {"image_size": 16, "patch_size": 8, "num_labels": 3}
Made = tuple[nn.Module, dict[str, Tensor]]


def words(*shape: int) -> Tensor:
    return torch.randint(3, WORDS, shape)


def masked() -> dict[str, Tensor]:
    """Texts of different lengths; what is behind an end is no target."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 3:], mask[5, 2:] = 0, 0
    tokens = words(BATCH, LENGTH)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16).double(), "labels": torch.randint(3, (BATCH,))}


class Continued(nn.Module):
    """A model of text, and the mean over what comes next; the library's own rounds it to single precision."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Continued(transformers.GPT2LMHeadModel(config)), masked()


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    labels = words(BATCH, 4)
    labels[2, 2:] = -100
    return transformers.T5ForConditionalGeneration(config), {**masked(), "labels": labels}


def bert() -> Made:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT)), masked()


def roberta() -> Made:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BERT)), masked()


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **IMAGES, **NO_DROPOUT
    )
    return transformers.ViTForImageClassification(config), images()


def swin() -> Made:
    config = transformers.SwinConfig(
        embed_dim=4, depths=[1, 1], num_heads=[1, 1], window_size=2, drop_path_rate=0.0, **{**IMAGES, "patch_size": 4}
    )
    return transformers.SwinForImageClassification(config), images()


MODELS: dict[str, Callable[[], Made]] = {f.__name__: f for f in (gpt2, t5, bert, roberta, vit, swin)}
PLANS = [
    ("gpt2", "data-parallel+micro=4"), ("t5", "pipeline:pp=2,micro=4,schedule=zero-bubble"),
    ("bert", "pipeline:pp=2,micro=2,schedule=gpipe"), ("roberta", "fsdp+micro=2"), ("vit", "fsdp+micro=4"),
    ("vit", "pipeline:pp=2,micro=4"), ("swin", "fsdp+micro=4"),
]  # fmt: skip


def the_loss(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output.loss


def judged(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch at once."""
    model = copy.deepcopy(model)
    found = the_loss(model(**batch))
    found.backward()
    named = model.named_parameters(remove_duplicate=False)
    return found.detach(), {name: p.grad for name, p in named if p.grad is not None}


def check(model: nn.Module, batch: dict[str, Tensor], strategy: str, ranks: int = 2) -> None:
    """Plan on thread ranks, and compare with the model."""
    graph, machine = capture(model, batch, the_loss), Machine("here", 1, ranks, "cpu")
    plan = (make_pipeline if strategy.startswith("pipeline") else make_plan)(graph, machine, strategy)
    wanted, gradients = judged(model, batch)

    def rank(world: ThreadRanks) -> set[str]:
        store = Store(plan, world.rank, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(plan, store, world)
        made = module(**batch)
        made.backward()
        torch.testing.assert_close(made.detach(), wanted, rtol=1e-9, atol=1e-12)
        own = {name: p for name, p in module.named_parameters(remove_duplicate=False) if name in gradients}
        for name, parameter in own.items():
            whole = gradients[name]
            mine = store.cut(name, whole)
            torch.testing.assert_close(parameter.grad, mine, rtol=1e-9, atol=1e-11)
        return set(own)

    assert set().union(*run_ranks(plan.mesh, rank)) == set(gradients)


@pytest.mark.parametrize(("name", "strategy"), PLANS, ids=[f"{a} {b}" for a, b in PLANS])
def test_a_step_is_that_of_the_whole_batch(name: str, strategy: str) -> None:
    torch.manual_seed(5)
    model, batch = MODELS[name]()
    check(model.double().train(), batch, strategy)


class Penalized(nn.Module):
    """How large weights are, with something of a batch beside it or alone."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.one, self.two, self.alone = nn.Linear(4, 4), nn.Linear(4, 4), alone
        self.start = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.one.weight.pow(2).sum() + self.start.exp().mean()
        if self.alone:
            return penalty
        start = self.start.expand(len(x), 1, 4)
        return penalty + self.two(torch.cat([start, self.one(x).tanh()], 1)).pow(2).mean()


@pytest.mark.parametrize("strategy", ["data-parallel+micro=4", "pipeline:pp=2,micro=4"])
def test_a_penalty_is_added_once_in_equal_shares(strategy: str) -> None:
    torch.manual_seed(5)
    check(Penalized(False).double().train(), {"x": torch.randn(8, 3, 4).double()}, strategy)


def test_a_loss_of_parameters_alone_has_micro_batches_and_no_stages() -> None:
    torch.manual_seed(5)
    model, batch = Penalized(True).double().train(), {"x": torch.randn(8, 3, 4).double()}
    check(model, batch, "data-parallel+micro=4")
    with pytest.raises(StrategyError, match="Ask for a strategy without stages"):
        check(model, batch, "pipeline:pp=2,micro=4")


def test_what_needs_all_samples_is_refused_with_what_helps() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = self.layer(x)
            return nn.functional.cross_entropy(made @ made.T, torch.arange(len(x)))

    graph = capture(Contrast(), {"x": torch.randn(8, 4)}, the_loss)
    with pytest.raises(StrategyError, match=r"needs all samples at once\. Take what needs them out of the loss"):
        cut_in_micro_batches(graph, 2)


def test_what_is_sorted_over_samples_is_not_told_as_random() -> None:
    class Ranked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x.sort(0)[0]).pow(2).mean()
            return made

    graph = capture(Ranked(), {"x": torch.randn(8, 4)}, the_loss)
    with pytest.raises(StrategyError, match=r"linear .* needs all samples at once"):
        cut_in_micro_batches(graph, 2)


def test_numbers_of_samples_are_no_part_of_one() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = self.layer(x) * torch.arange(len(x)).unsqueeze(1)
            return made.sum()

    graph = capture(Numbered(), {"x": torch.randn(8, 4)}, the_loss)
    with pytest.raises(StrategyError, match=r"arange.* is not the same for every part of a batch"):
        cut_in_micro_batches(graph, 2)
