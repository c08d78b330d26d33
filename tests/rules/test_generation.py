"""The generator finds known identities, drops what the second test refutes, and continues where it stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from conjoin.rules.generator import choice, resumed_enumeration
from conjoin.rules.generator.arithmetic import PRIME, Floats, Residues, evaluate
from conjoin.rules.generator.enumeration import Enumeration, Progress
from conjoin.rules.generator.fingerprints import of_outputs, of_values
from conjoin.rules.generator.generation import Selection, generate
from conjoin.rules.generator.model_vocabularies import HEADS, OF_MODELS
from conjoin.rules.generator.more_vocabularies import MORE
from conjoin.rules.generator.resumed_enumeration import enumerate_graphs
from conjoin.rules.generator.shapes import Type, result_type
from conjoin.rules.generator.vocabulary import (
    IMAGES,
    MATRICES,
    VOCABULARIES,
    Choice,
    Typed,
    Vocabulary,
    choose,
)
from tests.devices import vocabularies as devices

SIZES = {"m": 2, "k": 3}
OTHER = {"m": 4, "k": 5}


def quiet(line: str) -> None:
    """No progress in tests."""


def rules_of(selection: Selection) -> set[str]:
    return {str(rule).removeprefix(": ") for rule in selection.rules}


def only(vocabulary: Vocabulary, *choices: Choice, inputs: str = "") -> Vocabulary:
    """A vocabulary with some of its operators, and with some of its inputs where they are named."""
    given = tuple(typed for typed in vocabulary.inputs if not inputs or typed.name in inputs)
    constants = tuple(c for c in vocabulary.constants if any(choice.op in c.uses for choice in choices))
    return replace(vocabulary, inputs=given, choices=choices, constants=constants)


def numbers(*names: str) -> Vocabulary:
    return Vocabulary("numbers", tuple(Typed(n, "m k") for n in "xyz"), tuple(map(choose, names)), SIZES, OTHER)


def test_sums_and_products_leave_the_laws_of_numbers() -> None:
    found = generate(numbers("add", "mul"), 2, progress=quiet)
    assert rules_of(found) == {
        "add(x, y) => add(y, x)",
        "mul(x, y) => mul(y, x)",
        "add(x, add(y, z)) => add(y, add(x, z))",
        "mul(x, mul(y, z)) => mul(y, mul(x, z))",
        "add(mul(x, y), mul(x, y)) => mul(x, add(y, y))",
    }
    larger = rules_of(generate(numbers("add", "mul"), 3, progress=quiet))
    assert "add(mul(x, y), mul(x, z)) => mul(x, add(y, z))" in larger
    assert "add(mul(x, y), mul(x, y)) => mul(x, add(y, y))" not in larger  # now an instance


def test_products_of_matrices() -> None:
    plain = map(choose, ("add", "transpose", "matmul"))
    found = rules_of(generate(only(MATRICES, *plain, choose("concat", axis=-1), inputs="xyzw"), 3, progress=quiet))
    assert {
        "matmul(matmul(x, y), z) => matmul(x, matmul(y, z))",
        "matmul(x, identity) => x",
        "concat[axis=-1](matmul(x, y), matmul(x, z)) => matmul(x, concat[axis=-1](y, z))",
        "add(matmul(x, y), matmul(x, z)) => matmul(x, add(y, z))",
    } <= found
    assert not any("relu" in rule for rule in found)


def test_two_products_become_one_with_two_outputs() -> None:
    parts = (choose("concat", axis=-1), choose("split", axis=-1, part=0), choose("split", axis=-1, part=1))
    found = rules_of(generate(only(MATRICES, choose("matmul"), *parts, inputs="xzw"), 3, progress=quiet))
    merged = "matmul(x, concat[axis=-1](y, z))"
    assert f"matmul(x, y), matmul(x, z) => split[axis=-1, part=0]({merged}), split[axis=-1, part=1]({merged})" in found


def test_convolutions_are_tried_with_other_kernels_and_groups() -> None:
    convs = (choose("conv", stride="s", pad="same"), choose("conv", stride="s", pad="valid"))
    more = (choose("concat", axis=1), choose("concat", axis=0), choose("avg_pool", kernel="r", stride="s"))
    enlarge = Choice("enlarge", (("kernel", "r"),), on_inputs=True)
    images = only(IMAGES, *convs, *more, enlarge, inputs="xyabp")
    selection = generate(images, 3, progress=quiet)
    found = rules_of(selection)
    assert "conv[stride=s](x, enlarge[kernel=r](y)) => conv[stride=s](x, y)" in found
    assert "conv[stride=s](x, pool_kernel[kernel=r]) => avg_pool[kernel=r, stride=s](x)" in found
    joined = [rule for rule in found if rule.startswith("concat[axis=1](conv") and "concat[axis=0]" in rule]
    shared = [rule for rule in joined if rule.count("(x, ") == 3]
    assert shared and all("groups=1" in rule for rule in shared)  # false for several groups
    # A kernel of size 1 needs no padding: equal at the first sizes alone, and then refuted by the second test.
    alone = generate(replace(images, more_sizes=images.sizes), 2, progress=quiet)
    assert alone.refuted > 0 == generate(images, 2, progress=quiet).refuted
    for each in (found, rules_of(alone)):
        assert not any("valid](x, y) => conv[stride=s](x, y)" in rule for rule in each)


def test_work_is_divided_over_devices() -> None:
    plain = map(choose, ("matmul", "add", "replicate", "reduce"))
    moved = (choose(op, axis=axis) for op in ("partition", "combine") for axis in (-2, -1))
    parallel = only(devices.PARALLEL, *plain, *moved, inputs="xzXZ")
    found = rules_of(generate(parallel, 3, progress=quiet))
    assert "combine[axis=-2](partition[axis=-2](x)) => x" in found
    assert "reduce(matmul(x, replicate(y))) => matmul(reduce(x), y)" in found
    assert "matmul(combine[axis=-1](x), combine[axis=-2](y)) => reduce(matmul(x, y))" in found
    # Two copies add up to twice a tensor on two devices, not on three.
    alone = generate(replace(parallel, more_sizes=parallel.sizes), 3, progress=quiet)
    assert alone.refuted > 0
    assert not any("reduce(replicate(x)) =>" in rule for rule in found | rules_of(alone))


def test_heads_and_what_they_are_moved_through() -> None:
    plain = map(choose, ("flatten", "swap", "relu", "scale"))
    heads = only(HEADS, choose("unflatten", parts="h"), *plain, choose("softmax", axis=-1), inputs="xus")
    found = rules_of(generate(heads, 2, progress=quiet))
    assert {
        "flatten(unflatten[parts=h](x)) => x",
        "unflatten[parts=h](flatten(x)) => x",
        "swap(swap(x)) => x",
        "softmax[axis=-1](swap(x)) => swap(softmax[axis=-1](x))",
        "scale(unflatten[parts=h](x), y) => unflatten[parts=h](scale(x, y))",
    } <= found
    assert not any("softmax" in rule and "flatten" in rule for rule in found)


def test_a_vocabulary_names_only_operators_that_apply() -> None:
    for vocabulary in (*VOCABULARIES, *MORE, *OF_MODELS, *devices.VOCABULARIES):
        run = Enumeration(vocabulary)
        run.build(1)
        unused = set(range(len(vocabulary.choices)))
        for block in chain(run.blocks(1, is_last=False), run.blocks(2, is_last=False)):
            unused.discard(block.choice)
            if not unused:
                break
        assert not unused, (vocabulary.name, [vocabulary.choices[i] for i in unused])


def test_a_run_continues_where_it_stopped(tmp_path: Path) -> None:
    small = only(MATRICES, *map(choose, ("add", "transpose", "matmul", "relu")), inputs="xz")
    whole = enumerate_graphs(small, 3, directory=tmp_path, progress=quiet)
    (state,) = tmp_path.iterdir()
    files = sorted(state.iterdir())
    kept = {path: path.stat().st_mtime_ns for path in files[1:]}
    files[0].unlink()
    again = enumerate_graphs(small, 3, directory=tmp_path, workers=2, progress=quiet)
    assert files[0].exists() and all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert whole.num_graphs == again.num_graphs
    assert np.array_equal(whole.others.hashes, again.others.hashes)
    assert np.array_equal(whole.other_of, again.other_of)


def test_a_killed_enumeration_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = only(MATRICES, *map(choose, ("add", "transpose", "matmul", "relu")), inputs="xz")
    monkeypatch.setattr(resumed_enumeration, "_BLOCKS_IN_PART", 5)

    def die(line: str) -> None:
        if "3 operators, " in line:
            os.kill(os.getpid(), signal.SIGKILL)

    assert _run_apart(enumerate_graphs, small, 3, tmp_path, die) == -signal.SIGKILL
    (state,) = tmp_path.iterdir()
    kept = sorted(state.glob("last*.npz"))
    whole, again = (enumerate_graphs(small, 3, directory=aside, progress=quiet) for aside in (None, tmp_path))
    assert 0 < len(kept) < len(sorted(state.glob("last*.npz")))
    assert np.array_equal(whole.others.hashes, again.others.hashes) and whole.num_graphs == again.num_graphs


def test_a_killed_choice_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = only(IMAGES, choose("conv", stride="s", pad="same"), choose("concat", axis=1), choose("add"))
    whole = generate(images, 3, progress=quiet)
    monkeypatch.setattr(choice, "_SAVED_EACH", 10)
    told: list[str] = []

    def die(line: str) -> None:
        if "30 of" in line:
            os.kill(os.getpid(), signal.SIGKILL)

    assert _run_apart(generate, images, 3, tmp_path, die) == -signal.SIGKILL
    again = generate(images, 3, directory=tmp_path, progress=told.append)
    looked = [line for line in told if "looked at" in line]
    assert "30 of" in looked[0]  # what was saved after 20 is not looked at again
    assert (again.rules, again.refuted, again.derived) == (whole.rules, whole.refuted, whole.derived)


def _run_apart(run: Callable[..., object], vocabulary: Vocabulary, most_ops: int, state: Path, told: Progress) -> int:
    """The exit code of a run in a process of its own."""
    given = {"directory": state, "progress": told}
    process = multiprocessing.get_context("fork").Process(target=run, args=(vocabulary, most_ops), kwargs=given)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def test_another_vocabulary_has_another_state(tmp_path: Path) -> None:
    for names in (("add",), ("mul",)):
        enumerate_graphs(numbers(*names), 2, directory=tmp_path, progress=quiet)
    assert len(list(tmp_path.iterdir())) == 2


def test_fingerprints() -> None:
    values = np.arange(12).reshape(2, 2, 3)
    of = Type((2, 3))
    one, other = of_values(values, of).tolist()
    assert one != other
    assert of_values(values.reshape(2, 3, 2), Type((3, 2))).tolist() != [one, other]
    assert of_values(values, Type((2, (1, 2)))).tolist() == [one, other]
    assert of_outputs([one, other]) == of_outputs([other, one]) != of_outputs([one, one])


@pytest.mark.parametrize("pad", ["same", "valid"])
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_are_those_of_torch(pad: str, stride: int) -> None:
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(1, 2, 4, 7, 9)), random.normal(size=(1, 6, 2, 3, 3))
    types = [Type((2, 4, 7, 9)), Type((6, 2, 3, 3), role="kernel")]
    padding = 1 if pad == "same" else 0
    params: dict[str, int | str] = {"stride": stride, "pad": pad, "act": "none", "kernel": 3}
    images, kernels = torch.from_numpy(x[0]), torch.from_numpy(weight[0])
    wanted = {
        "conv": functional.conv2d(images, kernels, None, stride, padding, groups=2),
        "avg_pool": functional.avg_pool2d(images, 3, stride, padding),
        "max_pool": functional.max_pool2d(images, 3, stride, padding),
    }
    for op, expected in wanted.items():
        operands = 2 if op == "conv" else 1
        made = evaluate(Floats(), op, params, types[:operands], (x, weight)[:operands])
        np.testing.assert_allclose(made[0], expected.numpy(), atol=1e-12)
        of = result_type(op, params, types[:operands])
        assert of is not None and of.shape == expected.shape


def test_residues_divide_and_keep_order() -> None:
    field = Residues()
    x = np.array([1, 2, 9, PRIME - 1])
    assert (field.inverse(x) * x % PRIME).tolist() == [1, 1, 1, 1]
    many = np.sort(np.random.default_rng(1).integers(-PRIME // 2 + 1, PRIME // 2, 1000))
    once = field.function("relu", many % PRIME)
    assert np.array_equal(field.function("relu", once), once)
    signed = np.where(once > PRIME // 2, once - PRIME, once)
    assert np.all(np.diff(signed) >= 0) and np.mean(signed == many) < 0.01


def test_operands_that_do_not_fit() -> None:
    matrix, spread = Type((2, 4)), Type((2, 4), spread=2)
    assert result_type("add", {}, [matrix, spread]) is None
    assert result_type("split", {"axis": -1, "part": 0}, [matrix]) is None
    assert result_type("split", {"axis": -1, "part": 1}, [Type((2, (1, 3)))]) == Type((2, 3))
    assert result_type("add", {}, [Type((2, (1, 3))), matrix]) == Type((2, (1, 3)))
    assert result_type("add", {}, [Type((2, (1, 3))), Type((2, (2, 2)))]) is None
    assert result_type("partition", {"axis": -1, "devices": 2}, [Type((2, (1, 3)))]) is None
    assert result_type("partition", {"axis": -1, "devices": 2}, [matrix]) == Type((2, 2), spread=2)
