"""A step of a pipeline on one rank: the rows of its schedule, one after the other, with all that goes between stages.

What one stage sends another travels in channels, one for each pair of owners and direction, in the order in which the
sender's rows make it. A receiver gets ready for a message some rows before the one that needs it, so that it is under
way while something else is computed; nothing is ever waited for before it is needed. What was sent is let go of when
something comes that the other end made after it had taken it, as the gradient of an activation: no backend tells before
it is waited for, so as much is held as is in flight.

Where a stage fails, and no other rank has part in it, nothing more is computed, and the rows are gone through to their
end all the same: what comes is taken, and zeros are sent for what was to be made. So all ranks come to the end of the
schedule, where they learn of it, and no message is left under way that a later step would take for its own. Else the
ranks leave the step (`step_ends.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from conjoin.comm import plan_of_transfer, stage_grid
from conjoin.errors import RankError
from conjoin.ir import Pipeline, Transfer
from conjoin.runtime.pipelines.stage_runs import StageRun
from conjoin.runtime.pipelines.stage_transfers import Crossing, Expected
from conjoin.runtime.ranks.communicator import Channel, Parcel, World
from conjoin.schedules import Kind, Row

T = TypeVar("T")
AHEAD = 4
"""How many rows before it is needed a message is expected. Backends send only what is expected: where transfers take
longer than rows, the next of each direction has to be while the last one comes. On emulated links of 10 Mbit/s
(2 stages, 2026-11-17) an eager schedule took 603 ms with 4, and 860 ms with 1."""


class Way(NamedTuple):
    """From the owner of some stages to another, with activations or with gradients."""

    source: int
    target: int
    is_gradient: bool

    def __str__(self) -> str:
        return f"{'gradients' if self.is_gradient else 'activations'} {self.source}>{self.target}"


class Item(NamedTuple):
    """A tensor of a micro-batch that goes between stages: by its place among the transfers, there or back."""

    transfer: int
    micro_batch: int
    is_gradient: bool


class Action(NamedTuple):
    """A row of this rank, with what it takes from other stages and what it makes for them."""

    row: Row
    taken: tuple[Item, ...]
    made: tuple[Item, ...]
    over: tuple[Item, ...]
    """What was sent before, and is there when what is taken has come."""
    awaited: tuple[Item, ...] = ()
    """What this rank gets ready for before it."""


class Route:
    """All that goes between stages in a step: which way, and in which order."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.transfers = tuple(pipeline.transfers())
        self.schedule = pipeline.schedule
        self.order: dict[Way, list[Item]] = {}
        """By way, what is sent in the order of the sender's rows."""
        self._made: dict[Item, int] = {}
        self._taken: dict[Item, int] = {}
        """At which of its rows the owner that takes something does, and the other makes it."""
        for rows in self.schedule.rows:
            for position, row in enumerate(rows):
                self._taken |= dict.fromkeys(self._items(row, makes=False), position)
                for item in self._items(row, makes=True):
                    self._made[item] = position
                    self.order.setdefault(self.way(item), []).append(item)

    def way(self, item: Item) -> Way:
        transfer, owners = self.transfers[item.transfer], self.schedule.owners
        ends = owners[transfer.source], owners[transfer.target]
        return Way(*(ends[::-1] if item.is_gradient else ends), item.is_gradient)

    def actions(self, owner: int) -> tuple[Action, ...]:
        """What the rows of an owner are, in their order."""
        sent: dict[int, list[Item]] = {}
        """To each owner, what is not known to have come."""
        actions = []
        for row in self.schedule.rows[owner]:
            taken, made = (tuple(self._items(row, makes=makes)) for makes in (False, True))
            over: list[Item] = []
            for item in taken:
                giver, made_at = self.way(item).source, self._made[item]
                waiting = sent.get(giver, [])
                over += [each for each in waiting if self._taken[each] <= made_at]
                sent[giver] = [each for each in waiting if self._taken[each] > made_at]
            actions.append(Action(row, taken, made, tuple(over)))
            for item in made:
                sent.setdefault(self.way(item).target, []).append(item)
        return tuple(actions)

    def getting_ready(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Rows of an owner, with what it gets ready for before each: what one needs that comes later, and all that
        comes the same way before that."""
        coming, known, found = {way: iter(order) for way, order in self.order.items()}, set[Item](), []
        for i, action in enumerate(actions):
            awaited: list[Item] = []
            for soon in actions[i + AHEAD : i + AHEAD + 1] if i else actions[: AHEAD + 1]:
                for item in soon.taken:
                    while item not in known:
                        awaited.append(next(coming[self.way(item)]))
                        known.add(awaited[-1])
            found.append(action._replace(awaited=tuple(awaited)))
        return tuple(found)

    def _items(self, row: Row, *, makes: bool) -> Iterator[Item]:
        """What a row makes or takes: a forward pass activations, a backward pass gradients, which go the other way."""
        is_gradient = row.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        if row.kind is not Kind.FORWARD and not is_gradient:
            return
        for i, transfer in enumerate(self.transfers):
            end = transfer.source if makes != is_gradient else transfer.target
            if end == row.stage and (transfer.has_gradient or not is_gradient):
                yield Item(i, row.micro_batch, is_gradient)


class End(NamedTuple):
    """This rank's end of a transfer, there or back."""

    crossing: Crossing
    channel: Channel
    onward: Channel | None
    """For what the ranks of the target pass on to each other."""


@dataclass
class Links:
    """This rank's ends of all that goes between stages."""

    route: Route
    owner: int
    crossings: Sequence[tuple[Crossing, Crossing]]
    """For every transfer there and back."""
    channels: Mapping[Way, Channel]
    onward: Mapping[Way, Channel]
    """For what is passed on at the end of a way, where this rank is."""

    def __post_init__(self) -> None:
        actions, ready = self.route.actions(self.owner), self.route.getting_ready
        self.actions = ready(actions)
        self.forward_actions = ready([action for action in actions if action.row.kind is Kind.FORWARD])
        self.ends: dict[tuple[int, bool], End] = {}
        """By transfer, there and back, those that this rank has part in."""
        for number, both in enumerate(self.crossings):
            for is_gradient, crossing in enumerate(both):
                way = self.route.way(Item(number, 0, bool(is_gradient)))
                if way in self.channels:
                    self.ends[number, bool(is_gradient)] = End(crossing, self.channels[way], self.onward.get(way))

    @classmethod
    def of(cls, pipeline: Pipeline, world: World) -> Links:
        """Made by all ranks in the same order, each its own."""
        route, owners, rank = Route(pipeline), pipeline.schedule.owners, world.rank
        ranks = {owner: stage.ranks for owner, stage in zip(owners, pipeline.stages, strict=True)}
        owner = next(owner for owner, members in ranks.items() if rank in members)
        channels = {
            way: world.channel(str(way), tuple(sorted({*ranks[way.source], *ranks[way.target]})))
            for way in sorted(route.order)
            if owner in way[:2]
        }
        crossings = [_both_ways(pipeline, transfer, rank) for transfer in route.transfers]
        passing = {
            route.way(Item(number, 0, bool(is_gradient)))
            for number, both in enumerate(crossings)
            for is_gradient, crossing in enumerate(both)
            if crossing.passes_on
        }
        onward = {
            way: world.channel(f"{way} passed on", ranks[way.target])
            for way in sorted(passing & route.order.keys())
            if owner == way.target
        }
        return cls(route, owner, crossings, channels, onward)

    def begin(self) -> None:
        """A step begins."""
        for there, back in self.crossings:
            there.begin()
            back.begin()


def _both_ways(pipeline: Pipeline, transfer: Transfer, rank: int) -> tuple[Crossing, Crossing]:
    source = transfer.made.layout, stage_grid(pipeline, transfer.source)
    target = transfer.taken.layout, stage_grid(pipeline, transfer.target)
    there, back = (plan_of_transfer(pipeline, transfer, back) for back in (False, True))
    return Crossing(transfer.made, source, target, rank, there), Crossing(transfer.made, target, source, rank, back)


class ScheduleRun:
    """One step."""

    def __init__(
        self,
        links: Links,
        stages: Mapping[int, StageRun],
        inputs: Sequence[Mapping[int, Mapping[str, Tensor]]],
        goes_through: Callable[[], bool],
    ) -> None:
        """`goes_through` tells, when a stage has failed, whether its rows are gone through all the same."""
        self._links, self.stages, self._inputs, self._goes_through = links, stages, inputs, goes_through
        self._expected: dict[Item, Expected] = {}
        self._under_way: dict[Item, Parcel] = {}
        """What was sent, and is not known to have come."""
        self._device = next(iter(stages.values())).program.store.device
        self.loss: Tensor | None = None
        self.error: Exception | None = None
        """What a stage of this rank failed with."""

    def run(self, actions: Sequence[Action], begin: Callable[[int, int], None], scale: float) -> None:
        """Run rows; `begin` is told of stage and micro-batch before a forward pass."""
        for action in actions:
            for item in action.awaited:
                end = self._end(item)
                self._expected[item] = end.crossing.expect(end.channel, self._device, end.onward)
            row = action.row
            stage, number = self.stages.get(row.stage), row.micro_batch
            match row.kind:
                case Kind.FORWARD:
                    self._forward(action, begin)
                case Kind.BACKWARD | Kind.INPUT_GRADIENT:
                    assert stage is not None, "rows are of stages of this rank"
                    back = stage.backward if row.kind is Kind.BACKWARD else stage.input_gradient
                    incoming = self._incoming(action, scale)
                    self._send_back(action, self._attempt(lambda: back(number, incoming)))  # noqa: B023 # called at once
                case Kind.WEIGHT_GRADIENT:
                    assert stage is not None, "rows are of stages of this rank"
                    self._attempt(lambda: stage.weight_gradient(number))  # noqa: B023 # called at once
                case _:
                    pass  # when something is sent follows from what makes and needs it
        for parcel in self._under_way.values():
            parcel.wait()

    def _attempt(self, compute: Callable[[], T]) -> T | None:
        """What a stage computes; None where it fails, or something has failed before it."""
        if self.error is not None:
            return None
        try:
            return compute()
        except RankError:  # there is nobody to go on with
            raise
        except Exception as error:
            if not self._goes_through():
                raise
            traceback.clear_frames(error.__traceback__)  # memory may be what it lacked
            self.error = error
            for stage in self.stages.values():
                stage.abandon()
            return None

    def _take(self, action: Action) -> list[tuple[Item, Tensor]]:
        """What a row takes, when it has come; and what has been sent and is there by then is let go of."""
        taken = [(item, self._expected.pop(item).wait()) for item in action.taken]
        for item in action.over:
            if item in self._under_way:  # a forward pass alone sends no gradients
                self._under_way.pop(item).wait()
        return taken

    def _end(self, item: Item) -> End:
        return self._links.ends[item.transfer, item.is_gradient]

    def _send(self, item: Item, piece: Tensor | None) -> None:
        """Send a piece, or zeros where there is none."""
        end = self._end(item)
        piece = end.crossing.nothing(self._device) if piece is None else piece
        self._under_way[item] = end.crossing.send(end.channel, piece)

    def _forward(self, action: Action, begin: Callable[[int, int], None]) -> None:
        row, route = action.row, self._links.route
        stage = self.stages[row.stage]
        inputs = dict(self._inputs[row.micro_batch][row.stage])
        for item, piece in self._take(action):
            inputs[route.transfers[item.transfer].input] = piece

        def compute() -> Sequence[Tensor]:
            begin(row.stage, row.micro_batch)
            return stage.forward(row.micro_batch, inputs)

        outputs = self._attempt(compute)
        loss = stage.stage.plan.graph.loss
        if loss is not None and outputs is not None:
            found = outputs[loss].detach()
            self.loss = found if self.loss is None else self.loss + found
        for item in action.made:
            self._send(item, None if outputs is None else outputs[route.transfers[item.transfer].output])

    def _incoming(self, action: Action, scale: float) -> dict[int, Tensor]:
        """The gradients of what a stage made: of the loss, and what comes back from those who read it."""
        route, found = self._links.route, dict[int, Tensor]()
        graph = self.stages[action.row.stage].stage.plan.graph
        if graph.loss is not None:
            type = graph.outputs[graph.loss].type  # type: ignore[union-attr] # the loss is a tensor
            found[graph.loss] = torch.full(type.shape, scale, dtype=type.dtype, device=self._device)
        for item, gradient in self._take(action):
            place = route.transfers[item.transfer].output
            found[place] = found[place] + gradient if place in found else gradient
        return found

    def _send_back(self, action: Action, gradients: Mapping[str, Tensor] | None) -> None:
        transfers = self._links.route.transfers
        for item in action.made:
            self._send(item, None if gradients is None else gradients[transfers[item.transfer].input])
