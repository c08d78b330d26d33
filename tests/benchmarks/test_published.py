"""Published throughput: every row says where it is from and what it is taken as, and becomes a prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import published
from benchmarks.published import MACHINES, PARTS, Row, judged, kendall, predicted, read_rows, summary
from benchmarks.published_models import build
from conjoin.cost import CostModel
from conjoin.machine import parse_machine
from conjoin.search import read_request
from conjoin.sim import OPTIMIZER_COPIES

ROWS, MODELS = read_rows()
TINY = {
    "gpt": {"family": "gpt-before-flash", "sizes": {"layers": 2, "width": 16, "heads": 4, "vocabulary": 32}},
    "llama": {
        "family": "llama",
        "sizes": {"layers": 1, "width": 16, "feed_forward": 24, "heads": 4, "kv_heads": 2, "vocabulary": 32},
    },
    "bert": {"family": "bert", "sizes": {"layers": 1, "width": 16, "heads": 4, "vocabulary": 32}},
}


def tiny_row(**changed: object) -> Row:
    known = {
        "name": "here", "url": "https://example.org", "date": "2026", "gpu": "H100", "gpus": 8, "machine": "dgx-h100",
        "model": "gpt", "batch": 32, "precision": "bfloat16", "strategy": "fsdp", "optimizer": "adamw",
        "published": 1.0, "unit": "ms", "length": 8,
    }  # fmt: skip
    return Row(**{**known, **changed})  # type: ignore[arg-type]


def test_every_row_is_well_formed() -> None:
    assert len({row.title for row in ROWS}) == len(ROWS) > 60
    for row in ROWS:
        assert row.url.startswith("https://") and row.date[:2] == "20" and row.name, row.title
        assert row.published > 0 and row.seconds > 0 and row.gpus > 0 and row.batch > 0, row.title
        assert row.model in MODELS and row.gpu in parse_machine(row.machine, MACHINES).device_type(0).name, row.title
        assert row.differs or row.inexpressible, row.title
        assert row.batch % (row.accumulate * row.gpus) == 0 or row.inexpressible, row.title


def test_what_counts_can_be_said() -> None:
    counted = [row for row in ROWS if not row.inexpressible]
    assert {"V100", "A100", "H100"} == {row.gpu for row in counted} and len(counted) > 40
    for row in counted:
        assert read_request(row.request).micro == row.accumulate and row.optimizer in OPTIMIZER_COPIES, row.title
        assert row.precision.split()[-1] in ("float32", "bfloat16", "float16"), row.title


@pytest.mark.parametrize(
    ("model", "length", "parameters"),
    [
        # as the sources print them
        ("mpt-125m", 2048, 125311488), ("mpt-350m", 2048, 355985408), ("mpt-760m", 2048, 760470528),
        ("mpt-1b", 2048, 1315950592), ("mpt-3b", 2048, 2651837440), ("mpt-7b", 2048, 6658859008),
        ("mpt-13b", 2048, 12853954560), ("mpt-30b", 2048, 29975214080),
    ],
)  # fmt: skip
def test_models_have_the_published_size(model: str, length: int, parameters: int) -> None:
    made, batch, _ = build(MODELS[model], length, 1)
    assert sum(parameter.numel() for parameter in made.parameters()) == parameters
    assert batch[0].device == torch.device("meta")


@pytest.mark.parametrize(
    "row",
    [
        tiny_row(recompute="every-2", accumulate=2, precision="mixed bfloat16"),
        tiny_row(recompute="selective", strategy="hsdp", gpus=16),
        tiny_row(model="llama", precision="bf16-mixed,reduce=bf16", strategy="fsdp+context:cp=2,ring"),
        tiny_row(model="bert", precision="autocast float16", strategy="data-parallel", unit="samples/s"),
        tiny_row(gpus=1, precision="float32", gpu="V100", machine="dgx-1"),
    ],
    ids=lambda row: row.title,
)
def test_a_row_becomes_a_prediction(row: Row) -> None:
    costs = CostModel()
    found = judged(row, predicted(row, TINY, costs), costs)
    assert found["ratio"] == found["predicted_seconds"] / found["published_seconds"] > 0
    assert found["predicted_seconds"] == pytest.approx(sum(found["parts"][name] for name in PARTS))
    assert (found["parts"]["recompute"] > 0) == bool(row.recompute) and found["products_at_peak"] > 0


def test_units_of_one_step() -> None:
    step = tiny_row(published=500.0, unit="ms").seconds
    assert step == 0.5 == tiny_row(published=64.0, unit="samples/s").seconds
    assert step == tiny_row(published=64.0, unit="tokens/s/GPU").seconds
    assert step == tiny_row(published=2.0, unit="TFLOP/s/GPU", step_teraflops=8.0).seconds
    with pytest.raises(ValueError, match="no such unit"):
        _ = replace(tiny_row(), unit="furlongs").seconds


def test_the_summary_counts_what_was_predicted() -> None:
    rows = [
        {"gpu": "H100", "title": str(ratio), "ratio": ratio, "predicted_seconds": ratio * i, "published_seconds": i,
         "predicted_mfu": 1 / ratio, "published_mfu": 1.0 * i}
        for i, ratio in enumerate((0.5, 1.0, 1.2), 1)
    ]  # fmt: skip
    (found,) = summary([*rows, {"gpu": "H200", "title": "float8"}])
    assert (found["rows"], found["worst"], found["median_error"]) == (3, "0.5", 0.2)
    assert kendall(rows, "seconds") == 1.0 and kendall(rows, "mfu") == -1.0


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [tiny_row(), tiny_row(precision="float8", inexpressible="float8")]
    monkeypatch.setattr(published, "read_rows", lambda: (rows, TINY))
    output = tmp_path / "published.json"
    assert published.main(["--output", str(output)]) == 0
    data = json.loads(output.read_text())
    assert [row["expressible"] for row in data["rows"]] == [True, False] and data["summary"][0]["rows"] == 1
    assert "float8" in capsys.readouterr().out
