"""In-place writing becomes functional: values, gradients and buffers are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OperatorBase, OpOverload
from torch.nn import functional as F

from conjoin.errors import CaptureError
from conjoin.frontends import capture, torch_private
from conjoin.runtime import to_module


class Writes(nn.Module):
    """A layer and a buffer around some code that writes in place."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(3, 4))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.total, Tensor)
        return self.body(self.layer(x), self.total).sum()


def shifted(y: Tensor, total: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    z[:, 0] = 1.5
    return z * y


def slice_of_slice(y: Tensor, total: Tensor) -> Tensor:
    z = y * 2
    z[0, 1:3] *= 3
    w = z * 2
    z[1] = w[0]
    return z + w


def part_of_a_buffer(y: Tensor, total: Tensor) -> Tensor:
    total[1] = y.detach()[0]
    total[0, 2:] += 1
    return y * total


def chained(y: Tensor, total: Tensor) -> Tensor:
    return torch.relu_((y * 1).add_(1).mul_(2))


def counted(y: Tensor, total: Tensor) -> Tensor:
    total.add_(1)
    total.mul_(2)
    return y * total


def through_a_transpose(y: Tensor, total: Tensor) -> Tensor:
    z = y * 1
    z.t()[0] = 7.0
    return z * y


def view_read_afterwards(y: Tensor, total: Tensor) -> Tensor:
    z = y * 1
    flat = z.view(-1)
    z.add_(1)
    return flat.reshape(y.shape) * y


def widened(y: Tensor, total: Tensor) -> Tensor:
    z = torch.zeros(3, 4, dtype=torch.float64)
    z += y
    return z


BODIES = [
    shifted, slice_of_slice, part_of_a_buffer, chained, counted, through_a_transpose, view_read_afterwards, widened,
]  # fmt: skip


def diagonal(y: Tensor, total: Tensor) -> Tensor:
    """torch's functional form of this has the derivative of what was overwritten for the rest."""
    z = y * 2
    z.fill_diagonal_(2)
    return z.square()


def by_strides(y: Tensor, total: Tensor) -> Tensor:
    z = y * 2
    z.as_strided((2, 2), (3, 2)).mul_(3)
    return z.square() + (z * 2).t().as_strided((3, 4), (1, 2), 1)


def all_of_it(y: Tensor, total: Tensor) -> Tensor:
    """What it was gets a gradient of zeros, and not none."""
    z = y * 2
    z.copy_(total[0] + 1)
    return z


def added_to_a_part(y: Tensor, total: Tensor) -> Tensor:
    z = (y * 2)[None]
    z[:, :, 1:][:, 1:, :3] += y[1:, :3].square()
    z[..., 1:] -= y[:, 1:] * 3
    z[:, :1] += y[:1]
    return z.square()


def put_where_it_was(y: Tensor, total: Tensor) -> Tensor:
    """Only what was put into the same part before, and is there still, need not be put there again."""
    z = y * 2
    part = z[1:]
    part += y[1:] * 3
    old = part * 1
    z[:1] += y[:1]
    z[1:] = part
    z[:2] = z[1:] * 2
    z[1:] = old
    return z.square()


BODIES += [diagonal, by_strides, all_of_it, added_to_a_part, put_where_it_was]


def behind_another_name(y: Tensor) -> Tensor:
    flat = y.flatten()
    y[:, ::2] = y[:, :1].detach()
    return y * flat.sum()


def covariances(y: Tensor, total: Tensor) -> Tensor:
    """torch itself branches on how many samples there are."""
    return torch.cov(behind_another_name(y))


def correlations(y: Tensor, total: Tensor) -> Tensor:
    return torch.corrcoef(behind_another_name(y)).square()


BODIES += [covariances, correlations]


def test_an_addition_to_a_part_is_one_addition() -> None:
    def body(y: Tensor, total: Tensor) -> Tensor:
        z = y * 2
        z[1:, 1:] += y[1:, 1:].square()
        return z

    found = capture(Writes(body), torch.randn(3, 4))
    assert {"slice_scatter", "conjoin::overwrite"}.isdisjoint(node.op for node in found.nodes)


def by_other_names(y: Tensor, total: Tensor) -> Tensor:
    """In-place operators whose functional forms are not called as they are, beside an addition to a part."""
    kept, shift = torch.empty(3, 1).bernoulli_(0.6).div_(0.6), torch.empty_like(y).normal_(1.0, 0.1)
    z = y.exp() * kept + shift
    z.pow_(y.detach().abs() + 2)
    wide = z.double()
    wide.float_power_(y.double().detach().square())
    wide, steps = wide * 1, 8 * y.detach().double()
    steps.floor_divide_(y.detach().double() + 3)
    wide[1:, 1:] += steps[1:, 1:]
    return wide.float()


def test_operators_that_have_other_names_in_place() -> None:
    model, x = Writes(by_other_names), torch.randn(3, 4)
    plain, graph = copy.deepcopy(model), capture(model, x)
    assert {"slice_scatter", "conjoin::overwrite"}.isdisjoint(node.op for node in graph.nodes)
    assert {"bernoulli.p", "normal_functional", "pow.Tensor_Tensor"} <= {node.op for node in graph.nodes}
    found = []
    for step in (to_module(graph, model), plain):
        torch.manual_seed(7)
        found.append(step(x))
        found[-1].backward()
    assert torch.equal(*found)
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]


def test_an_unread_draw_is_drawn() -> None:
    """Whichever way torch makes a program functional: what is drawn after it would be drawn in its place."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand_like(x)
            z = x * 2
            z.reshape(-1)[:3] = 0.1
            nn.functional.dropout(x)
            return z + torch.randn_like(x)

    x, step = torch.randn(3, 4), to_module(capture(Drawing(), torch.randn(3, 4)), Drawing())
    torch.manual_seed(3)
    right = Drawing()(x)
    torch.manual_seed(3)
    assert torch.equal(step(x), right)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_writing_is_as_in_the_plain_model(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Writes(body)
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    step = to_module(capture(model, x), model)
    for _ in range(2):
        ours, theirs = step(x), plain(x)
        ours.backward()
        theirs.backward()
        assert torch.equal(ours, theirs)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    assert torch.equal(model.total, plain.total)  # type: ignore[arg-type]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda z: torch.einsum("ij->ji", z),
    "einsum of a diagonal": lambda z: torch.einsum("ii->i", z[:, :3]),
    "reshape": lambda z: z.reshape(2, 6),
    "reshape of a transpose": lambda z: z.t().reshape(2, 2, 3),
    "flatten": lambda z: z.flatten(),
    "ravel": lambda z: z.ravel(),
    "unflatten": lambda z: z.unflatten(1, (2, 2)),
    "contiguous": lambda z: z.contiguous(),
    "to": lambda z: z.to(torch.float32),
    "to another": lambda z: z.to(z),
    "type": lambda z: z.type(torch.float32),
    "type_as": lambda z: z.type_as(z),
    "float": lambda z: z.float(),
    "movedim": lambda z: z.movedim(0, 1),
    "swapaxes": lambda z: z.swapaxes(0, 1),
    "adjoint": lambda z: z.adjoint(),
    "matrix_H": lambda z: z.mH,
    "T": lambda z: z.T,
    "real": lambda z: torch.real(z),
    "conj": lambda z: z.conj(),
    "resolve_conj": lambda z: z.resolve_conj(),
    "resolve_neg": lambda z: z.resolve_neg(),
    "view_as_complex": lambda z: torch.view_as_real(torch.view_as_complex(z.unflatten(1, (2, 2)))),
    "narrow": lambda z: z.narrow(1, 1, 2),
    "unfold": lambda z: z.unfold(1, 2, 2),
    "diagonal": lambda z: z.diagonal(),
    "squeeze": lambda z: z[None].squeeze(0),
    "ellipsis": lambda z: z[..., None, 1],
    "expand": lambda z: z.expand(3, 4),
    "expand_as": lambda z: z.expand_as(z),
    "broadcast_to": lambda z: z.broadcast_to(3, 4),
    "broadcast_tensors": lambda z: torch.broadcast_tensors(z.new_ones(4), z)[1],
    "atleast_3d": lambda z: torch.atleast_3d(z),
    "atleast_2d of a list": lambda z: torch.atleast_2d([z.new_ones(2), z])[1],
    "meshgrid": lambda z: torch.meshgrid(z[0], indexing="ij")[0],
    "cartesian_prod": lambda z: torch.cartesian_prod(z.flatten()),
    "dropout outside of training": lambda z: nn.functional.dropout(z, 0.5, training=False),
    "dropout of none": lambda z: nn.functional.dropout(z, 0.0),
    "feature dropout": lambda z: nn.functional.feature_alpha_dropout(z, 0.5, training=False),
    "dropout in a module": lambda z: nn.Dropout(0.5).eval()(z),
    "identity": lambda z: nn.Identity()(z),
    "pad by nothing": lambda z: nn.functional.pad(z, (0, 0)),
    "interpolate to the same": lambda z: nn.functional.interpolate(z[None], 4)[0],
    "cpu": lambda z: z.cpu(),
    "positive": lambda z: z.positive(),
    "alias": lambda z: torch.ops.aten.alias(z),
    "concat of one": lambda z: torch.concat([z]),
    "moveaxis": lambda z: torch.moveaxis(z, (0, 1), (1, 0)),
    "rot90 by nothing": lambda z: z.rot90(0),
    "roll by nothing": lambda z: z.roll(0, 0),
    "sum over nothing": lambda z: z.sum_to_size(3, 4),
    "matrix_power": lambda z: torch.linalg.matrix_power(z[:, :3], 1),
    "channel shuffle": lambda z: nn.functional.channel_shuffle(z[None, :, :, None], 1)[0, :, :, 0],
    "pixel shuffle": lambda z: nn.functional.pixel_shuffle(z[None], 1)[0],
    "triu of all": lambda z: z.triu(-9),
    "clone": lambda z: z.clone(),
}
VIEWS |= {
    f"{name} of what is handed on": lambda z, view=view: view(F.dropout(z, 0.5, False)) for name, view in VIEWS.items()
}


class ThroughViews(nn.Module):
    """For every way to take what may be a view: one is written to, and the other read."""

    def __init__(self, views: tuple[str, ...], written: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.views, self.written = views, written

    def forward(self, x: Tensor) -> list[Tensor]:
        y, found = self.layer(x), []
        for name in self.views:
            whole = y * 1
            part = VIEWS[name](whole)
            (part if self.written == "part" else whole).mul_(2)
            found.append((whole if self.written == "part" else part).square().sum())
        return found


@pytest.mark.parametrize("written", ["part", "whole"])
@pytest.mark.parametrize(
    "views",
    [tuple(VIEWS), ("einsum",), ("meshgrid",), ("dropout outside of training",), ("einsum of what is handed on",)],
    ids=len,
)
def test_writing_through_what_may_be_a_view(views: tuple[str, ...], written: str) -> None:
    """Whether an operator hands out its operand's memory is seen when it runs, not in its schema."""
    model, x = ThroughViews(views, written), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    ours, theirs = to_module(capture(model, x), model)(x), plain(x)
    for name, mine, right in zip(views, ours, theirs, strict=True):
        assert mine == right, name
    torch.stack(ours).sum().backward()
    torch.stack(theirs).sum().backward()
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]


def test_writing_to_a_buffer_that_lies_in_another() -> None:
    """What is written to one is seen in the other at the next step."""

    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(3, 4))
            self.register_buffer("row", self.table[1])

        def forward(self, x: Tensor) -> Tensor:
            found = self.layer(x) * self.row
            self.table.mul_(2)  # type: ignore[operator]
            return found.sum()

    with pytest.raises(CaptureError):
        capture(Overlapping(), torch.randn(3, 4))


def expanded(h: Tensor) -> Tensor:
    wide = h.expand(2, *h.shape)
    wide[0] = 1.5
    return wide


def turned(h: Tensor) -> Tensor:
    h.unsqueeze(1).expand(-1, 3, -1).transpose(0, 1)[1].mul_(2.0)
    return h


def windows(h: Tensor) -> Tensor:
    seen = h.unfold(1, 2, 1)
    seen[:, 0] = 1.5
    return seen


def of_its_own(h: Tensor) -> Tensor:
    wide = h.expand(2, *h.shape).clone()
    wide[0] = 1.5
    return wide


def before_it_is_expanded(h: Tensor) -> Tensor:
    own = h.clone()
    wide = own.expand(2, *h.shape)
    own[0] = 1.5
    return wide


def apart(h: Tensor) -> Tensor:
    own = h.clone()
    own.unfold(1, 2, 2)[:, 0] = 1.5
    return own


class Through(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x)).square().mean()


@pytest.mark.parametrize("body", [expanded, turned, windows], ids=lambda body: body.__name__)
def test_writing_where_elements_share_memory_is_refused(body: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"a write to a part of an expanded tensor at .*call \.clone\(\)"):
        capture(Through(body), torch.randn(3, 4))


@pytest.mark.parametrize("body", [of_its_own, before_it_is_expanded, apart], ids=lambda body: body.__name__)
def test_writing_where_every_element_has_its_own_is_not(body: Callable[[Tensor], Tensor]) -> None:
    model, x = Through(body), torch.randn(3, 4)
    assert torch.equal(to_module(capture(model, x), model)(x), model(x))


def normed(h: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
    made = F.batch_norm(h.T, None, None, training=True)
    write(made)
    return made


DOUBTFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda made: made.contiguous().add_(0.5),
    "reshape": lambda made: made.reshape(-1).mul_(2.0),
    "a part of it flattened": lambda made: made.flatten()[:3].zero_(),
}


@pytest.mark.parametrize("write", DOUBTFUL.values(), ids=DOUBTFUL)
def test_writing_to_what_a_kernel_makes_a_copy_or_a_view_is_refused(write: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"a write to what may be a copy or a view at .*call \.clone\(\)"):
        capture(Through(partial(normed, write=write)), torch.randn(3, 4))


def of_the_usual_order(h: Tensor) -> Tensor:
    made = F.batch_norm(h, None, None, training=True)
    made.flatten()[:3].zero_()
    return made


def not_read_again(h: Tensor) -> Tensor:
    return F.batch_norm(h.T, None, None, training=True).contiguous().add_(0.5)


@pytest.mark.parametrize("body", [of_the_usual_order, not_read_again], ids=lambda body: body.__name__)
def test_writing_to_what_is_known_to_be_a_view_or_not_read_is_taken(body: Callable[[Tensor], Tensor]) -> None:
    model, x = Through(body), torch.randn(3, 4)
    assert torch.equal(to_module(capture(model, x), model)(x), model(x))


def copied(turned: Tensor) -> Tensor:
    made = torch.zeros(turned.shape)
    made.copy_(turned)
    return made


def rows_copied(turned: Tensor) -> Tensor:
    made = torch.zeros(turned.shape).t().contiguous().t()
    made.copy_(turned[0])
    return made


def seen_as_row(turned: Tensor) -> Tensor:
    row = turned[1]
    turned.triu_()
    return turned + row


WRITES_BEFORE_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill_": lambda h: h.masked_fill_(h > 0, 0.5),
    "index_add_": lambda h: h.index_add_(0, torch.tensor([1]), torch.ones(1, 3)),
    "scatter_": lambda h: h.scatter_(0, torch.zeros(1, 3, dtype=torch.long), 1.0).relu(),
    "triu_": lambda h: h.triu_(),
    "cumsum_": lambda h: h.cumsum_(0),
    "masked_scatter_": lambda h: h.masked_scatter_(h > 0, torch.ones(12)),
    "copy_": copied,
    "copy_ of a row": rows_copied,
    "triu_ of what a row is read of afterwards": seen_as_row,
    "none": lambda h: h * 2,
}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "rand_like": lambda h: torch.rand_like(h) * h,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("write", WRITES_BEFORE_DRAWS.values(), ids=WRITES_BEFORE_DRAWS)
def test_what_is_drawn_behind_a_write_is_drawn_in_the_order_of_what_was_written(
    write: Callable[[Tensor], Tensor], draw: Callable[[Tensor], Tensor]
) -> None:
    model, x = Through(lambda h: draw(write(h.t()))), torch.randn(3, 4)
    module = to_module(capture(model, x), model)
    for seed in range(4):
        torch.manual_seed(seed)
        plain = model(x)
        torch.manual_seed(seed)
        assert torch.equal(module(x), plain)


def test_composite_operators_are_prepared_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prepares hundreds of them to be kept whole; what it did for the first program serves the second."""
    prepared: list[OpOverload] = []
    prepare = OperatorBase.py_impl

    def counted(op: OpOverload, key: Any) -> Any:
        prepared.append(op)
        return prepare(op, key)

    monkeypatch.setattr(torch_private, "_kept_whole", {})
    monkeypatch.setattr(OperatorBase, "py_impl", counted)
    linear, model = torch.ops.aten.linear.default, Writes(view_read_afterwards)
    before = dict(linear.py_kernels)
    first, num_prepared = capture(model, torch.ones(3, 4)), len(prepared)
    second = capture(model, torch.ones(3, 4))
    assert first == second and "linear" in [node.op for node in second.nodes]
    assert linear in prepared and len(prepared) == num_prepared
    assert linear.py_kernels == before


def by_a_column(h: Tensor) -> Tensor:
    """The first column is doubled, and added to the others before or after that."""
    own = h.clone()
    return own.add_(own[:, :1])


def by_a_turn(h: Tensor) -> Tensor:
    own = h[:, :3].clone()
    return own.mul_(own.t())


def by_the_other_half(h: Tensor) -> Tensor:
    own = h.clone()
    own[:, :2] += own[:, 2:]
    own[:, 1::2].mul_(own[:, ::2])
    return own


def by_itself(h: Tensor) -> Tensor:
    own = h.clone()
    own[:, 1:].mul_(own[:, 1:])
    return own.add_(own.view(3, 4))


def by_a_row_beside(h: Tensor) -> Tensor:
    own = h.clone()
    own[1:] -= own[0]
    own[:, 1:] -= own[:, :1]
    return own


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("body", [by_a_column, by_a_turn], ids=lambda body: body.__name__)
def test_writing_over_what_the_call_reads_is_refused(body: Callable[[Tensor], Tensor], check: bool) -> None:
    told = r"a write to what the same call reads elsewhere in it at .*call \.clone\(\)"
    with pytest.raises(CaptureError, match=told):
        capture(Through(body), torch.randn(3, 4), check=check)


@pytest.mark.parametrize("body", [by_the_other_half, by_itself, by_a_row_beside], ids=lambda body: body.__name__)
def test_writing_beside_what_the_call_reads_is_not(body: Callable[[Tensor], Tensor]) -> None:
    model, x = Through(body), torch.randn(3, 4)
    graph = to_module(capture(model, x), model)
    assert torch.equal(graph(x), model(x))
