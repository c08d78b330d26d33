"""Published models from Hugging Face's transformers, written by others: the graph computes and trains as they do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.ir import Graph, parse_graph
from conjoin.runtime import to_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # raised while transformers and what it imports are loaded
    import transformers as hf

# Raised by transformers about its own code or configuration, whether or not the model is captured.
pytestmark = [
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # DeBERTa
]

Batch = dict[str, Any]
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
TWO_LAYERS = {"num_hidden_layers": 2}
"""Where a second layer is of another kind than the first; and of one model of each family."""
SEQ2SEQ = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip


def tokens() -> Batch:
    ids = torch.randint(3, 100, (2, 8))
    return {"input_ids": ids, "labels": ids}


def masked() -> Batch:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {**tokens(), "attention_mask": mask}


def classes() -> Batch:
    return {"input_ids": tokens()["input_ids"], "labels": torch.tensor([0, 1])}


def image() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def speech() -> Batch:
    return {"input_features": torch.randn(2, 8, 32), "labels": tokens()["labels"]}


def pairs() -> Batch:
    return {"input_ids": tokens()["input_ids"], "pixel_values": image()["pixel_values"], "return_loss": True}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**{key: value for key, value in SMALL.items() if key != "vocab_size"}, "image_size": 32, "patch_size": 8}
GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
T5 = {
    "decoder_start_token_id": 0,
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}
MIXTRAL = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
DISTILBERT = {"vocab_size": 100, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64}
DEBERTA = {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 32}
CLIP = {"text_config": {**SMALL, **SPECIAL, "max_position_embeddings": 16}, "vision_config": VISION}
SWIN = {
    "image_size": 32,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5, "image_size": 32}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
MAMBA = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
OPT = {**SMALL, "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32}
WHISPER = {
    **SEQ2SEQ, **SPECIAL, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
    "decoder_start_token_id": 1,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "bert": ("BertForMaskedLM", SMALL | TWO_LAYERS, masked),
    "gpt2": ("GPT2LMHeadModel", GPT2, tokens),
    "llama": ("LlamaForCausalLM", GROUPED | TWO_LAYERS, masked),
    "t5": ("T5ForConditionalGeneration", T5, tokens),
    "vit": ("ViTForImageClassification", VISION, image),
    "mixtral": ("MixtralForCausalLM", MIXTRAL, tokens),
    "roberta": ("RobertaForMaskedLM", {**SMALL, "max_position_embeddings": 32}, tokens),
    "distilbert": ("DistilBertForSequenceClassification", DISTILBERT, classes),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, tokens),
    "mistral": ("MistralForCausalLM", GROUPED, tokens),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, **TWO_LAYERS, "head_dim": 8}, tokens),
    "gpt-neox": ("GPTNeoXForCausalLM", SMALL, tokens),
    "deberta": ("DebertaV2ForMaskedLM", DEBERTA, tokens),
    "clip": ("CLIPModel", CLIP, pairs),
    "swin": ("SwinForImageClassification", SWIN, image),
    "convnext": ("ConvNextForImageClassification", CONVNEXT, image),
    "resnet": ("ResNetForImageClassification", RESNET, image),
    "mamba": ("MambaForCausalLM", MAMBA, tokens),
    # These draw a number for every layer even at a rate of 0, and the graph does not: any other draw would differ.
    "opt": ("OPTForCausalLM", {**OPT, "dropout": 0.0}, tokens),
    "bart": ("BartForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 32, "dropout": 0.0}, tokens),
    "whisper": ("WhisperForConditionalGeneration", {**WHISPER, "dropout": 0.0}, speech),
}

TOLERANCES = dict.fromkeys(("qwen2", "mistral", "mixtral"), 1e-6)
"""These call another kernel where they are exported: keys are repeated for grouped heads and a mask is given, not
asked for. Whether its gradients are rounded the same depends on the processor."""


def build(name: str) -> tuple[nn.Module, Batch]:
    class_name, options, data = MODELS[name]
    cls = getattr(hf, class_name)
    torch.manual_seed(0)
    return cls(cls.config_class(**options)), data()


@cache
def captured(name: str) -> tuple[Graph, nn.Module, nn.Module, Batch]:
    """In training: the graph, the model that was captured, as it was before, and the batch."""
    model, batch = build(name)
    plain = copy.deepcopy(model.train())
    return capture(model, batch), model, plain, batch


def run(net: nn.Module, batch: Batch) -> Any:
    torch.manual_seed(3)
    output = net(**batch)
    output.loss.backward()
    return output


def flat(output: Any) -> dict[str, Any]:
    return {key: value for key, value in output.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_plain_model(name: str, unequal: Callable[..., list[str]]) -> None:
    graph, model, plain, batch = captured(name)
    module = to_module(graph, model)
    got, want = run(module, batch), run(plain, batch)
    assert type(got) is type(want)
    assert graph.loss is not None and torch.equal(got.loss, want.loss)
    mine, theirs = flat(got), flat(want)
    assert list(mine) == list(theirs)
    assert [key for key in theirs if not torch.equal(mine[key], theirs[key])] == []
    assert unequal(module, plain, TOLERANCES.get(name, 0.0)) == []
    assert list(module.state_dict()) == list(plain.state_dict())
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mixtral"])
def test_evaluation_equals_the_plain_model(name: str, unequal: Callable[..., list[str]]) -> None:
    model, batch = build(name)
    model.eval()
    plain = copy.deepcopy(model)
    module = to_module(capture(model, batch), model)
    got, want = run(module, batch), run(plain, batch)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    assert unequal(module, plain, TOLERANCES.get(name, 0.0)) == []


def test_labels_may_be_left_to_a_loss_of_ones_own(unequal: Callable[..., list[str]]) -> None:
    model, batch = build("gpt2")
    plain, ids = copy.deepcopy(model.train()), batch["input_ids"]

    def loss(output: Any) -> Tensor:
        return output.logits.logsumexp(-1).mean()

    graph = capture(model, {"input_ids": ids}, loss)
    module = to_module(graph, model)
    torch.manual_seed(0)
    got = module(input_ids=ids)
    torch.manual_seed(0)
    want = loss(plain(input_ids=ids))
    got.backward()
    want.backward()
    assert torch.equal(got, want) and graph.loss == 0
    assert unequal(module, plain) == []


def test_a_model_on_meta_is_captured_as_a_real_one() -> None:
    with torch.device("meta"):
        graph = capture(*build("llama"))
    assert [node.op for node in graph.nodes] == [node.op for node in captured("llama")[0].nodes]


def test_lines_point_into_the_library() -> None:
    files = {source.file for source in captured("bert")[0].sources if source}
    assert any(file.endswith("modeling_bert.py") for file in files)
    packages = [Path(package.__file__ or "").parent for package in (torch, conjoin)]
    assert not any(Path(file).is_relative_to(package) for file in files for package in packages)


def test_experts_chosen_by_the_data_are_refused_with_advice() -> None:
    config = hf.MixtralConfig(**{**MIXTRAL, "experts_implementation": "eager"})
    with pytest.raises(CaptureError, match="tensor values") as caught:
        capture(hf.MixtralForCausalLM(config), tokens())
    assert "modeling_mixtral.py" in str(caught.value)
