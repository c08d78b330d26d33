"""Sharded initialisation: every plan gets the pieces of one and the same model, and no rank ever holds the whole."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import conjoin
from conjoin.errors import UsageError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.runtime.loading import load
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.initialization import initialise
from conjoin.runtime.state.pieces import full_state_dict
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences

CPU = torch.device("cpu")
WIDTH, WORDS = 6, 11


class Scale(nn.Module):
    """Parameters and buffers of its own, with an initialisation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.register_buffer("frequencies", torch.empty(WIDTH), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain, 0.5, 1.5)
        self.steps.fill_(7)
        self.frequencies.copy_(torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.frequencies


class Net(nn.Module):
    """Tied weights, a module in two places, layers of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, WIDTH)
        self.scale = Scale()
        self.again = self.scale
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        x = self.scale(self.embed(i))
        y: Tensor = self.head(self.again(self.down(self.norm(self.up(x)).relu())))
        return y


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@cache
def graph() -> Graph:
    batch = (torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64))
    return capture(on_meta(), batch, cross_entropy)


def plan_of(strategy: str, num_ranks: int) -> Plan:
    return make_plan(graph(), parse_machine(f"local:{num_ranks}"), strategy)


def gathered(plan: Plan, fill: Callable[[Store], None]) -> dict[str, Tensor]:
    """The whole state after every rank of a plan was filled."""

    def program(communicator: ThreadRanks) -> dict[str, Tensor]:
        store = Store(plan, communicator.rank, CPU)
        fill(store)
        module = ParallelModule(plan, store, communicator)
        state = full_state_dict(module, everywhere=True)
        state["frequencies"] = dict(module.named_buffers())["scale.frequencies"]
        return state

    results = run_ranks(plan.mesh, program)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in results[0])
    return results[0]


def alone(seed: int, init: Callable[[nn.Module], None]) -> nn.Module:
    """The whole model on one device, initialised in the order of `apply`."""
    model = Net()
    torch.manual_seed(seed)
    return model.apply(init)


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding | nn.BatchNorm1d | Scale):
        module.reset_parameters()


def small_normal(module: nn.Module) -> None:
    """As published models do it: some kinds of layers, through `.data`."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0.0, 0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0.0, 0.02)


def small_or_reset(module: nn.Module) -> None:
    (small_normal if isinstance(module, nn.Linear | nn.Embedding) else reset)(module)


PLANS = [("data-parallel", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("megatron", 4), ("fsdp", 1)]


@pytest.mark.parametrize(("strategy", "num_ranks"), PLANS)
@pytest.mark.parametrize(("init", "reference"), [(None, reset), (small_normal, small_or_reset)], ids=["reset", "init"])
def test_every_plan_gets_the_pieces_of_one_model(
    strategy: str, num_ranks: int, init: Callable[[nn.Module], None] | None, reference: Callable[[nn.Module], None]
) -> None:
    model, wanted = on_meta(), alone(3, reference)
    generator = torch.get_rng_state()
    found = gathered(plan_of(strategy, num_ranks), lambda store: initialise(store, model, seed=3, init=init))
    assert torch.equal(torch.get_rng_state(), generator)
    assert found.keys() - {"frequencies"} == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["frequencies"], torch.arange(1.0, WIDTH + 1))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_another_seed_is_another_model() -> None:
    model = on_meta()
    plan = plan_of("fsdp", 2)
    one, other = (gathered(plan, lambda store, s=seed: initialise(store, model, seed=s)) for seed in (0, 1))
    assert not torch.equal(one["up.weight"], other["up.weight"])


class Stack(nn.Sequential):
    """Many layers, the first larger than the others."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 64), nn.Linear(64, 8), *[nn.Linear(8, 8) for _ in range(6)])


def test_no_more_than_one_module_is_there_at_a_time() -> None:
    with torch.device("meta"):
        model = Stack()
    plan = plan_of_stack(model)
    peak = 0
    alive: list[weakref.ref[Tensor]] = []

    def init(module: nn.Module) -> None:
        nonlocal peak
        assert not any(reference() is not None for reference in alive), "a whole tensor outlived its module"
        real = [tensor for tensor in model.parameters() if not tensor.is_meta]
        peak = max(peak, sum(tensor.nbytes for tensor in real))
        alive[:] = [weakref.ref(tensor) for tensor in real]
        module.reset_parameters()

    initialise(Store(plan, 1, CPU), model, init=init)
    largest = max(sum(tensor.nbytes for tensor in layer.parameters()) for layer in model)
    assert peak == largest < sum(tensor.nbytes for tensor in model.parameters()) / 2


def plan_of_stack(model: nn.Module) -> Plan:
    return make_plan(capture(model, torch.zeros(4, 8), lambda y: y.sum()), parse_machine("local:2"), "fsdp")


def test_a_tied_tensor_is_whole_until_its_last_module_and_one_afterwards() -> None:
    model = on_meta()
    plan = plan_of("fsdp", 2)
    store = Store(plan, 0, CPU)
    initialise(store, model)
    assert store.root.embed.weight is store.root.head.weight
    assert store.root.scale.frequencies is store.root.again.frequencies


class Bare(nn.Module):
    """Says nothing of how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("mask", torch.empty(4), persistent=False)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.weight) * self.mask


@pytest.fixture
def bare() -> tuple[Bare, Store]:
    with torch.device("meta"):
        model = Bare()
    plan = make_plan(capture(model, torch.zeros(4, 4), lambda y: y.sum()), parse_machine("local:2"), "fsdp")
    return model, Store(plan, 0, CPU)


def refusal(bare: tuple[Bare, Store], **arguments: object) -> str:
    model, store = bare
    with pytest.raises(UsageError) as caught:
        initialise(store, model, **arguments)
    assert_three_sentences(caught.value)
    assert not list(store.root.parameters()) and all(tensor.is_meta for tensor in model.parameters())
    return str(caught.value)


def test_a_module_that_cannot_be_initialised_is_named(bare: tuple[Bare, Store]) -> None:
    message = refusal(bare)
    assert "the model itself (Bare) with weight, mask" in message and "for 1 module nobody does it" in message


def test_what_init_leaves_out_is_named(bare: tuple[Bare, Store]) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Bare):
            module.weight.data[:3].zero_()
            module.mask.fill_(1)

    assert "values are left out" in refusal(bare, init=init)


def test_an_init_that_reaches_into_submodules_is_refused(bare: tuple[Bare, Store]) -> None:
    def init(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)

    assert "other tensors than its own" in refusal(bare, init=init)


def test_an_init_that_changes_a_shape_is_refused(bare: tuple[Bare, Store]) -> None:
    def init(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros(2))

    assert "other tensors than its own" in refusal(bare, init=init)


def test_an_init_that_fails_leaves_the_model_as_it_was(bare: tuple[Bare, Store]) -> None:
    model, store = bare
    with pytest.raises(ZeroDivisionError):
        initialise(store, model, init=lambda module: 1 / 0)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_an_init_may_put_new_parameters(bare: tuple[Bare, Store]) -> None:
    model, store = bare

    def init(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.full_like(module.weight, 2.0))
        if isinstance(module, Bare):
            module.mask = torch.ones(4)
        else:
            module.bias.data.zero_()

    initialise(store, model, init=init)
    assert all((parameter == 2).all() for name, parameter in store.root.named_parameters() if "weight" in name)


def test_what_is_given_is_left_empty(bare: tuple[Bare, Store]) -> None:
    model, store = bare
    saved = frozenset(model.state_dict())
    assert "mask" in refusal(bare, given=saved)
    initialise(store, model, given=saved, init=lambda module: module.mask.fill_(3))
    assert [tuple(x.shape) for x in store.root.parameters()] == [(2, 4), (2, 4), (2,)]
    assert (store.root.mask == 3).all()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_tensors_that_have_values_keep_them(bare: tuple[Bare, Store]) -> None:
    model, store = bare
    model.weight = nn.Parameter(torch.full((4, 4), 5.0))
    model.inner = nn.Linear(4, 4)
    before = copy.deepcopy(model.inner.state_dict())

    def init(module: nn.Module) -> None:
        assert module is model
        module.weight.data.zero_()
        module.mask.fill_(1)

    initialise(store, model, init=init)
    assert (store.root.weight == 5).all() and (model.weight == 5).all()
    assert torch.equal(model.inner.weight, before["weight"])


# ---------------------------------------------------------------------------------------------- as transformers does it


def published(name: str) -> nn.Module:
    """A small model of transformers: GPT-2 scales the last layers of its blocks, LLaMA makes frequencies."""
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    config.use_cache = False
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_published_model_is_initialised_as_it_says_itself(name: str) -> None:
    with torch.device("meta"):
        model = published(name).train()
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    plan = make_plan(capture(model, {"input_ids": tokens, "labels": tokens}), parse_machine("local:2"), "fsdp")
    wanted = published(name)
    torch.manual_seed(3)
    wanted.apply(wanted._init_weights)

    def program(communicator: ThreadRanks) -> dict[str, Tensor]:
        store = Store(plan, communicator.rank, CPU)
        initialise(store, model, seed=3)
        found = full_state_dict(ParallelModule(plan, store, communicator), everywhere=True)
        return {**found, **dict(store.root.named_buffers())}

    found = run_ranks(plan.mesh, program)[0]
    for own, tensor in (*wanted.state_dict().items(), *wanted.named_buffers()):
        assert torch.equal(found[own], tensor), own


class OwnInit(nn.Module):
    """Says how some of its modules are initialised, and gives the last of another one its values."""

    def __init__(self, forgotten: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blank = Blank()
        self.forgotten = Blank() if forgotten else None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(2.0)
            module.bias.data.zero_()
        if isinstance(module, OwnInit):
            module.last.weight.data.mul_(0.5)
            nn.init.ones_(module.blank.values)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x)) * self.blank.values
        return y if self.forgotten is None else y * self.forgotten.values


class Blank(nn.Module):
    """Has no initialisation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(4))


@pytest.mark.parametrize("with_values", [False, True])
def test_a_model_may_write_to_tensors_of_its_modules(with_values: bool) -> None:
    with torch.device("meta"):
        model = OwnInit(forgotten=False)
    if with_values:
        model.first = nn.Linear(4, 4)
    before = [x.clone() for x in model.first.parameters()]
    plan = make_plan(capture(model, torch.zeros(4, 4), lambda y: y.sum()), parse_machine("local:2"), "fsdp")
    store = Store(plan, 1, CPU)
    initialise(store, model)
    assert (store.root.last.weight == 1).all() and (store.root.blank.values == 1).all()
    if with_values:
        assert all(map(torch.equal, model.first.parameters(), before))
        assert torch.equal(store.root.first.bias, before[1][2:])


def test_who_would_not_be_initialised_is_told_by_plan_and_before_ranks_meet(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = OwnInit(forgotten=True)
    plan = conjoin.plan(model, torch.zeros(4, 4), "local:2", loss=lambda y: y.sum(), strategy="fsdp")
    assert "not loaded without init= or weights=" in caplog.text and "forgotten (Blank) with values" in caplog.text
    with pytest.raises(UsageError) as caught:
        load(plan, model)  # alone: it would complain of the missing rank
    assert_three_sentences(caught.value)
    assert "forgotten (Blank) with values" in str(caught.value) and "\n  blank" not in str(caught.value)
    assert all(tensor.is_meta for tensor in model.parameters())


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_torchs_attention_is_initialised_as_torch_makes_it(strategy: str) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        model = make()
    plan = make_plan(capture(model, torch.zeros(4, 3, 8), lambda y: y.sum()), parse_machine("local:2"), strategy)

    def program(communicator: ThreadRanks) -> dict[str, Tensor]:
        store = Store(plan, communicator.rank, CPU)
        initialise(store, model, seed=3)
        return full_state_dict(ParallelModule(plan, store, communicator), everywhere=True)

    found = run_ranks(plan.mesh, program)[0]
    plain = make()
    torch.manual_seed(3)
    wanted = plain.apply(init).state_dict()
    assert found.keys() == wanted.keys() and not wanted["self_attn.out_proj.bias"].any()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
