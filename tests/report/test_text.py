"""Numbers and tables for people."""

from __future__ import annotations

import pytest

from conjoin.report import Inspection, OperatorSummary, format_bytes, format_count, inspection_summary, inspection_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"),
        (3.5 * 2**30, "3.5 GiB"), (2**40, "1.0 TiB"), (2**50, "1.0 PiB"), (2**61, "2048.0 PiB"), (-2048, "-2.0 KiB"),
    ],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1.00 k"), (25_557_032, "25.56 M"), (8.2e9, "8.20 G"), (1e12, "1.00 T"),
        (1e15, "1.00 P"), (1e18, "1.00 E"), (1e22, "10000.00 E"),
    ],
)  # fmt: skip
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


def inspection(**changes: object) -> Inspection:
    operators = (
        OperatorSummary("linear", 2, 4e9, 2**20, ("P", "S(0)"), False, False),
        OperatorSummary("batch_norm", 1, 5.0, 12, ("S(1)",), False, True),
        OperatorSummary("nonzero", 1, 0.0, 8, (), True, False),
        OperatorSummary("t", 1, 0.0, 0, (), False, False),
    )
    facts = {
        "name": "net", "training": True, "fingerprint": "0123456789abcdef0123", "num_nodes": 5, "num_parameters": 1234,
        "parameter_bytes": 4936, "num_trainable": 1234, "buffer_bytes": 0, "input_bytes": 64, "forward_flops": 4e9,
        "activation_bytes": 2048, "peak_bytes": 1024, "operators": operators,
    }  # fmt: skip
    return Inspection(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_table_has_a_row_for_every_operator() -> None:
    assert inspection_table(inspection()) == [
        ("linear", "2", "4.00 G", "1.0 MiB", "P S(0)"),
        ("batch_norm", "1", "5", "12 B", "S(1) +"),
        ("nonzero", "1", "0", "8 B", "opaque: replicated"),
        ("t", "1", "0", "0 B", "–"),
    ]


def test_the_summary_has_a_line_for_every_total() -> None:
    assert inspection_summary(inspection()) == [
        ("mode", "train"),
        ("operators", "5 calls of 4 kinds, 1 opaque"),
        ("parameters", "1,234 (4.8 KiB)"),
        ("buffers", "0 B"),
        ("inputs", "64 B"),
        ("forward", "4.00 Gflop"),
        ("activations", "2.0 KiB kept for backward, 1.0 KiB if none is kept"),
        ("fingerprint", "0123456789abcdef"),
    ]
    other = dict(inspection_summary(inspection(training=False, num_trainable=1000, forward_flops=12.0)))
    assert (other["mode"], other["forward"]) == ("eval", "12 flop")
    assert other["parameters"] == "1,234 (4.8 KiB), 234 frozen"
