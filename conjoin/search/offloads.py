"""What a strategy has on the host, as it is asked for by `offload=`: activations, optimizer state, or both."""

from __future__ import annotations

from dataclasses import replace

from conjoin.ir import LeafKind, Plan, check_plan, offload_actions
from conjoin.sim import Wanted, kept_tensors, simulate


def with_offloads(plan: Plan, mode: str, kind: str) -> Plan:
    """The plan with all tensors that devices of a kind keep for the backward pass, or all optimizer state, or both, on
    the host; the plan itself where nothing was asked for."""
    if not mode or not plan.graph.training:
        return plan
    states = [leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.is_trained]
    kept = kept_tensors(simulate(plan, Wanted()).program, kind) if mode != "optimizer" else ()
    actions = offload_actions(plan.graph, (tensor.made for tensor in kept), states if mode != "activations" else ())
    return check_plan(replace(plan, memory=(*plan.memory, *actions)))
