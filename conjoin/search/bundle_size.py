"""How large bundles of parameters are to be on a machine.

A model of M bytes in bundles of B takes M/B latencies L of a collective over all devices, its launch included; and for
the last bundle, B/R seconds at its rate R, everyone waits when nothing is left to compute. B = √(M·L·R) makes both
alike, and their sum least. Bundles over 64 MiB are not made: two more are on their way meanwhile and take memory, and
large parameters travel alone anyway.
"""

from __future__ import annotations

from math import sqrt

from conjoin.cost import collective_seconds
from conjoin.ir import BUNDLE_BYTES, Graph, LeafKind
from conjoin.machine import Machine

MEBI = 2**20
_LARGEST = 64 * MEBI
_LAUNCH_SECONDS = 6e-5
"""Of the host for a collective, as the profile of an H200 has it (`CostModel.launch`)."""


def choose_bundle_bytes(graph: Graph, machine: Machine) -> int:
    """Whole MiB, from one to 64; the default where speeds are not known.

    >>> from conjoin.ir import parse_graph
    >>> graph = parse_graph('''graph "product" train
    ... param:w f32[1024,1024] trainable
    ... input:x f32[1024]
    ... takes [input:x] in null
    ... %0: f32[1024] = mv(param:w, input:x)
    ... %1: f32[] = sum(%0)
    ... returns [%1] in null loss 0
    ... ''')
    >>> [choose_bundle_bytes(graph, Machine.preset("dgx-h100", nodes=n)) // MEBI for n in (1, 2, 16)]
    [9, 10, 14]
    """
    if machine.num_devices == 1 or not machine.device_types:
        return BUNDLE_BYTES
    axes = machine.mesh.names
    latency, longer = (collective_seconds(machine, "all-gather", axes, sent).value for sent in (1, _LARGEST))
    if not longer > latency:
        return BUNDLE_BYTES
    rate, latency = _LARGEST / (longer - latency), latency + _LAUNCH_SECONDS
    num_bytes = sum(leaf.type.bytes for leaf in graph.leaves_of(LeafKind.PARAMETER))
    return MEBI * round(min(_LARGEST, max(MEBI, sqrt(num_bytes * latency * rate))) / MEBI)
