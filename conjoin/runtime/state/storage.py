"""What a rank keeps between steps: its pieces of the model's parameters and buffers, under the user's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.comm import has_places
from conjoin.errors import PlanError, UsageError
from conjoin.ir import Graph, Leaf, LeafKind, Pipeline, Plan, Region, by_tensor, region_of, whole_type
from conjoin.machine import Mesh
from conjoin.ops import Layout, TensorType
from conjoin.runtime.state.blocks import Blocks, cut_out, shape_of
from conjoin.runtime.state.holders import PiecesOfLayer
from conjoin.runtime.state.slots import Slot, find_constant, read_slot

_IMAGE_RANK = 4


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a parameter or buffer lies: its leaf or those of its sections, and this rank on the mesh that holds it."""

    leaves: tuple[Leaf, ...]
    mesh: Mesh
    rank: int


@dataclass(frozen=True, slots=True)
class Content:
    """A parameter or persistent buffer of the model as a whole."""

    name: str
    type: TensorType
    first: str
    """The name under which the same tensor is listed first."""


class Store:
    """Empty modules nested as the user's, holding this rank's pieces: of a plan, or of its stages of a pipeline."""

    def __init__(self, plan: Plan | Pipeline, rank: int, device: torch.device) -> None:
        self.root = nn.Module()
        self.device = device
        self._plan, self._rank = plan, rank
        self._homes: dict[str, _Home] = {}
        self._elsewhere = _names_elsewhere(plan, rank)
        """Parameters and buffers that only ranks of other stages hold."""
        self._has_rest = isinstance(plan, Plan) or rank in plan.stages[0].ranks
        """Whether what nobody reads lies here: with the first stage."""
        self.contents: tuple[Content, ...] = ()
        """Parameters and persistent buffers of the model, those of other ranks too, when the store is filled."""
        for part, own_rank, borrowed in _with_loans(plan, rank):
            stored = (leaf for leaf in part.graph.leaves if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER))
            for leaves in by_tensor(leaf for leaf in stored if leaf.name not in borrowed).values():
                for name in leaves[0].names:
                    self._homes.setdefault(name, _Home(leaves, part.mesh, own_rank))
        self._constants: dict[Leaf, Tensor] = {}

    def holds(self, name: str) -> bool:
        """Whether this rank has part in a parameter or buffer."""
        return name in self._homes or (self._has_rest and name not in self._elsewhere)

    def leaves(self, name: str) -> tuple[Leaf, ...]:
        """The leaf of the graph that a parameter or buffer of that name is, or its sections; none when the graph does
        not use it."""
        home = self._homes.get(name)
        return home.leaves if home else ()

    def layout(self, name: str) -> Layout:
        """How a parameter or buffer is stored; what the graph does not use is whole."""
        leaves = self.leaves(name)
        return leaves[0].type.layout if leaves else ()

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks:
        """The parts of a parameter or buffer that this rank holds: one, or one of each section."""
        home = self._homes.get(name)
        if home is None:
            return (tuple((0, size) for size in shape),)
        return tuple(_block(leaf, shape, home) for leaf in home.leaves)

    def is_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this rank holds all of a parameter or buffer, as every other does."""
        return shape_of(self.blocks(name, shape)) == shape and not has_places(self.layout(name))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as a tensor of its own on this rank's device; channels that lie last in
        memory stay there.
        """
        part = cut_out(whole.detach(), self.blocks(name, tuple(whole.shape)))
        last = part.dim() == _IMAGE_RANK and part.is_contiguous(memory_format=torch.channels_last)
        order = torch.channels_last if last and not part.is_contiguous() else torch.contiguous_format
        return part.to(self.device, copy=True, memory_format=order)

    def shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        """The whole shape of a parameter or buffer of which this rank holds `local`."""
        leaves = self.leaves(name)
        return whole_type(leaves[0]).shape if leaves else tuple(local.shape)

    def fill(self, model: nn.Module) -> None:
        """Take this rank's pieces out of a model that is there as a whole."""
        check_model(self._plan, model)
        self.place(model, self.cut)
        self.keep_constants(model)

    def check(self, model: nn.Module) -> None:
        """Refuse a model other than the plan's."""
        check_model(self._plan, model)

    def place(self, model: nn.Module, make_piece: Callable[[str, Tensor], Tensor]) -> None:
        """Hold the piece made of every parameter and buffer of a model, in its order and under all their names."""
        self.contents = _contents(model)
        for name, module in model.named_modules(remove_duplicate=False):
            own = (*module._parameters, *module._buffers)
            if any(self.holds(f"{name}.{last}" if name else last) for last in own):
                self._owner(f"{name}." if name else "")
        made: dict[int, nn.Parameter] = {}
        for name, whole in model.named_parameters(remove_duplicate=False):
            if not self.holds(name):
                continue
            if id(whole) not in made:
                made[id(whole)] = nn.Parameter(make_piece(name, whole), requires_grad=whole.requires_grad)
            self.put_parameter(name, made[id(whole)])
        cuts: dict[int, Tensor] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if not self.holds(name):
                continue
            if id(buffer) not in cuts:
                cuts[id(buffer)] = make_piece(name, buffer)
            self.put_buffer(name, cuts[id(buffer)], persistent=is_persistent(model, name))

    def keep_constants(self, model: nn.Module, plan: Plan | Pipeline | None = None) -> None:
        """This rank's parts of the constants of a plan, or of its own."""
        for part, rank in _parts_of(self._plan if plan is None else plan, self._rank):
            self._keep_constants(model, part.graph, part.mesh, rank)

    def _keep_constants(self, model: nn.Module, graph: Graph, mesh: Mesh, rank: int) -> None:
        for leaf in graph.leaves_of(LeafKind.CONSTANT):
            whole = find_constant(model, leaf)
            if whole.is_meta:
                raise UsageError(
                    f"The plan of {self._plan.model.name} needs the values of the model's attribute {leaf.name}. It is "
                    f"on the meta device and has none. Make it a buffer, or build the model on the CPU."
                )
            region = region_of(leaf.type.shape, leaf.type.layout, mesh, rank)
            self._constants[leaf] = whole[tuple(slice(*span) for span in region)].to(self.device)

    def keep_only(self, leaves: Collection[Leaf]) -> None:
        """Let go of constants that no program needs any more."""
        self._constants = {leaf: x for leaf, x in self._constants.items() if leaf in leaves}

    def copied(self, memo: dict[int, Any]) -> Store:
        """A store with pieces of its own and the same values."""
        made = Store(self._plan, self._rank, self.device)
        made.root, made.contents = copy.deepcopy(self.root, memo), self.contents
        made._constants = dict(self._constants)
        return made

    def put_parameter(self, name: str, parameter: nn.Parameter) -> None:
        module, last = self._owner(name)
        module.register_parameter(last, parameter)

    def put_buffer(self, name: str, buffer: Tensor, persistent: bool) -> None:
        module, last = self._owner(name)
        module.register_buffer(last, buffer, persistent)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, last = name.rpartition(".")
        module = self.root
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module.add_module(part, PiecesOfLayer())
            child = module._modules[part]
            assert child is not None
            module = child
        return module, last

    def slot(self, leaf: Leaf) -> Slot | Leaf:
        """Where the value of a leaf is found: in a module, or among the constants."""
        return leaf if leaf.kind is LeafKind.CONSTANT else self._owner(leaf.names[0])

    def slots_of_buffer(self, leaf: Leaf) -> tuple[Slot, ...]:
        """All places of a buffer: once for every name it has."""
        return tuple(self._owner(name) for name in leaf.names)

    def read(self, slot: Slot | Leaf, device: torch.device) -> Tensor | None:
        """The value of a leaf; a constant is brought to the device of the step."""
        if not isinstance(slot, Leaf):
            return read_slot(slot)
        if self._constants[slot].device != device:
            self._constants[slot] = self._constants[slot].to(device)
        return self._constants[slot]

    def parameters(self) -> Iterator[tuple[nn.Parameter, Layout]]:
        """Every parameter once, with the layout in which it is stored."""
        return ((parameter, self.layout(name)) for name, parameter in self.root.named_parameters())


def _block(leaf: Leaf, shape: tuple[int, ...], home: _Home) -> Region:
    """The part of the whole tensor that a rank holds of a leaf."""
    if leaf.section is None:
        return region_of(shape, leaf.type.layout, home.mesh, home.rank)
    region, dim = region_of(leaf.type.shape, leaf.type.layout, home.mesh, home.rank), leaf.section.dim
    start, stop = region[dim]
    moved = leaf.section.start if stop > start else 0
    return (*region[:dim], (start + moved, stop + moved), *region[dim + 1 :])


def _contents(model: nn.Module) -> tuple[Content, ...]:
    """What a model's `state_dict` has, in its order."""
    firsts: dict[int, str] = {}
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named |= {n: x for n, x in model.named_buffers(remove_duplicate=False) if is_persistent(model, n)}
    return tuple(
        Content(name, TensorType(tuple(x.shape), x.dtype), firsts.setdefault(id(x), name)) for name, x in named.items()
    )


def _with_loans(plan: Plan | Pipeline, rank: int) -> list[tuple[Plan, int, tuple[str, ...]]]:
    """The plans that a rank has part in, which of their ranks it is, and what each only borrows."""
    if isinstance(plan, Plan):
        return [(plan, rank, ())]
    return [(s.plan, s.ranks.index(rank), s.borrowed) for s in plan.stages if rank in s.ranks]


def _parts_of(plan: Plan | Pipeline, rank: int) -> list[tuple[Plan, int]]:
    return [(part, own_rank) for part, own_rank, _ in _with_loans(plan, rank)]


def _names_elsewhere(plan: Plan | Pipeline, rank: int) -> frozenset[str]:
    """What only ranks of other stages hold; a parameter that a stage borrows lies with the stage it belongs to."""
    if isinstance(plan, Plan):
        return frozenset()
    mine, others = set[str](), set[str]()
    for stage in plan.stages:
        for leaf in stage.plan.graph.leaves:
            if leaf.kind in (LeafKind.PARAMETER, LeafKind.BUFFER) and leaf.name not in stage.borrowed:
                (mine if rank in stage.ranks else others).update(leaf.names)
    return frozenset(others - mine)


def is_persistent(model: nn.Module, name: str) -> bool:
    """Whether a buffer belongs to the model's `state_dict`."""
    owner, _, last = name.rpartition(".")
    return last not in model.get_submodule(owner)._non_persistent_buffers_set


def check_model(plan: Plan | Pipeline, model: nn.Module) -> None:
    """Refuse a model other than the plan's: names, shapes, dtypes, what is trained, what is tied."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for leaf in plan.graph.leaves:
        if leaf.kind not in (LeafKind.PARAMETER, LeafKind.BUFFER):
            continue
        for name in leaf.names:
            why = _difference(leaf, name, found)
            if why:
                reason, advice = _reason(plan, leaf, found.get(name))
                raise PlanError(f"The plan of {plan.model.name} was given a model in which {why}. {reason}. {advice}.")


def _reason(plan: Plan | Pipeline, leaf: Leaf, given: Tensor | None) -> tuple[str, str]:
    """Why a model is another one than the plan's, and what to do."""
    precision, dtype = plan.precision.partition("@")[0], leaf.type.dtype
    is_narrower = precision and dtype.is_floating_point and dtype != torch.float32
    if is_narrower and given is not None and given.is_floating_point() and given.dtype != dtype:
        return f"The plan trains all of it in {precision}, and casts no parameter", f"Give it model.to({dtype})"
    return "It was made for another model, or the model was changed since", "Make the plan again for this model"


def _difference(leaf: Leaf, name: str, found: dict[str, Tensor]) -> str | None:
    tensor = found.get(name)
    if tensor is None:
        return f"there is no {leaf.kind.value} {name}"
    type, wanted = TensorType(tuple(tensor.shape), tensor.dtype), whole_type(leaf).laid_out(())
    if type != wanted:
        return f"{name} is {type} instead of {wanted}"
    if tensor is not found[leaf.names[0]]:
        return f"{leaf.names[0]} and {name} are two tensors instead of one"
    if leaf.kind is LeafKind.PARAMETER and tensor.requires_grad != leaf.trainable:
        return f"{name} is {'trained' if tensor.requires_grad else 'frozen'}, which it was not"
    return None
