"""Strangers' files: whatever they hold, reading gives a machine or UsageError, soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conjoin.errors import UsageError
from conjoin.machine import Machine
from tests.ir.wording import assert_three_sentences

PROFILE = settings.get_profile("machine")
TEXT = Machine.preset("summit", nodes=4).to_toml()
PLACES = st.integers(0, 10**6)
STRANGE = st.sampled_from([
    "=", '"', "'", '"""', "[", "]", "[[", "{", "}", "#", "\n", "\r", "\x00", "\\", "\\u", ".", ",", "-", "0", "0x",
    "1e999", "1e99999999999999999999", "nan", "inf", "true",
    "99999999999999999999", "1979-05-27T07:32:00Z", "é", "\u2028", "name", "a.b",
])  # fmt: skip


def check(text: str) -> None:
    """Reading gives a machine that can be written again, or the one error there is for it."""
    try:
        machine = Machine.from_toml(text)
    except UsageError as error:
        assert_three_sentences(error)
        return
    assert Machine.from_toml(machine.to_toml()) == machine


@st.composite
def damaged_text(draw: st.DrawFn) -> str:
    """A machine in which a few characters or lines were lost, doubled, swapped or replaced."""
    text = TEXT
    for _ in range(draw(st.integers(1, 3))):
        parts = text.splitlines(keepends=True) if draw(st.booleans()) else list(text)
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


def test_the_undamaged_text_is_read() -> None:
    assert Machine.from_toml(TEXT) == Machine.preset("summit", nodes=4)


@given(damaged_text())
@settings(PROFILE, max_examples=150)
def test_damaged_text(text: str) -> None:
    check(text)


@given(st.text() | st.lists(STRANGE, max_size=12).map("".join))
@example('"' * 10_000)
@example("[a]\n" * 2)
@example("a = {" * 1000)
@example("[" + "a." * 900 + "a]\n" + "\n".join(f"b{i} = 1" for i in range(900)))
@settings(PROFILE, max_examples=100)
def test_any_text(text: str) -> None:
    check(text)
    check(f"{TEXT}{text}")


VALUES = st.recursive(
    st.sampled_from(["true", "1", "-1", "0", "1.5", "nan", '""', '"cuda"', "0xffffffffffffffffff", "07:32:00", "2**3"])
    | st.integers().map(str)
    | st.floats().map(str),
    lambda items: (
        st.lists(items, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.dictionaries(st.sampled_from(["a", "b", "name"]), items, max_size=2).map(
            lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
        )
    ),
    max_leaves=5,
)
KEYS_WITHIN = {
    "node.link": ("between", "gigabytes_per_second", "latency_microseconds", "kind", "shared", "duplex"),
    "node": ("name", "count", "devices", "switches", "link"),
    "device_type": (
        "name", "memory_gigabytes", "memory_gigabytes_per_second", "teraflops", "efficiency", "host_factor",
    ),
    "axes": ("name", "size", "between_nodes"),
    "fit": ("kind", "axes", "latency_microseconds", "seconds_per_gigabyte", "r_squared", "break_bytes"),
}
KEYS = ("format", "version", "name", "num_nodes", "devices_per_node", "device", "description", "links", '"a b"', "a.b")


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
@settings(PROFILE, max_examples=100)
def test_any_values(entries: dict[str, str]) -> None:
    head, speeds = TEXT.split("\n\n", 1)
    good = dict(line.split(" = ", 1) for line in head.splitlines())
    lines = "\n".join(f"{key} = {value}" for key, value in {**good, **entries}.items())
    check(lines)
    check(f"{lines}\n{speeds}")


@given(st.data())
@settings(PROFILE, max_examples=100)
def test_any_speeds(data: st.DataObject) -> None:
    """Any value at any key of any table, next to a good machine or instead of its own."""
    table = data.draw(st.sampled_from(sorted(KEYS_WITHIN)))
    keys = st.sampled_from((*KEYS_WITHIN[table], "typo"))
    texts = st.sampled_from(['"0"', '"network"', '"V100-SXM2-16GB"', '["0", "network"]', '["d0"]', "2", "true", "{}"])
    entries = data.draw(st.dictionaries(keys, VALUES | texts, max_size=5))
    lines = "\n".join(f"{key} = {value}" for key, value in entries.items())
    head = TEXT.split("\n\n", 1)[0]
    check(f"{TEXT}\n[[{table.replace('node.link', 'link')}]]\n{lines}\n")
    check(f"{head}\n\n[[{table}]]\n{lines}\n")
    inline = ", ".join(f"{key} = {value}" for key, value in entries.items())
    check(TEXT.replace("link = [", f"link = [{{{inline}}},"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "machine.toml"


@given(content=st.binary() | damaged_text().map(str.encode))
@settings(PROFILE)
def test_any_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        Machine.load(file)
    except UsageError as error:
        assert_three_sentences(error)
