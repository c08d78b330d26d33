"""Parts to and from the members of a group as single messages, where Gloo's collectives hold up one way by the other.

Gloo sends a message when the receiver has said that it is ready. Its all-to-all, and its all-gather between two ranks,
say so after they have begun to send: to a rank that came first the word then stands behind all of our own data, and the
two ways of a link are used one after the other. How long that takes depends on who comes first, and is up to twice as
long. Here all receivers are ready before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from conjoin.runtime.recording import CollectiveLabel, labelled

_TAG = 0x5AB
"""Apart from messages that a user of the same group sends."""


class Swap:
    """Messages under way, which are all to be there in the end."""

    def __init__(self, messages: Sequence[dist.Work], label: CollectiveLabel) -> None:
        self._messages, self._label = messages, label

    def wait(self) -> None:
        with labelled(self._label):
            for message in self._messages:
                message.wait()


def swap(kind: str, group: dist.ProcessGroup, into: Sequence[Tensor], out: Sequence[Tensor]) -> Swap:
    """Send each member of a group its part and receive one from each; a recording calls it by its kind.

    Empty parts are left out on both sides.
    """
    own, count = group.rank(), len(out)
    before, after = ([(own + way * step) % count for step in range(1, count)] for way in (-1, 1))
    label = CollectiveLabel.new(kind)
    with labelled(label), torch.no_grad():
        messages = [dist.irecv(into[m], group=group, tag=_TAG, group_src=m) for m in before if into[m].numel()]
        messages += [dist.isend(out[m], group=group, tag=_TAG, group_dst=m) for m in after if out[m].numel()]
        into[own].copy_(out[own])
    return Swap([_under_way(message) for message in messages], label)


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of the group"
    return work
