"""Random small models from the operators people use: what may be drawn, and how often.

Most operators are a pattern. `{x}` is a tensor of real numbers, `{y}` another that broadcasts with it, `{b}` booleans
and `{i}` integers that do, `{d}` and `{e}` dims of x, `{c}` a number; `{h}` is written to. The others are functions
of the drawing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from tests.fuzz.programs import MAX_ELEMENTS, SIZES, Drawing, Program, kind_of, shape_text

POINTWISE = (
    "{x}.relu()", "F.gelu({x})", "{x}.tanh()", "{x}.sigmoid()", "F.silu({x})", "{x}.abs()", "{x}.square()", "-{x}",
    "{x} * {c}", "{x} + {c}", "{c} - {x}", "{x} / {c}", "{x}.clamp(-{c}, {c})", "torch.sin({x})",
    "({x} * -0.5).exp()", "{x}.abs().add(0.5).sqrt()", "F.leaky_relu({x}, 0.1)", "F.softplus({x})",
    "{x}.abs().log1p()", "F.elu({x})", "{x}.pow(3) * 0.1", "F.hardtanh({x})", "{x}.erf()",
    "(1 + {x}.square()).reciprocal()", "{x} * {x}.sigmoid()", "{c} * ({x} + {x})", "{x}.clone()", "F.relu6({x} * 3)",
    "{x}.sign() * {x}",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})", "{x} + {c} * {y}", "torch.lerp({x}, {y}, 0.3)", "{x} * {y} + {x}",
    "{x} * {y} - {x} * {c}", "torch.where({x} > {y}, {x}, {y} * {c})", "({x} + {y}) * ({x} - {y})",
    "torch.addcmul({x}, {x}, {y}, value={c})", "{x}.square() + {y}.square()", "{c} * {x} + {c} * {y}",
    "torch.hypot({x}, {y} + {c})",
)  # fmt: skip
REDUCTIONS = (
    "{x}.sum({d})", "{x}.mean({d})", "{x}.sum({d}, keepdim=True)", "{x}.mean({d}, keepdim=True)", "{x}.amax({d})",
    "{x}.amin({d}, keepdim=True)", "{x}.var({d})", "{x}.std({d}, keepdim=True, correction=0)", "{x}.logsumexp({d})",
    "{x}.norm(dim={d})", "{x}.cumsum({d}) * 0.3", "{x}.prod({d})", "{x}.max({d}).values", "{x}.sum()", "{x}.mean()",
    "{x}.sum(({d}, {e}))", "{x}.mean(({d}, {e}), keepdim=True)", "{x} - {x}.mean({d}, keepdim=True)",
    "{x} / ({x}.norm(dim={d}, keepdim=True) + 1)", "F.normalize({x}, dim={d})", "{x}.contiguous().median({d}).values",
    "{x}.sort({d}).values", "{x}.topk(1, {d}).values", "{x}.flip({d})", "{x}.roll(1, {d})",
    "torch.linalg.vector_norm({x}, dim={d})", "{x}.var(({d}, {e}), correction=0)", "{x}.diff(dim={d})",
)  # fmt: skip
"""A median is of a contiguous tensor: along a dim that is expanded torch's is wrong on CPUs (2.11 and 2.13)."""
SOFTMAXES = (
    "{x}.softmax({d})", "F.softmax({x} * {c}, {d})", "F.log_softmax({x}, {d})",
    "{x}.transpose({d}, {e}).softmax({d})", "({x} + {y}).softmax({d})", "{x}.softmax({d}) * {y}",
    "F.softmin({x}, {d})", "{x}.masked_fill({x} < {c} - 2, -1e9).softmax({d})",
)  # fmt: skip
MOVES = (
    "{x}.transpose({d}, {e})", "{x}.movedim({d}, {e})", "{x}.flatten({d})", "{x}.flatten()", "{x}.unsqueeze({d})",
    "{x}.mT", "{x}.contiguous()", "{x}[..., None]", "{x}[None]", "{x}.squeeze()", "{x}.select({d}, 0)",
    "{x}.narrow({d}, 1, 2)", "{x}[1:]", "{x}[..., :-1]", "{x}[:, ::2]", "{x}[..., 0]", "{x}.chunk(2, {d})[0]",
    "{x}.chunk(2, {d})[1]", "{x}.split(2, {d})[0]", "{x}.unbind({d})[0]", "{x}.repeat(2, *[1] * ({x}.dim() - 1))",
    "{x}.repeat_interleave(2, {d})", "{x}.tile(2)", "torch.cat([{x}, {y}], {d})",
    "torch.stack([{x}, {x} * {c}], {d})", "torch.cat([{x}, {x}.flip({d})], {d})", "F.pad({x}, (1, 2))",
    "F.pad({x}, (0, 1), value={c})", "{x}.expand(2, *{x}.shape)", "{x}.unfold({d}, 2, 1)", "{x}.swapaxes({d}, {e})",
    "{x}.reshape(-1, {x}.shape[-1])", "{x}.reshape({x}.shape[0], -1)", "{x}.T if {x}.dim() == 2 else {x}",
    "torch.atleast_2d({x})", "{x}.expand_as({x})", "torch.tril({x})", "torch.triu({x}, 1)", "{x}.diagonal()",
    "torch.stack(list({x}.unbind({d})), {e})", "torch.cat([{x}.narrow({d}, 0, 1), {x}], {d})",
    "torch.cat([{y}, {x}], {e})", "torch.einsum('...ij->...ji', {x})",
)  # fmt: skip
BOOLEANS = (
    "{x} > {y}", "{x} > 0", "{x} <= {c}", "{x} == {x}", "~{b}", "{b} & ({x} > 0)", "{b} | ({x} > {c})",
    "{b} + ({x} > 0)", "{b} * ({x} < 0)", "{b} ^ ({x} > 0)", "{x} * {b}", "{b} * {x}", "{x} * {b} + {x} * ({x} > 0)",
    "{x}.masked_fill({b}, {c})", "torch.where({b}, {x}, {c})", "torch.where({b}, {x}, {y})", "{b}.to({x}.dtype)",
    "{x} + {b}", "({x} > 0).any({d})", "({x} > {c}).all({d})", "({x} > 0).sum({d})",
    "{x} * ({x} > 0).any({d}, keepdim=True)", "{b}.float().mean().to({x}.dtype) * {x}", "{x} - {b}.to({x}.dtype)",
    "{b}.cumsum(0)", "{b}.int() + 1", "torch.ones_like({x}, dtype=torch.bool).tril() * {x}",
)  # fmt: skip
INTEGERS = (
    "{i} + 1", "{i} * 2", "{i} % 3", "{i} // 2", "{i} > 1", "{i} == 0", "{i}.clamp(0, 2)", "{i}.sum(0)",
    "{i}.cumsum(-1)", "{i} * {b}", "{x} * {i}", "{x} + {i}", "F.one_hot({i}.clamp(0, 3), 4)",
    "F.one_hot({i}.abs() % 3, 3).to({x}.dtype)", "{x}.argmax({d})", "{x}.argmin({d}, keepdim=True)",
    "{x}.argsort({d})", "torch.arange({x}.shape[-1])", "torch.arange({x}.shape[0]) % 2", "{i}.to({x}.dtype) * 0.1",
    "{i}.float() * 0.1", "{i} - {i}.max()", "-{i}", "torch.where({i} > 1, {i}, 0)", "{i}.remainder(2).bool()",
    "{i} & 1", "{x}.gather({d}, {x}.argsort({d}))", "{x}.index_select({d}, torch.arange(2))",
    "{x}[torch.arange({x}.shape[0]) % 2]", "{x}[:, [1, 0]]", "{x}.take_along_dim({x}.argmax({d}, keepdim=True), {d})",
    "{i} / 2", "{i}.unsqueeze(-1)", "{i}.transpose(0, -1)", "{i}.float().mean() * {x}",
    "torch.zeros_like({x}).scatter({d}, {x}.argmax({d}, keepdim=True), 1.0)", "{i}.flip(0)", "{i} ** 2 % 5",
    "torch.zeros_like({x}).scatter_add({d}, {x}.argsort({d}), {x})",
    "torch.zeros_like({x}).index_add({d}, torch.arange({x}.shape[{d}]), {x})",
)  # fmt: skip
ADDRESSED = (
    "torch.zeros_like({x}).index_put((torch.arange({x}.shape[0]) % 2,), {x}, accumulate=True)",
    "{x}.index_add(0, torch.arange({x}.shape[0]) // 2, {x} * {c})",
    "{x}.scatter_reduce(0, {x}.argsort(0), {x}, 'mean')",
    "{x}.scatter_reduce({d}, {x}.argsort({d}) // 2, {x}, 'amax', include_self=False)",
    "{x}.index_copy(0, torch.arange(2).flip(0), {x}[:2] * {c})", "{x}[{i}.flatten().abs() % {x}.shape[0]]",
    "{x}.gather({d}, {x}.argsort({d}).argsort({d}))", "{x}.masked_scatter({x} > 0, {x}.flip(0) * {c})",
    "torch.bucketize({x}.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype={x}.dtype))",
    "{x}.index_fill({d}, torch.arange(1), {c})",
    "torch.zeros_like({x}).scatter_add(0, ({x}.argsort(0) // 2), {x})", "{x}.take(torch.arange(6) * 5 % {x}.numel())",
)  # fmt: skip
"""What is read and written at addresses, some of them twice."""
ORDERED = (
    "{x}.cummax({d}).values", "{x}.cummin({d}).values", "{x}.logcumsumexp({d})", "{x}.cumprod({d})",
    "{x}.kthvalue(2, {d}).values", "{x}.aminmax(dim={d})[0]", "{x}.quantile(0.3, {d})",
    "{x}.topk(2, {d}).values.prod({d})",
    "{x}.relu().max({d}).values + {x}.relu().amax({d})", "{x}.nan_to_num().minimum({x}.flip(0))",
    "({x} * ({x} > 0)).sum({d}) / ({x} > 0).sum({d}).clamp(min=1)", "torch.cov({x}.flatten(1)) * 0.3",
    "{x}.unflatten({d}, (-1, 2)).sum({e})", "{x}.tensor_split(2, {d})[0]", "F.glu({x}, {d})",
    "torch.cdist({x}, {x} * {c} + 1)", "torch.einsum('...ii->...i', {x} @ {x}.mT)",
    "torch.einsum('bi,ci,bi->c', {x}, {x}, {x})",
    "torch.kron({x}, torch.ones(2, 1, dtype={x}.dtype))", "torch.fft.rfft({x}, dim={d}).abs() * 0.2",
    "torch.fft.irfft(torch.fft.rfft({x}, dim=-1) * {c}, n={x}.shape[-1], dim=-1)",
    "torch.view_as_real(torch.view_as_complex({x}.unflatten(-1, (-1, 2)).contiguous()).conj() * {c}).flatten(-2)",
)  # fmt: skip
"""Along a dim in order, by pairs, by waves."""
CHECKS = (
    "assert {h}.isfinite().all()", "assert not torch.isnan({h}).any().item(), 'no number'",
    "torch._assert(({h}.abs() < 1e6).all(), 'large')",
)  # fmt: skip
PRODUCTS = (
    "{x} @ {x}.mT", "{x}.mT @ {x}", "torch.einsum('...ik,...jk->...ij', {x}, {x})",
    "torch.einsum('...ij,...ij->...i', {x}, {x})", "torch.matmul({x}, {y}.mT) * 0.3",
    "({x} @ {x}.mT).softmax(-1) @ {x}", "torch.einsum('bi,bj->bij', {x}, {x})",
    "torch.outer({x}.flatten()[:6], {x}.flatten()[:4])", "torch.einsum('ij->j', {x})",
    "torch.einsum('i...->...', {x})", "torch.einsum('...i,...i', {x}, {y})", "torch.bmm({x}, {x}.transpose(1, 2))",
    "torch.mm({x}.t(), {x})", "{x}.matmul({x}[0].mT) * 0.3",
)  # fmt: skip
DRAWS = (
    "F.dropout({x}, 0.3)", "F.dropout({x}, 0.5, training=False)", "{x} + torch.randn_like({x}) * 0.1",
    "{x} * torch.rand({x}.shape[-1])", "F.dropout1d({x}, 0.4)", "F.dropout({x}.transpose({d}, {e}), 0.4)",
    "{x} * (torch.rand_like({x}) > 0.3)", "F.dropout({x} @ {x}.mT, 0.2)", "F.alpha_dropout({x}, 0.2)",
    "F.dropout({x} + {y}, 0.3) + {x}", "torch.bernoulli(torch.full_like({x}.detach(), 0.7)) * {x}",
    "F.dropout(F.dropout({x}, 0.2), 0.3)",
)  # fmt: skip
CASTS = (
    "{x}.float()", "{x}.double()", "{x}.bfloat16()", "{x}.half()", "{x}.to(torch.bfloat16).float()",
    "{x}.bfloat16() * 2", "{x}.bfloat16().sum({d})", "({x}.half() + {x}.half().mean({d}, keepdim=True)).float()",
    "{x}.softmax({d}, dtype=torch.float32)", "{x}.sum({d}, dtype=torch.float64)",
    "({x}.bfloat16() @ {x}.bfloat16().mT).float()", "{x}.type_as({y})",
)  # fmt: skip
REGROUPED = (
    "{x} * {c} + {y} * {c}", "({x} + {y}) * {c}", "{x} * {y} + {x} * {c}", "({x} * {c}).sum({d})",
    "({x} + {y}).mean({d})", "{x}.transpose({d}, {e}).transpose({d}, {e})", "({x} * {y}).sum({d})",
    "torch.cat([{x}.relu(), {y}.relu()], {d})", "torch.cat([{x} * {c}, {x} + {c}], {d})",
    "{x}.relu().transpose({d}, {e})", "({x} + {c}) + {y}", "({x} * {c}) @ {x}.mT", "({x} @ {x}.mT) @ {x} * 0.1",
    "({x} * {y}).transpose({d}, {e}).sum({d})", "torch.cat([{x}, {y}], {d}).mean({e})",
    "({x} * {c}).softmax({d}) * {c}", "{x}.transpose({d}, {e}) + {y}.transpose({d}, {e})",
    "({x}.square().sum({d}, keepdim=True) + {x}).mean({e})", "{x}.reshape(-1).reshape({x}.shape)",
    "{x}.chunk(2, {d})[0] + {c}", "torch.cat({x}.chunk(2, {d}), {d})", "torch.stack([{x}, {y}], {d}).sum({d})",
    "{x}.unsqueeze({d}).squeeze({d})", "({x} + {x}) * {c} + {x}", "{x} * {b} + {x} * {b}", "{x} * {y} * {c}",
    "({x} - {y}) * {x} - {x} * {y}", "{x}.relu().relu()", "({x}.sum({d}) * {c}).sum()",
    "{x}.permute(*reversed(range({x}.dim()))).sum({d})", "{x}.mean({d}).mean({e})",
)  # fmt: skip
STOPS = ("{x}.detach()", "{x}.detach() * {y}", "{x} - {x}.detach() * 0.5", "{x} * {x}.detach().sigmoid()")
WRITES = (
    "{h}.mul_({c})", "{h}.add_({y})", "{h}.relu_()", "{h}[0] = {c}", "{h}[..., 0] = {c}", "{h}[:, 1:] *= {c}",
    "{h} += {y}", "{h}.masked_fill_({h} > 1, {c})", "{h}.transpose({d}, {e}).mul_({c})",
    "{h}.transpose({d}, {e})[0] = {c}", "torch.einsum('...ij->...ji', {h}).mul_({c})", "{h}.reshape(-1)[:3] = {c}",
    "{h}.select({d}, 0).add_(1)", "{h}.clamp_(-1, 1)", "{h}.flatten().add_({c})", "{h}[1:] += {h}[:-1].clone()",
    "{h}.copy_({y})", "{h}.narrow({d}, 0, 1).zero_()", "{h}.unsqueeze(0)[0].sub_({c})",
    "F.dropout({h}, 0.5, training=False).mul_({c})", "{h}.contiguous().add_({c})", "{h}.expand_as({h}).mul_({c})",
    "{h}[..., ::2] = {h}[..., :1].detach()", "{h}.squeeze().mul_({c})", "{h}.fill_diagonal_({c})",
    "{h}.movedim({d}, {e}).tanh_()",
)  # fmt: skip
RECIPES = (
    "{x} + torch.randn_like({x}) * ({x} * 0.1).exp()", "({x}.log_softmax({d}) + {y}.tanh()).logsumexp({d})",
    "{x} * {x}.norm(dim={d}, keepdim=True) / (1 + {x}.square().sum({d}, keepdim=True))", "{x}.tanh() * {x}.sigmoid()",
    "F.cosine_similarity({x}, {y} + {c}, dim={d})", "F.pairwise_distance({x}, {x}.flip(0))",
    "F.huber_loss({x}, {y}.detach().expand_as({x}), reduction='none')",
    "torch.cat([torch.ones_like({x}[..., :1]), (1 - {x}.sigmoid()).cumprod(-1)], -1)",
    "torch.cat([f({x} * 2**i) for i in range(2) for f in (torch.sin, torch.cos)], -1)",
    "(lambda a, b: torch.cat([a, b * a.tanh().exp() + a], -1))(*{x}.chunk(2, -1))",
    "(lambda f: f(f({x})))(lambda h: h + 0.1 * (h * {c}).tanh())", "{x}.unsqueeze(-1) * {x}.unsqueeze(-2)",
    "{x}.masked_fill({b}, float('-inf')).softmax({d}).nan_to_num()", "F.gumbel_softmax({x}, dim={d})",
    "{x}.index_select({d}, {i}.flatten().abs() % {x}.shape[{d}])", "{x}.flip({d}).cumsum({d}).flip({d}) * 0.3",
    "torch.var_mean({x}, {d})[0]", "sum({x}.unbind({d}))", "torch.stack([h * {c} for h in {x}])",
    "torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT) * 0.3", "torch.vmap(lambda row: (row * row).sum())({x})",
    "torch.vmap(lambda row: row.softmax(-1) * {c})({x})", "F.interpolate({x}, scale_factor=2)",
    "F.pixel_unshuffle({x}, 2)", "F.unfold({x}, 2)", "{x}.new_zeros({x}.shape).add({x})",
    "torch.einsum('bii->b', {x} @ {x}.mT)", "({x} @ {x}.mT).diagonal(dim1=-2, dim2=-1).sum(-1)",
    "F.pad({x}, (1, 0))[..., :-1]",
    "F.kl_div({x}.log_softmax({d}), {x}.detach().flip(0).softmax({d}), reduction='none')",
)  # fmt: skip
"""What models of textbooks and tutorials do in a line or two."""
PATTERNS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (6, POINTWISE), (8, BINARY), (8, REDUCTIONS), (4, SOFTMAXES), (9, MOVES), (5, BOOLEANS), (5, INTEGERS),
    (3, PRODUCTS), (3, DRAWS), (1, STOPS), (9, REGROUPED), (3, ADDRESSED), (3, ORDERED),
    (4, RECIPES),
)  # fmt: skip


FIRST = {"bool": "{} > 0", "int": "({}.detach() * 3).long()"}
"""Booleans and integers are made where a pattern asks for some and there are none: else few patterns would be drawn."""


def fill(d: Drawing, pattern: str, kinds: tuple[str, ...] = ("float", "half")) -> str | None:
    """A pattern with tensors of the drawing in it; None where there are none that fit."""
    found: dict[str, str] = {}
    if "{h}" in pattern:  # what is written to is what a line made
        own = [n for n in d.names if n.startswith("h") and kind_of(d[n]) in kinds and _is_made(d[n])]
        if not own:
            return None
        found["h"] = d.rng.choice(own[-4:])
    x = found.get("h") or d.pick(*kinds)
    if x is None:
        return None
    found |= {"x": x, "c": str(d.rng.choice((0.5, 0.25, 1.5, 2, 0.1))), "n": str(d.rng.randrange(1, 4))}
    for key in "de":
        found[key] = str(d.dim(x)) if d[x].dim() else "0"
    if "{y}" in pattern:
        found["y"] = d.alike(x) or parameter_like(d, d[x])
    for key, kind in (("b", "bool"), ("i", "int")):
        if f"{{{key}}}" in pattern:
            chosen = d.pick(kind) or d.let(FIRST[kind].format(x))
            if chosen is None:
                return None
            found[key] = chosen
    return pattern.format(**found)


def _is_made(tensor: Tensor) -> bool:
    """Whether operators made a tensor; one of several views is none any more when its base was written to."""
    try:
        return not tensor.is_leaf
    except RuntimeError:
        return False


MADE_OF = (
    "(1 + {}.float()).to({})", "{}.double().tanh().to({})", "(-{}.exp()).to({})", "({}.to(torch.bfloat16)).to({})",
)  # fmt: skip
"""What models make of a parameter before they use it."""


def parameter_like(d: Drawing, x: Tensor) -> str:
    """A new parameter, or rarely a buffer, that broadcasts with a tensor."""
    shape = list(x.shape[d.rng.choice((0, 0, -1)) :]) if x.dim() else []
    shape = [1 if d.rng.random() < 0.2 else size for size in shape]
    made = f"torch.randn({shape_text(shape)}, dtype={x.dtype})" if shape else f"torch.randn((), dtype={x.dtype})"
    if d.rng.random() < 0.15:
        return d.init("b", f"self.register_buffer('{{}}', {made})")
    stored = d.init("p", f"nn.Parameter({made})")
    return d.rng.choice(MADE_OF).format(stored, x.dtype) if d.rng.random() < 0.25 else stored


def by_pattern(d: Drawing) -> None:
    family = d.rng.choices([p for _, p in PATTERNS], [w for w, _ in PATTERNS])[0]
    text = fill(d, d.rng.choice(family))
    if text is not None:
        d.let(text)


def cast(d: Drawing) -> None:
    text = fill(d, d.rng.choice(CASTS))
    if text is not None:
        d.let(text)


def write(d: Drawing) -> None:
    """A write in place, or rarely a line that would raise if values were others."""
    text = fill(d, d.rng.choice(CHECKS if d.rng.random() < 0.1 else WRITES))
    if text is not None:
        d.do(text)


def linear(d: Drawing) -> None:
    """A layer: a new one, one that is there already, one whose weight is tied, or a weight without a layer."""
    x = d.pick(least=1)
    if x is None or d[x].dtype != d.dtype:
        return
    size, out = d[x].shape[-1], d.rng.choice(SIZES)
    match d.rng.randrange(8):
        case 0:
            known = [f"self.{n}" for n, layer in d.model.named_children() if isinstance(layer, torch.nn.Linear)]
            for name in d.rng.sample(known, len(known)):
                if d.let(f"{name}({x})") or d.let(f"F.linear({x}, {name}.weight.t())") or d.let(f"{x} @ {name}.weight"):
                    return
        case 1:
            weight = d.init("w", f"nn.Parameter(torch.randn({size}, {out}, dtype={d.dtype}) * 0.3)")
            d.let(f"{x} @ {weight}")
        case 2:
            first = d.init("l", f"nn.Linear({size}, {out}, dtype={d.dtype})")
            second = d.init("l", f"nn.Linear({size}, {out}, bias=False, dtype={d.dtype})")
            d.let(f"{first}({x}) {d.rng.choice('+*-')} {second}({x})")
        case 3:
            first = d.init("l", f"nn.Linear({size}, {size}, dtype={d.dtype})")
            d.do_init(f"{d.init('l', f'nn.Linear({size}, {size}, dtype={d.dtype})')}.weight = {first}.weight")
            d.let(f"{first}({x}.tanh())")
        case _:
            bias = d.rng.random() < 0.6
            layer = d.init("l", f"nn.Linear({size}, {out}, bias={bias}, dtype={d.dtype})")
            if d.rng.random() < 0.25:
                other = d.init("l", f"nn.Linear({size}, {out}, bias={bias}, dtype={d.dtype})")
                d.let(f"torch.cat([{layer}({x}), {other}({x})], {d.dim(x)})")
                return
            dim = d.dim(x)
            act = d.rng.choice(
                ("", "", ".relu()", ".tanh()", f".mean({dim})", ".transpose(-1, -2)", f".softmax({dim})")
            )
            d.let(f"{layer}({x}){act}")


def convolution(d: Drawing) -> None:
    """In one dim or two, with strides, groups, padding; or transposed; or a pool."""
    x = d.pick(least=3, most=4)
    if x is None or d[x].dtype != d.dtype:
        return
    n, channels = d[x].dim() - 2, d[x].shape[1]
    groups = d.rng.choice([g for g in (1, 1, 2, 3, channels) if channels % g == 0])
    out = groups * d.rng.choice((1, 2, 3))
    stride, padding, bias = d.rng.choice((1, 1, 2)), d.rng.choice((0, 1)), d.rng.random() < 0.5
    rest = f"stride={stride}, padding={padding}, groups={groups}, bias={bias}"
    match d.rng.randrange(5):
        case 0:
            kind = d.rng.choice(("max_pool", "avg_pool"))
            d.let(f"F.{kind}{n}d({x}, 2, stride={d.rng.choice((1, 2))})")
        case 1:
            d.let(f"{d.init('k', f'nn.ConvTranspose{n}d({channels}, {out}, 2, {rest}, dtype={d.dtype})')}({x})")
        case 2:
            d.let(f"F.adaptive_avg_pool{n}d({x}, 1)")
        case _:
            size = d.rng.choice((1, 2, 3))
            d.let(f"{d.init('k', f'nn.Conv{n}d({channels}, {out}, {size}, {rest}, dtype={d.dtype})')}({x})")


def norm(d: Drawing) -> None:
    x = d.pick(least=2, most=4)
    if x is None or d[x].dtype != d.dtype:
        return
    shape, kind = d[x].shape, d.rng.choice(("layer", "layer", "batch", "batch", "group", "rms", "instance"))
    channels = shape[1]
    match kind:
        case "layer":
            last = shape[d.rng.choice((-1, -1, 1)) :]
            d.let(f"{d.init('n', f'nn.LayerNorm([{shape_text(last)}], dtype={d.dtype})')}({x})")
        case "rms":
            d.let(f"{d.init('n', f'nn.RMSNorm({shape[-1]}, dtype={d.dtype})')}({x})")
        case "batch":
            which = 2 if len(shape) == 4 else 1
            momentum = d.rng.choice((0.1, 0.3, None))
            d.let(f"{d.init('n', f'nn.BatchNorm{which}d({channels}, momentum={momentum}, dtype={d.dtype})')}({x})")
        case "group":
            groups = d.rng.choice([g for g in (1, 2, 3, channels) if channels % g == 0])
            d.let(f"{d.init('n', f'nn.GroupNorm({groups}, {channels}, dtype={d.dtype})')}({x})")
        case "instance":
            d.let(f"F.instance_norm({x})")


def embedding(d: Drawing) -> None:
    """A table and addresses: an input of its own, or integers that are there."""
    rows, width = d.rng.choice(SIZES), d.rng.choice(SIZES)
    table = d.init("t", f"nn.Embedding({rows}, {width}, dtype={d.dtype})")
    ids = d.pick("int", most=3) if d.rng.random() < 0.5 else None
    if ids is not None:
        d.let(f"{table}({ids}.abs() % {rows})")
        return
    shape = d.rng.sample(SIZES, d.rng.choice((1, 2, 2)))
    d.let(f"{table}({d.take(f'torch.randint({rows}, ({shape_text(shape)},))')})")


def attention(d: Drawing) -> None:
    x = d.pick(least=3, most=4)
    if x is None or d[x].dtype != d.dtype:
        return
    size = d[x].shape[-1]
    causal = d.rng.random() < 0.4
    match d.rng.randrange(4):
        case 0 if d[x].dim() == 3:
            heads = d.rng.choice([h for h in (1, 2, 3, 4) if size % h == 0])
            layer = d.init("a", f"nn.MultiheadAttention({size}, {heads}, batch_first=True, dtype={d.dtype})")
            d.let(f"{layer}({x}, {x}, {x}, need_weights={d.rng.random() < 0.5})[0]")
        case 1:
            q, k = (d.init("l", f"nn.Linear({size}, {size}, dtype={d.dtype})") for _ in range(2))
            score = f"{q}({x}) @ {k}({x}).mT / {size**0.5:.3f}"
            square = f"torch.ones({d[x].shape[-2]}, {d[x].shape[-2]})"
            mask = f".masked_fill({square}.triu(1).bool(), -torch.inf)" if causal else ""
            d.let(f"({score}){mask}.softmax(-1) @ {x}")
        case 2 if d[x].dim() == 3:
            heads = d.rng.choice([h for h in (1, 2, 3, 4) if size % h == 0])
            layer = d.init("l", f"nn.Linear({size}, {3 * size}, dtype={d.dtype})")
            parts = d.let(f"{layer}({x}).reshape(*{x}.shape[:2], 3, {heads}, {size // heads}).permute(2, 0, 3, 1, 4)")
            if parts:
                attended = f"F.scaled_dot_product_attention({parts}[0], {parts}[1], {parts}[2], is_causal={causal})"
                d.let(f"{attended}.transpose(1, 2).flatten(2)")
        case _:
            d.let(f"F.scaled_dot_product_attention({x}, {x} * 0.5, {x} + 1, is_causal={causal})")


HEADS = (
    "{l}({x}).unflatten(-1, ({n}, {e})).transpose(1, 2)", "{l}({x}).unflatten(-1, ({e}, {n})).permute(0, 3, 1, 2)",
    "torch.einsum('bse,ehd->bhsd', {x}, {w})", "torch.einsum('bse,ehd->bhds', {x}, {w}).mT",
    "{l}({x}).unflatten(-1, ({n}, {e})).transpose(1, 2).repeat_interleave(2, -1)[..., ::2]",
    "{l}({x}).unflatten(-1, ({n}, {e})).transpose(1, 2).flip({d})", "{o}({x}).unsqueeze(1).expand(-1, {n}, -1, -1)",
    "{o}({x})[..., :1].unsqueeze(1).expand(-1, {n}, -1, {e})", "{l}({x}).reshape({x}.shape[0], {n}, -1, {e})",
    "{l}({x}).unflatten(-1, ({n}, {e})).transpose(1, 2) * 0.5",
    "{w}.sum(0)[:, None].expand({x}.shape[0], -1, {x}.shape[1], -1)",
)  # fmt: skip
"""Heads of what is a sequence of vectors, as numbers of all kinds of orders in memory: turned, every other, one for
all, backwards."""
_HEAD_WEIGHTS = {
    "l": "nn.Linear({size}, {n} * {e}, dtype={dtype})", "o": "nn.Linear({size}, {e}, bias=False, dtype={dtype})",
    "w": "nn.Parameter(torch.randn({size}, {n}, {e}, dtype={dtype}) * 0.3)",
}  # fmt: skip
MASKS = (
    "", "", "is_causal=True", "is_causal=True", "is_causal=True", "attn_mask=torch.ones({s}, {s}).tril(1).bool()",
    "attn_mask=torch.ones({s}, {s}).triu(-1).bool().mT", "attn_mask={m}", "attn_mask={m}.mT",
    "attn_mask={m}[:1].expand({s}, -1)", "attn_mask=({x}[..., 0] > -1)[:, None, None]",
    "attn_mask={x}[..., :1].tanh().expand(-1, -1, {s})[:, None]",
)  # fmt: skip
READ = (
    ".transpose(1, 2).flatten(2)", ".transpose(1, 2).flatten(2)", ".mT", ".mean(2)", ".sum(-1)", "[..., ::2]",
    ".flip(2)", ".movedim(1, -1)", "[:, :, -1]", ".sum(1)", "",
)  # fmt: skip
"""How what heads have seen is read, so that gradients come in all kinds of orders, too."""


def heads(d: Drawing) -> None:
    """Attention of heads that lie in memory in any order; of the pixels of an image, whose channels may lie last."""
    x = d.pick(least=3, most=4)
    if x is None or d[x].dtype != d.dtype:
        return
    if d[x].dim() == 4:
        last = d.rng.choice(("", ".contiguous(memory_format=torch.channels_last)"))
        x = d.let(f"{x}{last}.flatten(2).mT")
        if x is None:
            return
    _, length, size = d[x].shape
    num, width, groups = d.rng.choice((1, 2, 3)), d.rng.choice((2, 4, 8)), d.rng.choice((1, 1, 1, 2))
    read = []
    for count in (num * groups, num, num):
        pattern, given = d.rng.choice(HEADS), {"x": x, "n": count, "e": width, "d": d.rng.choice((1, 2, 3))}
        for key, text in _HEAD_WEIGHTS.items():
            if f"{{{key}}}" in pattern:
                given[key] = d.init(key, text.format(size=size, n=count, e=width, dtype=d.dtype))
        made = d.let(pattern.format(**given))
        if made is None:
            return
        read.append(made)
    mask = d.rng.choice(MASKS)
    added = d.init("p", f"nn.Parameter(torch.randn({length}, {length}, dtype={d.dtype}))") if "{m}" in mask else ""
    rest = [mask.format(x=x, s=length, m=added)] if mask else []
    rest += ["enable_gqa=True"] if groups > 1 else []
    seen = d.let(f"F.scaled_dot_product_attention({', '.join([*read, *rest])})")
    if seen:
        d.let(f"{seen}{d.rng.choice(READ)}")


def buffer(d: Drawing) -> None:
    """A statistic that is kept between steps: written in place, replaced, or counted."""
    x = d.pick()
    if x is None or d[x].dtype != d.dtype:
        return
    size = d[x].shape[-1] if d[x].dim() else 1
    kept = d.init("b", f"self.register_buffer('{{}}', torch.ones({size}, dtype={d.dtype}))")
    mean = f"{x}.detach().reshape(-1, {size}).mean(0)"
    match d.rng.randrange(4):
        case 0:
            d.do(f"{kept}.mul_(0.9).add_({mean}, alpha=0.1)")
        case 1:
            d.do(f"{kept} = 0.9 * {kept} + 0.1 * {mean}")
        case 2:
            d.do(f"{kept}[0] += 1")
        case 3:
            count = d.init("b", "self.register_buffer('{}', torch.zeros((), dtype=torch.long))")
            d.do(f"{count} += 1")
            d.do(f"{kept}.add_({count} * 0.1)")
    if d.rng.random() < 0.8:
        d.let(f"{x} * {kept}")


def region(d: Drawing) -> None:
    """Some lines under autocast, or without gradients."""
    context = d.rng.choice(("torch.no_grad()", *["torch.autocast('cpu', torch.bfloat16)"] * 2))
    with d.within(context):
        for _ in range(d.rng.choice((1, 2, 3))):
            (linear if d.rng.random() < 0.6 else by_pattern)(d)


def new_input(d: Drawing) -> None:
    shape = d.rng.sample(SIZES, d.rng.choice((1, 2, 2, 3)))
    if d.rng.random() < 0.5 and d.inputs:
        shape = list(d[d.inputs[0][0]].shape)
    dtype = d.dtype if d.dtype.is_floating_point else torch.float32
    text = d.rng.choice((
        f"torch.randn({shape_text(shape)}, dtype={dtype})", f"torch.randn({shape_text(shape)}, dtype={dtype})",
        f"torch.rand({shape_text(shape)}) > 0.4", f"torch.randint(5, ({shape_text(shape)},))",
    ))  # fmt: skip
    d.take(text)


MAKERS: tuple[tuple[float, Callable[[Drawing], None]], ...] = (
    (40, by_pattern), (14, linear), (4, convolution), (5, norm), (3, embedding), (4, attention), (6, heads),
    (2, buffer), (5, write), (2, cast), (1.5, region), (2, new_input),
)  # fmt: skip


def loss_text(d: Drawing) -> str | None:
    """A number of what nothing has read, and of the newest."""
    unread = [n for n in d.names if n.startswith("h") and d[n].is_floating_point() and d[n].requires_grad]
    chosen = unread[-1:] + d.rng.sample(unread[:-1], min(len(unread) - 1, d.rng.choice((1, 2, 3)))) if unread else []
    parts = []
    for name in dict.fromkeys(chosen):
        x = d[name]
        kinds = [f"{name}.mean()", f"{name}.square().mean()", f"{name}.sum() * 0.01", f"{name}.abs().mean()"]
        kinds += [f"F.mse_loss({name}, torch.zeros_like({name}))"]
        if x.dim() >= 2 and x.shape[1] > 1 and kind_of(x) == "float":
            target = d.take(f"torch.randint({x.shape[1]}, ({shape_text((x.shape[0], *x.shape[2:]))},))")
            more = d.rng.choice(("", ", reduction='sum'", ", label_smoothing=0.1", ", ignore_index=0"))
            kinds += [f"F.cross_entropy({name}, {target}{more})"] * 3
        if kind_of(x) == "float":
            kinds += [f"F.binary_cross_entropy_with_logits({name}, ({name} > 0).to({name}.dtype))"]
            kinds += [f"F.smooth_l1_loss({name}, {name}.detach().roll(1))"]
        parts.append(d.rng.choice(kinds))
    return " + ".join(parts) or None


def draw(seed: int) -> Program:
    """The program of a seed: the first one from it on that torch itself can differentiate."""
    for attempt in range(100):
        found = _draw(seed, Random(f"{seed} {attempt}"))
        if found is not None:
            return found
    raise AssertionError(f"no program was drawn from seed {seed}")


def _draw(seed: int, rng: Random) -> Program | None:
    dtype = rng.choices((torch.float32, torch.float64, torch.bfloat16), (6, 3, 0.6))[0]
    torch.manual_seed(seed)
    d = Drawing(rng, dtype)
    shape = rng.sample(SIZES, rng.choice((1, 2, 2, 3, 3, 4)))
    shape = shape if torch.Size(shape).numel() <= MAX_ELEMENTS else shape[:2]
    d.take(f"torch.randn({shape_text(shape)}, dtype={dtype})")
    for _ in range(rng.choice((4, 8, 12, 16))):
        rng.choices([m for _, m in MAKERS], [w for w, _ in MAKERS])[0](d)
    result = loss_text(d)
    if result is None:
        return None
    program = d.finish(seed, result)
    return program if _trains(program) else None


def _trains(program: Program) -> bool:
    """Whether torch differentiates it, to numbers; some programs write over what backward needs."""
    model, batch = program.build()
    try:
        loss = model(*copy.deepcopy(batch))
        loss.backward()
    except (RuntimeError, IndexError):
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = all(x.isfinite().all() and x.abs().max() < 1e3 for x in (loss, *gradients) if x.numel())
    return bool(gradients) and finite and any(g.abs().max() > 0 for g in gradients)
