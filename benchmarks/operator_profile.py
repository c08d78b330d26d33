"""Seconds of the operators that the zoo's models run, whole and split, on one device: the profile that ships.

    python -m benchmarks.operator_profile collect --keys operator_keys.txt [--sweep]
    python -m benchmarks.operator_profile measure --keys operator_keys.txt --machine dgx-h200 --device cuda --minutes 8

`collect` needs no device: it captures every model on the meta device and writes the keys of its calls, the weightiest
first: at the size of the paper, with the batch cut to what one device takes, and each other index split 2, 4 and 8
ways; in float32, in bfloat16, and the casts between; and so the operators of our own that batch norms and losses are
expanded into where a batch is split. With `--sweep` the keys are those of operators that people use, at sizes over
the whole range, from no model (`operator_sweep.py`), in an order that is even wherever it ends. `measure` takes them
in that order until the time is up, keeps every measurement in the store at once (`--store`, else that of this
account), skips what the store has, and writes `conjoin/cost/profiles/<device>.jsonl.gz`. With `--onto` the store
first takes what a profile has, measured with the same version of torch. `fit` measures nothing: it takes the outcomes
of `--onto`, and writes what follows from them.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from random import Random

import torch

import zoo
from benchmarks.operator_sweep import IN_EIGHT_BITS, Case, Swept, sweep
from conjoin.comm import GradientFlow
from conjoin.cost import (
    OPTIMIZERS,
    Absence,
    CostModel,
    Fit,
    Measurement,
    MeasurementStore,
    Profile,
    copy_key,
    fit_efficiencies,
    load_profile,
    local_calls,
    measure,
    measure_copy,
    measure_update,
    read_key,
    save_profile,
    update_key,
    work_of,
    write_key,
)
from conjoin.environment import costs_path
from conjoin.errors import ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Graph, calls_as_they_lie, can_expand, expand
from conjoin.machine import DeviceType, parse_machine
from conjoin.ops import SCALED_LINEAR, Call, TensorType, bind_args, map_tensors, sharding_rules, space_of, spec_for

PROFILES = Path(__file__).parent.parent / "conjoin" / "cost" / "profiles"
WAYS = (2, 4, 8)
NO_FIT = Fit((), 0.0, 0.0, 0.0, 0.0)
BATCH_STEP = 4
"""The batch is cut by this factor again and again: interpolation does the steps between."""
MAX_SECONDS = 8e-3
"""A call estimated to take longer is not measured: large ones follow the roofline, and each repeat costs as much."""
MAX_BYTES = 2**33
MAX_KEYS = 15_000
SWEPT = 200
"""Cases of the sweep that are captured as one model."""
CAST_WEIGHT = 3e-2
"""The weight of a cast, which no model written in float32 has: that of a call with a thousandth of the step."""
LEARNED = (
    *((tensors, elements) for tensors in (1, 64) for elements in (2**14, 2**18, 2**22, 2**26)),
    *((tensors, elements) for tensors in (256, 1024) for elements in (2**22, 2**26)),
    (64, 2**29),
)
COPIED = tuple(2**power for power in range(12, 31, 3))

Asked = tuple[Call, tuple[int, ...]]


def calls_of(name: str) -> dict[Asked, int]:
    """How often a model makes each call in one training step, and which operands then get a gradient; with those of the
    model expanded.
    """
    graph = capture(*zoo.build(name, device="meta"))
    return _counted(expand(graph, {node for node in graph.nodes if can_expand(node)})) | _counted(graph)


def _counted(graph: Graph) -> dict[Asked, int]:
    gradients = GradientFlow(graph)
    found: dict[Asked, int] = defaultdict(int)
    for node, call in calls_as_they_lie(graph).items():
        needs = tuple(i for i in range(len(node.inputs)) if gradients.reach_operand(node, i))
        found[call, needs] += 1
    return found


def in_bfloat16(call: Call) -> Call:
    def cast(tensor: TensorType) -> TensorType:
        return TensorType(tensor.shape, torch.bfloat16) if tensor.dtype == torch.float32 else tensor

    args = map_tensors(call.op, call.args, cast)
    return Call(call.op, tuple(torch.bfloat16 if arg is torch.float32 else arg for arg in args), call.turned)


def split_calls(call: Call, index: str, ways: int) -> tuple[Call, ...]:
    """What one device runs when an index is split; nothing where it does not divide."""
    spec = spec_for(call)
    size = space_of(spec, call).sizes[index] if spec else 0
    if size < ways or size % ways:
        return ()
    try:
        return tuple(local.call for local in local_calls(call, ((index, (0, size // ways)),)))
    except (ValueError, LookupError, AssertionError, TypeError):
        return ()


def splittable(call: Call) -> list[str]:
    """The indices that may be split, the first being the batch's in all that works on samples."""
    spec = spec_for(call)
    if spec is None or spec.view:
        return []
    found = (rule.index for rule in sharding_rules(spec, call))
    return list(dict.fromkeys(index for index in found if index is not None))


def variants(call: Call, device: DeviceType, model: CostModel) -> Iterator[tuple[float, Call]]:
    """A call at every batch that one device takes, and split further; each with its weight."""
    indices = splittable(call)
    batches = [call, *_cut_again(call, indices[0])] if indices else [call]
    fitting = [each for each in batches if fits(each, device, model)]
    for each in fitting:
        yield 1.0 / len(fitting), each
        for index in indices[1:] if spec_for(each) else ():
            for ways in WAYS:
                for local in split_calls(each, index, ways):
                    if fits(local, device, model):
                        yield 0.5 / len(fitting) / len(WAYS), local


def _cut_again(call: Call, index: str) -> Iterator[Call]:
    """The call with its batch cut by a factor again and again; calls around it (padding, masks) are not followed."""
    while True:
        local = [each for each in split_calls(call, index, BATCH_STEP) if each.op == call.op]
        if len(local) != 1:
            return
        call = local[0]
        yield call


def fits(call: Call, device: DeviceType, model: CostModel) -> bool:
    work = work_of(call, ())
    return model.operator(call, (), device).forward.value <= MAX_SECONDS and work.forward.bytes <= MAX_BYTES


def collect(names: Iterable[str], device: DeviceType) -> dict[str, float]:
    """Keys and their weights: the root of the share of a step that the call takes, split among its variants, over all
    models. The root, since the variants of a few large products would otherwise stand before all else.
    """
    weights: dict[str, float] = defaultdict(float)
    model = CostModel(profiles=())
    for name in names:
        start = time.perf_counter()
        try:
            found = calls_of(name)
        except ConjoinError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        shares = {asked: count * _seconds(asked, device, model) for asked, count in found.items()}
        total = sum(shares.values())
        for (call, needs), share in shares.items():
            for way in (call, in_bfloat16(call)):
                for weight, variant in variants(way, device, model):
                    wanted = needs if len(variant.tensors) == len(call.tensors) else ()
                    weights[write_key(variant, wanted)] += weight * (share / total) ** 0.5
            for cast in casts_of(call):
                weights[write_key(cast, (0,))] += CAST_WEIGHT if fits(cast, device, model) else 0.0
        print(f"{name}: {len(found)} calls, {len(weights)} keys, {time.perf_counter() - start:.1f} s", flush=True)
    return {key: weight for key, weight in weights.items() if weight > 0 and read_key(key)}


def collect_sweep(device: DeviceType, cases: list[Case]) -> list[str]:
    """The keys of the sweep that are not too large; sums of whole results, which every case ends in, only now and then.
    """
    model = CostModel(profiles=())
    found = {write_key(Call(SCALED_LINEAR, (*_matrices(*sizes), None)), (0, 1)): None for sizes in IN_EIGHT_BITS}
    for dtype in (torch.float32, torch.bfloat16):
        for start in range(0, len(cases), SWEPT):
            swept = Swept(cases[start : start + SWEPT], dtype)
            graph = capture(swept, (torch.empty((), device="meta"),))
            calls = [asked for asked in _counted(graph) if fits(asked[0], device, model)]
            sums = [asked for asked in calls if asked[0].op == "sum"]
            found |= {write_key(*asked): None for asked in calls if asked not in sums[SWEPT // 20 :]}
    keys = [key for key in found if read_key(key)]
    Random(0).shuffle(keys)
    return keys


def _matrices(rows: int, inner: int, outer: int) -> Iterator[TensorType]:
    return (TensorType(shape, torch.bfloat16) for shape in ((rows, inner), (outer, inner)))


def casts_of(call: Call) -> Iterator[Call]:
    """What mixed precision adds: the operands of products are cast before every use."""
    if work_of(call, ()).family in ("contraction", "convolution"):
        for tensor in call.tensors:
            if tensor.dtype == torch.float32:
                yield Call("_to_copy", bind_args("_to_copy", (tensor,), {"dtype": torch.bfloat16}))


def _seconds(asked: Asked, device: DeviceType, model: CostModel) -> float:
    cost = model.operator(*asked, device)
    return cost.forward.value + cost.backward.value + cost.host_forward


def measure_transfers(store: MeasurementStore, device: DeviceType, place: str) -> None:
    """Optimizer steps, and copies between host and device, at a few sizes."""
    for name, dtype in product(OPTIMIZERS, (torch.float32, torch.bfloat16)):
        for tensors, elements in LEARNED if place == "cuda" else LEARNED[:3]:
            key = update_key(name, dtype, tensors, elements)
            if store.find(device.name, torch.__version__, key) is None:
                found = measure_update(name, dtype, tensors, elements, place)
                store.add(device.name, torch.__version__, [found])
    for num_bytes in COPIED if place == "cuda" else ():
        if store.find(device.name, torch.__version__, copy_key(num_bytes)) is None:
            store.add(device.name, torch.__version__, [measure_copy(num_bytes, place)])


def measure_keys(
    keys: list[str], store: MeasurementStore, device: DeviceType, place: str, limits: tuple[float, float]
) -> None:
    """Measure what is not known yet, in order, until the time is up; each outcome is kept at once."""
    seconds_in_all, seconds_each = limits
    known = {outcome.key for outcome in store.outcomes(device.name, torch.__version__)}
    todo = [key for key in keys if key not in known]
    start, absent = time.perf_counter(), 0
    for i, key in enumerate(todo):
        elapsed = time.perf_counter() - start
        if elapsed > seconds_in_all:
            break
        read = read_key(key)
        assert read is not None
        outcome = measure(*read, place, seconds=seconds_each)
        absent += isinstance(outcome, Absence)
        store.add(device.name, torch.__version__, [outcome])
        print(f"\r{i + 1} of {len(todo)} keys, {absent} absent, {elapsed:.0f} s  {key[:60]:<60}", end="", flush=True)
    print()


def add_profile(store: MeasurementStore, profile: Profile, device: DeviceType) -> None:
    """Let the store know what a profile knows, where the device and torch are the same."""
    if (profile.device, profile.torch) != (device.name, torch.__version__):
        sys.exit(f"The profile is of {profile.device}, {profile.torch}; here is {device.name}, {torch.__version__}.")
    store.add(device.name, torch.__version__, profile.outcomes)


def known_to(store: MeasurementStore, device: DeviceType) -> Profile:
    """All that a store knows of the device with this torch."""
    outcomes = sorted(store.outcomes(device.name, torch.__version__), key=lambda outcome: outcome.key)
    command = " ".join(["python", *sys.argv])
    return Profile(device.name, torch.__version__, date.today().isoformat(), command, NO_FIT, tuple(outcomes))


def write_profile(profile: Profile, device: DeviceType, path: Path) -> None:
    """A profile, with what follows from its outcomes."""
    fit = fit_efficiencies([each for each in profile.outcomes if isinstance(each, Measurement)], device)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(replace(profile, fit=fit), path)
    print(f"{path}: {len(profile.outcomes)} outcomes, {len(fit.curves)} curves, {path.stat().st_size:,} bytes")
    print(f"overhead {fit.overhead_seconds * 1e6:.1f} µs, typical error of the fitted roofline {fit.error:.0%}")
    print(f"host {fit.host_forward * 1e6:.1f} µs forward, {fit.host_backward * 1e6:.1f} µs backward")
    for name, value in fit.efficiency:
        print(f"  {name:<40} {value:.3f}")


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description="Measure the operators of the zoo's models on one device.")
    parser.add_argument("what", choices=["collect", "measure", "fit"])
    parser.add_argument("--keys", type=Path, help="the file of keys, one a line")
    parser.add_argument("--sweep", action="store_true", help="collect from no model, over the whole range of sizes")
    parser.add_argument("--models", nargs="*", default=zoo.names(), help="models to collect from")
    parser.add_argument("--machine", default="dgx-h200", help="a machine whose first device this is")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seconds-each", type=float, default=0.03)
    parser.add_argument("--store", type=Path, default=None)
    parser.add_argument("--onto", type=Path, default=None, help="a profile to add to")
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    device = parse_machine(given.machine).device_type(0)
    path = given.output or PROFILES / f"{device.name}.jsonl.gz"
    if given.what == "fit":
        write_profile(load_profile(given.onto or path), device, path)
        return 0
    if given.what == "collect":
        if given.sweep:
            keys = collect_sweep(device, list(sweep()))
        else:
            weights = collect(given.models, device)
            keys = sorted(weights, key=lambda key: -weights[key])[:MAX_KEYS]
        given.keys.write_text("".join(f"{key}\n" for key in keys), encoding="utf-8")
        print(f"{given.keys}: {len(keys)} keys")
        return 0
    with MeasurementStore(given.store or costs_path()) as store:
        if given.onto:
            add_profile(store, load_profile(given.onto), device)
        measure_transfers(store, device, given.device)
        limits = (60 * given.minutes, given.seconds_each)
        measure_keys(given.keys.read_text(encoding="utf-8").splitlines(), store, device, given.device, limits)
        write_profile(known_to(store, device), device, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
