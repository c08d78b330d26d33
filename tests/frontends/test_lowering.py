"""Names, sources and constants: a graph says everything in the user's words, and points at the user's lines."""

from __future__ import annotations

import importlib.util
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from conjoin.errors import CaptureError
from conjoin.frontends import capture, not_understood
from conjoin.ir import Graph, LeafKind, Source, parse_graph
from conjoin.ops import Dtype, catalog, find_spec
from conjoin.runtime import to_module
from tests.zoo.graphs import captured

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def here(text: str) -> int:
    """The number of the only line of this file that ends in a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(text)]
    return number


def scaled(x: Tensor, by: float) -> Tensor:
    shifted = x + 1  # line: add
    return _really_scaled(shifted, by)


def _really_scaled(x: Tensor, by: float) -> Tensor:
    return (
        x  # line: mul
        * by
    ).relu()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(self.fc(x))  # line: linear

    def helper(self, x: Tensor) -> Tensor:
        return scaled(x, 2.0).tanh()  # line: tanh


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            scale = x.sigmoid()  # line: sigmoid
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T  # line: matmul
        return torch.exp(y * 0.5).sum() + scale.sum()  # line: exp


def source(graph: Graph, op: str, nth: int = 0) -> Source | None:
    return graph.source_of([node for node in graph.nodes if node.op == op][nth])


@pytest.mark.parametrize("op", ["linear", "tanh", "add.Tensor", "mul.Tensor", "sigmoid", "matmul", "exp"])
def test_a_node_points_at_the_users_line(op: str) -> None:
    found = source(capture(Outer(), X), op)
    assert found is not None
    assert (found.file, found.line) == (__file__, here(f"# line: {op.partition('.')[0]}"))


def test_a_node_names_the_module_it_is_in() -> None:
    graph = capture(Outer(), X)
    assert [source(graph, "linear", i).module for i in (0, 1)] == ["blocks.0.fc", "blocks.1.fc"]
    assert [source(graph, "tanh", i).module for i in (0, 1)] == ["blocks.0", "blocks.1"]
    assert source(graph, "exp").module == ""


def test_a_loss_points_at_its_own_line() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)  # line: loss

    found = source(capture(Inner(), (X, X), loss), "mse_loss")
    assert (found.file, found.line, found.module) == (__file__, here("# line: loss"), "")


@pytest.mark.parametrize("name", ["resnet-50", "bert-large", "nmt", "dlrm"])
def test_no_source_is_inside_torch_or_conjoin(name: str) -> None:
    graph = captured(name)
    files = {Path(found.file) for found in graph.sources if found}
    assert files and all(file.parent == Path(inspect.getfile(zoo)).parent for file in files)
    assert sum(found is not None for found in graph.sources) > len(graph.nodes) * 0.9


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["torchy", "conjoined", 'with "quotes" and, commas'])
def test_files_with_names_like_ours_are_the_users(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "model.py"
    file.parent.mkdir()
    file.write_text(
        textwrap.dedent("""\
        from torch import nn

        class Model(nn.Module):
            def forward(self, x):
                return x.tanh()
        """)
    )
    found = source(capture(load(file).Model(), X), "tanh")
    assert (found.file, found.line) == (str(file), 5)


def test_a_model_of_torchs_own_layers_has_no_lines() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    assert [graph.source_of(node) for node in graph.nodes] == [None, None]


def test_equal_graphs_do_not_depend_on_lines() -> None:
    assert capture(Inner(), X) == capture(Inner(), X)
    first, again = capture(nn.Sequential(Inner()), X), capture(nn.Sequential(Inner()), X)
    assert first == again and str(first) == str(again)


class Odd(nn.Module):
    NAMES = ("a-b c", 'say "hi"', "it's", "new\nline", "back\\slash", "ünï", "{x}", "import os", "self")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.register_parameter(name, nn.Parameter(torch.ones(4)))
        self.register_buffer("odd buffer; #", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self._buffers["odd buffer; #"].add_(1)
        return x + sum(getattr(self, name) * i for i, name in enumerate(self.NAMES)) + getattr(self, "odd buffer; #")


def test_names_with_odd_characters_are_kept(compare: Callable[..., Any]) -> None:
    captured = compare(Odd(), X, steps=2)
    assert [leaf.name for leaf in captured.graph.leaves_of(LeafKind.PARAMETER)] == list(Odd.NAMES)
    assert [name for name, _ in captured.graph.updates] == ["odd buffer; #"]
    assert "say" not in captured.module.code and "import os" not in captured.module.code


class WithConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = torch.tensor([1.0, 2, 3, 4])
        self.tables = {"row": torch.arange(4)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + torch.tensor([5.0, 6, 7, 8]) + self.tables["row"] + torch.tensor(2.5)


def test_tensors_that_are_no_state_become_constants(compare: Callable[..., Any]) -> None:
    captured = compare(WithConstants(), X, steps=2)
    values = [torch.frombuffer(bytearray(leaf.data), dtype=leaf.type.dtype).tolist()
              for leaf in captured.graph.leaves_of(LeafKind.CONSTANT)]  # fmt: skip
    assert [1.0, 2, 3, 4] in values and [5.0, 6, 7, 8] in values and [0, 1, 2, 3] in values
    assert list(captured.module.state_dict()) == ["layer.weight", "layer.bias"]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * (2 - 1j) + 1j).abs()


def test_complex_numbers_are_kept(compare: Callable[..., Any]) -> None:
    graph = compare(Turned(), X, steps=2).graph
    assert "mul.Tensor(%0, 2-1j)" in str(graph) and "add.Tensor(%1, 1j)" in str(graph)
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_a_constant_of_any_dtype_keeps_its_values(dtype: torch.dtype) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.values = torch.tensor([[1, 0, 3, 0], [0, 7, 0, 9]]).to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ self.values.to(x.dtype).T

    model = Fixed()
    assert torch.equal(to_module(capture(model, X), model)(X), model(X))


def test_a_constant_that_is_a_view_keeps_its_values(compare: Callable[..., Any]) -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.values = torch.arange(24.0).reshape(4, 6).t()[1::2]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.values

    compare(View(), X)


def test_an_empty_constant(compare: Callable[..., Any]) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.nothing = torch.zeros(0, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x), self.nothing])

    compare(Empty(), X)


def test_a_large_constant_is_refused_with_advice() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(5, 2**20)

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() + self.table.sum()

    with pytest.raises(CaptureError, match=r"constant table of 20 MiB.*: tensors this large .*: use register_buffer"):
        capture(Large(), X)


def test_the_constants_of_a_graph_are_no_views_of_the_model() -> None:
    model = WithConstants()
    module = to_module(capture(model, X), model)
    before = module(X)
    model.scale.zero_()
    assert torch.equal(module(X), before)


def test_leaves_are_named_and_typed_as_the_users() -> None:
    graph = capture(Inner(), X)
    assert [str(leaf) for leaf in graph.leaves] == ["param:fc.weight", "param:fc.bias", "input:x"]
    assert graph.name == "Inner" and graph.training
    assert not capture(Inner().eval(), X).training


def test_an_undeclared_operator_is_kept_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.linalg.matrix_exp(self.layer.weight)  # line: rare
            return self.layer(x) @ y @ torch.linalg.matrix_exp(y)

    model = Rare()
    graph = capture(model, X)
    report = not_understood(graph)
    (entry,) = report.opaque
    assert (entry.op, entry.count) == ("linalg_matrix_exp", 2) and not report.complete
    assert entry.source == Source(__file__, here("# line: rare"))
    assert "runs replicated, is never split or rewritten" in str(report)
    assert f"Rare: {report}" in caplog.messages
    assert torch.equal(to_module(graph, model)(X), model(X))


def test_nothing_is_logged_when_all_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    graph = capture(Inner(), X)
    assert str(not_understood(graph)) == "Everything was understood."
    assert [record for record in caplog.records if record.name == "conjoin"] == []


@torch.library.custom_op("conjoin_tests::counted", mutates_args=())
def counted(x: Tensor) -> tuple[Tensor, int]:
    return x.clone(), 3


@counted.register_fake
def _(x: Tensor) -> tuple[Tensor, int]:
    return torch.empty_like(x), 3


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return counted(self.layer(x))[0]


def test_what_is_no_tensor_is_told_as_that() -> None:
    with pytest.raises(CaptureError, match="it returns a int, and a graph holds tensors only"):
        capture(Counts(), torch.randn(3, 4))


FORMS: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "32-bit places": (lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5), out_int32=True), None),
    "32-bit places in a row": (lambda x: torch.searchsorted(torch.linspace(-1, 1, 5), x, out_int32=True), None),
    "a range": (lambda x: torch.arange(0, 0.9, 0.3), None),
    "division": (lambda x: torch.div(x, 2, rounding_mode=None), None),
    "division of whole numbers": (lambda x: torch.div((x > 0).long(), 2, rounding_mode=None), None),
    "no dims": (lambda x: torch.any(x > 0, dim=()), "any.dims"),
    "no dims to sum": (lambda x: torch.nansum(x, dim=()), "nansum"),
    "no dims to squeeze": (lambda x: torch.squeeze(x[:1], ()), "squeeze.dims"),
    "no differences": (lambda x: torch.diff(x, 0), "diff"),
    "whole numbers of floats": (lambda x: torch.arange(4.5, dtype=torch.int64), "arange"),
}


@pytest.mark.parametrize(("function", "opaque"), FORMS.values(), ids=FORMS)
def test_a_form_that_no_declaration_covers_is_opaque_with_the_reason(
    compare: Callable[..., Any], function: Callable[[Tensor], Any], opaque: str | None
) -> None:
    class Formed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x), function(x)

    captured = compare(Formed(), torch.linspace(-1, 1, 12).reshape(3, 4))
    report = not_understood(captured.graph)
    assert [entry.op for entry in report.opaque] == ([] if opaque is None else [opaque])
    assert all("its declaration does not cover this form: " in str(entry) for entry in report.opaque)


def test_another_type_than_export_states_makes_a_call_opaque(
    compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A declaration that is wrong costs the splitting of a call, not the model."""
    wrong = replace(find_spec("cumsum"), dtype=Dtype.INT64)  # type: ignore[type-var]
    monkeypatch.setattr(catalog, "_by_name", lambda: {**_BY_NAME, "cumsum": wrong})
    catalog._judge.cache_clear()
    try:
        captured = compare(Written(lambda m, x: m.layer(x).cumsum(0)), torch.linspace(-1, 1, 12).reshape(3, 4))
        (entry,) = not_understood(captured.graph).opaque
        assert captured.ops() == ["linear", "conjoin::opaque::cumsum"]
        assert entry.op == "cumsum" and "gives i64[3,4] where torch gives f32[3,4]" in entry.reason
        assert parse_graph(str(captured.graph)) == captured.graph
    finally:
        catalog._judge.cache_clear()


_BY_NAME = dict(catalog._by_name())


class Written(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Norms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x.sum(0, keepdim=True), dim=0) * 1.5
        return norm.relu() + norm


def test_a_norm_over_a_dim_of_size_one_has_the_shape_it_has() -> None:
    """Some releases of torch state another one, and of all that is made of it."""
    x = torch.randn(4, 2, 3)
    graph = capture(Norms(), (x,))
    assert [node.types[0].shape for node in graph.nodes if node.op != "sum.dim_IntList"] == [Norms()(x).shape] * 4
    assert not_understood(graph).complete
