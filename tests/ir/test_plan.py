"""Plans as files: round trips, edits by hand, and damage of every kind told in three sentences."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import PlanError
from conjoin.ir import (
    REGATHER,
    MemoryAction,
    Plan,
    Substitution,
    check_plan,
    load_plan,
    plan_fingerprint,
    plan_from_json,
    plan_to_json,
    plan_to_text,
    recompute_actions,
    recomputed_segments,
)
from conjoin.machine import Axis, Mesh
from tests.ir.meshes import megatron_plan
from tests.ir.wording import assert_three_sentences

PROFILE = settings.get_profile("ir")
FULL = replace(
    megatron_plan(),
    memory=(MemoryAction(REGATHER, "fc2.weight"),),
    substitutions=(Substitution("fuse", "fc1", "z3:1f3c"),),
)


def document() -> dict[str, Any]:
    return json.loads(plan_to_text(FULL))  # type: ignore[no-any-return]


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(PlanError) as told:
        action()
    assert_three_sentences(told.value)
    return str(told.value)


def test_a_plan_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    FULL.save(path)
    assert load_plan(path) == FULL
    assert plan_to_text(load_plan(path)) == path.read_text()
    assert plan_fingerprint(load_plan(path)) == plan_fingerprint(FULL)
    assert str(load_plan(path)) == "megatron(degree=2) plan of mlp for 4 ranks (d:2 t:2)"


def test_the_file_has_one_line_for_every_operator() -> None:
    lines = plan_to_text(FULL).splitlines()
    assert '  "%4: f32[8,6]{d:S(0),t:S(1)} = relu(%3)  @ \\"mlp.py\\":4",' in lines
    assert lines[1:4] == [' "format": "conjoin.plan",', ' "version": 1,', ' "strategy": "megatron(degree=2)",']


def edited(tmp_path: Path, old: str, new: str) -> Path:
    path = tmp_path / "plan.json"
    text = plan_to_text(FULL)
    assert text.count(old) == 1, text.count(old)
    path.write_text(text.replace(old, new))
    return path


def test_a_legal_edit_by_hand_is_taken(tmp_path: Path) -> None:
    """The second weight stored whole along d: what gathered it is taken out by hand."""
    path = edited(tmp_path, "param:fc2.weight f32[3,6]{t:S(1),d:S(1)}", "param:fc2.weight f32[3,6]{t:S(1)}")
    gathered = "conjoin::combine(param:fc2.weight, dim=1, axes=[\\\"d\\\"])"
    assert path.read_text().count(gathered) == 1
    path.write_text(path.read_text().replace(gathered, "clone(param:fc2.weight)"))
    plan = load_plan(path)
    assert "clone(param:fc2.weight)" in str(plan.graph)
    assert plan_fingerprint(plan) != plan_fingerprint(FULL)


def test_an_illegal_edit_is_refused_with_line_and_reason(tmp_path: Path) -> None:
    path = edited(tmp_path, "%4: f32[8,6]{d:S(0),t:S(1)} = relu", "%4: f32[8,6]{d:S(0)} = relu")
    message = refused(lambda: load_plan(path))
    assert message.startswith("The plan of mlp on the mesh d:2 t:2 is not legal: 2 faults found.")
    assert "%4 relu at mlp.py:4: on axis t S(1) -> I is not legal; these operands give S(1)" in message
    assert "%9 linear at mlp.py:5 (fc2): on axis t I, S(1), P -> P is not legal" in message


def test_a_fault_is_named_as_in_the_file(tmp_path: Path) -> None:
    """An editor need not count: a line put in by hand has any number that is free."""
    path = edited(tmp_path, "%4: f32[8,6]{d:S(0),t:S(1)} = relu(%3)", "%77: f32[8,6]{d:S(0)} = relu(%3)")
    path.write_text(path.read_text().replace("(%4", "(%77"))
    message = refused(lambda: load_plan(path))
    assert "%77 relu at mlp.py:4: on axis t" in message and "%9 linear at mlp.py:5 (fc2)" in message


def test_a_pickled_plan_is_the_same_again() -> None:
    again = pickle.loads(pickle.dumps(FULL))
    assert again == FULL and plan_to_text(again) == plan_to_text(FULL)
    assert all(one is other for one, other in zip(again.graph.nodes, FULL.graph.nodes, strict=True))


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    message = refused(lambda: load_plan(edited(tmp_path, "= relu(%3)", "= relu(%99)")))
    assert "Line 13 of the graph cannot be read" in message and "%99" in message


def test_an_operator_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refused(lambda: load_plan(edited(tmp_path, "= relu(%3)", "= relux(%3)")))
    assert "relux" in message


def test_at_most_eight_faults_are_listed() -> None:
    text = plan_to_text(FULL).replace("d:S(0)", "t:S(0)")
    message = refused(lambda: check_plan(plan_from_json(json.loads(text))))
    assert "more" in message.splitlines()[-1] or len(message.splitlines()) <= 9


def test_another_mesh_is_refused() -> None:
    small = replace(FULL, mesh=Mesh((Axis("d", 2),)))
    assert "there is no axis t: the mesh is d:2" in refused(lambda: check_plan(small))


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


AXIS = {"axis": "d", "size": 2, "between_nodes": True}
MALFORMED: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("no format", lambda d: d.pop("format"), "This is not a plan"),
    ("other format", _set("format", to="conjoin.graph"), "This is not a plan"),
    ("other version", _set("version", to=2), "another format version than 1"),
    ("true as version", _set("version", to=True), "another format version than 1"),
    ("unknown key", _set("colour", to=1), "'colour' is unknown"),
    *((f"no {key}", lambda d, key=key: d.pop(key), f"{key!r} is missing")  # type: ignore[misc]
      for key in ("strategy", "model", "machine", "mesh", "stages", "schedule", "memory", "predictions", "graph",
                  "substitutions")),
    ("strategy", _set("strategy", to=None), "strategy is not text"),
    *((f"strategy {i}", _set("strategy", to=text), "strategy is not one line of printable characters")
      for i, text in enumerate(("\ud800", "a\nb", "\x1b[31m"))),
    ("model", _set("model", to="mlp"), "does not have exactly name, fingerprint"),
    ("model's field", _set("model", to={"name": "a", "fingerprint": "b", "c": "d"}), "does not have exactly"),
    ("model's name", _set("model", "name", to=3), "name is not text"),
    ("model's line", _set("model", "name", to="a\nb"), "name is not one line of printable characters"),
    ("prediction's line", _set("predictions", to={"\x1b": 1}), "the name of a prediction is not one line"),
    ("long fingerprint", _set("machine", "fingerprint", to="a" * 200), "the fingerprint of the machine is too long"),
    ("mesh", _set("mesh", to={}), "mesh is not a list"),
    ("axis", _set("mesh", 0, to={**AXIS, "links": 2}), "is not an axis of the mesh"),
    ("axis' size", _set("mesh", 0, to={**AXIS, "size": 1}), "'d' of size 1 is not an axis"),
    ("huge axis", _set("mesh", 0, to={**AXIS, "size": 10**30}), "is not an axis of the mesh"),
    ("true as size", _set("mesh", 0, to={**AXIS, "size": True}), "is not an axis of the mesh"),
    ("axis' name", _set("mesh", 0, to={**AXIS, "axis": "a b"}), "is not an axis of the mesh"),
    ("axis twice", _set("mesh", 1, to=AXIS), "the mesh has an axis twice"),
    ("many axes", _set("mesh", to=[{**AXIS, "axis": f"a{i}"} for i in range(25)]), "the mesh has an axis twice, or"),
    ("stages", _set("stages", to=[{"name": "a", "ranks": [0]}]), "it has several stages"),
    ("schedule", _set("schedule", to="1f1b"), "it has several stages"),
    ("memory", _set("memory", to=[1]), "does not have exactly action, tensor"),
    ("action", _set("memory", 0, "action", to="burn"), "there is no memory action 'burn'; known are regather"),
    ("tensor", _set("memory", 0, "tensor", to="fc9"), "regather names 'fc9', which is no parameter"),
    ("substitution", _set("substitutions", 0, to={"name": "a"}), "does not have exactly name, where, proof"),
    ("predictions", _set("predictions", to=[]), "predictions are not named figures"),
    ("prediction", _set("predictions", to={"a": "b"}), "the prediction 'a' is not a number"),
    ("true as figure", _set("predictions", to={"a": True}), "the prediction 'a' is not a number"),
    ("huge figure", _set("predictions", to={"a": 10**400}), "The plan is malformed"),
    *((f"bundles of {size}", _set("bundle_bytes", to=size), "a number from 1 to")
      for size in (0, -5, True, 2.5, "25 MiB", 2**60, None)),
    ("graph", _set("graph", to="graph"), "graph is not a list"),
    ("a line", _set("graph", 3, to=7), "a line of the graph is not text"),
    ("empty graph", _set("graph", to=[]), "The graph in the plan cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "why"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_what_is_malformed_is_told(change: Callable[[dict[str, Any]], None], why: str) -> None:
    data = document()
    change(data)
    message = refused(lambda: check_plan(plan_from_json(data)))
    assert why in message, message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=4), items, max_size=3),
    max_leaves=6,
)
WORDS: st.SearchStrategy[Any] = st.sampled_from([
    "", "d", "t", "{d:S(0)}", "%0", "f32[2]", "d:B", 0, 1, 2, -1, 2**63, 10**400, 1.5, True, None, [], {},
    "%3: f32[8,6]{t:S(0),d:S(0)} = relu(%2)", '%3: f32[8,6] = conjoin::partition(%2, dim=9, axes=["d", "d"])',
    '%3: f32[8,6]{d:S(0)} = conjoin::combine(%2, dim=-1, axes=none)', "param:a f32[2]{zz:P}", "conjoin.plan",
    "returns [%0] in null loss 0",
])  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A plan in which a few places hold something else, were lost, doubled or cut short."""
    data = document()
    for _ in range(draw(st.integers(1, 3))):
        place: Any = data
        key: Any = draw(st.sampled_from(sorted(data))) if data else None
        while key is not None and isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if key is None:
            break
        kind = draw(st.sampled_from(["replace", "word", "lose", "cut", "layout"]))
        if kind == "lose":
            del place[key]
        elif kind == "layout" and isinstance(place[key], str):
            edits = ("d:S(0)", "t:S(0)"), ("t:", "d:"), ("S(1)", "S(7)"), ("B", "P"), ("%", "%1")
            old, new = draw(st.sampled_from(edits))
            place[key] = place[key].replace(old, new)
        elif kind == "cut" and isinstance(place[key], str | list):
            place[key] = place[key][: draw(st.integers(0, 40))]
        else:
            place[key] = copy.deepcopy(draw(WORDS)) if kind == "word" else draw(JSON)
    return data


def check(action: Callable[[], Plan]) -> None:
    try:
        plan = action()
    except PlanError as error:
        assert_three_sentences(error)
        return
    assert plan_from_json(plan_to_json(plan)) == plan


@given(damaged())
@settings(PROFILE, max_examples=120)
def test_a_damaged_plan_is_refused_or_read(data: Any) -> None:
    check(lambda: check_plan(plan_from_json(data)))


@given(JSON)
@settings(PROFILE)
def test_any_data(data: Any) -> None:
    check(lambda: check_plan(plan_from_json(data)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans") / "plan.json"


@given(content=st.binary() | st.integers(0, 10**5).map(lambda n: plan_to_text(FULL).encode()[: n % 3000]))
@settings(PROFILE)
def test_any_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    check(lambda: load_plan(file))


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_text(FULL).replace(' "version": 1,', ' "version": 1,\n "strategy": "other",'))
    assert "the key 'strategy' stands twice in one object" in refused(lambda: load_plan(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "could not be read" in refused(lambda: load_plan(tmp_path / "none.json"))
    assert "could not be read" in refused(lambda: load_plan(tmp_path))
    assert "could not be written" in refused(lambda: FULL.save(tmp_path / "none" / "plan.json"))


def test_a_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    FULL.save(path)
    before = path.read_text()

    def broken(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", broken)
    message = refused(lambda: replace(FULL, strategy="other").save(path))
    assert "No space left on device" in message
    assert path.read_text() == before and [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_the_fingerprint_is_of_what_runs() -> None:
    own = plan_fingerprint(FULL)
    assert plan_fingerprint(replace(FULL, predictions=(("seconds_per_step", 9.0),), strategy="by hand")) == own
    others = [
        replace(FULL, memory=()),
        replace(FULL, mesh=Mesh((Axis("d", 2, True), Axis("t", 3)))),
        replace(FULL, model=replace(FULL.model, fingerprint="abd")),
    ]
    found = {own, *map(plan_fingerprint, others)}
    text = plan_to_text(FULL)
    for i in (i for i, letter in enumerate(text) if text.startswith("S(", i)):
        found.add(plan_fingerprint(plan_from_json(json.loads(text[:i] + "S(3" + text[i + 3 :]))))
    assert len(found) == 1 + len(others) + text.count("S(")


AGAIN = replace(FULL, memory=(*FULL.memory, *recompute_actions(FULL.graph, [(0, 1)])))


def recomputing(*names: str) -> dict[str, Any]:
    memory = [{"action": "recompute", "tensor": name} for name in names]
    return {**document(), "memory": memory}


def test_segments_to_recompute_are_named_by_what_they_make() -> None:
    plan = plan_from_json(plan_to_json(AGAIN))
    assert plan == AGAIN and recomputed_segments(plan) == ((0, 1),)
    old = {**document(), "memory": []}
    assert recomputed_segments(check_plan(plan_from_json(old))) == (), "a plan without segments"
    assert plan_fingerprint(plan_from_json(old)) != plan_fingerprint(plan)


def test_an_editor_may_number_as_it_likes() -> None:
    """What a segment is called in the text that was read is what counts; it is then called by the printed numbers."""
    data = plan_to_json(AGAIN)
    (name,) = (entry["tensor"] for entry in data["memory"] if entry["action"] == "recompute")
    shifted = re.sub(r"%(\d+)", lambda found: f"%{int(found[1]) + 100}", json.dumps(data))
    plan = check_plan(plan_from_json(json.loads(shifted)))
    assert recomputed_segments(plan) == ((0, 1),)
    assert [a.tensor for a in plan.memory if a.action == "recompute"] == [name]


@pytest.mark.parametrize("names", [("%999..%1000",), ("fc1.weight",), ("%5",), ("%4..%0",), ("%0..%99999999999999",)])
def test_what_is_no_segment_is_refused(names: tuple[str, ...]) -> None:
    refused(lambda: plan_from_json(recomputing(*names)))


def test_segments_have_no_operators_in_common() -> None:
    (name,) = (action.tensor for action in AGAIN.memory if action.action == "recompute")
    assert "in common" in refused(lambda: plan_from_json(recomputing(name, name)))
    doubled = replace(AGAIN, memory=(*AGAIN.memory, MemoryAction("recompute", name)))
    assert "in common" in refused(lambda: check_plan(doubled))


def test_the_size_of_bundles_is_part_of_the_plan() -> None:
    plan = plan_from_json(document())
    other = replace(plan, bundle_bytes=3 * 2**20)
    assert "bundle_bytes" not in plan_to_json(plan) and plan_to_json(other)["bundle_bytes"] == 3 * 2**20
    assert plan_from_json(plan_to_json(other)) == other and plan_fingerprint(other) != plan_fingerprint(plan)
