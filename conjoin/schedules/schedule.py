"""A pipeline schedule as data: for each owner of stages, the rows it runs, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Edge = tuple[int, int]


class Kind(StrEnum):
    """What a row does. A backward is an input gradient and a weight gradient in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND = "S"
    RECEIVE = "R"


TRANSFERS = (Kind.SEND, Kind.RECEIVE)


@dataclass(frozen=True, slots=True)
class Row:
    """One thing an owner does for one stage and one micro-batch; a send or a receive names the stage at the other end.

    >>> print(Row(Kind.FORWARD, 0, 3), Row(Kind.SEND, 0, 3, peer=1), Row(Kind.RECEIVE, 1, 3, peer=0))
    F0.3 S0>1.3 R1<0.3
    """

    kind: Kind
    stage: int
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        arrow = {Kind.SEND: f">{self.peer}", Kind.RECEIVE: f"<{self.peer}"}.get(self.kind, "")
        return f"{self.kind}{self.stage}{arrow}.{self.micro_batch}"

    @property
    def source(self) -> int:
        """The stage that makes what a transfer carries."""
        assert self.peer is not None
        return self.stage if self.kind is Kind.SEND else self.peer

    @property
    def target(self) -> int:
        """The stage that a transfer is for; before the source where it carries a gradient."""
        assert self.peer is not None
        return self.peer if self.kind is Kind.SEND else self.stage


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who owns which stage, and what each owner runs in which order.

    Activations go along `edges`, from a stage to later ones, gradients come back along them. Where no row is a send or
    a receive, transfers are implied: they start as soon as what they carry is there, and take no part of an owner's
    time.
    """

    owners: tuple[int, ...]
    """The owner of each stage."""
    num_micro_batches: int
    rows: tuple[tuple[Row, ...], ...]
    """What each owner runs."""
    edges: tuple[Edge, ...]
    name: str = ""

    @property
    def num_stages(self) -> int:
        return len(self.owners)

    @property
    def num_owners(self) -> int:
        return len(self.rows)

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives are rows of it."""
        return any(row.kind in TRANSFERS for rows in self.rows for row in rows)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, rows)) for rows in self.rows)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Every stage gives to the next.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def one_each(num_stages: int) -> tuple[int, ...]:
    """Every stage has an owner of its own."""
    return tuple(range(num_stages))


def looped(num_owners: int, stages_each: int) -> tuple[int, ...]:
    """Stages are dealt out in turn.

    >>> looped(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_owners)) * stages_each


def v_shaped(num_owners: int) -> tuple[int, ...]:
    """Two stages each, there and back: the first owner also has the last stage.

    >>> v_shaped(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_owners), *reversed(range(num_owners)))
