"""Literals: text and JSON forms give back the same value, of the same type."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from conjoin.ir import is_literal
from conjoin.ir.literals import literal_from_json, literal_text, literal_to_json, parse_word
from conjoin.ir.nodes import typed_key
from tests.ir.graphs import LITERALS


@given(LITERALS)
@settings(settings.get_profile("ir"))
def test_json_gives_every_literal_back(value: Any) -> None:
    assert is_literal(value)
    again = literal_from_json(json.loads(json.dumps(literal_to_json(value), allow_nan=False)))
    assert typed_key(again) == typed_key(value)
    assert literal_text(again) == literal_text(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", None),
        ("true", True),
        ("0", 0),
        ("-9223372036854775808", -(2**63)),
        ("9223372036854775807", 2**63 - 1),
        ("-0.0", -0.0),
        ("1e-05", 1e-5),
        ("1e+300", 1e300),
        ("-inf", -math.inf),
        ("nan", math.nan),
        ("1j", 1j),
        ("-0j", complex(0.0, -0.0)),
        ("-0-0j", complex(-0.0, -0.0)),
        ("-1.5+1e-05j", -1.5 + 1e-5j),
        ("-inf+nanj", complex(-math.inf, math.nan)),
        ("bf16", torch.bfloat16),
        ("channels_last", torch.channels_last),
    ],
)
def test_words(text: str, value: Any) -> None:
    assert typed_key(parse_word(text)) == typed_key(value) and literal_text(value) == text


@pytest.mark.parametrize(
    "word",
    [
        "", "-", "9223372036854775808", "9" * 10_000, "1_0", "1e", "0x10", "infinity", "-nan", "f33", "None", "٣", "j",
        "1+2", "1jj", "infinfj",
    ],
)  # fmt: skip
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError):
        parse_word(word)


@pytest.mark.parametrize("value", [2**63, {"word": 3}, {"word": "f32", "more": 1}, {"name": "f32"}, {}, [{}]])
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        literal_from_json(value)


@pytest.mark.parametrize("value", [[1], {"a": 1}, torch.zeros(1), (1, (torch.device("cpu"),))])
def test_other_objects_are_no_literals(value: Any) -> None:
    assert not is_literal(value)
    with pytest.raises(TypeError):
        literal_text(value)
