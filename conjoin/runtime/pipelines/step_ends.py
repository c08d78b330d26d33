"""How ranks come to the end of a step of a pipeline: all with its loss, or all out of it where one has failed.

Other ranks may be in a collective with the one that failed, or wait for what it was to send. So it leaves what is under
way: the connections of the pipeline are closed, by which those who wait for it learn that it has left, and leave as
well, and so on. All meet where the loss is shared, over connections of all ranks that stay, and connect anew.

Where nobody but the next stage waits for it, it goes through its rows to their end instead (`schedule_runs.py`). Where
the backend cannot leave a collective and others may be in one, they are ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conjoin.comm import exchanges_in_passes
from conjoin.errors import RankError
from conjoin.ir import Pipeline, Value
from conjoin.runtime.program.rank_program import LocalProgram
from conjoin.runtime.ranks.communicator import World
from conjoin.runtime.ranks.progress import first_line


@dataclass(slots=True)
class Outcome:
    """What a rank comes to the end of a step with."""

    loss: Tensor | None = None
    error: Exception | None = None
    has_left: bool = False


class StepEnd:
    """Where the ranks of a pipeline meet after a step."""

    def __init__(
        self, pipeline: Pipeline, world: World, stages: Mapping[int, LocalProgram], device: torch.device
    ) -> None:
        self._pipeline, self._world, self._stages, self._device = pipeline, world, stages, device
        stage = pipeline.stages[pipeline.loss_stage]
        output = stage.plan.graph.outputs[stage.plan.graph.loss or 0]
        assert isinstance(output, Value), "a loss is a tensor"
        self._type, self._tells_loss = output.type, world.rank == stage.ranks[0]

    is_under_way = False
    """Whether a step has begun, and ranks have not met at its end."""

    def begin(self) -> None:
        """A step begins: get ready to meet."""
        self.is_under_way = True
        self._shared = torch.zeros(2 + self._world.mesh.size, dtype=torch.float64, device=self._device)
        last = self._pipeline.stages[0].ranks[0]  # a step ends with the first stage's last gradients
        self._meeting = self._world.to_sum(self._shared, last)

    @property
    def can_leave(self) -> bool:
        return self._world.can_break_off

    @cached_property
    def goes_through(self) -> bool:
        """Whether a rank that fails comes to the end of its rows all the same: nobody is in a collective with it."""
        if self.can_leave:
            return all(program.plan.mesh.size == 1 for program in self._stages.values())
        return not any(exchanges_in_passes(program.plan) for program in self._stages.values())

    def leave(self) -> None:
        """Leave what is under way."""
        self._world.break_off()

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """Around what cannot be left: whoever waits for a rank that fails in it ends."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self._world.fail(error)
            raise RankError(
                f"A step of the pipeline of {self._pipeline.model.name} failed on rank {self._world.rank}: "
                f"{_told(error)}. Others may be in collectives with it, which this backend cannot leave; they end. "
                f"Start again from the last checkpoint, with smaller micro-batches where it is memory that lacks."
            ) from error

    def meet(self, outcome: Outcome) -> Tensor:
        """The loss, which one stage has, on all ranks; where one of them has failed, all give the step up."""
        world, told, sent = self._world, self._shared, self._world.bytes_sent
        if outcome.has_left:
            told[1] = 1
        if outcome.error is not None:
            told[2 + world.rank] = 1
        if outcome.loss is not None and self._tells_loss:
            told[0] = outcome.loss
        self._meeting.wait()
        world.bytes_sent = sent  # what is counted is what the plan says
        _, has_left, *failed = told.tolist()
        if has_left or any(failed):
            self._give_up(bool(has_left), outcome.error)
        self.is_under_way = False
        return told[0].reshape(self._type.shape).to(self._type.dtype)

    def _give_up(self, is_left: bool, error: Exception | None) -> None:
        """Raise on all ranks what some have failed with; nothing is under way any more."""
        said = self._world.compare("" if error is None else _told(error))
        for program in self._stages.values():
            if is_left:
                program.drop()
            else:
                program.forget()
        if is_left:
            self._world.renew()
        self.is_under_way = False
        if error is not None:
            raise error
        failed = [f"rank {rank} ({text})" for rank, text in enumerate(said) if text]
        raise RankError(
            f"A step of the pipeline of {self._pipeline.model.name} was given up: it failed on "
            f"{', '.join(failed[:8])}. All ranks have left it, and nothing of it is left. See the error "
            f"there; the step may be taken again, or the next one."
        )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
