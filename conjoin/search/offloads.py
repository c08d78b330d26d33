"""What a strategy has on the host, as it is asked for by `offload=`: activations, optimizer state, or inputs."""

from __future__ import annotations

from dataclasses import replace

from conjoin.errors import StrategyError
from conjoin.ir import LeafKind, Plan, check_plan, offload_actions, streamable_inputs
from conjoin.sim import Wanted, kept_tensors, simulate


def with_offloads(plan: Plan, mode: str, kind: str) -> Plan:
    """The plan with all tensors that devices of a kind keep for the backward pass, or all optimizer state, or both, on
    the host, or all inputs that can be read there; the plan itself where nothing was asked for."""
    if mode == "inputs":
        names = [name for group in streamable_inputs(plan.graph) for name in group]
        if not names or plan.accumulation is not None:
            why = "They are cut into micro-batches" if names else "None of them is read row by row, or along edges,"
            raise StrategyError(
                f"The strategy {plan.strategy} was asked to have the inputs of {plan.model.name} on the host. {why} "
                f"and would be copied whole where they are read. Leave offload=inputs out, or take offload=activations."
            )
        return check_plan(replace(plan, memory=(*plan.memory, *offload_actions(plan.graph, (), (), names))))
    if not mode or not plan.graph.training:
        return plan
    states = [leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.is_trained]
    kept = kept_tensors(simulate(plan, Wanted()).program, kind) if mode != "optimizer" else ()
    actions = offload_actions(plan.graph, (tensor.made for tensor in kept), states if mode != "activations" else ())
    return check_plan(replace(plan, memory=(*plan.memory, *actions)))
