"""AutoDDL's Figures 9 and 10: VGG13 and GPTs on Piz Daint and on two servers of A100, against the best Megatron.

    python -m benchmarks.autoddl_fig9_10                    # writes results/autoddl_fig9_10.json
    python -m benchmarks.autoddl_fig9_10 --models vgg13     # Figure 9 above and Figure 10 left

The paper tunes the two degrees of Megatron by hand: here every degree of tensor parallelism is tried. Its GPTs gather
gradients over micro-batches, the largest that fit; here a step is one micro-batch, so that gradients are summed up more
often than in the paper. On A100 it trains in mixed precision; here parameters are in bfloat16 too. Speed-ups of the
paper are what its saved run time comes to; they are measured, ours are predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.search_table import Case, open_table, options
from conjoin.machine import Machine, parse_machine

NAME = "autoddl_fig9_10"
_SERVERS = "a100-2x16"


@dataclass(frozen=True, slots=True)
class Published:
    """An experiment: devices (on A100 those of each of two servers), samples in a step, and the run time saved."""

    model: str
    devices: int
    batch_size: int
    saved: float
    """Of the second best strategy's run time."""


PIZ_DAINT = (
    Published("vgg13", 16, 8 * 16, 0.03),
    Published("vgg13", 32, 8 * 32, 0.088),
    Published("vgg13", 64, 8 * 64, 0.177),
    Published("gpt-autoddl-8l", 64, 64, 0.12),
    Published("gpt-autoddl-20l", 128, 64, 0.361),
    Published("gpt-autoddl-44l", 256, 64, 0.311),
)
"""Figure 9."""
A100 = (
    Published("vgg13", 4, 128, 0.715),
    Published("vgg13", 8, 256, 0.635),
    Published("gpt-350m", 16, 256, 0.0),
    Published("gpt-autoddl-large", 16, 64, 0.10),
)
"""Figure 10; the small GPT is best trained in data parallelism."""
MODELS = tuple(dict.fromkeys(known.model for known in (*PIZ_DAINT, *A100)))


def smaller_servers(gpus: int) -> Machine:
    """The two servers, with fewer GPUs each."""
    whole = parse_machine(_SERVERS)
    (kind,) = whole.nodes
    gone = {str(position) for position in range(gpus, whole.devices_per_node)}
    links = tuple(link for link in kind.links if gone.isdisjoint(link.ends))
    fewer = replace(kind, devices=kind.devices[:gpus], links=links)
    return replace(whole, name=f"a100-2x{gpus}", devices_per_node=gpus, nodes=(fewer,))


def megatrons(devices: int) -> tuple[str, ...]:
    """Megatron with every degree of tensor parallelism, without and with the sequence split."""
    degrees = [degree for degree in range(2, devices + 1) if devices % degree == 0]
    return tuple(f"megatron:tp={degree}{flag}" for degree in degrees for flag in ("", ",sp"))


def cases(models: Sequence[str], figures: Sequence[int]) -> Iterator[Case]:
    """The experiments of the figures; a name may end in `:tiny`."""
    for model in models:
        base = model.removesuffix(":tiny")
        optimizer = "sgd" if base == "vgg13" else "adam"
        for known in PIZ_DAINT if 9 in figures else ():
            if known.model == base:
                yield Case(
                    model, f"piz-daint:{known.devices}", known.batch_size, f"{1 / (1 - known.saved):.2f}", optimizer,
                    named=megatrons(known.devices),
                )  # fmt: skip
        for known in A100 if 10 in figures else ():
            if known.model == base:
                yield Case(
                    model, f"a100-2x{known.devices}", known.batch_size, f"{1 / (1 - known.saved):.2f}", optimizer,
                    half=True, named=megatrons(2 * known.devices),
                    make_machine=partial(smaller_servers, known.devices),
                )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME, MODELS)
    parser.add_argument("--figures", type=int, nargs="+", choices=(9, 10), default=[9, 10])
    chosen = parser.parse_args(arguments)
    table = open_table(chosen, NAME, arguments)
    table.fill(cases(chosen.models, chosen.figures))
    return table.status


if __name__ == "__main__":
    sys.exit(main())
