"""Vision transformers: ViT-B/16 and ViT-L/16, pre-norm encoders over image patches with a class token.

Shapes: N batch, C channels, HW the image, L tokens, D model width, H heads, E width of a head, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.images import image_entry
from zoo.workload import Entry

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ViTConfig:
    layers: int
    width: int
    mlp: int
    heads: int
    patch: int = 16
    dropout: float = 0.1
    """After patch embedding and every dense layer except the projections to query, key and value (appendix B.1)."""
    channels: int = 3
    image: int = 224
    classes: int = 1000


class SelfAttention(nn.Module):
    """Multi-head self-attention with query, key and value as three projections (one matrix in appendix A)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_NLD: Tensor) -> Tensor:
        q_NHLE = self._split_heads(self.query(x_NLD))
        k_NHLE = self._split_heads(self.key(x_NLD))
        v_NHLE = self._split_heads(self.value(x_NLD))
        y_NHLE = F.scaled_dot_product_attention(q_NHLE, k_NHLE, v_NHLE)
        y_NLD: Tensor = self.out(y_NHLE.transpose(1, 2).flatten(2))
        return y_NLD

    def _split_heads(self, x_NLD: Tensor) -> Tensor:
        return x_NLD.view(*x_NLD.shape[:2], self.heads, -1).transpose(1, 2)


class EncoderLayer(nn.Module):
    """Attention and MLP, each normalised before and added to its input (equations 2 and 3)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.attention = SelfAttention(config.width, config.heads)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.mlp_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.mlp), nn.GELU(), nn.Dropout(config.dropout),
            nn.Linear(config.mlp, config.width), nn.Dropout(config.dropout),
        )  # fmt: skip

    def forward(self, x_NLD: Tensor) -> Tensor:
        x_NLD = x_NLD + self.attention_dropout(self.attention(self.attention_norm(x_NLD)))
        y_NLD: Tensor = x_NLD + self.mlp(self.mlp_norm(x_NLD))
        return y_NLD


class VisionTransformer(nn.Module):
    """Patches, a class token and learned positions in; the class token's last state classified."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        num_patches = (config.image // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, 1 + num_patches, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.Sequential(*[EncoderLayer(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.classifier = nn.Linear(config.width, config.classes)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        patches_NLD = self.patches(x_NCHW).flatten(2).transpose(1, 2)
        class_N1D = self.class_token.expand(patches_NLD.shape[0], -1, -1)
        x_NLD = self.dropout(torch.cat([class_N1D, patches_NLD], dim=1) + self.positions)
        class_ND = self.norm(self.layers(x_NLD))[:, 0]
        logits_NK: Tensor = self.classifier(class_ND)
        return logits_NK


VIT_B_16 = ViTConfig(layers=12, width=768, mlp=3072, heads=12)
VIT_L_16 = ViTConfig(layers=24, width=1024, mlp=4096, heads=16)

TINY_B = ViTConfig(layers=2, width=32, mlp=64, heads=4, patch=8, image=32, classes=10)
TINY_L = ViTConfig(layers=3, width=48, mlp=96, heads=4, patch=8, image=32, classes=10)

MODELS: dict[str, Entry] = {
    "vit-b-16": image_entry(
        VisionTransformer, (VIT_B_16, TINY_B), batch_size=64,
        source="Dosovitskiy et al. 2021, Table 1, ViT-Base with 16x16 patches",
    ),
    "vit-l-16": image_entry(
        VisionTransformer, (VIT_L_16, TINY_L), batch_size=64,
        source="Dosovitskiy et al. 2021, Table 1, ViT-Large with 16x16 patches",
    ),
}  # fmt: skip
