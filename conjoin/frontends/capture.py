"""`capture`: a plain model, a batch and a loss become a graph, or one complete report of why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from conjoin.errors import CaptureError
from conjoin.frontends.dealt_batch import Batch
from conjoin.frontends.expert_rows import in_their_own_order
from conjoin.frontends.filled_tensors import with_parts_together
from conjoin.frontends.lowering import Lowering
from conjoin.frontends.merged_rows import with_rows_in_their_dims
from conjoin.frontends.neighbours import with_neighbours
from conjoin.frontends.problems import Problem
from conjoin.frontends.report import not_understood
from conjoin.frontends.torch_export import AutocastRegions, export
from conjoin.frontends.torch_private import settle_autograd
from conjoin.ir import Graph, find_faults, plain_model

_log = logging.getLogger("conjoin")


def capture(
    model: nn.Module,
    batch: Batch,
    loss: Callable[..., Any] | None = None,
    check: Callable[[Graph], str] | None = None,
    autocast: AutocastRegions | None = None,
) -> Graph:
    """Turn a model into a graph, in the mode (train or eval) it is in.

    `batch` is a tensor, a tuple of positional inputs or a dict of keyword inputs. With a `loss`, inputs that the
    model's forward does not take are given to the loss after the model's output, and the graph returns the loss.
    What is kept but not understood is told in one report on the logger `conjoin`, and what `check` says of the graph.
    The model is called in the regions of `autocast`, or in those that the caller is in.

    >>> import torch
    >>> graph = capture(nn.Linear(4, 2), torch.zeros(3, 4))
    >>> [node.op for node in graph.nodes]
    ['linear']
    """
    model = plain_model(model, CaptureError)
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        kind = f"class {loss.__name__}" if isinstance(loss, type) else f"type {type(loss).__name__}"
        raise CaptureError(
            f"A loss of {kind} was given. A loss is called with the model's output. "
            f"Pass a function, or a module as nn.CrossEntropyLoss()."
        )
    settle_autograd()
    exported = export(model, batch, loss, autocast)
    lowering = Lowering(exported, model)
    graph = lowering.run(type(model).__name__, model.training)
    if graph is None:
        raise _refusal(lowering.problems)
    graph = with_rows_in_their_dims(with_parts_together(graph))
    graph = with_neighbours(in_their_own_order(graph), exported, model)
    if loss is not None and graph.loss is None:
        raise CaptureError(
            "The loss did not return one floating-point number. Training minimises a single number. "
            "Return a scalar tensor, for example with reduction='mean'."
        )
    faults = find_faults(graph)
    if faults:
        advice = "torch.export states of it what torch itself does not: write it with other operators"
        raise _refusal([Problem(str(fault), None, advice) for fault in faults])
    report = not_understood(graph, exported.dropped, check(graph) if check else "")
    _log.log(logging.INFO if report.complete else logging.WARNING, "%s: %s", graph.name, report)
    return graph


def _refusal(problems: Sequence[Problem]) -> CaptureError:
    listed = list(dict.fromkeys(f"  {problem}" for problem in problems))
    return CaptureError(
        f"{len(listed)} part(s) of the model cannot be captured. Every one is listed here, with the user's line "
        f"and what to do. Change them and capture again:\n" + "\n".join(listed)
    )
