"""Strangers' files: whatever they hold, reading gives a graph or GraphError, soon, and so does verifying."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conjoin.errors import GraphError
from conjoin.ir import Graph, find_faults, load_graph, parse_graph, verify
from conjoin.ir.graph_file import graph_from_json, graph_to_json
from tests.ir.graphs import GOLDEN, random_graphs
from tests.ir.wording import assert_three_sentences
from tests.zoo.graphs import captured

PROFILE = settings.get_profile("ir")


@cache
def texts() -> tuple[str, ...]:
    graphs = [captured(name) for name in ("lenet", "dlrm")]
    return (GOLDEN, *map(str, graphs))


@cache
def documents() -> tuple[Any, ...]:
    return tuple(graph_to_json(parse_graph(text)) for text in texts())


def check(read: Callable[[], Graph]) -> None:
    """Reading gives a graph that can be written and judged, or the one error there is for it."""
    try:
        graph = read()
    except GraphError as error:
        assert_three_sentences(error)
        return
    assert parse_graph(str(graph)) == graph
    for fault in find_faults(graph):
        assert str(fault)
    try:
        assert verify(graph) is graph
    except GraphError as error:
        assert_three_sentences(error)


PLACES = st.integers(0, 10**6)
STRANGE = st.sampled_from([
    "%", "[", "]", "(", ")", ", ", '"', "\\", "=", "@", "#1", " pinned", "-", "0", "99999999999", "1e999", "nan",
    "none", "true", "f32", "\n", "\u2028", "\x00", "é", "input:x", "%1", "relu", "add_.Tensor", "from_file",
    "{x:S(0)}", "b64:",
])  # fmt: skip


@st.composite
def damaged_text(draw: st.DrawFn) -> str:
    """A graph in which a few characters or lines were lost, doubled, swapped or replaced."""
    text = draw(st.sampled_from(texts()))
    for _ in range(draw(st.integers(1, 3))):
        by_line = draw(st.booleans())
        parts = text.splitlines(keepends=True) if by_line else list(text)
        if not parts:
            break
        at, other = draw(PLACES) % len(parts), draw(PLACES) % len(parts)
        match draw(st.sampled_from(["lose", "double", "swap", "replace", "cut"])):
            case "lose":
                del parts[at]
            case "double":
                parts.insert(other, parts[at])
            case "swap":
                parts[at], parts[other] = parts[other], parts[at]
            case "replace":
                parts[at] = draw(STRANGE)
            case "cut":
                del parts[min(at, other) : max(at, other)]
        text = "".join(parts)
    return text


@given(damaged_text())
@settings(PROFILE, max_examples=120)
def test_damaged_text(text: str) -> None:
    check(lambda: parse_graph(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=4), items, max_size=3),
    max_leaves=6,
)
WORDS: st.SearchStrategy[Any] = st.sampled_from([
    {"value": 0}, {"value": 3}, {"leaf": "input:x"}, {"word": "f32"}, {"word": "inf"}, [], {}, "f32[2]",
    "f32[4,3]{x:P}", "relu", "split.Tensor", "add_.Tensor", "from_file", 2**63, -(2**63), 10**18, 1.5, True, None, "",
])  # fmt: skip


@st.composite
def damaged_json(draw: st.DrawFn) -> Any:
    """A document in which a few places hold something else: any JSON, or what belongs elsewhere."""
    data = copy.deepcopy(draw(st.sampled_from(documents())))
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(_places(data))
        match draw(st.sampled_from(["replace", "word", "lose", "move"])):
            case "replace":
                holder[key] = draw(JSON)
            case "word":
                holder[key] = copy.deepcopy(draw(WORDS))
            case "lose":
                del holder[key]
            case "move":
                source, name = draw(_places(data))
                holder[key] = copy.deepcopy(source[name])
    return data


@st.composite
def _places(draw: st.DrawFn, data: Any) -> tuple[Any, Any]:
    """A list or object inside the data and a key of it, at any depth."""
    place, key = data, draw(st.sampled_from(sorted(data)))
    while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
        place = place[key]
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    return place, key


@given(damaged_json())
@settings(PROFILE, max_examples=120)
def test_damaged_json(data: Any) -> None:
    check(lambda: graph_from_json(data))


@given(JSON)
@settings(PROFILE)
def test_any_json(data: Any) -> None:
    check(lambda: graph_from_json(data))
    check(lambda: graph_from_json({**documents()[0], "graph": data}))


@given(st.text())
@example("graph")
@example('graph "g" eval\nreturns [')
@settings(PROFILE)
def test_any_text(text: str) -> None:
    check(lambda: parse_graph(text))
    check(lambda: parse_graph(f'graph "g" eval\n{text}\nreturns [] in null'))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "graph.json"


@given(content=st.binary() | damaged_text().map(str.encode) | st.builds(json.dumps, damaged_json()).map(str.encode))
@settings(PROFILE)
def test_any_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    check(lambda: load_graph(file))


@given(random_graphs())
@settings(PROFILE)
def test_any_graph_can_be_verified(graph: Graph) -> None:
    faults = find_faults(graph)
    assert all(fault.where and fault.what for fault in faults)


LINES = (
    "split.Tensor(input:x, split_size=1)",
    "chunk(input:x, chunks=999999999999)",
    "tensor_split.sections(input:x, sections=999999999999)",
    "unbind.int(input:x)",
    "unsafe_split.Tensor(input:x, split_size=1)",
    "hsplit.int(input:x, sections=999999999999)",
    "repeat(input:x, repeats=[999999999999])",
    "arange(end=999999999999)",
    "diff(input:x, n=999999999)",
    "item(input:x)",
    "is_same_size(input:x, input:x)",
    "size.int(input:x, dim=0)",
    "einsum(\"" + "a" * 10_000 + "\", [input:x])",
    "cat([" + ", ".join(["input:x"] * 5_000) + "])",
    "permute(input:x, dims=[0, 0, 0])",
    "reshape(input:x, shape=[-1, -1])",
    "reshape(input:x, shape=[0, 3.5, none])",
    "sum.dim_IntList(input:x, dim=[9999999999])",
    "conv2d(input:x, input:x, stride=[0, 0], groups=0)",
    "max_pool2d(input:x, kernel_size=[0, 0], stride=[0, 0])",
    "layer_norm(input:x, normalized_shape=\"all\")",
    "add.Tensor(1, 2)",
    "pow.Scalar(2, input:x)",
    "_to_copy(input:x, dtype=channels_last)",
    "rand(size=[999999999999999999])",
)  # fmt: skip


@pytest.mark.parametrize("call", LINES, ids=[line[:30] for line in LINES])
def test_a_line_that_asks_for_too_much_is_a_fault(call: str) -> None:
    head = 'graph "g" eval\ninput:x f32[999999999999]\ntakes [input:x] in null\n'
    graph = parse_graph(f"{head}%0: f32[2] = {call}\nreturns [%0] in null")
    assert len(find_faults(graph)) == 1


@pytest.mark.parametrize("length", [10, 100_000])
def test_reading_takes_time_proportional_to_the_text(length: int) -> None:
    name = "\\\\" * length
    for text in (f'graph "{name}', f'input:"{name} f32[]', f"param:{'a.' * length}", "%0: " * length, "[" * length):
        with pytest.raises(GraphError):
            parse_graph(text)
