"""What the tests of this room share: tiny models of the zoo, each captured once, and what is counted in plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from conjoin.api import PlainModel, run_plainly, verify_in_process
from conjoin.ir import Graph, Plan, is_parallel
from conjoin.runtime import Case, Verdict
from tests.zoo import graphs

FAMILIES = (
    "mlp", "mlp-autoddl", "candle-uno", "lenet", "alexnet", "vit-b-16", "rnnlm", "rnntc", "nasrnn-taso", "nmt",
    "bert-base", "gpt-125m", "llama-70b", "moe-8x7b", "dlrm", "xdl",
)  # fmt: skip
"""One name for each architecture: other names have the same tiny size, or differ in sizes only."""
LARGE_FAMILIES = ("resnet-50",)
"""Architectures whose tiny size has hundreds of operators once they are expanded."""
DEEP_FAMILIES = ("bert-base", "gpt-125m", "llama-70b", "moe-8x7b", "nasrnn-taso", "nmt", "rnnlm", "vit-b-16")
"""Architectures with many operators."""


def captured(name: str, batch_size: int = 4) -> Graph:
    """The graph of a tiny model with its loss."""
    return graphs.captured(name, batch_size)


_BESIDE_THE_MODEL: list[tuple[Graph, nn.Module, Any]] = []
"""What trained like the model itself already, which does not depend on a plan."""


def compared(plan: Plan, graph: Graph, model: nn.Module, batch: Any, num_steps: int = 2) -> Verdict:
    """A plan beside one device and the model itself, as by `conjoin.verify_plan`, with a graph captured before: with
    the first of its plans the graph is judged by the model, and the others by the graph.
    """
    known = any(g is graph and m is model and b is batch for g, m, b in _BESIDE_THE_MODEL)
    plain = None if known else PlainModel(model, None, run_plainly)
    verdict = verify_in_process(Case(plan, graph, model, batch, plain), num_steps)
    if verdict.passed and not known:
        _BESIDE_THE_MODEL.append((graph, model, batch))
    return verdict


def reshards(plan: Plan) -> dict[str, int]:
    """How many reshards of each kind a plan has."""
    return dict(Counter(node.op.removeprefix("conjoin::") for node in plan.graph.nodes if is_parallel(node)))


def lines_with(plan: Plan, *words: str) -> list[str]:
    """The lines of a plan's graph that have all of the words, without where they come from."""
    lines = (line.split("  @")[0] for line in str(plan.graph).splitlines())
    return [line for line in lines if all(word in line for word in words)]
