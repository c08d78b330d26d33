"""A pipeline for people: its stages, what goes between them, and its schedule as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conjoin.ir import Pipeline, Transfer
from conjoin.machine import Machine
from conjoin.report.explanation import Explanation, explain, precision_text
from conjoin.report.explanation_text import explanation_text
from conjoin.report.prediction_notes import busy_notes, notes_to_json, price_notes
from conjoin.report.prediction_text import format_seconds
from conjoin.report.text import format_bytes
from conjoin.report.trace import Event
from conjoin.schedules import Kind, Timeline
from conjoin.sim import PipelinePrediction

_WIDTH = 100
"""Characters of a picture: what a terminal shows in a line, with the name of the owner before it."""
_MAX_OWNERS = 64
_BACKWARD = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class PipelineExplanation:
    """What a pipeline does: every stage as a plan is explained, and what goes between stages."""

    pipeline: Pipeline
    stages: tuple[Explanation, ...]
    transfers: tuple[Transfer, ...]

    def to_json(self) -> dict[str, Any]:
        return {**self.summary_to_json(), "stages": [stage.to_json() for stage in self.stages]}

    def summary_to_json(self) -> dict[str, Any]:
        """Without the operators."""
        pipeline = self.pipeline
        return {
            "strategy": pipeline.strategy,
            "devices": pipeline.mesh.size,
            "model": pipeline.model.name,
            "machine": pipeline.machine.name,
            "micro_batches": pipeline.num_micro_batches,
            "schedule": pipeline.schedule.name,
            "stages": [
                {"ranks": list(stage.ranks), "strategy": stage.plan.strategy, "borrows": list(stage.borrowed)}
                for stage in pipeline.stages
            ],
            "transfers": [
                {
                    "from": transfer.source,
                    "to": transfer.target,
                    "tensor": str(transfer.made),
                    "taken_as": str(transfer.taken),
                    "gradient": transfer.has_gradient,
                    "chunks": None if transfer.chunks is None else list(transfer.chunks),
                }
                for transfer in self.transfers
            ],
        }


def explain_pipeline(pipeline: Pipeline) -> PipelineExplanation:
    """What a pipeline does."""
    stages = tuple(explain(stage.plan) for stage in pipeline.stages)
    return PipelineExplanation(pipeline, stages, tuple(pipeline.transfers()))


def pipeline_summary(found: PipelineExplanation) -> list[str]:
    """The header: what the pipeline is for, its stages, and what goes between them."""
    pipeline = found.pipeline
    lines = [
        f"{'strategy':<12} {pipeline.strategy}",
        f"{'devices':<12} {pipeline.mesh.size}, axes {pipeline.mesh}",
        f"{'model':<12} {pipeline.model.name} {pipeline.model.fingerprint[:16]}",
        f"{'machine':<12} {pipeline.machine.name}",
        f"{'precision':<12} {precision_text(pipeline)}",
        f"{'schedule':<12} {pipeline.schedule.name}, {pipeline.num_micro_batches} micro-batches",
    ]
    for i, (stage, told) in enumerate(zip(pipeline.stages, found.stages, strict=True)):
        ranks = ranks_text(stage.ranks)
        borrowed = f", borrows {', '.join(stage.borrowed)}" if stage.borrowed else ""
        stored = format_bytes(told.stored_bytes)
        lines.append(
            f"{f'stage {i}':<12} {ranks}: {stage.plan.strategy}, {len(told.operators)} operators, "
            f"{stored} of parameters per rank{borrowed}"
        )
    lines += [f"{'between':<12} {between_text(transfer)}" for transfer in found.transfers]
    return lines


def between_text(transfer: Transfer) -> str:
    """What goes between two stages, in words."""
    back = "and its gradient back" if transfer.has_gradient else "without gradient"
    size = format_bytes(transfer.made.laid_out(()).bytes)
    return f"{transfer.source} > {transfer.target}: {transfer.made} ({size}), {back}{_chunks_text(transfer)}"


def _chunks_text(transfer: Transfer) -> str:
    """In how many chunks it is passed on, where the plan says so."""
    if transfer.chunks is None:
        return ""
    there, back = transfer.chunks
    return f", in {there} chunks" + (f" and {back} back" if transfer.has_gradient else "")


def pipeline_text(found: PipelineExplanation) -> str:
    """The whole explanation, stage by stage."""
    parts = ["\n".join(pipeline_summary(found)) + "\n"]
    for i, told in enumerate(found.stages):
        parts.append(f"\n== stage {i}, {ranks_text(found.pipeline.stages[i].ranks)} ==\n{explanation_text(told)}")
    return "".join(parts)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks in few words.

    >>> ranks_text((4, 5, 6, 7)), ranks_text((3,))
    ('ranks 4-7', 'rank 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def schedule_picture(timeline: Timeline, width: int = _WIDTH) -> list[str]:
    """A line for each owner of stages, from left to right in time: forward passes as digits, backward passes as
    letters, by the last digit or letter of their micro-batch; weight gradients by themselves as w, nothing as a dot."""
    total = max(timeline.seconds, 1e-30)
    lines = []
    for owner, rows in enumerate(timeline.schedule.rows[:_MAX_OWNERS]):
        cells = ["."] * width
        for row, start, end in zip(rows, timeline.starts[owner], timeline.ends[owner], strict=True):
            first, last = int(start / total * width), int(end / total * width)
            for cell in range(first, max(last, first + 1)):
                if cell < width:
                    cells[cell] = _mark(row.kind, row.micro_batch)
        lines.append("".join(cells))
    return lines


def _mark(kind: Kind, micro_batch: int) -> str:
    match kind:
        case Kind.FORWARD:
            return str(micro_batch % 10)
        case Kind.BACKWARD | Kind.INPUT_GRADIENT:
            return _BACKWARD[micro_batch % 10]
        case Kind.WEIGHT_GRADIENT:
            return "w"
        case _:
            return "-"


def pipeline_prediction_text(found: PipelinePrediction, machine: Machine) -> str:
    """A prediction in lines: the step, the schedule as a picture, what stages take and hold."""
    pipeline, timeline = found.pipeline, found.timeline
    lines = [*price_notes(found, machine), f"{'plan':<12} {pipeline}", f"{'precision':<12} {precision_text(pipeline)}"]
    lines.append(f"{'machine':<12} {machine}")
    lines.append(f"{'step':<12} {format_seconds(found.seconds)} ± {found.error:.0%}")
    lines.append(f"{'bubble':<12} {timeline.bubble:.1%} of the time in which stages run is spent waiting")
    lines.append(
        f"{'between':<12} {format_seconds(timeline.exposed_seconds)} of transfers waited for, "
        f"{format_seconds(timeline.hidden_seconds)} hidden"
    )
    for owner, line in enumerate(schedule_picture(timeline)):
        lines.append(f"  {owner:>2} |{line}|")
    for i, stage in enumerate(found.stages):
        lines.append(
            f"{f'stage {i}':<12} forward {format_seconds(stage.forward)}, backward {format_seconds(stage.backward)}, "
            f"end {format_seconds(stage.finish)}; {format_bytes(stage.peak)} with {stage.in_flight} in flight"
        )
    lines += busy_notes(found)
    rate = found.samples_per_second
    use = f"{found.model_flops_utilization:.1%} of the devices' peak rate goes into the model (MFU)"
    lines.append(f"{'throughput':<12} {'' if rate is None else f'{rate:,.1f} samples/s, '}{use}")
    lines.append(f"{'memory':<12} {format_bytes(found.peak)} of {format_bytes(found.capacity)} on the fullest device")
    if not found.fits:
        lines.append(f"  does not fit: {format_bytes(found.peak - found.capacity)} too much")
    return "\n".join(lines) + "\n"


def pipeline_prediction_to_json(found: PipelinePrediction, machine: Machine) -> dict[str, Any]:
    """A prediction as plain data; seconds and bytes."""
    return {
        "plan": found.pipeline.strategy,
        "precision": precision_text(found.pipeline),
        "model": found.pipeline.model.name,
        "machine": machine.name,
        "devices": machine.num_devices,
        "seconds_per_step": found.seconds,
        "expected_error": found.error,
        "bubble": found.timeline.bubble,
        "transfers": {"exposed": found.timeline.exposed_seconds, "hidden": found.timeline.hidden_seconds},
        "stages": [
            {
                "forward": stage.forward,
                "backward": stage.backward,
                "finish": stage.finish,
                "in_flight": stage.in_flight,
                "peak": stage.peak,
            }
            for stage in found.stages
        ],
        "samples_per_second": found.samples_per_second,
        "model_flops_utilization": found.model_flops_utilization,
        "memory": {"peak": found.peak, "capacity": found.capacity, "fits": found.fits},
        **notes_to_json(found, machine),
    }


def pipeline_events(found: PipelinePrediction) -> Iterator[Event]:
    """Every row of the schedule on a track of its stage, for a trace."""
    words = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT_GRADIENT: "input gradient"}
    timeline = found.timeline
    for owner, rows in enumerate(timeline.schedule.rows[:_MAX_OWNERS]):
        for row, start, end in zip(rows, timeline.starts[owner], timeline.ends[owner], strict=True):
            name = f"{words.get(row.kind, 'weight gradient')} {row.micro_batch}"
            yield Event(f"predicted: owner {owner}", f"stage {row.stage}", name, start * 1e6, (end - start) * 1e6)
