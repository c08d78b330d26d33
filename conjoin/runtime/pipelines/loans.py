"""Parameters that a stage borrows of another: they come before a step, and their gradients go back after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conjoin.comm import stage_grid
from conjoin.ir import Leaf, Pipeline
from conjoin.runtime.pipelines.stage_runs import StageRun
from conjoin.runtime.pipelines.stage_transfers import Crossing
from conjoin.runtime.program.rank_program import LocalProgram
from conjoin.runtime.ranks.communicator import Channel, World


@dataclass(frozen=True, slots=True)
class _Loan:
    """One parameter that one stage has of another, as this rank has part in it."""

    lender: int
    borrower: int
    have: Leaf
    want: Leaf
    there: Crossing
    back: Crossing
    channel: Channel


class Loans:
    """All loans of a pipeline that this rank has part in."""

    def __init__(self, pipeline: Pipeline, world: World) -> None:
        self._loans: list[_Loan] = []
        for borrower, stage in enumerate(pipeline.stages):
            for name in stage.borrowed:
                number = pipeline.owner_of(name)
                lender = pipeline.stages[number]
                if world.rank in (*lender.ranks, *stage.ranks):
                    have, want = lender.parameter(name), stage.parameter(name)
                    source = have.type.layout, stage_grid(pipeline, number)
                    target = want.type.layout, stage_grid(pipeline, borrower)
                    there = Crossing(have.type, source, target, world.rank)
                    back = Crossing(have.type, target, source, world.rank)
                    ranks = tuple(sorted({*lender.ranks, *stage.ranks}))
                    channel = world.channel(f"loan of {name} from {number} to {borrower}", ranks)
                    self._loans.append(_Loan(number, borrower, have, want, there, back, channel))

    def take(self, stages: Mapping[int, LocalProgram]) -> dict[int, dict[str, Tensor]]:
        """By stage, this rank's pieces of what it borrows for a step, which begins."""
        coming, sent = [], []
        for loan in self._loans:
            loan.there.begin()
            loan.back.begin()
            if loan.borrower in stages:
                coming.append((loan, loan.there.expect(loan.channel, stages[loan.borrower].store.device)))
            if loan.lender in stages:
                piece = stages[loan.lender].held(loan.have)
                assert piece is not None, "a parameter has values"
                sent.append(loan.there.send(loan.channel, piece))
        found: dict[int, dict[str, Tensor]] = {}
        for loan, expected in coming:
            found.setdefault(loan.borrower, {})[loan.want.name] = expected.wait()
        for parcel in sent:
            parcel.wait()
        return found

    def give_back(self, runs: Mapping[int, StageRun]) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters of this rank that others borrowed, each with the gradient that comes back."""
        coming, sent = [], []
        for loan in self._loans:
            if not loan.want.trainable:
                continue
            if loan.lender in runs:
                coming.append((loan, loan.back.expect(loan.channel, runs[loan.lender].program.store.device)))
            if loan.borrower in runs:
                run = runs[loan.borrower]
                gradient = dict(zip(run.parameters, run.gradients, strict=True))[loan.want]
                piece = torch.zeros_like(run.parameters[loan.want]) if gradient is None else gradient
                sent.append(loan.back.send(loan.channel, piece))
        for loan, expected in coming:
            parameter = runs[loan.lender].program.held(loan.have)
            assert parameter is not None, "a parameter has values"
            yield parameter, expected.wait()
        for parcel in sent:
            parcel.wait()
