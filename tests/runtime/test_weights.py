"""Pretrained weights: what other libraries wrote arrives in the pieces of every plan, by its names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from conjoin.errors import CheckpointError
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.runtime import load, run_ranks, save_weights
from conjoin.runtime.state.weights import Weights, check_weights
from conjoin.search import make_plan
from tests.runtime.checkpoint_cases import in_processes
from tests.runtime.weight_cases import (
    PLANS,
    Net,
    assert_is_source,
    given,
    loaded,
    on_meta,
    part_of,
    plan_for,
    source,
    told,
    written,
)


@pytest.mark.parametrize(
    "form",
    ["model.safetensors", "safetensors", "bin", "weights.pth", "nested.pt", "transposed.pt", "pytorch_model.bin"],
)
def test_every_form_arrives(tmp_path: Path, form: str) -> None:
    assert_is_source(loaded(plan_for("fsdp", 3), written(tmp_path, form)))


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_every_plan_gets_its_pieces(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    assert_is_source(loaded(plan_for(strategy, num_ranks), written(tmp_path, "safetensors")))


def test_buffers_that_files_do_not_hold_are_initialised(tmp_path: Path) -> None:
    plan = plan_for("fsdp", 2)
    weights = Weights(written(tmp_path, "model.safetensors"))
    for step in run_ranks(plan.mesh, lambda ranks: part_of(plan, ranks, weights, on_meta())):
        assert (dict(step.named_buffers())["derived"] == 2).all()


# ---------------------------------------------------------------------------------------------------------- by regions


def test_floats_are_converted_and_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = given(tmp_path, up__weight=source()["up.weight"].bfloat16(), down__weight=source()["down.weight"].double())
    plan = plan_for("data-parallel", 1)
    with caplog.at_level(logging.WARNING, "conjoin"):
        step = load(plan, on_meta(), weights=path)
    assert torch.equal(dict(step.named_parameters())["up.weight"], source()["up.weight"].bfloat16().float())
    assert "1 tensors converted from torch.bfloat16 to torch.float32" in caplog.text
    assert "1 tensors converted from torch.float64 to torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"up__weight": None}, ["up.weight is not in the files"]),
        (
            {"up__weight": None, "up__weigth": torch.ones(10, 6)},
            [
                "up.weight is not in the files; the nearest is up.weigth",
                "up.weigth is no tensor of the model; the nearest is up.weight",
            ],
        ),
        ({"more": torch.ones(2)}, ["more is no tensor of the model"]),
        ({"up__weight": torch.ones(6, 10)}, ["up.weight is f32[6,10] in the files and f32[10,6] in the model"]),
        ({"up__bias": torch.ones(10, dtype=torch.int64)}, ["up.bias is i64[10] in the files and f32[10] in the model"]),
        ({"norm__num_batches_tracked": torch.ones(())}, ["norm.num_batches_tracked is f32[] in the files and i64[]"]),
        ({"embed__weight": None}, ["embed.weight is not in the files"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Tensor | None], words: list[str]) -> None:
    message = told(lambda: check_weights(Weights(given(tmp_path, **changes)), on_meta()))
    assert all(word in message for word in words), message


def test_new_and_unused_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = given(tmp_path, kept=None, old__gate=torch.ones(2), derived=torch.ones(6))
    message = told(lambda: check_weights(Weights(path), on_meta()))
    assert "kept is not in the files" in message and "old.gate is no tensor" in message and "derived" not in message
    weights = Weights(path, new=("kep*",), unused=("old",))
    with caplog.at_level(logging.WARNING, "conjoin"):
        step = load(plan_for("data-parallel", 1), on_meta(), weights=weights)
    assert (dict(step.named_buffers())["kept"] == 3).all() and (dict(step.named_buffers())["derived"] == 2).all()
    assert "2 of the files not used: old.gate, derived" in caplog.text and "begin anew: kept" in caplog.text
    assert "text is not one" in told(lambda: Weights(path, new="kept"))


def test_a_tied_weight_under_either_name_or_twice(tmp_path: Path) -> None:
    table = source()["embed.weight"]
    assert_is_source(loaded(plan_for("fsdp", 2), given(tmp_path, embed__weight=None, head__weight=table)))
    assert_is_source(loaded(plan_for("fsdp", 2), given(tmp_path, head__weight=table.clone())))
    message = told(
        lambda: load(plan_for("data-parallel", 1), on_meta(), weights=given(tmp_path, head__weight=table + 1))
    )
    assert "embed.weight and head.weight with other values" in message


@pytest.mark.parametrize("longer", [True, False])
def test_one_prefix_more_or_less(tmp_path: Path, longer: bool) -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()

        def forward(self, i: Tensor) -> Tensor:
            y: Tensor = self.body(i)
            return y

    state = source() if longer else {f"body.{name}": x for name, x in source().items()}
    path = tmp_path / "x.pt"
    torch.save(state, path)
    model = on_meta(Headed) if longer else on_meta()
    checked = check_weights(Weights(path), model)
    assert len(checked.names) == len(source())
    assert any("body." in note for note in checked.pairing.notes)


def test_two_prefixes_that_fit_are_not_guessed(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "x.pt")
    twins = nn.ModuleDict({"left": nn.Linear(3, 3), "right": nn.Linear(3, 3)})
    assert "left.weight is not in the files" in told(lambda: check_weights(Weights(tmp_path / "x.pt"), twins))


# ---------------------------------------------------------------------------------------------------------- bad files


def llama(tied: bool = True) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


TOKENS = torch.arange(16).view(4, 4) * 5 % 48


def test_from_pretrained_and_back_on_processes(tmp_path: Path) -> None:
    """Transformers writes shards, two processes load their pieces, train a step and save; transformers reads that."""
    torch.manual_seed(1)
    plain = llama().train()
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    meta = on_meta(llama)
    plan = make_plan(capture(meta, {"input_ids": TOKENS, "labels": TOKENS}), parse_machine("local:2"), "fsdp")

    def program() -> list[Any]:
        step = load(plan, meta, weights=tmp_path / "theirs")
        refused = []
        for bad in (tmp_path / "none", tmp_path / f"only-{step.communicator.rank}"):
            (tmp_path / "only-0").mkdir(exist_ok=True)
            try:
                load(plan, meta, weights=bad)
            except CheckpointError as error:
                refused.append(str(error))
        optimizer = torch.optim.SGD(step.parameters(), lr=0.5)
        loss = step(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        save_weights(tmp_path / "ours", step, max_shard_bytes=4000)
        return [loss.item(), refused]

    (loss, refused), other = in_processes(2, tmp_path / "ranks", program)
    assert other == [loss, refused] and len(refused) == 2
    wanted = plain(input_ids=TOKENS, labels=TOKENS).loss
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    plain.config.save_pretrained(tmp_path / "ours")
    again, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, tensor), (_, expected) in zip(again.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(tensor, expected, msg=name)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_what_a_published_model_says_of_names_is_heard(tmp_path: Path) -> None:
    """Files of GPT-2 have masks that its attention does not keep any more, and no prefix."""
    config = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    state = {**model.transformer.state_dict(), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    torch.save(state, tmp_path / "x.bin")
    notes = check_weights(Weights(tmp_path / "x.bin"), model).pairing.notes
    assert notes == (
        "names in the files are taken with transformer. before them", "1 of the files not used: h.0.attn.bias"
    )  # fmt: skip


def test_a_model_with_values_keeps_those_that_are_new(tmp_path: Path) -> None:
    model = Net().train()
    own = model.up.weight.detach().clone()
    weights = Weights(given(tmp_path, up__weight=None), new=("up.weight",))
    step = load(plan_for("data-parallel", 1), model, weights=weights)
    state = dict(step.named_parameters())
    assert torch.equal(state["up.weight"], own) and torch.equal(state["down.weight"], source()["down.weight"])


def test_a_base_model_under_a_head(tmp_path: Path) -> None:
    """As `from_pretrained` does it: names get the prefix, the head begins anew; here that is said by hand."""
    torch.manual_seed(1)
    base = llama().model
    base.save_pretrained(tmp_path)
    config = base.config
    config.num_labels, config.pad_token_id = 3, 0
    headed = on_meta(lambda: transformers.LlamaForSequenceClassification(config))
    assert "score.weight is not in the files" in told(lambda: check_weights(Weights(tmp_path), headed))
    plan = make_plan(capture(headed, {"input_ids": TOKENS, "labels": torch.zeros(4, dtype=torch.int64)}),
                     parse_machine("local:1"), "single")  # fmt: skip
    step = load(plan, headed, weights=Weights(tmp_path, new=("score",)))
    theirs = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path)
    state = dict(step.named_parameters())
    for name, tensor in theirs.named_parameters():
        assert name == "score.weight" or torch.equal(state[name], tensor), name
    assert 0 < state["score.weight"].std() < 0.05  # as its `_init_weights` draws it
