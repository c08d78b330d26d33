"""What autocast does to an operator on CUDA, by PyTorch's own reference of its lists, for a value in half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HALF, FULL = torch.bfloat16, torch.float32


class Cast(nn.Module):
    """Functions of a half-precision value h, a float32 value x and a weight, inside an autocast region."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.device = device

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast(self.device, dtype=HALF):
            h = self.layer(x)
            return {name: function(h, x, self.weight) for name, (function, _) in ON_CUDA.items()}


LOWER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda h, x, w: F.linear(x, w),
    "matmul": lambda h, x, w: x @ w,
    "mm": lambda h, x, w: torch.mm(x, w),
    "bmm": lambda h, x, w: torch.bmm(x[None], w[None]),
    "addmm": lambda h, x, w: torch.addmm(w[0], x, w),
    "baddbmm": lambda h, x, w: torch.baddbmm(w[None], x[None], w[None]),
    "mv": lambda h, x, w: torch.mv(x, w[0]),
    "einsum": lambda h, x, w: torch.einsum("ij,jk->ik", x, w),
    "conv1d": lambda h, x, w: F.conv1d(x[None], w[:, :, None]),
    "conv2d": lambda h, x, w: F.conv2d(x[None, :, :, None], w[:, :, None, None]),
    "conv_transpose1d": lambda h, x, w: F.conv_transpose1d(x[None], w[:, :, None]),
    "prelu": lambda h, x, w: F.prelu(x, w[0, :1]),
    "gru_cell": lambda h, x, w: torch.gru_cell(x, x, torch.cat([w, w, w]), torch.cat([w, w, w])),
    "scaled_dot_product_attention": lambda h, x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
}
FULLER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "exp": lambda h, x, w: h.exp(),
    "log": lambda h, x, w: h.square().add(1).log(),
    "rsqrt": lambda h, x, w: h.square().add(1).rsqrt(),
    "reciprocal": lambda h, x, w: h.square().add(1).reciprocal(),
    "pow": lambda h, x, w: h.pow(2),
    "tan": lambda h, x, w: h.tan(),
    "sinh": lambda h, x, w: h.sinh(),
    "expm1": lambda h, x, w: h.expm1(),
    "softplus": lambda h, x, w: F.softplus(h),
    "softmax": lambda h, x, w: h.softmax(-1),
    "log_softmax": lambda h, x, w: h.log_softmax(-1),
    "sum": lambda h, x, w: h.sum(),
    "sum of rows": lambda h, x, w: h.sum(-1),
    "prod": lambda h, x, w: h.prod(),
    "cumsum": lambda h, x, w: h.cumsum(-1),
    "norm": lambda h, x, w: h.norm(),
    "layer_norm": lambda h, x, w: F.layer_norm(h, (4,), w[0], w[1]),
    "group_norm": lambda h, x, w: F.group_norm(h, 2, w[0], w[1]),
    "mse_loss": lambda h, x, w: F.mse_loss(h, x),
    "l1_loss": lambda h, x, w: F.l1_loss(h, x),
    "smooth_l1_loss": lambda h, x, w: F.smooth_l1_loss(h, x),
    "cross_entropy": lambda h, x, w: F.cross_entropy(h, torch.zeros(4, dtype=torch.long, device=x.device)),
    "cosine_similarity": lambda h, x, w: F.cosine_similarity(h, x),
    "addcmul, the widest": lambda h, x, w: torch.addcmul(h, x, x),
    "cat, the widest": lambda h, x, w: torch.cat([h, x]),
    "stack, the widest": lambda h, x, w: torch.stack([h, x]),
    "atan2, the widest": lambda h, x, w: torch.atan2(h, x),
    "grid_sample, the widest": lambda h, x, w: F.grid_sample(h[None, None], x.view(1, 2, 4, 2), align_corners=False),
    "add, by promotion": lambda h, x, w: h + x,
}
AS_IT_IS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": lambda h, x, w: h.relu(),
    "gelu": lambda h, x, w: F.gelu(h),
    "tanh": lambda h, x, w: h.tanh(),
    "sigmoid": lambda h, x, w: h.sigmoid(),
    "mul by a number": lambda h, x, w: h * 2,
    "mul by a tensor of one number": lambda h, x, w: h * x.flatten()[0],
    "max_pool": lambda h, x, w: F.max_pool1d(h[None], 2),
    "mean": lambda h, x, w: h.mean(-1),
    "amax": lambda h, x, w: h.amax(-1),
    "transpose": lambda h, x, w: h.t().contiguous(),
    "cat of halves": lambda h, x, w: torch.cat([h, h]),
}
ON_CUDA = {
    **{name: (function, HALF) for name, function in LOWER.items()},
    **{name: (function, FULL) for name, function in FULLER.items()},
    **{name: (function, HALF) for name, function in AS_IT_IS.items()},
}
