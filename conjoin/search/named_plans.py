"""The door to the named strategies: a graph, a machine and a strategy's name make a plan."""

from __future__ import annotations

from collections.abc import Callable

from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.ir import Graph, Plan
from conjoin.machine import Machine
from conjoin.search.drafts import Draft, make_plan_by, with_sections_alike
from conjoin.search.facts import Facts
from conjoin.search.request import Request
from conjoin.search.strategies import PIPELINE, STRATEGIES, known_strategies, read_request


def strategy_names() -> tuple[str, ...]:
    """The names that `make_plan` knows, but for those that stand for another.

    >>> strategy_names()[:4]
    ('single', 'data-parallel', 'zero1', 'fsdp')
    """
    return tuple(known_strategies())


def make_plan(graph: Graph, machine: Machine, strategy: str) -> Plan:
    """The legal plan that a named strategy makes for a model on a machine; StrategyError says why there is none.

    >>> from conjoin.ir import parse_graph
    >>> graph = parse_graph('''graph "sum" train
    ... param:w f32[4] trainable
    ... input:x f32[8,4]
    ... takes [input:x] in null
    ... %0: f32[8,4] = mul.Tensor(input:x, param:w)
    ... %1: f32[] = sum(%0)
    ... returns [%1] in null loss 0
    ... ''')
    >>> print(make_plan(graph, Machine("two", 1, 2, "cpu"), "data-parallel").graph)
    graph "sum" train
    param:w f32[4] trainable
    input:x f32[8,4]{d0:S(0)}
    takes [input:x] in null
    %0: f32[4]{d0:B} = conjoin::replicate(param:w, axes=["d0"])
    %1: f32[8,4]{d0:S(0)} = mul.Tensor(input:x, %0)
    %2: f32[]{d0:P} = sum(%1)
    %3: f32[] = conjoin::reduce(%2, axes=["d0"])
    returns [%3] in null loss 0
    <BLANKLINE>
    """
    request = read_request(strategy)
    if request.name == PIPELINE:
        raise UsageError(
            f"A plan of one stage was asked for by {strategy[:60]!r}. A pipeline has several. Choose another strategy "
            f"here; plan, compare and make_pipeline take a pipeline."
        )
    try:
        return make_plan_by(graph, machine, drafter(machine, request), request.micro, part=request.part)
    except PlanError as error:
        if request.name in STRATEGIES:
            raise
        raise StrategyError(
            f"The strategy {request.name} was asked for {graph.name} on {machine.name}. What its function drafted is "
            f"no legal plan. Correct the function that was registered: {error}"
        ) from None


def drafter(machine: Machine, request: Request) -> Callable[[Facts], Draft]:
    """What drafts the layouts of a strategy on a machine."""
    mesh = request.mesh(machine.mesh)

    def draft(facts: Facts) -> Draft:
        try:
            found = known_strategies()[request.name].draft(facts, mesh, request)
            return with_sections_alike(facts.graph, found, mesh)
        except StrategyError as error:
            if request.micro == 1:
                raise
            raise StrategyError(f"In each of {request.micro} micro-batches: {error}") from None

    return draft
