"""Models of published sizes for `published.py`: zoo families on the meta device, captured as a step was trained."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from conjoin import capture as named_capture
from conjoin.frontends import PRECISIONS, capture
from conjoin.ir import Graph
from zoo.bert import Bert, BertConfig, pretraining_batch, pretraining_loss
from zoo.gpt import CausalAttention, Gpt, GptConfig, gpt_batch
from zoo.images import labelled_images
from zoo.llama import Llama, LlamaConfig, llama_batch
from zoo.resnet import ResNet, ResNetConfig
from zoo.tokens import next_token_loss

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class SpelledOutAttention(nn.Module):
    """Causal attention as Megatron-LM had it before there was one kernel for it: two products, a softmax, a dropout.

    Scale, mask and softmax are one kernel there, which reads and writes each score once. So does the softmax alone,
    which stands for it here: what is captured is priced, and never run.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        fused = CausalAttention(config)
        self.qkv, self.output, self.heads = fused.qkv, fused.output, fused.heads
        self.dropout = nn.Dropout(fused.dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv_BL3HK = self.qkv(x_BLD).unflatten(2, (3, self.heads, -1))
        q_BHLK, k_BHLK, v_BHLK = (part.transpose(1, 2) for part in qkv_BL3HK.unbind(dim=2))
        scores_BHLL = torch.matmul(q_BHLK / math.sqrt(q_BHLK.shape[3]), k_BHLK.transpose(2, 3))
        weights_BHLL = self.dropout(torch.softmax(scores_BHLL, dim=3))
        mixed_BLD: Tensor = self.output(torch.matmul(weights_BHLL, v_BHLK).transpose(1, 2).flatten(2))
        return mixed_BLD


class Step(nn.Module):
    """A model with its loss; the loss is in float32 as all sources have it.

    Under autocast where that is asked for; or, as FSDP's mixed precision does, with its parameters cast before use.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], precision: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.way, self.dtype = precision.split()[0], HALVES.get(precision.split()[-1])
        self.num_inputs = len(inspect.signature(model.forward).parameters)

    def forward(self, *batch: Tensor) -> Tensor:
        given = batch[: self.num_inputs]
        with torch.autocast("cuda", dtype=self.dtype) if self.way == "autocast" else nullcontext():
            if self.way == "mixed":
                named = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
                made = functional_call(self.model, named, given)
            else:
                made = self.model(*given)
        outputs = [x.float() for x in (made if isinstance(made, tuple) else (made,))]
        return self.loss(tuple(outputs) if len(outputs) > 1 else outputs[0], *batch[self.num_inputs :])


def build(model: Mapping[str, Any], length: int, batch: int) -> tuple[nn.Module, Sequence[Any], Callable[..., Tensor]]:
    """A model of some sizes on the meta device, its batch, and its loss; images may have their channels last."""
    sizes = model["sizes"]
    with torch.device("meta"):
        match model["family"]:
            case "gpt" | "gpt-before-flash" as family:
                gpt = GptConfig(**sizes, length=length)
                made = Gpt(gpt)
                for block in made.blocks if family == "gpt-before-flash" else ():
                    block.attention = SpelledOutAttention(gpt)
                return made, gpt_batch(batch, gpt), next_token_loss
            case "llama":
                llama = LlamaConfig(**sizes, length=length)
                return Llama(llama), llama_batch(batch, llama), next_token_loss
            case "bert":
                bert = BertConfig(**sizes, positions=length)
                return Bert(bert), pretraining_batch(batch, bert), pretraining_loss
            case "resnet":
                resnet = ResNetConfig(**sizes)
                images, labels = labelled_images(resnet, batch)
                order = torch.channels_last if model.get("channels_last") else torch.contiguous_format
                return ResNet(resnet).to(memory_format=order), (images.to(memory_format=order), labels), cross_entropy
    raise ValueError(f"no such family: {model['family']}")


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def capture_step(model_sizes: Mapping[str, Any], length: int, batch_size: int, precision: str) -> Graph:
    """A training step of a model: in `bfloat16` throughout, under `autocast bfloat16`, or with parameters of float32
    that are cast before use, `mixed bfloat16`; or in a precision by the name that `--precision` has for it."""
    model, batch, loss = build(model_sizes, length, batch_size)
    if precision.split(",")[0] in PRECISIONS and precision != "float32":
        return named_capture(model.train(), tuple(batch), loss, precision=f"{precision}@cuda")
    if precision in HALVES:
        half = HALVES[precision]
        model, batch = model.to(half), tuple(_narrow(x, half) for x in batch)
    if precision.startswith("mixed "):
        for owner in model.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                owner.register_buffer(name, _narrow(buffer, HALVES[precision.split()[1]]), persistent=False)
    return capture(Step(model, loss, precision).train(), tuple(batch))
