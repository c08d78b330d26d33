"""`to_module`: a graph is an ordinary module over the user's own state; it trains, saves, copies and compiles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import GraphError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Graph, LeafKind, load_graph, parse_graph, save_graph
from conjoin.runtime import CapturedModule, to_module


class Net(nn.Module):
    """Convolution, statistics, dropout, tied layers, an unused layer, a constant and two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))
        self.tied = self.body[3]
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 3, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)
        self.scale = torch.tensor([1.0, 2.0, 0.5])

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.norm(self.conv(x)).relu().flatten(1)
        return self.head(self.tied(self.body(h))) * self.scale


X, TARGET = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 1, 0])


@pytest.fixture
def model() -> Net:
    torch.manual_seed(5)
    return Net()


@cache
def captured() -> Graph:
    """Of another model of the kind: a graph has no values but those of constants, which are the same."""
    with torch.random.fork_rng(devices=[]):
        return capture(Net(), (X, TARGET), functional.cross_entropy)


@pytest.fixture
def module(model: Net) -> CapturedModule:
    return to_module(captured(), model)


@pytest.fixture
def plain(model: Net) -> Net:
    return copy.deepcopy(model)


def loss_of(net: nn.Module) -> Tensor:
    """The loss of either kind of module on the batch."""
    if isinstance(net, CapturedModule):
        return net(X, TARGET)
    return functional.cross_entropy(net(X), TARGET)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, one tensor at a time": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
}


def train(
    net: nn.Module, make: Callable[..., torch.optim.Optimizer], steps: int = 5, micro: int = 1, clip: float = 0
) -> list[float]:
    optimizer, losses = make(net.parameters()), []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for _ in range(micro):
            loss = loss_of(net) / micro
            loss.backward()
        if clip:
            losses.append(nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_the_same(module: CapturedModule, plain: Net, make: Any, unequal: Callable[..., list[str]]) -> None:
    assert train(module, make) == train(plain, make)
    assert unequal(module, plain) == []
    assert module.norm.num_batches_tracked == 5 and module.steps == 5


def test_gradients_accumulate_and_are_clipped(
    module: CapturedModule, plain: Net, unequal: Callable[..., list[str]]
) -> None:
    make = OPTIMIZERS["sgd"]
    assert train(module, make, micro=3, clip=0.1) == train(plain, make, micro=3, clip=0.1)
    assert unequal(module, plain) == []


def test_autocast(module: CapturedModule, plain: Net, unequal: Callable[..., list[str]]) -> None:
    losses = []
    for net in (module, plain):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(loss_of(net))
        losses[-1].backward()
    assert torch.equal(*losses) and losses[0].dtype == losses[1].dtype
    assert unequal(module, plain) == []


# torch's own compiler deprecates its own functions; nothing of it is ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(module: CapturedModule, plain: Net, backend: str, unequal: Callable[..., list[str]]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend)
    for seed in range(2):
        torch.manual_seed(seed)
        loss = compiled(X, TARGET)
        torch.manual_seed(seed)
        want = loss_of(plain)
        torch.testing.assert_close(loss, want)
        loss.backward()
        want.backward()
    for (name, mine), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for (name, mine), theirs in zip(module.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_state_has_the_users_names_and_values(module: CapturedModule, plain: Net) -> None:
    mine, theirs = module.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in module.named_modules()] == [name for name, _ in plain.named_modules()]


def test_state_is_loaded_both_ways(module: CapturedModule, plain: Net) -> None:
    train(plain, OPTIMIZERS["sgd"], steps=2)
    module.load_state_dict(plain.state_dict())
    torch.manual_seed(0)
    mine = loss_of(module)
    torch.manual_seed(0)
    assert torch.equal(mine, loss_of(plain))
    train(module, OPTIMIZERS["sgd"], steps=2)
    fresh = Net()
    fresh.load_state_dict(module.state_dict())
    torch.manual_seed(0)
    mine = loss_of(module)
    torch.manual_seed(0)
    assert torch.equal(mine, loss_of(fresh))
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})


def test_the_model_itself_is_trained(model: Net, module: CapturedModule) -> None:
    before = model.head.weight.clone()
    train(module, OPTIMIZERS["sgd"], steps=1)
    assert module.head.weight is model.head.weight and not torch.equal(before, model.head.weight)
    assert model.steps == 1


def test_a_parameter_replaced_in_the_model_is_used(model: Net, module: CapturedModule) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, 8))
    torch.manual_seed(0)
    assert loss_of(module).item() == pytest.approx(torch.tensor(3.0).log().item())


def test_a_copy_is_independent(
    model: Net, module: CapturedModule, plain: Net, unequal: Callable[..., list[str]]
) -> None:
    other = copy.deepcopy(module)
    train(other, OPTIMIZERS["sgd"])
    assert unequal(model, plain) == [] and model.steps == 0
    train(plain, OPTIMIZERS["sgd"])
    assert unequal(other, plain) == []
    assert other.tied.weight is other.body[3].weight
    assert other.graph == module.graph


@pytest.mark.parametrize("save", ["pickle", "torch"])
def test_a_saved_module_trains_on(
    module: CapturedModule, plain: Net, save: str, unequal: Callable[..., list[str]]
) -> None:
    train(module, OPTIMIZERS["sgd"], steps=1)
    file = io.BytesIO()
    if save == "pickle":
        loaded = pickle.loads(pickle.dumps(module))
    else:
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    train(plain, OPTIMIZERS["sgd"], steps=1)
    for net in (loaded, plain):
        net.zero_grad()
        train(net, OPTIMIZERS["sgd"], steps=2)
    assert unequal(loaded, plain) == []
    assert loaded.graph == module.graph


def test_hooks_of_the_module_run(module: CapturedModule) -> None:
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    loss_of(module).backward()
    assert seen == ["before", "after"]


def test_eval_mode_is_refused_and_train_mode_is_not(model: Net, module: CapturedModule) -> None:
    assert module.train() is module
    with pytest.raises(
        UsageError, match=r"captured in training mode .* switch to eval mode\. .*\. Call model.eval\(\)"
    ):
        module.eval()
    evaluated = to_module(capture(model.eval(), (X, TARGET), functional.cross_entropy), model)
    assert evaluated.eval() is evaluated and not evaluated.training
    with pytest.raises(UsageError, match=r"captured in eval mode .* switch to training mode"):
        evaluated.train()


def test_eval_mode_neither_drops_nor_counts(model: Net) -> None:
    evaluated = to_module(capture(model.eval(), (X, TARGET), functional.cross_entropy), model)
    assert torch.equal(loss_of(evaluated), loss_of(evaluated))
    assert torch.equal(loss_of(evaluated), loss_of(model))
    assert model.norm.num_batches_tracked == 0


def test_a_graph_read_back_runs_the_same(model: Net, module: CapturedModule, plain: Net) -> None:
    read = parse_graph(str(module.graph))
    assert read == module.graph
    other = to_module(read, plain)
    torch.manual_seed(0)
    mine = loss_of(module)
    torch.manual_seed(0)
    assert torch.equal(mine, loss_of(other))
    assert other.code == module.code


def test_a_graph_from_a_file_runs_the_same(module: CapturedModule, plain: Net, tmp_path: Path) -> None:
    save_graph(module.graph, tmp_path / "net.json")
    other = to_module(load_graph(tmp_path / "net.json"), plain)
    assert train(other, OPTIMIZERS["sgd"]) == train(module, OPTIMIZERS["sgd"])


def test_code_is_straight_and_readable(module: CapturedModule) -> None:
    lines = module.code.strip().splitlines()
    assert lines[0].startswith("def forward(self, state, device, input_0, input_1)")
    calls = [line for line in lines if "torch" in line or "batch_norm" in line]
    assert len(calls) >= len(module.graph.nodes) - 2
    assert not any(word in module.code for word in ("for ", "while ", "if ", "Interpreter", "eval("))
    assert any("torch.conv2d(input_0, " in line for line in calls)


def test_an_error_at_run_time_shows_the_generated_line(model: Net, module: CapturedModule) -> None:
    model.head.weight = nn.Parameter(torch.zeros(5, 9))
    with pytest.raises(RuntimeError) as caught:
        loss_of(module)
    frames = [
        entry
        for entry in caught.traceback
        if str(entry.path).startswith("<conjoin Net") or "conjoin Net" in str(entry.path)
    ]
    assert frames and "linear" in str(frames[-1].statement)


def three_sentences(error: BaseException) -> bool:
    """Whether a message has the three parts of house style; numbers and paths have points of their own."""
    text = str(error).split("\n")[0]
    return text.replace("e.g.", "").count(". ") >= 2


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "another batch size": ((X[:3], TARGET[:3]), {}, r"captured for f32\[6,2,4,4\] where .* shape \(3, 2, 4, 4\) came"),
    "another dtype": ((X.double(), TARGET), {}, r"captured for f32\[6,2,4,4\] where torch.float64"),
    "another dtype of the target": ((X, TARGET.int()), {}, r"captured for i64\[6\] where torch.int32"),
    "too few": ((X,), {}, r"it takes \(x, target\), as captured, and \(Tensor\) came"),
    "too many": ((X, TARGET, TARGET), {}, r"\(Tensor, Tensor, Tensor\) came"),
    "none at all": ((), {}, r"\(\) came"),
    "by an unknown name": ((X,), {"labels": TARGET}, r"\(Tensor, labels=Tensor\) came"),
    "twice": ((X, TARGET), {"target": TARGET}, r"\(Tensor, Tensor, target=Tensor\) came"),
    "nested": (((X,), TARGET), {}, r"\(tuple of 1 Tensor, Tensor\) came"),
    "no tensor": ((X, [0, 1, 2, 2, 1, 0]), {}, r"\(Tensor, list of 6 int\) came"),
    "numpy": ((X.numpy(), TARGET), {}, r"\(ndarray, Tensor\) came"),
    "none": ((X, None), {}, r"\(Tensor, NoneType\) came"),
}


@pytest.mark.parametrize(("args", "kwargs", "why"), REFUSED.values(), ids=REFUSED)
def test_other_inputs_are_refused(module: CapturedModule, args: Any, kwargs: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        module(*args, **kwargs)
    assert three_sentences(caught.value)
    assert module.steps == 0


def test_what_is_captured_by_position_may_be_given_by_name(module: CapturedModule) -> None:
    torch.manual_seed(0)
    want = module(X, TARGET)
    for args, kwargs in (((), {"target": TARGET, "x": X}), ((X,), {"target": TARGET})):
        torch.manual_seed(0)
        module.steps.zero_()
        assert torch.equal(module(*args, **kwargs), want)


def test_what_is_captured_by_name_has_no_order() -> None:
    model = nn.Bilinear(4, 4, 2)
    module = to_module(capture(model, {"input2": X[:, 0, 0], "input1": X[:, 1, 0]}), model)
    with pytest.raises(UsageError, match=r"it takes \(input\d=, input\d=\), as captured, and \(Tensor, Tensor\) came"):
        module(X[:, 1, 0], X[:, 0, 0])


def test_a_plain_value_is_the_one_of_the_capture() -> None:
    class Powers(nn.Module):
        def forward(self, x: Tensor, power: int = 1) -> Tensor:
            return x**power

    model = Powers()
    module = to_module(capture(model, {"x": X, "power": 3}), model)
    assert torch.equal(module(x=X, power=3), X**3)
    for other in (2, 3.0, True, None, "3"):
        with pytest.raises(UsageError, match="was called with other inputs"):
            module(x=X, power=other)


MISMATCHED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "another model": (lambda net: nn.Linear(3, 3), r"param:conv.weight of type f32\[4,2,3,3\], but the model has no"),
    "another size": (lambda net: _with(net, "head", nn.Linear(8, 4)), r"param:head.weight .* model's is f32\[4,8\]"),
    "another dtype": (lambda net: net.double(), r"param:conv.weight .* the model's is f64"),
    "a parameter missing": (lambda net: _with(net, "head", nn.Identity()), "param:head.weight .* no tensor"),
    "a module where a tensor was": (lambda net: _with(net.head, "weight", None) or net, "param:head.weight"),
}  # fmt: skip


def _with(owner: nn.Module, name: str, value: Any) -> nn.Module:
    if name in owner._parameters and value is None:
        del owner._parameters[name]
        owner.weight = nn.ReLU()
        return None
    setattr(owner, name, value)
    return owner


@pytest.mark.parametrize(("change", "why"), MISMATCHED.values(), ids=MISMATCHED)
def test_a_model_the_graph_does_not_fit_is_refused(module: CapturedModule, plain: Net, change: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        to_module(module.graph, change(plain))
    assert three_sentences(caught.value)


def test_weights_tied_at_capture_must_be_tied_in_the_model(module: CapturedModule, plain: Net) -> None:
    plain.tied = nn.Linear(8, 8)
    with pytest.raises(UsageError, match=r"param:body.3.weight .* tied.weight"):
        to_module(module.graph, plain)


@pytest.mark.parametrize(
    "change", [lambda m: m.double(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)], ids=["double", "half", "to"]
)
def test_another_dtype_is_refused_when_asked_for(module: CapturedModule, change: Any) -> None:
    with pytest.raises(UsageError, match=r"float.* holds the dtypes .* capture") as caught:
        change(module)
    assert three_sentences(caught.value)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_moving_without_another_dtype_is_allowed(module: CapturedModule) -> None:
    assert module.to("cpu") is module and module.float() is module and module.to(torch.float32) is module
    loss_of(module).backward()


@pytest.mark.parametrize("thing", [None, 3, lambda x: x, {"conv": 1}], ids=["none", "number", "function", "dict"])
def test_something_else_than_a_model_is_refused(module: CapturedModule, thing: Any) -> None:
    with pytest.raises(UsageError, match="was given instead of the model") as caught:
        to_module(module.graph, thing)
    assert three_sentences(caught.value)


def test_an_unknown_operator_is_refused(module: CapturedModule) -> None:
    text = str(module.graph).replace("conv2d(", "mylib::conv2d(")
    with pytest.raises(GraphError):
        to_module(parse_graph(text), Net())


def test_an_output_class_nobody_imported_is_refused() -> None:
    model = nn.Linear(4, 4)
    text = str(capture(model, torch.zeros(2, 4))).replace(
        "in null", 'in {"kind":"os.system","keys":["a"],"children":[null]}'
    )
    with pytest.raises(GraphError, match=r"os\.system") as caught:
        to_module(parse_graph(text), model)
    assert three_sentences(caught.value)


def test_the_module_shows_as_the_model(module: CapturedModule, plain: Net) -> None:
    assert repr(module).splitlines()[1:] == repr(plain).splitlines()[1:]
    assert {leaf.kind for leaf in module.graph.leaves} == set(LeafKind)


def test_running_without_gradients(module: CapturedModule, plain: Net) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        losses = []
        for net in (module, plain):
            torch.manual_seed(0)
            with context():
                losses.append(loss_of(net))
        assert torch.equal(*losses) and not losses[0].requires_grad


def test_a_second_backward_is_a_second_run(module: CapturedModule) -> None:
    loss = loss_of(module)
    loss.backward(retain_graph=True)
    first = module.head.weight.grad.clone()
    loss.backward()
    assert torch.equal(module.head.weight.grad, first * 2)


def test_two_modules_over_one_model_share_its_state(model: Net, module: CapturedModule) -> None:
    evaluated = to_module(capture(model.eval(), (X, TARGET), functional.cross_entropy), model)
    before = loss_of(evaluated)
    train(module, OPTIMIZERS["sgd"], steps=2)
    assert not torch.equal(loss_of(evaluated), before)


class Named(nn.Module):
    """Parts called as the attributes of the captured module are."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Linear(4, 4)
        self._program = nn.Linear(4, 4)
        self.code = nn.Parameter(torch.ones(4))
        self.register_buffer("_constants", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self._constants += 1
        return self._program(self.graph(x)) * self.code + self._constants


def test_parts_may_have_the_names_of_our_attributes(compare: Callable[..., Any]) -> None:
    captured = compare(Named(), torch.randn(3, 4), steps=2)
    assert list(captured.module.state_dict()) == list(captured.plain.state_dict())
    again = copy.deepcopy(captured.module)
    assert again.graph == captured.module.graph


def test_a_buffer_with_two_names_is_updated_under_both() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.first.register_buffer("count", torch.zeros(()))
            self.second.register_buffer("count", self.first.count)

        def forward(self, x: Tensor) -> Tensor:
            self.first.count.add_(1)
            return self.second(self.first(x)) * self.second.count

    model = Shared()
    x = torch.randn(3, 4)
    module = to_module(capture(model, x), model)
    for step in (1.0, 2.0):
        module(x)
        assert model.first.count == step and model.second.count is model.first.count


def test_training_goes_on_after_a_run_in_inference_mode(module: CapturedModule, plain: Net) -> None:
    for net in (module, plain):
        torch.manual_seed(0)
        with torch.inference_mode():
            loss_of(net)
    assert train(module, OPTIMIZERS["sgd"]) == train(plain, OPTIMIZERS["sgd"])
    assert module.steps == plain.steps


def test_a_deep_graph_is_copied_and_saved() -> None:
    model = nn.Sequential(*[nn.ReLU() for _ in range(400)])
    x = torch.randn(2)
    module = to_module(capture(model, x), model)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_a_constant_that_was_changed_in_the_model_is_used() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((3,), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    net, x = Scaled(), torch.ones(3)
    graph = capture(net, x)
    net.scale = torch.full((3,), 5.0)
    assert torch.equal(to_module(graph, net)(x), 5 * x)
    del net.scale
    assert torch.equal(to_module(graph, net)(x), 2 * x), "its values at capture"
