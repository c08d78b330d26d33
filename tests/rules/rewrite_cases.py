"""Rules and small models in which they apply, for the tests of matching and rewriting."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.ir import Graph, LeafKind, Value, parse_graph, verify
from conjoin.ops import execute, map_tensors
from conjoin.rules.patterns import Rule
from conjoin.rules.text import parse_rule

_SPLITS = "split[axis=-1, part=0]({0}); split[axis=-1, part=1]({0})"
_CHANNELS = "split[axis=1, part=0]({0}); split[axis=1, part=1]({0})"

RULES: dict[str, Rule] = {
    name: parse_rule(name, left, right)
    for name, left, right in (
        ("add-commutes", "add(x, y)", "add(y, x)"),
        ("add-associates", "add(x, add(y, z))", "add(add(x, y), z)"),
        ("mul-distributes", "mul(add(x, y), z)", "add(mul(x, z), mul(y, z))"),
        ("mul-collects", "add(mul(x, z), mul(y, z))", "mul(add(x, y), z)"),
        ("scale-distributes", "scale(add(x, y), w)", "add(scale(x, w), scale(y, w))"),
        ("scale-joins", "scale(scale(x, y), w)", "scale(x, scale(y, w))"),
        ("scale-into-matmul", "scale(matmul(x, y), w)", "matmul(scale(x, w), y)"),
        ("sub-is-add", "sub(x, y)", "add(x, neg(y))"),
        ("matmul-associates", "matmul(matmul(a, b), c)", "matmul(a, matmul(b, c))"),
        ("matmul-collects", "add(matmul(a, b), matmul(a, c))", "matmul(a, add(b, c))"),
        ("matmul-inner", "add(matmul(a, b), matmul(c, d))",
         "matmul(concat[axis=-1](a, c), concat[axis=-2](b, d))"),
        ("matmul-merge", "matmul(a, b); matmul(a, c)", _SPLITS.format("matmul(a, concat[axis=-1](b, c))")),
        ("matmul-transposed", "matmul(a, transpose(b))", "transpose(matmul(b, transpose(a)))"),
        ("transpose-twice", "transpose(transpose(x))", "x"),
        ("linear-merge", "linear(a, b); linear(a, c)", _SPLITS.format("linear(a, concat[axis=0](b, c))")),
        ("linear-bias-merge", "bias(linear(a, b), x); bias(linear(a, c), y)",
         _SPLITS.format("bias(linear(a, concat[axis=0](b, c)), concat[axis=0](x, y))")),
        ("linear-collects", "add(linear(a, b), linear(a, c))", "linear(a, add(b, c))"),
        ("linear-joins", "add(linear(a, b), linear(c, d))", "linear(concat[axis=-1](a, c), concat[axis=1](b, d))"),
        ("linear-associates", "linear(linear(x, a), b)", "linear(x, matmul(b, a))"),
        ("linear-splits", "linear(concat[axis=-1](x, y), w)",
         "add(linear(x, split[axis=1, part=0](w)), linear(y, split[axis=1, part=1](w)))"),
        ("relu-concat", "concat[axis=a](relu(x), relu(y))", "relu(concat[axis=a](x, y))"),
        ("concat-relu", "relu(concat[axis=a](x, y))", "concat[axis=a](relu(x), relu(y))"),
        ("split-concat", "split[axis=a, part=0](concat[axis=a](x, y))", "x"),
        ("split-concat-second", "split[axis=a, part=1](concat[axis=a](x, y))", "y"),
        ("split-swap", "concat[axis=a](split[axis=a, part=1](concat[axis=a](x, y)), "
         "split[axis=a, part=0](concat[axis=a](x, y)))", "concat[axis=a](y, x)"),
        ("relu-split", "relu(split[axis=a, part=0](x)); relu(split[axis=a, part=1](x))",
         "split[axis=a, part=0](relu(x)); split[axis=a, part=1](relu(x))"),
        ("concat-associates", "concat[axis=a](concat[axis=a](x, y), z)", "concat[axis=a](x, concat[axis=a](y, z))"),
        ("softmax-concat", "softmax[axis=b](concat[axis=a](x, y))",
         "concat[axis=a](softmax[axis=b](x), softmax[axis=b](y))"),
        ("mean-scale", "mean[axis=a](scale(x, w))", "scale(mean[axis=a](x), w)"),
        ("mean-concat", "mean[axis=a](concat[axis=b](x, y))", "concat[axis=b](mean[axis=a](x), mean[axis=a](y))"),
        ("sum-add", "sum[axis=a](add(x, y))", "add(sum[axis=a](x), sum[axis=a](y))"),
        ("conv-merge", "conv[stride=s, groups=1](x, y); conv[stride=s, groups=1](x, z)",
         _CHANNELS.format("conv[stride=s, groups=1](x, concat[axis=0](y, z))")),
        ("conv-merge-enlarged", "conv[groups=1](x, y); conv[groups=1](x, z)",
         _CHANNELS.format("conv[groups=1](x, concat[axis=0](enlarge[kernel=k](y), z))")),
        ("conv-linear", "add(conv[stride=s](x, y), conv[stride=s](x, z))", "conv[stride=s](x, add(y, z))"),
        ("conv-enlarge", "conv[stride=s](x, y)", "conv[stride=s](x, enlarge[kernel=5](y))"),
        ("conv-concat", "concat[axis=1](conv(x, y), conv(x, z))", "conv(x, concat[axis=0](y, z))"),
        ("conv-relu", "relu(conv[stride=s](x, y))", "conv[stride=s, act=relu](x, y)"),
        ("relu-conv", "conv[stride=s, act=relu](x, y)", "relu(conv[stride=s](x, y))"),
        ("conv-groups", "concat[axis=1](conv[groups=g](x, y), conv[groups=h](w, z))",
         "conv[groups=k](concat[axis=1](x, w), concat[axis=0](y, z))"),
        ("pool-is-conv", "avg_pool[kernel=k, stride=s](x)", "conv[stride=s, groups=g](x, pool_kernel[kernel=k])"),
        ("pool-valid-is-conv", "avg_pool[kernel=k, stride=s, pad=valid](x)",
         "conv[stride=s, pad=valid, groups=g](x, pool_kernel[kernel=k])"),
        ("max-pool-concat", "max_pool[kernel=k, stride=s](concat[axis=1](x, y))",
         "concat[axis=1](max_pool[kernel=k, stride=s](x), max_pool[kernel=k, stride=s](y))"),
        ("identity-conv", "add(x, conv[groups=1](x, y))",
         "conv[groups=1](x, add(y, identity_kernel[kernel=k]))"),
        ("identity-matmul", "add(x, matmul(x, y))", "matmul(x, add(y, identity))"),
        ("ones", "add(x, mul(x, y))", "mul(x, add(y, ones))"),
        ("bag-is-sum", "embedding_bag(z, x)", "sum[axis=-2](embedding(z, x))"),
        ("embedding-concat", "concat[axis=-1](embedding(x, i), embedding(y, i))", "embedding(concat[axis=1](x, y), i)"),
    )
}  # fmt: skip


class Products(nn.Module):
    """Matrix products in a chain, beside each other, and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu((x @ self.a) @ self.b) + x @ self.c + x @ self.b
        y = y - x @ (self.a.t() * 0.5)
        z = torch.addmm(y, y, self.c) + y * 2 / 3
        z = z + ((z @ self.a + z @ self.b) + y).t().t() + (y @ self.c + z @ self.a)
        return (y + z @ self.a).sum() + (z @ self.wide).square().sum()


class Attention(nn.Module):
    """Heads, a scaled softmax, a residual, and layers that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.up, self.gate, self.down = nn.Linear(6, 8, False), nn.Linear(6, 8, False), nn.Linear(8, 6, False)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).view(2, 3, 2, 3).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        weights = torch.softmax(heads[0] @ heads[1].transpose(-2, -1) / 1.7, -1)
        y = x + self.drop((weights @ heads[2]).transpose(1, 2).reshape(2, 3, 6))
        y = self.norm(y)
        y = y + self.down(functional.silu(self.gate(y)) * self.up(y) + self.gate(y) * 0.5)
        y = y + self.down(self.up(y) + self.gate(y))
        return self.drop(self.down(self.up(y)) + self.down(self.gate(y))).square().mean()


class Convolutions(nn.Module):
    """Convolutions that share an input, of several sizes, strides and groups, with pools, batch norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d
        self.first = conv(4, 4, 3, padding=1, bias=False)
        self.point, self.wide = conv(4, 4, 1, bias=False), conv(4, 6, 3, padding=1, bias=False)
        self.tall = conv(4, 4, (3, 1), padding=(1, 0), bias=False)
        self.biased, self.strided = conv(4, 4, 3, padding=1), conv(4, 4, 3, 2, 1, bias=False)
        self.pointed = conv(4, 4, 1, 2, bias=False)
        self.grouped = conv(4, 4, 3, padding=1, groups=2, bias=False)
        self.depthwise, self.same = conv(4, 4, 3, padding=1, groups=4), conv(4, 4, 3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)))
        y = torch.cat([functional.relu(self.point(y)), functional.relu(self.first(y))], 1)[:, :4] + self.tall(y)
        z = torch.cat([self.wide(y), self.first(y), self.biased(y), self.point(y)], 1)
        z = z * (self.first(y) + self.same(y)).mean()
        small = self.strided(y) + self.pointed(y) + functional.avg_pool2d(y, 3, 2, 1) + functional.avg_pool2d(y, 1, 2)
        y = y + self.point(y) + self.grouped(y) + self.depthwise(y) + self.grouped(y).relu()
        pair = torch.cat([self.grouped(y), self.grouped(small.repeat(1, 1, 2, 2))], 1)
        pooled = functional.max_pool2d(torch.cat([y, x], 1), 3, 2, 1)
        windows = functional.avg_pool2d(y, 2)
        return sum((t.square().mean() for t in (z, small, y, pair, pooled, windows)), x.sum())


class Parts(nn.Module):
    """Concatenations and splits of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(7, 5, False), nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([x, y], -1)
        z = torch.cat([torch.relu(x), torch.relu(y), torch.tanh(x), torch.tanh(y)], 1)
        first, second, third = joined.split([3, 2, 2], -1)
        left, right = torch.relu(joined).chunk(2, 0)
        exact, rest = joined.split([3, 4], -1)
        turned = torch.cat([rest, exact], -1)
        other = torch.cat([joined[:, 4:], joined[:, :4]], -1)
        soft = torch.softmax(joined, 0) + torch.softmax(torch.cat([x, y], 1), 1)
        means = (joined * self.scale * 2).mean(0) + torch.cat([x, y], -1).mean(0)
        total = (torch.relu(first), torch.relu(second), torch.relu(third), left * right, turned * other, soft, means, z)
        gates = torch.relu(joined[:, :2]).sum() + torch.relu(joined[:, 2:]).square().sum()
        return sum((t.square().sum() for t in total), self.w(joined).sum() + gates) + (joined + turned).sum(0).prod()


class Lookups(nn.Module):
    """Tables read at one place, summed and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(9, 3), nn.Embedding(9, 4)
        self.bag = nn.EmbeddingBag(9, 5, mode="sum")

    def forward(self, i: Tensor) -> Tensor:
        return torch.cat([self.one(i), self.two(i)], -1).square().sum() + self.bag(i).square().sum()


class Elements(nn.Module):
    """Sums and products of every element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = (x + self.a) * self.b + (x + x * self.a) + (self.b + (x + self.a))
        z = (y * x + self.b * x) * 0.5 + y + y * x
        return (z * 3 - z * self.a[:1] * 2).square().sum() + (z + x).sum(1).square().sum()


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


MODELS: dict[str, tuple[type[nn.Module], tuple[Tensor, ...]]] = {
    "products": (Products, (_draw(4, 4),)),
    "attention": (Attention, (_draw(2, 3, 6),)),
    "convolutions": (Convolutions, (_draw(2, 4, 6, 6),)),
    "parts": (Parts, (_draw(4, 3), _draw(4, 4))),
    "lookups": (Lookups, (torch.arange(8).reshape(4, 2) % 5,)),
    "elements": (Elements, (_draw(3, 4),)),
}


def graph_of(body: str, returns: str) -> Graph:
    """A graph from its leaves and calls in the text form, and what it returns: `%2, %3`."""
    lines = [line.strip() for line in body.strip().splitlines()]
    leaves = [line for line in lines if not line.startswith("%")]
    inputs = [line.split()[0] for line in leaves if line.startswith("input:")]
    form = lambda count: f'{{"kind":"tuple","keys":[],"children":[{",".join(["null"] * count)}]}}'
    text = "\n".join(
        [
            'graph "g" train',
            *leaves,
            f"takes [{', '.join(inputs)}] in {form(len(inputs))}",
            *(line for line in lines if line.startswith("%")),
            f"returns [{returns}] in {form(len(returns.split(', ')))}",
        ]
    )
    return verify(parse_graph(text + "\n"))


def body_of(graph: Graph) -> str:
    """The calls of a graph in the text form."""
    return "".join(f"{line}\n" for line in str(graph).splitlines() if line.startswith("%"))


def run_graph(graph: Graph, seed: int = 0) -> list[Tensor]:
    """The outputs of a graph on random leaves, then the gradients of all of them."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[Value, Tensor] = {}
    for leaf in graph.leaves:
        if leaf.type.dtype.is_floating_point:
            tensor = torch.randn(leaf.type.shape, generator=generator, dtype=leaf.type.dtype)
            tensor.requires_grad_(leaf.kind is not LeafKind.BUFFER)
        else:
            tensor = torch.randint(0, 4, leaf.type.shape, generator=generator)
        values[Value(leaf)] = tensor
    torch.manual_seed(seed)
    for node in graph.nodes:
        made = execute(node.op, *map_tensors(node.op, node.args, values.__getitem__))
        values.update(zip(node.outputs(), made if isinstance(made, tuple) else (made,), strict=True))
    outputs = [values[value] for value in graph.outputs if isinstance(value, Value)]
    sum(output.square().sum() for output in outputs if output.requires_grad).backward()  # type: ignore[union-attr]
    leaves = [values[Value(leaf)] for leaf in graph.leaves if values[Value(leaf)].requires_grad]
    gradients = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return [*(output.detach() for output in outputs), *gradients]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two runs agree to double precision."""
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(one, other, strict=True)
    )
