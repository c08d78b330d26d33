"""A player that shares nothing with ours: it goes round until nothing changes any more."""

from __future__ import annotations

from conjoin.schedules import Kind, Row, Schedule, Times


class SlowPlayer:
    """Ends of rows and arrivals of what is sent, guessed to be 0 and raised until they stand still."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.times = schedule, times
        self.end = {row: 0.0 for rows in schedule.rows for row in rows}
        self.sent: dict[tuple[int, int, int], float] = {}
        self.channels: dict[tuple[int, int], float] = {}

    def ended(self, forward: bool, stage: int, m: int) -> float:
        kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        return next(self.end[Row(kind, stage, m)] for kind in kinds if Row(kind, stage, m) in self.end)

    def neighbours(self, stage: int, later: bool) -> list[tuple[int, int]]:
        """Edges and the stages at their other ends, after or before a stage."""
        pairs = enumerate(self.schedule.edges)
        return [(e, edge[later]) for e, edge in pairs if edge[not later] == stage]

    def ready(self, row: Row) -> float:
        stage, m, owners = row.stage, row.micro_batch, self.schedule.owners
        if row.kind is Kind.WEIGHT_GRADIENT:
            return self.ended(False, stage, m)
        forward = row.kind is Kind.FORWARD
        came = [0.0 if forward else self.ended(True, stage, m)]
        for _, other in self.neighbours(stage, not forward):
            local = owners[other] == owners[stage]
            came.append(self.ended(forward, other, m) if local else self.sent.get((other, stage, m), 0.0))
        return max(came)

    def send(self, row: Row, now: float) -> None:
        forward, owners = row.kind is Kind.FORWARD, self.schedule.owners
        seconds = self.times.activations if forward else self.times.gradients
        for edge, other in self.neighbours(row.stage, forward):
            channel = owners[row.stage], owners[other]
            if channel[0] != channel[1]:
                self.channels[channel] = max(now, self.channels.get(channel, 0.0)) + seconds[edge]
                self.sent[row.stage, other, row.micro_batch] = self.channels[channel]

    def round(self) -> None:
        self.channels = {}
        for rows in self.schedule.rows:
            free = 0.0
            for row in rows:
                free = self.end[row] = max(free, self.ready(row)) + self.times.of(row.kind, row.stage)
                if row.kind is not Kind.WEIGHT_GRADIENT:
                    self.send(row, free)


def slow_seconds(schedule: Schedule, times: Times) -> float:
    """When the last row ends; inf where the rounds come to no end."""
    player = SlowPlayer(schedule, times)
    for _ in range(len(player.end) + 2):
        before = dict(player.end), dict(player.sent)
        player.round()
        if (player.end, player.sent) == before:
            return max(player.end.values())
    return float("inf")
