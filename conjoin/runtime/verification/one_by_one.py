"""A pipeline's micro-batches on one device, one after the other: what its stages have to do together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conjoin.ir import Pipeline, Plan, calling_graph
from conjoin.machine import Mesh
from conjoin.runtime.program.accumulation import MicroBatches
from conjoin.runtime.program.call_forms import Calling
from conjoin.runtime.program.captured import CapturedModule, to_module


class OneByOne(nn.Module):
    """The captured graph of a micro-batch over the model's own parameters, called for one part of a batch at a time.

    Each has its backward pass before the next begins, as in a loop that accumulates gradients.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module) -> None:
        super().__init__()
        graph, accumulation = pipeline.graph, pipeline.accumulation
        captured = to_module(graph, model)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = captured.__dict__[name]
        single = Plan(graph, Mesh(()), pipeline.model, pipeline.machine, "one device", accumulation=accumulation)
        self.__dict__.update(
            _captured=captured,
            _micro=MicroBatches(single, accumulation, 0, True),
            _calling=Calling(graph if accumulation is None else calling_graph(graph, accumulation)),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the batch; gradients are added to those of the parameters."""
        graph = self._captured.graph
        total = torch.zeros(())
        for parts in self._micro.of(self._calling.arrange(args, kwargs)):
            loss: Tensor = self._captured.run_flat(parts)[graph.loss or 0]
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            total = total.to(loss) + loss.detach()
        return self._calling.results([total])

    _captured: CapturedModule
    _micro: MicroBatches
    _calling: Calling
