"""One step of a pipeline on one rank: its rows, the sums of its gradients, and the way out where something fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conjoin.errors import RankError
from conjoin.ir import Pipeline, by_tensor
from conjoin.runtime.pipelines.loans import Loans
from conjoin.runtime.pipelines.pipeline_draws import Begin
from conjoin.runtime.pipelines.schedule_runs import Action, Links, ScheduleRun
from conjoin.runtime.pipelines.stage_runs import StageRun
from conjoin.runtime.pipelines.step_ends import Outcome, StepEnd
from conjoin.runtime.program.rank_program import LocalProgram
from conjoin.runtime.program.step_values import Gradients
from conjoin.runtime.ranks.progress import BrokenOff
from conjoin.runtime.state.blocks import put_together
from conjoin.runtime.state.storage import Store


class Program(Protocol):
    """What a step needs of the pipeline on this rank."""

    plan: Pipeline
    store: Store
    stages: dict[int, LocalProgram]
    links: Links
    loans: Loans
    end: StepEnd

    def written(self) -> dict[int, tuple[Tensor, ...]]: ...

    def write_back(self, values: Mapping[int, tuple[Tensor, ...]]) -> None: ...


class StepRun:
    """One step on this rank, which may be run again: with another scale, or for a second backward pass."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[int, list[dict[str, Tensor]]],
        begin: Begin,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._program, self._parameters, self._begin = program, parameters, begin
        count = program.plan.num_micro_batches
        self._inputs = [{stage: parts[m] for stage, parts in inputs.items()} for m in range(count)]
        self._versions = [parameter._version for parameter in parameters]
        kind = program.store.device.type
        self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        """What products are rounded to where autocast says so."""
        self.written = program.written()
        """The buffers that the step changes, as they were before it."""

    def again(self, action: Callable[[], Any]) -> Any:
        """Call something as the step was called at first; draws begin anew by themselves, and buffers that it changes
        are afterwards what they were."""
        if self._versions != [parameter._version for parameter in self._parameters]:
            raise RuntimeError(
                "A parameter was changed between a step of a pipeline and a backward pass that runs it again. The "
                "gradient would be that of another model. Call backward before the optimizer's step."
            )
        now = self._program.written()
        self._program.write_back(self.written)
        try:
            with self._autocast:
                return action()
        finally:
            self._program.write_back(now)

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            return self._run(1.0, forward_only=True)[0]

    def forward_and_backward(self, scale: float) -> tuple[Tensor, Gradients]:
        return self._run(scale, forward_only=False)

    def _run(self, scale: float, *, forward_only: bool) -> tuple[Tensor, Gradients]:
        """The loss and the gradients; or on all ranks an error, after which nothing of the step is left."""
        self._program.end.begin()
        if self._program.end.can_leave:
            return self._run_to_leave(scale, forward_only)
        return self._run_through(scale, forward_only)

    def _run_to_leave(self, scale: float, forward_only: bool) -> tuple[Tensor, Gradients]:
        """Whoever fails leaves, and so do those who wait for him; all meet when all is done."""
        end, outcome, gradients = self._program.end, Outcome(), list[Tensor | None]()
        run = None
        try:
            run = self._schedule()
            run.run(self._actions(forward_only), self._begin, scale)
            gradients = self._gradients(run, forward_only)
        except BrokenOff:
            outcome.has_left = True
        except RankError:  # there is nobody to go on with
            raise
        except Exception as error:
            outcome.error, outcome.has_left = error, True
            traceback.clear_frames(error.__traceback__)  # memory may be what it lacked
        if run is not None:
            outcome.loss, outcome.error = run.loss, outcome.error or run.error
        if outcome.has_left:
            run = None
            end.leave()
        return end.meet(outcome), gradients

    def _run_through(self, scale: float, forward_only: bool) -> tuple[Tensor, Gradients]:
        """Ranks meet when their rows are through: nobody begins to sum up what another has failed to make."""
        with self._program.end.ending_all():
            run = self._schedule()
            run.run(self._actions(forward_only), self._begin, scale)
        total = self._program.end.meet(Outcome(run.loss, run.error))
        with self._program.end.ending_all():
            return total, self._gradients(run, forward_only)

    def _schedule(self) -> ScheduleRun:
        program = self._program
        program.links.begin()
        lent = program.loans.take(program.stages)
        stages = {i: StageRun(program.plan.stages[i], local, lent.get(i, {})) for i, local in program.stages.items()}
        return ScheduleRun(program.links, stages, self._inputs, lambda: program.end.goes_through)

    def _actions(self, forward_only: bool) -> tuple[Action, ...]:
        links = self._program.links
        return links.forward_actions if forward_only else links.actions

    def _gradients(self, run: ScheduleRun, forward_only: bool) -> Gradients:
        """Of the parameters of this rank, summed over its stages' ranks and those who borrowed them."""
        if forward_only:
            for stage in run.stages.values():
                stage.program.forget()
            return []
        programs = self._program.stages
        found: dict[int, Tensor | None] = {}
        for i, stage in sorted(run.stages.items()):
            stage.sum_up()
            gradients = dict(zip(stage.parameters, stage.gradients, strict=True))
            for leaves in by_tensor(leaf for leaf in gradients if leaf.name not in stage.stage.borrowed).values():
                like = [stage.parameters[leaf] for leaf in leaves]
                made = put_together(leaves, [gradients[leaf] for leaf in leaves], like)
                found[id(programs[i].held(leaves[0]))] = made
        for parameter, gradient in self._program.loans.give_back(run.stages):
            own = found.get(id(parameter))
            found[id(parameter)] = gradient if own is None else own + gradient
        return [found.get(id(parameter)) for parameter in self._parameters] or [None]
