"""Pipelines train like the plain model in a loop over the same micro-batches: the model itself is the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from conjoin.comm import plan_of_transfer, stage_grid
from conjoin.cost import CostModel
from conjoin.errors import RankError, StrategyError
from conjoin.frontends import capture
from conjoin.ir import Pipeline, check_pipeline, cut_in_stages, num_elements, region_of
from conjoin.machine import Machine, parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.pipelines.schedule_runs import ScheduleRun
from conjoin.runtime.pipelines.stage_runs import StageRun
from conjoin.runtime.pipelines.stage_transfers import Crossing
from conjoin.runtime.ranks.communicator import Channel, Messages, Parcel
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.schedules import read_rows
from conjoin.search import make_pipeline
from conjoin.sim import predict_pipeline

STEPS = 3
Batch = tuple[Tensor, ...]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Detached(nn.Module):
    """A bias that all layers read and none teaches, one that a single layer teaches, and a branch whose values go on
    while its gradients do not."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.taught = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.side, self.layers = nn.Linear(6, 6), nn.ModuleList(Block(6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(x)
        for i, layer in enumerate(self.layers):
            x = layer(x) + self.read.detach() * (self.taught if i == 1 else self.taught.detach())
        return x + side.detach()


class Tied(nn.Module):
    """Words in, words out, by one table."""

    def __init__(self, words: int = 24, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(words, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Residual(nn.Module):
    """Convolutions with batch norm, which change buffers in every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.body:
            x = x + part(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Skips(nn.Module):
    """Down and up again, each step up reading what its step down made: tensors pass over stages."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        out: Tensor = self.head(x)
        return out


class Translator(nn.Module):
    """What the encoder makes is read by every layer of the decoder; a mask comes of the batch alone."""

    def __init__(self, words: int = 20, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.ModuleList(Block(width) for _ in range(depth))
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.decoder = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = (x != 0).unsqueeze(1)
        memory = self.source(x)
        for layer in self.encoder:
            memory = layer(memory)
        out = self.target(y)
        for mix, layer in zip(self.mixes, self.decoder, strict=True):
            scores = (mix(out) @ memory.transpose(1, 2)).masked_fill(~mask, -1e9)
            out = layer(out + scores.softmax(-1) @ memory)
        made: Tensor = self.head(out)
        return made


class Frozen(nn.Module):
    """Weights that are not trained, beside such that are."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.small = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.layers.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, small in zip(self.layers, self.small, strict=True):
            x = torch.tanh(layer(x) + small(x))
        return x


class FrozenStem(nn.Module):
    """Batch norm that takes statistics after a convolution that is not trained, and is not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False)
        self.rest = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rest(self.stem(x)).flatten(1))
        return out


def over_words(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def words(*shapes: tuple[int, ...], most: int = 20) -> Callable[[], Batch]:
    return lambda: tuple(torch.randint(1, most, shape) for shape in shapes)


CASES: dict[str, tuple[type[nn.Module], Callable[[], Batch], Callable[..., Tensor]]] = {
    "tied": (Tied, words((8, 5), (8, 5)), over_words),
    "batch norm": (
        Residual,
        lambda: (torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.randint(5, (8,))),
        nn.functional.cross_entropy,
    ),
    "frozen stem": (
        FrozenStem,
        lambda: (torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.randint(5, (8,))),
        nn.functional.cross_entropy,
    ),
    "skips": (
        Skips,
        lambda: (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)),
        nn.functional.mse_loss,
    ),
    "translator": (Translator, words((8, 4), (8, 5), (8, 5)), over_words),
    "detached": (
        Detached,
        lambda: (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)),
        nn.functional.mse_loss,
    ),
    "frozen": (
        Frozen,
        lambda: (torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)),
        nn.functional.mse_loss,
    ),
}


def pipeline_of(model: nn.Module, batch: Batch, loss: Any, strategy: str, ranks: int) -> Pipeline:
    graph = capture(model, batch, loss)
    return make_pipeline(graph, Machine("here", 1, ranks, "cpu"), strategy)


def train_plainly(
    model: nn.Module, batches: list[Batch], loss: Callable[..., Tensor], parts: int
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """A loop over micro-batches, as people write it."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses, gradients = [], []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(x.chunk(parts) for x in batch), strict=True):
            found = loss(model(*part[:-1]), part[-1]) / parts
            found.backward()  # type: ignore[no-untyped-call]
            total += found.item()
        losses.append(total)
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
        )
        optimizer.step()
    return losses, gradients, {n: x.detach().clone() for n, x in model.state_dict().items()}


def compare(pipeline: Pipeline, model: nn.Module, loss: Callable[..., Tensor], batches: list[Batch]) -> list[set[str]]:
    """Train on thread ranks, compare everything with the plain loop; which parameters every rank has."""
    wanted = train_plainly(model, batches, loss, pipeline.num_micro_batches)

    def rank(world: ThreadRanks) -> set[str]:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(pipeline, store, world)
        module.compare_every(None)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

        def cut(name: str, whole: Tensor) -> Tensor:
            return store.cut(name, whole)

        for batch, value, gradients in zip(batches, *wanted[:2], strict=True):
            optimizer.zero_grad()
            made = module(*batch)
            made.backward()
            assert made.item() == pytest.approx(value, rel=1e-12)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.requires_grad and name in gradients:
                    torch.testing.assert_close(parameter.grad, cut(name, gradients[name]), rtol=1e-9, atol=1e-12)
                elif parameter.requires_grad:
                    assert parameter.grad is None, f"{name} is read, but nothing of the loss goes back to it"
            optimizer.step()
        for name, held in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            torch.testing.assert_close(held.detach(), cut(name, wanted[2][name]), rtol=1e-9, atol=1e-12)
        return {name for name, _ in module.named_parameters()}

    return run_ranks(pipeline.mesh, rank)


PIPELINES = [
    ("tied", "pipeline:pp=2,tp=2,sp,micro=2,schedule=gpipe", 4),
    ("tied", "pipeline:pp=4,micro=8,schedule=eager-1f1b", 4),
    ("tied", "pipeline:pp=2,micro=4,schedule=interleaved", 2),
    ("tied", "pipeline:pp=2,micro=4+recompute=full", 2),
    ("tied", "pipeline:pp=4,micro=4+recompute=every-2", 4),
    ("tied", "pipeline:pp=3,micro=2,schedule=zero-bubble+recompute=every-2", 6),
    ("batch norm", "pipeline:pp=3,micro=2", 6),
    ("frozen stem", "pipeline:pp=2,micro=4", 4),
    ("frozen stem", "pipeline:pp=3,micro=2,schedule=zero-bubble", 3),
    ("batch norm", "pipeline:pp=2,micro=4,schedule=zero-bubble", 2),
    ("skips", "pipeline:pp=4,micro=4,schedule=eager-1f1b", 4),
    ("skips", "pipeline:pp=3,micro=2,schedule=interleaved", 3),
    ("translator", "pipeline:pp=2,tp=2,zero1,micro=2", 8),
    ("translator", "pipeline:pp=3,micro=2,schedule=zero-bubble", 8),
    ("frozen", "pipeline:pp=2,fsdp,micro=4,schedule=zero-bubble", 4),
    ("detached", "pipeline:pp=2,micro=2", 2),
    ("detached", "pipeline:pp=4,fsdp,micro=2,schedule=zero-bubble", 8),
]


@pytest.mark.parametrize(("case", "strategy", "ranks"), PIPELINES, ids=[f"{a} {b}" for a, b, _ in PIPELINES])
def test_a_pipeline_trains_like_a_loop_over_micro_batches(case: str, strategy: str, ranks: int) -> None:
    kind, make, loss = CASES[case]
    torch.manual_seed(3)
    model = kind().double().train()
    pipeline = pipeline_of(model, make(), loss, strategy, ranks)
    held = compare(pipeline, model, loss, [make() for _ in range(STEPS)])
    assert set().union(*held) == {name for name, _ in model.named_parameters()}
    assert len({frozenset(names) for names in held}) == len({stage.ranks for stage in pipeline.stages}), "stages share"


def test_micro_batches_may_be_taken_in_another_order_than_they_were_made() -> None:
    kind, make, loss = CASES["skips"]
    torch.manual_seed(3)
    model = kind().double().train()
    pipeline = pipeline_of(model, make(), loss, "pipeline:pp=1,v=2,micro=2,schedule=interleaved", 1)
    rows = (read_rows("F0.0 F0.1 F1.1 F1.0 B1.0 B1.1 B0.1 B0.0"),)
    edited = replace(pipeline, schedule=replace(pipeline.schedule, rows=rows))
    compare(check_pipeline(edited), model, loss, [make() for _ in range(2)])


class Noting(nn.Module):
    """Buffers that are changed and read by nobody: to a parameter, to something made of one, to what one layer saw."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        for name, shape in (("copied", (width, width)), ("made", (width,)), ("count", ())):
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.copied.copy_(self.layers[3].weight.detach())
        self.made.copy_(self.layers[2].weight.detach().sum(0))
        self.count += 1
        return x


class Late(Noting):
    """The first layer reads what the last one changes."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x + self.count)
        return made


class Averaging(Noting):
    """A buffer of what the samples are in the mean."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        self.made.copy_(x.mean(0))
        return made


def test_buffers_that_nobody_reads_are_changed_where_what_they_become_is_made() -> None:
    _, make, loss = CASES["frozen"]
    torch.manual_seed(3)
    model = Noting().double().train()
    pipeline = pipeline_of(model, make(), loss, "pipeline:pp=2,micro=2", 2)
    compare(pipeline, model, loss, [make() for _ in range(2)])


@pytest.mark.parametrize(("kind", "why"), [(Late, "places to cut it at"), (Averaging, "buffer made is made of all")])
def test_buffers_that_micro_batches_would_change_otherwise_are_refused(kind: type[nn.Module], why: str) -> None:
    _, make, loss = CASES["frozen"]
    with pytest.raises(StrategyError, match=why):
        pipeline_of(kind().double().train(), make(), loss, "pipeline:pp=2,micro=2", 2)


def test_no_stage_reads_what_another_changes() -> None:
    _, make, loss = CASES["frozen"]
    graph = capture(Late().double().train(), make(), loss)
    with pytest.raises(StrategyError, match="read the buffer count, and stage 1 change it"):
        cut_in_stages(graph, [int(i > 2) for i, _ in enumerate(graph.nodes)])


def on_ranks(pipeline: Pipeline, model: nn.Module, action: Callable[[ParallelModule], Any]) -> list[Any]:
    def rank(world: ThreadRanks) -> Any:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(pipeline, store, world)
        module.compare_every(None)
        return action(module)

    return run_ranks(pipeline.mesh, rank)


def test_a_backward_pass_that_runs_a_step_again_changes_no_buffers() -> None:
    kind, make, loss = CASES["batch norm"]
    torch.manual_seed(3)
    model, batch = kind().double().train(), make()

    def twice(module: ParallelModule) -> None:
        found = module(*batch)
        before = {name: x.clone() for name, x in module.named_buffers()}
        found.backward(retain_graph=True)
        once = [x.grad.clone() for x in module.parameters() if x.grad is not None]
        found.backward()
        assert before and all(torch.equal(before[name], x) for name, x in module.named_buffers())
        both = [x.grad for x in module.parameters() if x.grad is not None]
        torch.testing.assert_close(both, [2 * x for x in once], rtol=1e-12, atol=1e-12)

    on_ranks(pipeline_of(model, batch, loss, "pipeline:pp=2,micro=2", 2), model, twice)


def test_under_autocast_stages_send_what_the_plan_says() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    batch, loss = (torch.randn(8, 8), torch.randn(8, 8)), nn.functional.mse_loss
    with torch.autocast("cpu", torch.bfloat16):
        wanted = loss(model(batch[0]), batch[1])
    wanted.backward()
    right = {name: x.grad for name, x in model.named_parameters()}

    def step(module: ParallelModule) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found = module(*batch)
        found.backward()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)
        for name, x in module.named_parameters():
            torch.testing.assert_close(x.grad, right[name], rtol=0.02, atol=1e-3)

    on_ranks(pipeline_of(model, batch, loss, "pipeline:pp=2,micro=2", 2), model, step)


class Both(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.square().mean(), x


def test_what_is_given_beside_the_loss_is_refused() -> None:
    with pytest.raises(StrategyError, match="gives a loss and 1 other tensor"):
        pipeline_of(nn.Sequential(nn.Linear(3, 3), Both()).train(), (torch.ones(4, 3),), None, "pipeline:pp=1", 1)


NODES: list[tuple[Machine, str, tuple[int, ...]]] = [
    (Machine("two nodes", 2, 2, "cpu"), "pipeline:pp=2,tp=2,micro=2", ()),
    (Machine("three nodes", 3, 2, "cpu"), "pipeline:tp=2,micro=4,schedule=eager-1f1b", (2, 4)),
    (Machine("three nodes", 3, 2, "cpu"), "pipeline:tp=2,fsdp,micro=2", (4, 2)),
    (Machine.preset("piz-daint", nodes=3), "pipeline:micro=4,schedule=found", (1, 1, 1)),
]


@pytest.mark.parametrize(("machine", "strategy", "sizes"), NODES, ids=["a node each", "one, two", "two, one", "found"])
def test_what_goes_to_several_nodes_goes_once_to_each(
    machine: Machine, strategy: str, sizes: tuple[int, ...]
) -> None:
    kind, make, loss = CASES["tied"]
    torch.manual_seed(3)
    model = kind().double().train()
    pipeline = make_pipeline(capture(model, make(), loss), machine, strategy, sizes=sizes)
    compare(pipeline, model, loss, [make() for _ in range(2)])
    for transfer in pipeline.transfers():
        source, target = (stage_grid(pipeline, stage) for stage in (transfer.source, transfer.target))
        plan = plan_of_transfer(pipeline, transfer)
        host = dict(zip((*source.devices, *target.devices), (*source.hosts, *target.hosts), strict=True))
        sent = dict.fromkeys(target.hosts, 0)
        for message in (message for messages in plan.rounds() for message in messages):
            if host[message.sender] != host[message.receiver]:
                sent[host[message.receiver]] += message.end - message.begin
        shape, layout = transfer.taken.shape, transfer.taken.layout
        held = {rank: region_of(shape, layout, target.mesh, i) for i, rank in enumerate(target.devices)}
        for node, elements in sent.items():
            wanted = {held[rank] for rank in target.devices if host[rank] == node}
            assert elements == sum(num_elements(region) for region in wanted), "every slice once"


def test_what_is_sent_is_held_no_longer_than_it_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 micro-batches; a backend does not tell that something has come before it is asked to wait for it."""
    kind, make, loss = CASES["batch norm"]
    torch.manual_seed(3)
    batch = tuple(torch.cat([x] * 2) for x in make())
    model = kind().double().train()
    pipeline = pipeline_of(model, batch, loss, "pipeline:pp=3,micro=16", 3)
    held: dict[int, WeakSet[Any]] = {rank: WeakSet() for rank in range(3)}
    peak, send = dict.fromkeys(held, 0), Crossing.send

    def noted(crossing: Crossing, *args: Any) -> Any:
        parcel, rank = send(crossing, *args), crossing._rank
        held[rank].add(parcel)
        peak[rank] = max(peak[rank], len(held[rank]))
        return parcel

    monkeypatch.setattr(Crossing, "send", noted)

    def rank(world: ThreadRanks) -> None:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(pipeline, store, world)
        module(*batch).backward()

    run_ranks(pipeline.mesh, rank)
    leaving = sum(transfer.source == 0 for transfer in pipeline.transfers())
    assert 0 < peak[0] <= 3 * leaving


class InOrder:
    """A channel whose messages are over one after another in the order in which they were started, as NCCL's are."""

    are_apart = False

    def __init__(self, channel: Channel) -> None:
        self._channel, self._under_way = channel, list[Parcel]()
        self.bytes_sent = 0

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        self._under_way.append(self._channel.start(sends, receives))
        return Behind(self._under_way[:])


class Behind:
    def __init__(self, parcels: list[Parcel]) -> None:
        self._parcels = parcels

    def wait(self, count: int | None = None) -> None:
        while self._parcels:
            self._parcels.pop(0).wait()


@pytest.mark.parametrize("strategy", ["micro=8", "v=2,micro=4,schedule=interleaved"])
def test_what_is_passed_on_does_not_wait_for_what_comes_later(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages for rows ahead are expected before; they are sent when what is passed on has been used."""
    kind, make, loss = CASES["tied"]
    torch.manual_seed(3)
    model, batch, channel = kind().double().train(), make(), ThreadRanks.channel
    pipeline = make_pipeline(capture(model, batch, loss), Machine("two", 2, 2, "cpu"), f"pipeline:pp=2,tp=2,{strategy}")
    monkeypatch.setattr(ThreadRanks, "channel", lambda *args: InOrder(channel(*args)))
    compare(pipeline, model, loss, [batch])


@pytest.mark.parametrize("inside", ["", "+recompute=full", ",fsdp"])
def test_gradients_of_weights_come_later_where_it_is_predicted_that_they_do(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, make_batch, loss = CASES["tied"]
    batch, machine = make_batch(), parse_machine("p3.8xlarge")
    memory, also = (inside, "") if inside.startswith("+") else ("", inside)
    strategy = f"pipeline:pp=2{also},micro=2,schedule=zero-bubble{memory}"
    pipeline = make_pipeline(capture(make().train(), batch, loss), machine, strategy)
    input_gradient, at_once = StageRun.input_gradient, dict[str, bool]()

    def note(run: StageRun, *args: Any) -> Any:
        found = input_gradient(run, *args)
        at_once[run.stage.plan.model.name] = not run._put_off
        return found

    monkeypatch.setattr(StageRun, "input_gradient", note)
    on_ranks(pipeline, make(), lambda module: module(*batch).backward())
    later = predict_pipeline(pipeline, machine, CostModel()).times.weight_gradient
    assert at_once == {f"stage {i}": not seconds for i, seconds in enumerate(later)}
    assert all(at_once.values()) == bool(inside)


def test_after_a_step_that_nobody_could_leave_no_other_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stage had sent would be taken for the next step's."""
    kind, make, loss = CASES["tied"]
    torch.manual_seed(3)
    model = kind().double().train()
    pipeline = pipeline_of(model, make(), loss, "pipeline:pp=2,micro=4", 2)
    batch = make()

    def rank(world: ThreadRanks) -> str:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(pipeline, store, world)
        with pytest.raises(RankError, match=rf"failed on rank {world.rank}: MemoryError\. .*cannot leave"):
            module(*batch)
        with pytest.raises(RankError, match="failed in its middle") as caught:
            module(*batch)
        return str(caught.value)

    def out_of_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(ThreadRanks, "can_break_off", False)
    monkeypatch.setattr(ScheduleRun, "run", out_of_memory)  # on all ranks: none waits for another
    assert len(set(run_ranks(pipeline.mesh, rank))) == 1
