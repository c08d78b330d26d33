"""Models that others wrote, at sizes they are trained at: from torchvision and transformers, with random weights.

Nothing here was ever fitted on: `prediction_gpu.py` judges predictions and planned steps by them. `NAMES` were looked
at while the way to predict was made, `OTHERS` were tried afterwards, and `LATER` when those had been looked at, too.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map


class Public(NamedTuple):
    """A model, a batch for it, and its loss where the model does not compute one itself."""

    model: nn.Module
    batch: tuple[Tensor, ...] | dict[str, Tensor]
    loss: Callable[..., Tensor] | None


class Text(NamedTuple):
    """A language model of transformers: its class and configuration, and the batch's size and length."""

    kind: str
    config: str
    shape: tuple[int, int]
    sizes: Mapping[str, Any]


class Images(NamedTuple):
    """A model of torchvision: its function, and the shape of its batch."""

    name: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = {}


class Features(NamedTuple):
    """A model of transformers on numbers: family and task, what the numbers are called, their shape, the labels'."""

    family: str
    task: str
    name: str
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    sizes: Mapping[str, Any]


_WIDE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}

TEXTS: dict[str, Text] = {
    "roberta-large": Text("RobertaForMaskedLM", "RobertaConfig", (16, 256), {
        **_WIDE, "vocab_size": 50265, "max_position_embeddings": 514,
    }),
    "electra-base": Text("ElectraForMaskedLM", "ElectraConfig", (32, 128), {**_BASE, "embedding_size": 768}),
    "distilbert": Text("DistilBertForMaskedLM", "DistilBertConfig", (32, 128), {}),
    "gpt2-medium": Text("GPT2LMHeadModel", "GPT2Config", (8, 512), {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "opt-350m": Text("OPTForCausalLM", "OPTConfig", (8, 512), {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    }),
    "bloom-560m": Text("BloomForCausalLM", "BloomConfig", (4, 512), {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "pythia-1b": Text("GPTNeoXForCausalLM", "GPTNeoXConfig", (4, 1024), {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 8192,
        "vocab_size": 50304,
    }),
    "mistral-400m": Text("MistralForCausalLM", "MistralConfig", (4, 1024), {
        **_WIDE, "num_key_value_heads": 8, "intermediate_size": 3584, "vocab_size": 32000,
    }),
    "qwen2-0.5b": Text("Qwen2ForCausalLM", "Qwen2Config", (4, 512), {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "tinyllama-1.1b": Text("LlamaForCausalLM", "LlamaConfig", (4, 1024), {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000,
    }),
    "phi-1": Text("PhiForCausalLM", "PhiConfig", (2, 1024), {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "intermediate_size": 8192,
        "vocab_size": 51200,
    }),
    "t5-base": Text("T5ForConditionalGeneration", "T5Config", (16, 256), {
        "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
        "decoder_start_token_id": 0,
    }),
    "bart-base": Text("BartForConditionalGeneration", "BartConfig", (16, 256), {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265,
    }),
}  # fmt: skip

IMAGES: dict[str, Images] = {
    "wide-resnet-50": Images("wide_resnet50_2", (64, 3, 224, 224)),
    "densenet-121": Images("densenet121", (64, 3, 224, 224)),
    "efficientnet-b0": Images("efficientnet_b0", (128, 3, 224, 224)),
    "convnext-t": Images("convnext_tiny", (64, 3, 224, 224)),
    "swin-t": Images("swin_t", (64, 3, 224, 224)),
    "shufflenet-x1": Images("shufflenet_v2_x1_0", (128, 3, 224, 224)),
    "mobilenet-v3": Images("mobilenet_v3_large", (128, 3, 224, 224)),
    "regnet-y-8gf": Images("regnet_y_8gf", (64, 3, 224, 224)),
    "mnasnet": Images("mnasnet1_0", (128, 3, 224, 224)),
    "squeezenet": Images("squeezenet1_1", (256, 3, 224, 224)),
    "googlenet": Images("googlenet", (128, 3, 224, 224), {"aux_logits": False, "init_weights": False}),
    "fcn-resnet-50": Images("segmentation.fcn_resnet50", (16, 3, 256, 256), {"weights_backbone": None}),
    "r3d-18": Images("video.r3d_18", (8, 3, 16, 112, 112)),
}

OTHER_TEXTS: dict[str, Text] = {
    "deberta-v2": Text("DebertaV2ForMaskedLM", "DebertaV2Config", (16, 256), {
        **_BASE, "vocab_size": 128100, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
    }),
    "xlnet-base": Text("XLNetLMHeadModel", "XLNetConfig", (16, 256), {
        "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072,
    }),
    "albert-base": Text("AlbertForMaskedLM", "AlbertConfig", (32, 128), _BASE),
    "mpnet-base": Text("MPNetForMaskedLM", "MPNetConfig", (32, 128), _BASE),
    "gpt-neo-125m": Text("GPTNeoForCausalLM", "GPTNeoConfig", (8, 512), {
        "hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]],
    }),
    "gemma-300m": Text("GemmaForCausalLM", "GemmaConfig", (4, 1024), {
        "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 256, "intermediate_size": 4096, "vocab_size": 64000,
    }),
}  # fmt: skip

OTHER_IMAGES: dict[str, Images] = {
    "deeplab-v3": Images("segmentation.deeplabv3_resnet50", (8, 3, 256, 256), {"weights_backbone": None}),
    "lraspp": Images("segmentation.lraspp_mobilenet_v3_large", (16, 3, 320, 320), {"weights_backbone": None}),
    "efficientnet-v2": Images("efficientnet_v2_s", (48, 3, 288, 288)),
    "regnet-x-3gf": Images("regnet_x_3_2gf", (96, 3, 224, 224)),
    "maxvit-t": Images("maxvit_t", (32, 3, 224, 224)),
    "swin-v2-t": Images("swin_v2_t", (32, 3, 256, 256)),
    "mobilenet-v2": Images("mobilenet_v2", (96, 3, 224, 224)),
    "resnet-18": Images("resnet18", (256, 3, 224, 224)),
    "s3d": Images("video.s3d", (8, 3, 16, 224, 224)),
}

FEATURES: dict[str, Features] = {
    "whisper-base": Features("Whisper", "ForConditionalGeneration", "input_features", (8, 80, 3000), (8, 128), {
        "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "use_cache": False,
    }),
    "segformer-b1": Features("Segformer", "ForSemanticSegmentation", "pixel_values", (8, 3, 512, 512), (8, 512, 512), {
        "hidden_sizes": [64, 128, 320, 512], "num_labels": 150,
    }),
    "convnextv2-t": Features("ConvNextV2", "ForImageClassification", "pixel_values", (32, 3, 224, 224), (32,), {
        "num_labels": 100,
    }),
    "dinov2-s": Features("Dinov2", "ForImageClassification", "pixel_values", (48, 3, 224, 224), (48,), {
        "hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12, "num_labels": 100, "image_size": 224,
    }),
    "mobilevit-s": Features("MobileViT", "ForImageClassification", "pixel_values", (48, 3, 256, 256), (48,), {
        "num_labels": 100,
    }),
}  # fmt: skip

LATER_TEXTS: dict[str, Text] = {
    "olmo-1b": Text("OlmoForCausalLM", "OlmoConfig", (2, 1024), {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 8192,
        "vocab_size": 50304,
    }),
    "falcon-400m": Text("FalconForCausalLM", "FalconConfig", (4, 512), {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 65024,
    }),
    "codegen-350m": Text("CodeGenForCausalLM", "CodeGenConfig", (4, 512), {
        "n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32, "vocab_size": 51200,
    }),
    "biogpt": Text("BioGptForCausalLM", "BioGptConfig", (8, 512), {**_WIDE, "vocab_size": 42384}),
    "modernbert-base": Text("ModernBertForMaskedLM", "ModernBertConfig", (16, 512), {}),
    "gemma2-300m": Text("Gemma2ForCausalLM", "Gemma2Config", (4, 512), {
        "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 4096, "vocab_size": 64000,
    }),
    "pegasus-base": Text("PegasusForConditionalGeneration", "PegasusConfig", (8, 256), {
        "d_model": 768, "encoder_layers": 8, "decoder_layers": 8, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265,
    }),
    "roformer-base": Text("RoFormerForMaskedLM", "RoFormerConfig", (32, 128), {**_BASE, "vocab_size": 50000}),
}  # fmt: skip

LATER_IMAGES: dict[str, Images] = {
    "vit-b-32": Images("vit_b_32", (128, 3, 224, 224)),
    "vgg-16-bn": Images("vgg16_bn", (48, 3, 224, 224)),
    "densenet-201": Images("densenet201", (32, 3, 224, 224)),
    "efficientnet-b3": Images("efficientnet_b3", (48, 3, 300, 300)),
    "convnext-s": Images("convnext_small", (48, 3, 224, 224)),
    "regnet-y-16gf": Images("regnet_y_16gf", (48, 3, 224, 224)),
    "r2plus1d-18": Images("video.r2plus1d_18", (8, 3, 16, 112, 112)),
    "mvit-v2-s": Images("video.mvit_v2_s", (4, 3, 16, 224, 224)),
}

LATER_FEATURES: dict[str, Features] = {
    "beit-base": Features("Beit", "ForImageClassification", "pixel_values", (48, 3, 224, 224), (48,), {
        "num_labels": 100,
    }),
    "pvt-v2-b1": Features("PvtV2", "ForImageClassification", "pixel_values", (48, 3, 224, 224), (48,), {
        "num_labels": 100,
    }),
    "hf-swin-t": Features("Swin", "ForImageClassification", "pixel_values", (48, 3, 224, 224), (48,), {
        "num_labels": 100,
    }),
}  # fmt: skip

NAMES = (*TEXTS, *IMAGES)
OTHERS = (*OTHER_TEXTS, *OTHER_IMAGES, *FEATURES)
LATER = (*LATER_TEXTS, *LATER_IMAGES, *LATER_FEATURES)


def _library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised while it and what it imports are loaded
        return importlib.import_module(name)


def _build_text(text: Text) -> Public:
    hf = _library("transformers")
    model = getattr(hf, text.kind)(getattr(hf, text.config)(**text.sizes, use_cache=False))
    ids = torch.randint(3, 1000, text.shape)
    return Public(model, {"input_ids": ids, "labels": ids.clone()}, None)


def _build_features(of: Features) -> Public:
    hf = _library("transformers")
    model = getattr(hf, of.family + of.task)(getattr(hf, f"{of.family}Config")(**of.sizes))
    return Public(model, {of.name: torch.randn(of.shape), "labels": torch.randint(1, 30, of.labels)}, None)


def _pixels_loss(made: dict[str, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(made["out"], labels)


def _build_images(images: Images) -> Public:
    models: Any = _library("torchvision.models")
    *modules, function = images.name.split(".")
    for module in modules:
        models = getattr(models, module)
    model = getattr(models, function)(**images.options)
    x, (count, _, *sizes) = torch.randn(images.shape), images.shape
    if "segmentation" in modules:
        return Public(model, (x, torch.randint(0, 21, (count, *sizes))), _pixels_loss)
    return Public(model, (x, torch.randint(0, 100, (count,))), cross_entropy)


def build(name: str, device: str) -> Public:
    """A model of the list on a device, ready to train; on the meta device it takes no memory."""
    torch.manual_seed(0)
    images, texts = IMAGES | OTHER_IMAGES | LATER_IMAGES, TEXTS | OTHER_TEXTS | LATER_TEXTS
    features = FEATURES | LATER_FEATURES
    if name in texts:
        with torch.device(device):
            model, batch, loss = _build_text(texts[name])
    else:  # small, and some compute their widths with tensors
        model, batch, loss = _build_images(images[name]) if name in images else _build_features(features[name])
    return Public(model.to(device).train(), tree_map(lambda x: x.to(device), batch), loss)
