"""What cannot be captured is told in three sentences, all at once, at the user's line; the model stays as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from conjoin.errors import CaptureError
from conjoin.frontends import capture

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Written(nn.Module):
    """A layer and a buffer in a forward given as a function of the module and the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def check_message(text: str) -> None:
    """Three sentences on the first line, the rest indented; nothing of torch's own advice."""
    first, *rest = text.split("\n")
    assert len(re.findall(r"[.:](?: |$)", first)) >= 3, first
    assert all(line.startswith("  ") for line in rest), rest
    assert "torch._dynamo" not in text and "file an issue" not in text and "TORCH_LOGS" not in text


def refused(model: Any, batch: Any = X, loss: Any = None) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, batch, loss)
    text = str(caught.value)
    check_message(text)
    return text


def line_of(marker: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# line: {marker}")]
    return f"{__file__}:{number}"


@pytest.mark.parametrize(
    "thing", [None, 3, lambda x: x, nn.Linear, [nn.Linear(4, 4)]], ids=["none", "number", "function", "class", "list"]
)
def test_something_else_than_a_model(thing: Any) -> None:
    assert "was given instead of the model" in refused(thing)


BATCHES: dict[str, tuple[Any, str]] = {
    "none": (None, "A batch was given as NoneType"),
    "numpy array": (np.zeros((3, 4)), "A batch was given as ndarray"),
    "number": (3, "A batch was given as int"),
    "text": ("x", "A batch was given as str"),
    "object": (object(), "A batch was given as object"),
    "set": ({1, 2}, "A batch was given as set"),
    "generator": ((x for x in [X]), "A batch was given as generator"),
    "empty tuple": ((), "0 value(s) without any tensor"),
    "empty dict": ({}, "0 value(s) without any tensor"),
    "tuple without tensors": ((1, None), "2 value(s) without any tensor"),
    "numpy array inside": ((X, np.zeros(3)), "values of type ndarray"),
    "object inside": ({"x": X, "y": [object()]}, "values of type object"),
    "sparse": (X.to_sparse(), "of shape (3, 4), is sparse"),
    "nested": (torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), "Pad the rows to one length"),
    "sparse inside": ({"input": X.to_sparse().unsqueeze(0)}, "of shape (1, 3, 4), is sparse"),
    "keys that are no words": ((X, {(1, 2): X}), "keys"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "why"), BATCHES.values(), ids=BATCHES)
def test_something_else_than_a_batch(batch: Any, why: str) -> None:
    assert why in refused(nn.Linear(4, 4), batch)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_of_a_model_is_told_with_what_to_write(layout: torch.layout) -> None:
    """And what is written so is its product."""

    class Neighbours(nn.Module):
        def __init__(self, matrix: Tensor) -> None:
            super().__init__()
            self.register_buffer("matrix", matrix)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.matrix, x)

    dense = torch.tensor([[0.0, 2.0, 0.0], [0.5, 0.0, 3.0], [0.0, 0.0, 0.0]])
    text = refused(Neighbours(dense.to_sparse(layout=layout)))
    assert "tensor matrix, of shape (3, 3), is sparse" in text and text.count(". ") == 2
    A, h = dense, X
    (row, column), weight = A.to_sparse().indices(), A.to_sparse().values()
    written = text.split("`")[1]
    given = {"A": A, "h": h, "row": row, "column": column, "weight": weight}
    assert torch.allclose(eval(written, {}, given), A @ h)


@pytest.mark.parametrize("made", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_that_is_made_on_the_way_is_told(made: str) -> None:
    class Neighbours(nn.Module):
        def forward(self, x: Tensor, ends: Tensor, column: Tensor) -> Tensor:
            if made == "coo":  # its size hangs on the values
                return torch.sparse_coo_tensor(torch.stack((ends[:3], column)), x[:, 0]) @ x
            return torch.sparse.mm(x[:, :3].to_sparse_csr(), x)

    text = refused(Neighbours(), (X, torch.arange(4), torch.tensor([2, 0, 1])))
    assert "that the model makes is sparse" in text and "index_add(0, row, h[column] * weight[:, None])" in text


ARGUMENTS: dict[str, tuple[Any, str]] = {
    "too many": ((X, X), "TypeError"),
    "another name": ({"y": X}, "TypeError"),
    "another size": (torch.zeros(3, 5), "RuntimeError: "),
}


@pytest.mark.parametrize(("batch", "why"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_batch_the_model_does_not_take(batch: Any, why: str) -> None:
    text = refused(nn.Linear(4, 4), batch)
    assert "could not be captured on this batch" in text and why in text


def test_operands_of_different_dtypes_are_refused() -> None:
    assert "operator linear: it is given torch.float32 and torch.float64" in refused(nn.Linear(4, 4), X.double())
    assert "operator linear: it is given torch.float32 and torch.int64" in refused(nn.Linear(4, 4), X.long())


def test_an_input_is_missing() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    assert "missing 1 required positional argument: 'y'" in refused(Two(), X)


def test_a_mismatch_points_at_the_users_line() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.layer(x) + torch.zeros(7)  # line: mismatch

    text = refused(Written(forward))
    assert f"at {line_of('mismatch')}: return m.layer(x) + torch.zeros(7)" in text


def test_an_exception_in_forward_is_told_with_its_line() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        raise KeyError("no such thing")  # line: raised

    text = refused(Written(forward))
    assert "KeyError" in text and "no such thing" in text and f"at {line_of('raised')}" in text


def test_an_exception_keeps_its_cause() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(CaptureError) as caught:
        capture(Written(forward), X)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_passes_through(interruption: type[BaseException]) -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        raise interruption

    with pytest.raises(interruption):
        capture(Written(forward), X)


def branch(m: Written, x: Tensor) -> Tensor:
    if x.sum() > 0:  # line: branch
        return m.layer(x)
    return x


def item(m: Written, x: Tensor) -> Tensor:
    scale = x.max().item()  # line: item
    return m.layer(x) * scale


def to_float(m: Written, x: Tensor) -> Tensor:
    return m.layer(x) * float(x.max())  # line: to_float


def to_int(m: Written, x: Tensor) -> Tensor:
    return m.layer(x)[: int(x.abs().sum())]  # line: to_int


def to_list(m: Written, x: Tensor) -> Tensor:
    return m.layer(x) * sum(x[0].tolist())  # line: to_list


def nonzero(m: Written, x: Tensor) -> Tensor:
    rows = x.sum(1).nonzero()  # line: nonzero
    return m.layer(x[rows.flatten()])


def boolean_mask(m: Written, x: Tensor) -> Tensor:
    return m.layer(x)[x > 0].sum()  # line: boolean_mask


def masked_select(m: Written, x: Tensor) -> Tensor:
    return m.layer(x).masked_select(x > 0).sum()  # line: masked_select


def unique(m: Written, x: Tensor) -> Tensor:
    return m.layer(x).sum() + x.unique().sum()  # line: unique


def loop_over_values(m: Written, x: Tensor) -> Tensor:
    for step in range(int(x.abs().max() * 3)):  # line: loop_over_values
        x = x + step
    return m.layer(x)


def loop_while(m: Written, x: Tensor) -> Tensor:
    while x.norm() > 1:  # line: loop_while
        x = x / 2
    return m.layer(x)


def loop_over_a_tensor(m: Written, x: Tensor) -> Tensor:
    for row in x:
        if row[0] > 0:  # line: loop_over_a_tensor
            x = x + row
    return m.layer(x)


def assertion(m: Written, x: Tensor) -> Tensor:
    assert bool((x < 5).all())  # line: assertion
    return m.layer(x)


def split_by_values(m: Written, x: Tensor) -> Tensor:
    sizes = [int((x[0] > 0).sum()), 1]  # line: split_by_values
    return torch.cat(m.layer(x).split(sizes))


DATA_DEPENDENT = {
    function.__name__: function
    for function in (
        branch, item, to_float, to_int, to_list, nonzero, boolean_mask, masked_select, unique, loop_over_values,
        loop_while, loop_over_a_tensor, assertion, split_by_values,
    )
}  # fmt: skip


@pytest.mark.parametrize("function", DATA_DEPENDENT.values(), ids=DATA_DEPENDENT)
def test_what_depends_on_values_is_refused_at_its_line(function: Callable[..., Any]) -> None:
    text = refused(Written(function))
    assert line_of(function.__name__) in text
    assert "tensor values" in text


def test_all_that_depends_on_values_is_told_at_once() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        if x.sum() > 100:  # line: first of many
            x = x + 1
        y = m.layer(x)[x > 0]  # line: second of many
        return y.sum() * x.max().item()  # line: third of many

    text = refused(Written(forward))
    assert all(line_of(f"{nth} of many") in text for nth in ("first", "second", "third"))


def test_one_place_is_told_once() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        for i in range(3):
            if x[i, 0] > 0:  # line: repeated
                x = x + 1
        return m.layer(x)

    assert refused(Written(forward)).count(line_of("repeated")) == 1


def test_a_branch_in_a_model_on_meta() -> None:
    with torch.device("meta"):
        text = refused(Written(branch), torch.zeros(3, 4))
    assert line_of("branch") in text and "tensor values" in text


def test_several_shapes_that_depend_on_values_are_told_together() -> None:
    def forward(m: Written, x: Tensor) -> Any:
        first = x.sum(1).nonzero()  # line: shape one
        second = m.layer(x).masked_select(x > 0)  # line: shape two
        return first, second

    text = refused(Written(forward))
    assert line_of("shape one") in text and line_of("shape two") in text


def writes_to_its_input(m: Written, x: Tensor) -> Tensor:
    x.add_(1)
    return m.layer(x)


def writes_to_a_view_of_its_input(m: Written, x: Tensor) -> Tensor:
    x[0] = 0
    return m.layer(x)


def writes_to_a_parameter(m: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight.mul_(0.5)
    return m.layer(x)


WRITES = {f.__name__: f for f in (writes_to_its_input, writes_to_a_view_of_its_input, writes_to_a_parameter)}


@pytest.mark.parametrize("function", WRITES.values(), ids=WRITES)
def test_writing_to_inputs_or_parameters_is_refused(function: Callable[..., Any]) -> None:
    model, x = Written(function), X.clone()
    weight = model.layer.weight.clone()
    text = refused(model, x)
    assert f"it writes to {'parameter layer.weight' if 'parameter' in function.__name__ else 'input x'}" in text
    assert re.search(r"test_errors.py:\d+: it writes", text)
    assert torch.equal(x, X) and torch.equal(model.layer.weight, weight)


LOSSES: dict[str, tuple[Any, str]] = {
    "not callable": (3, "A loss of type int was given"),
    "text": ("mse", "A loss of type str was given"),
    "a class": (nn.MSELoss, "A loss of class MSELoss was given"),
    "a vector": (lambda out: out.sum(0), "did not return one floating-point number"),
    "the output": (lambda out: out, "did not return one floating-point number"),
    "a number": (lambda out: 3.0, "did not return one floating-point number"),
    "an integer": (lambda out: out.argmax(), "did not return one floating-point number"),
    "nothing": (lambda out: None, "did not return one floating-point number"),
    "a pair": (lambda out: (out.sum(), out.mean()), "did not return one floating-point number"),
    "too many arguments": (lambda out, a, b: out.sum(), "missing 2 required positional arguments"),
}


@pytest.mark.parametrize(("loss", "why"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_none(loss: Any, why: str) -> None:
    assert why in refused(nn.Linear(4, 4), X, loss)


def test_control_flow_operators_are_refused_at_their_line() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (m.layer(x),))  # line: cond

    text = refused(Written(forward))
    assert line_of("cond") in text and "torch.where" in text


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a capture might touch."""
    state = {name: (id(t), t.detach().clone(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()}
    flags = {name: part.training for name, part in model.named_modules()}
    hooks = {name: (len(part._forward_hooks), len(part._backward_hooks)) for name, part in model.named_modules()}
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    return {"state": state, "flags": flags, "hooks": hooks, "attributes": attributes}


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    mine, theirs = before.pop("state"), after.pop("state")
    equal = all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and a[2] == b[2]
        for a, b in zip(mine.values(), theirs.values(), strict=True)
    )
    return equal and list(mine) == list(theirs) and before == after


class Touchy(nn.Module):
    """Statistics, dropout, a counter, a cached tensor, a frozen part in eval mode, a recurrent part."""

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.norm, self.frozen, self.rnn = nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval(), nn.LSTM(4, 4)
        self.frozen.requires_grad_(False)
        self.fail, self.calls, self.last = fail, 0, None
        self.norm.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = nn.functional.dropout(self.frozen(self.norm(x)), 0.5)
        y, _ = self.rnn(self.last)
        if self.fail and y.sum() > 0:
            return y
        return y + self.norm(y)


@pytest.mark.parametrize("fail", [False, True], ids=["captured", "refused"])
def test_capture_leaves_everything_as_it_was(fail: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = Touchy(fail)
    model.norm.weight.grad = torch.ones(4)
    before, drawn, threads = snapshot(model), torch.get_rng_state(), torch.get_num_threads()
    if fail:
        refused(model, X)
    else:
        capture(model, X)
    assert same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), drawn) and torch.get_num_threads() == threads
    assert (model.calls, model.last) == (0, None)
    assert torch.equal(model.norm.weight.grad, torch.ones(4)) and model.rnn.weight_ih_l0.grad is None
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not torch.is_inference_mode_enabled()
    assert not any(isinstance(t, FakeTensor) for part in model.modules() for t in vars(part).values())
    assert not any(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers(), *model.rnn._flat_weights))
    assert capfd.readouterr() == ("", "")


def test_what_the_user_prints_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        print("in forward")
        return m.layer(x)

    capture(Written(forward), X)
    assert "in forward" in capfd.readouterr().out


def test_the_warnings_of_a_failed_capture_are_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    refused(Written(branch))
    assert list(recwarn) == []


def test_a_long_message_is_shortened() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        raise ValueError("x" * 5000)

    assert len(refused(Written(forward))) < 1000


def test_a_hook_on_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    text = refused(model)
    assert "0" in text and "backward hook" in text


def test_a_hook_on_a_tensors_gradient_is_refused() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.register_hook(lambda gradient: gradient * 2)  # line: hook
        return y

    text = refused(Written(forward))
    assert line_of("hook") in text and "a graph would forget it" in text


@pytest.mark.parametrize("how", ["grad", "backward", "func"])
def test_a_gradient_inside_of_the_forward_pass_is_refused(how: str) -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        y = m.layer(x)
        if how == "grad":
            (y,) = torch.autograd.grad(y.square().sum(), m.layer.weight, create_graph=True)  # line: inner grad
        elif how == "backward":
            y.sum().backward(retain_graph=True)  # line: inner backward
        else:
            y = y + torch.func.grad(lambda z: m.layer(z).square().sum())(x)  # line: inner func
        return y

    text = refused(Written(forward))
    assert line_of(f"inner {how}") in text and "takes gradients inside its forward pass" in text


class Kept(nn.Module):
    """Reads its state past its own attributes."""

    def __init__(self, kept: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.kept = kept(self)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept if isinstance(self.kept, Tensor) else next(iter(self.kept))
        return self.layer(x) + kept.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kept", "name"),
    [
        (lambda m: [m.layer.weight], "layer.weight"),
        (lambda m: (m.layer.bias.detach(),), "layer.bias"),
        (lambda m: [m.layer.weight[0].detach()], "layer.weight"),
        (lambda m: m.layer.weight.data, "layer.weight"),
        (lambda m: {m.count}, "count"),
        (lambda m: m.count.reshape(2, 2), "count"),
    ],
    ids=["list", "detached", "part", "attribute", "buffer", "attribute of a buffer"],
)
def test_state_kept_under_another_name_is_not_frozen(kept: Any, name: str, device: str) -> None:
    """Export takes a parameter in a list for a constant: it would keep its first value and get no gradient."""
    with torch.device(device):
        model = Kept(kept)
    told = refused(model)  # one of its own memory, on meta, is refused as what stands on another device
    assert re.search(f"it is the memory of {re.escape(name)}|DeviceMismatch|Device Propagation", told)


class Hidden(nn.Module):
    """Weights that `model.parameters()` does not have."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        self.listed = [nn.Parameter(torch.randn(4, 4))]
        self.named = {"w": torch.randn(4, requires_grad=True)}
        self.parts = (nn.Linear(4, 4, bias=False), nn.LSTM(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.layer(x))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda m, h: h @ m.listed[0], "listed[0]"),
        (lambda m, h: torch.stack([m.listed[0], m.layer.weight]).sum(0) @ h.mT, "listed[0]"),
        (lambda m, h: nn.functional.layer_norm(h, (4,), weight=m.named["w"]), "named['w']"),
        (lambda m, h: m.parts[0](h), "parts[0].weight"),
        (lambda m, h: m.parts[1](h)[0], "parts[1].weight_ih_l0"),
    ],
    ids=["list", "stacked", "dict", "module in a tuple", "LSTM in a tuple"],
)
def test_a_parameter_in_a_plain_container_is_refused_by_name(read: Any, name: str) -> None:
    told = refused(Hidden(read))
    assert f"a parameter {name} of shape" in told and "model.parameters() does not have" in told
    assert "nn.ParameterList" in told and "test_errors.py" in told


def test_a_hidden_parameter_that_is_read_without_gradients_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A teacher in a list: shapes may be asked for, values are kept as they are, and that is said."""

    def read(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            taught = m.parts[0](h)
        return (h - taught) * m.listed[0].detach()[0] * m.listed[0].shape[0] * m.named["w"].data

    capture(Hidden(read), X)
    assert all(f"a parameter {n}" in caplog.text for n in ("parts[0].weight", "listed[0]", "named['w']"))
    assert "the graph keeps it as it was at capture" in caplog.text and "parts[1]" not in caplog.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loss_over_a_parameter_does_not_freeze_it(device: str) -> None:
    model = nn.Linear(4, 4, device=device)
    weight = model.weight
    assert "it is the memory of weight" in refused(model, X, lambda output: output.sum() + weight.norm())


@pytest.mark.parametrize("shown", ["whole", "row"])
def test_buffers_that_share_what_is_written_are_named(shown: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.part = nn.Linear(3, 3), nn.Module()
            self.register_buffer("seen", torch.ones(2, 3))
            self.part.register_buffer("shown", self.seen if shown == "whole" else self.seen[0])

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x) * self.part.shown.clone()[..., 0].mean()
            self.seen[0].mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return h.mean()

    with pytest.raises(CaptureError, match=r"buffers seen and part\.shown share memory"):
        capture(Shared(), torch.randn(4, 3))
