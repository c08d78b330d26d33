"""What may be asked of a strategy in one line: parts joined by +, degrees, what is run again, micro-batches, axes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import ConjoinError, StrategyError, UsageError
from conjoin.ir import RECOMPUTE, LeafKind, Plan, regathered_parameters
from conjoin.machine import Machine
from conjoin.ops import Split
from conjoin.search import make_plan, read_request
from tests.ir.wording import assert_three_sentences
from tests.search.models import captured

TWO_NODES = Machine("two nodes", 2, 4, "cpu")


def plan_of(strategy: str, name: str = "llama-70b", batch_size: int = 8, machine: Machine = TWO_NODES) -> Plan:
    return make_plan(captured(name, batch_size), machine, strategy)


READ = [
    ("ddp", "data-parallel"),
    ("zero2:8", "zero1:dp=8"),
    ("zero3", "fsdp"),
    ("hsdp:8,4", "hsdp:shard=8,replicate=4"),
    ("hsdp:replicate=4,8", "hsdp:replicate=4,shard=8"),
    ("megatron:8,4,sp", "megatron:tp=8,dp=4,sp"),
    ("fsdp:recompute=full,micro=2", "fsdp+recompute=full+micro=2"),
    ("micro=2+fsdp@n0,d0+recompute=every-3", "fsdp+recompute=every-3+micro=2@n0,d0"),
    ("fsdp+recompute=every-1+micro=1", "fsdp+recompute=full"),
    ("zero3:4+megatron:tp=2,sp", "megatron:tp=2,dp=4,fsdp,sp"),
    ("megatron:tp=2 + ddp", "megatron:tp=2"),
    ("fsdp+context:cp=2+megatron:tp=2,sp", "megatron:tp=2,cp=2,fsdp,sp"),
    ("context:2,4,heads", "context:cp=2,dp=4,heads"),
    (
        "hsdp:shard=8,replicate=4+megatron:tp=8,sp+recompute=selective+micro=4",
        "megatron:tp=8,shard=8,replicate=4,hsdp,sp+recompute=selective+micro=4",
    ),
]


@pytest.mark.parametrize(("asked", "told"), READ, ids=[asked for asked, _ in READ])
def test_how_a_request_is_read(asked: str, told: str) -> None:
    assert str(read_request(asked)) == told
    assert read_request(told) == read_request(asked)


ERRORS = [
    ("hsdp:8,4,2", UsageError, "The keys of hsdp are shard=N, replicate=N."),
    ("hsdp:shard=3", StrategyError, "The nearest degree that fits is shard=2."),
    ("hsdp:replicate=3", StrategyError, "The nearest degree that fits is replicate=2."),
    ("hsdp:shard=2,replicate=2", StrategyError, "ask for 4 devices. The mesh n0:2 d0:2 d1:2 has 8"),
    ("hsdp:shard=8,replicate=2", StrategyError, "no axis is left for it"),
    ("hsdp:2,2+megatron:tp=4", StrategyError, "The nearest degree that fits is replicate=1."),
    ("fsdp+ddp", UsageError, "fsdp and data-parallel split the batch, which only one can"),
    ("fsdp+hsdp+megatron:tp=2", UsageError, "fsdp and hsdp and megatron split the batch"),
    ("fsdp+reduction", UsageError, "They cannot be joined. Leave one of them out, or write one of data-parallel+mega"),
    ("hsdp+megatron:tp=2,dp=4", UsageError, "dp=4 and hsdp. Both split the batch"),
    ("megatron:tp=2,dp=4,shard=2", UsageError, "dp=4 and shard. Both split the batch"),
    ("fsdp:dp=4+megatron:tp=2,dp=4", UsageError, "dp twice"),
    ("fsdp+megatron:tp=2,zero1", UsageError, "both zero1 and fsdp"),
    ("hsdp+megatron:tp=2,fsdp", UsageError, "both fsdp and hsdp"),
    ("fsdp+recompute=some", UsageError, "none, selective, full, or every so many blocks one, as every-2. Did you mean"),
    ("fsdp+recompute=every-0", UsageError, "recompute='every-0'"),
    ("fsdp+recompute=every-3", StrategyError, "It has 2 blocks. Write every-2"),
    ("fsdp+recompute=full+recompute=none", UsageError, "recompute twice"),
    ("fsdp:micro=2,micro=4", UsageError, "micro twice"),
    ("fsdp@n0,d0,d1+micro=2@n0,d0,d1", UsageError, "axes twice"),
    ("fsdp+micro=0", UsageError, "A degree is a whole number from 1, of at most 7 digits."),
    ("fsdp+micro=3", StrategyError, "a batch of 8 has no 3 equal parts"),
    ("fsdp+micro=2", StrategyError, "In each of 2 micro-batches: The batch of Llama was to be split 8 ways (dp=8). It"),
    ("hsdp+micro=2", StrategyError, "split 8 ways (shard × replicate=8). It has 4 samples"),
    ("recompute=full", UsageError, "names none"),
    ("recompute=full,dp=2+fsdp", UsageError, "unknown key 'dp'"),
    ("zero4", UsageError, "Did you mean zero"),
]


@pytest.mark.parametrize(("asked", "kind", "words"), ERRORS, ids=[asked for asked, _, _ in ERRORS])
def test_a_request_that_cannot_be_had(asked: str, kind: type[ConjoinError], words: str) -> None:
    with pytest.raises(kind) as error:
        plan_of(asked)
    assert words in str(error.value), str(error.value)
    assert_three_sentences(error.value)


def test_a_model_without_blocks() -> None:
    with pytest.raises(StrategyError, match="no list of modules has two members") as error:
        plan_of("ddp+recompute=full", "mlp")
    assert_three_sentences(error.value)


def test_statistics_of_a_whole_batch_are_not_taken_of_its_parts() -> None:
    with pytest.raises(StrategyError, match=r"it takes statistics of a whole batch .* part= in the place of micro="):
        plan_of("ddp+micro=2", "resnet-50", machine=Machine("local", 1, 2, "cpu"))


DATA = st.sampled_from(["ddp", "zero1", "zero2", "fsdp", "zero3", "hsdp", "hsdp:2", "hsdp:replicate=2"])
TENSOR = st.sampled_from(["megatron", "megatron:tp=2", "megatron:4,sp", "megatron:tp=2,sp,vocab"])
FLAGGED = st.sampled_from(["megatron:2,fsdp", "megatron:tp=2,dp=4,zero1", "megatron:tp=2,shard=2,replicate=2", "sbp3d"])
JOINED = st.permutations([0, 1]).flatmap(lambda order: st.builds("{}+{}".format, *((DATA, TENSOR)[i] for i in order)))
NAMED = st.one_of(DATA, TENSOR, FLAGGED, JOINED)
AGAIN = st.sampled_from(["", "", "+recompute=none", "+recompute=selective", "+recompute=full", "+recompute=every-2"])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(NAMED, AGAIN, st.sampled_from(["", "+micro=2"]), st.sampled_from(["", "@d1,n0,d0"]))
def test_what_a_plan_says_makes_the_same_plan_again(named: str, again: str, micro: str, axes: str) -> None:
    first = plan_of(f"{named}{again}{micro}{axes}", batch_size=16)
    assert plan_of(first.strategy, batch_size=16) == first
    assert plan_of(f"{micro[1:]}+{named}{axes}{again}".lstrip("+"), batch_size=16) == first


def test_hybrid_sharding_splits_inside_a_node_and_holds_alike_between() -> None:
    plan = plan_of("hsdp")
    assert plan.strategy == "hsdp:shard=4,replicate=2"
    layouts = {leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)}
    assert layouts == {(("d0", Split(0)), ("d1", Split(0)))}
    (batch,) = {leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.INPUT)}
    assert [axis for axis, _ in batch] == ["n0", "d0", "d1"]
    assert regathered_parameters(plan) == {leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)}


def test_of_one_node_all_is_sharded() -> None:
    machine = Machine("local", 1, 4, "cpu")
    hybrid, full = plan_of("hsdp", machine=machine), plan_of("fsdp", machine=machine)
    assert (hybrid.strategy, hybrid.graph, hybrid.memory) == ("hsdp:shard=4,replicate=1", full.graph, full.memory)


def test_tensor_parallel_inside_then_sharding_then_copies() -> None:
    plan = plan_of("hsdp:shard=2,replicate=2+megatron:tp=2,sp")
    stored = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.PARAMETER)}
    assert stored["blocks.0.attention.query.weight"] == (("d1", Split(0)), ("d0", Split(0)))
    assert stored["norm.weight"] == (("d0", Split(0)),)
    across = plan_of("hsdp:shard=2,replicate=2+megatron:tp=2,sp@d1,d0,n0")
    stored = {leaf.name: leaf.type.layout for leaf in across.graph.leaves_of(LeafKind.PARAMETER)}
    assert stored["blocks.0.attention.query.weight"] == (("n0", Split(0)), ("d0", Split(0)))


def test_micro_batches_are_said_in_the_plan() -> None:
    plan, whole = plan_of("zero1+micro=2", batch_size=16), plan_of("zero1", batch_size=16)
    assert plan.strategy == "zero1:dp=8+micro=2" and plan.model == whole.model
    assert plan.accumulation is not None and plan.accumulation.steps == 2


@pytest.mark.parametrize(("mode", "count"), [("none", 0), ("every-2", 1), ("full", 2), ("selective", 2)])
def test_what_is_run_again_is_said_in_the_plan(mode: str, count: int) -> None:
    plan = plan_of(f"megatron:tp=4,sp+recompute={mode}")
    assert sum(action.action == RECOMPUTE for action in plan.memory) == count
    assert plan.strategy == f"megatron:tp=4,dp=2,sp+recompute={mode}"
