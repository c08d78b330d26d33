"""The state of a module on its ranks: the names of the model, whole tensors or pieces, and what does not fit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from conjoin.errors import CheckpointError, UsageError
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.state.pieces import Piece, full_state_dict
from tests.ir.wording import assert_three_sentences
from tests.runtime.checkpoint_cases import BATCH, adam, alone, joined, make_model, on_threads, train

PLANS = [("data-parallel", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("megatron", 4)]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_the_state_has_the_names_and_values_of_the_model(strategy: str, num_ranks: int) -> None:
    model = make_model(0)
    states = on_threads(strategy, num_ranks, lambda step: (step.state_dict(), full_state_dict(step, everywhere=True)))
    wanted = model.state_dict()
    for own, whole in states:
        assert list(own) == list(wanted) and list(whole) != [] and whole.keys() == wanted.keys()
        assert all(torch.equal(whole[name], wanted[name]) for name in wanted)
    assert all(torch.equal(joined([own[name] for own, _ in states]), wanted[name]) for name in wanted)
    assert any(isinstance(value, Piece) for value in states[0][0].values()) == (strategy != "data-parallel")


def test_the_whole_state_is_on_rank_0_alone_unless_asked() -> None:
    found = on_threads("fsdp", 2, full_state_dict)
    assert len(found[0]) == len(make_model(0).state_dict()) and found[1] == {}
    assert found[0]["embed.weight"] is found[0]["head.weight"]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
def test_whole_tensors_and_own_pieces_are_loaded(strategy: str, num_ranks: int) -> None:
    wanted = make_model(5).state_dict()

    def program(step: ParallelModule) -> dict[str, Tensor]:
        parameters = list(step.parameters())
        assert step.load_state_dict(wanted) == ([], [])
        kept = {name: Piece(v.local.clone(), v.shape, v.region) if isinstance(v, Piece) else v.clone()
                for name, v in step.state_dict().items()}  # fmt: skip
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        step.load_state_dict(kept)
        assert all(a is b for a, b in zip(parameters, step.parameters(), strict=True))
        return full_state_dict(step, everywhere=True)

    for found in on_threads(strategy, num_ranks, program):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_prefix_destination_and_keep_vars() -> None:
    def program(step: ParallelModule) -> None:
        into: dict[str, Any] = {"other": 1}
        state = step.state_dict(destination=into, prefix="inner.", keep_vars=True)
        assert state is into and into["other"] == 1
        piece = into["inner.up.weight"]
        assert isinstance(piece, Piece) and piece.local is dict(step.named_parameters())["up.weight"]
        assert not step.state_dict()["up.weight"].local.requires_grad
        outer = nn.ModuleDict({"step": step})
        assert set(outer.state_dict()) == {f"step.{name}" for name in step.state_dict()}

    on_threads("fsdp", 2, program)


def test_names_that_a_wrapper_has_changed_are_told() -> None:
    def program(step: ParallelModule) -> None:
        for wrapper in ("_orig_mod.", "module."):  # of torch.compile, of DistributedDataParallel
            with pytest.raises(CheckpointError, match=f"under names without '{wrapper}', which a wrapper has put"):
                step.load_state_dict({wrapper + name: x for name, x in make_model(5).state_dict().items()})

    on_threads("single", 1, program)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    def program(step: ParallelModule) -> str:
        state: dict[str, Any] = make_model(5).state_dict()
        state["up.weight"] = state["up.weight"][:3]
        state["new"] = torch.zeros(3)
        del state["down.bias"]
        own = step.state_dict()["down.weight"]
        shifted = tuple((start + 1, stop + 1) for start, stop in own.region)
        state["down.weight"] = Piece(own.local, own.shape, shifted)
        state["norm.bias"] = 3
        before = full_state_dict(step, everywhere=True)
        with pytest.raises(CheckpointError) as caught:
            step.load_state_dict(state)
        assert_three_sentences(caught.value)
        with pytest.raises(CheckpointError):
            step.load_state_dict(state, strict=False)
        after = full_state_dict(step, everywhere=True)
        assert all(torch.equal(after[name], before[name]) for name in before)
        return str(caught.value)

    for message in on_threads("fsdp", 2, program):
        assert "in 5 tensors" in message
        for part in ("up.weight has shape (3, 6) instead of (10, 6)", "new is unexpected", "down.bias is missing",
                     "down.weight is Piece(", "norm.bias is a int, not a tensor"):  # fmt: skip
            assert part in message


def test_many_faults_are_cut_short_and_strict_may_be_left() -> None:
    step = alone()
    with pytest.raises(CheckpointError, match="and 5 more"):
        step.load_state_dict({})
    missing, unexpected = step.load_state_dict({"new": torch.zeros(1), "frozen": torch.ones(6)}, strict=False)
    assert unexpected == ["new"] and "up.weight" in missing and "frozen" not in missing
    assert (dict(step.named_parameters())["frozen"] == 1).all()
    with pytest.raises(UsageError) as caught:
        step.load_state_dict({}, assign=True)
    assert_three_sentences(caught.value)


def test_a_buffer_left_by_inference_is_loaded() -> None:
    step = alone()
    with torch.inference_mode():
        step(BATCH)
    step.load_state_dict(make_model(5).state_dict())
    assert torch.equal(step.state_dict()["norm.running_mean"], torch.zeros(10).double())
    train(step, adam(step.parameters()))


def test_a_piece_is_copied_and_not_computed_with() -> None:
    piece = Piece(torch.ones(2, 3), (4, 3), ((2, 4), (0, 3)))
    for made in (copy.deepcopy(piece), pickle.loads(pickle.dumps(piece)), piece.to(torch.float64), piece.clone()):
        assert isinstance(made, Piece) and (made.region, made.shape) == (piece.region, (4, 3)) and made.local.sum() == 6
        assert made.local.data_ptr() != piece.local.data_ptr()
    piece.copy_(Piece(torch.zeros(2, 3), (4, 3), ((2, 4), (0, 3))))
    assert piece.local.sum() == 0 and piece.detach().local.data_ptr() == piece.local.data_ptr()
    for wrong in (lambda: piece + 1, lambda: piece.sum(), lambda: piece[0], lambda: piece.new_empty(3),
                  lambda: piece.copy_(Piece(torch.zeros(2, 3), (4, 3), ((0, 2), (0, 3))))):  # fmt: skip
        with pytest.raises(UsageError, match="on a piece of a tensor") as caught:
            wrong()
        assert_three_sentences(caught.value)


def test_empty_pieces_and_empty_tensors_speak_the_protocol() -> None:
    nothing = Piece(torch.empty(0, 3), (4, 3), ((2, 2), (0, 3)))
    assert nothing.__create_write_items__("x", nothing) == nothing.__create_chunk_list__() == []
    empty = Piece(torch.empty(0, 1), (0, 3), ((0, 0), (1, 2)))
    (item,) = empty.__create_write_items__("x", empty)
    assert item.tensor_data.size == torch.Size((0, 3)) and empty.__get_tensor_shard__(item.index).shape == (0, 3)
    some = Piece(torch.ones(2, 3), (4, 3), ((2, 4), (0, 3)))
    (item,) = some.__create_write_items__("x", some)
    assert some.__get_tensor_shard__(item.index).shape == (2, 3) and some.size() == (4, 3)
    with pytest.raises(ValueError, match="begins at"):
        some.__get_tensor_shard__(dcp.metadata.MetadataIndex("x", (0, 0)))
