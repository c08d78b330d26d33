"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

_MODEL_HELP = "Zoo name (bert-large, bert-large:tiny), file.py:function, module:function, or graph.json."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
_IMPORT_HELP = "Import this module first, for what it registers: operators, strategies, machines."
ImportOption = Annotated[list[str] | None, typer.Option("--import", metavar="MODULE", help=_IMPORT_HELP)]
_PRECISION_HELP = (
    "float32, tf32, bf16, bf16-mixed, fp16-mixed or fp8-mixed; bf16-mixed,reduce=bf16 sums gradients in it, too. "
    "Without it as the model is."
)
PrecisionOption = Annotated[str | None, typer.Option("--precision", help=_PRECISION_HELP)]
LengthOption = Annotated[
    int | None, typer.Option("--length", min=1, help="Tokens of a sequence; of a function its parameter length.")
]
_SIZE_HELP = "Another size of the model, as layers=4; may be given several times. Of a function a parameter."
SizeOption = Annotated[list[str] | None, typer.Option("--size", metavar="NAME=N", help=_SIZE_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
