"""Random programs of the calls that models are made of, whatever rules there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from conjoin.ir import LEAF, Graph, GraphBuilder, LeafKind, Structure, Value, make_leaf
from conjoin.ops import Call, NotationError, TensorType, bind_args, map_tensors, output_types, spec_for

FUNCTIONS = ("relu", "tanh", "sigmoid", "gelu", "exp", "neg", "square")
_MOST_ELEMENTS = 400


@dataclass
class Program:
    """A program under way: each call reads what was made before."""

    rng: Random
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    leaves: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Value:
        made = make_leaf(LeafKind.INPUT, f"x{len(self.leaves)}", TensorType(shape, dtype))
        self.leaves.append(self.builder.add_leaf(made))
        return self.leaves[-1]

    def call(self, op: str, *args: Any) -> None:
        """Add a call, where torch takes these operands and the result is small."""
        bound = bind_args(op, args, {})
        typed = Call(op, map_tensors(op, bound, lambda value: value.type))
        try:
            spec = spec_for(typed)
            types = () if spec is None else output_types(spec, typed)
        except NotationError:
            return
        if types and all(type.num_elements <= _MOST_ELEMENTS for type in types):
            self.values += self.builder.add_call(op, bound, types).outputs()

    def some(self) -> Value:
        """A value of real numbers, most often a late one."""
        reals = [value for value in self.values if value.type.dtype.is_floating_point]
        return self.rng.choice(reals[-4:] if self.rng.random() < 0.7 else reals)

    def like(self, x: Value) -> Value:
        """Something that can be added to a value: made before, or new, perhaps broadcast, perhaps no real numbers."""
        shape = x.type.shape
        alike = [value for value in self.values if value.type.shape == shape]
        match self.rng.randrange(6):
            case 0 if shape:
                return self.leaf(shape[-1:])
            case 1 if shape:
                at = self.rng.randrange(len(shape))
                return self.leaf((*shape[:at], 1, *shape[at + 1 :]))
            case 2:
                return self.leaf(shape, self.rng.choice((torch.bool, torch.int64)))
            case 3:
                return self.leaf(shape)
        return self.rng.choice(alike)

    def step(self) -> None:
        """One more call."""
        x, pick = self.some(), self.rng.choice
        shape, rank = x.type.shape, len(x.type.shape)
        match self.rng.randrange(9):
            case 0:
                self.call(pick(FUNCTIONS), x)
            case 1 | 2:
                other = self.like(x)
                op = "mul" if other.type.dtype is torch.bool else pick(("add", "mul", "sub"))
                self.call(f"{op}.Tensor", *pick(((x, other), (other, x))))
            case 3:
                self.call("mul.Tensor", x, pick((2.0, -0.5, 3)))
            case 4 if rank:
                self.call("linear", x, self.leaf((pick((2, 3, 5)), shape[-1])))
            case 5 if rank > 1:
                order = self.rng.sample(range(rank), rank)
                self.call("permute", x, tuple(order))
            case 6 if rank > 1:
                self.call(pick(("sum.dim_IntList", "mean.dim")), x, (self.rng.randrange(rank),))
            case 7 if rank:
                self.call("softmax.int", x, self.rng.randrange(rank))
            case 8 if rank:
                self._parts(x, self.rng.randrange(rank))

    def _parts(self, x: Value, dim: int) -> None:
        size, shape = x.type.shape[dim], x.type.shape
        if size > 1 and self.rng.random() < 0.5:
            at = self.rng.randint(1, size - 1)
            self.call("split_with_sizes", x, (at, size - at), dim)
        else:
            other = self.leaf((*shape[:dim], self.rng.randint(1, 3), *shape[dim + 1 :]))
            self.call("cat", self.rng.choice(((x, other), (other, x), (x, x))), dim)


def random_program(seed: int, length: int = 24) -> Graph:
    """A program over tensors of several ranks, with sizes that differ or, every other time, do not."""
    rng = Random(seed)
    program = Program(rng)
    sizes = (4, 4, 4) if seed % 2 else (2, 3, 5)
    program.values = [program.leaf(sizes[:rank]) for rank in (2, 3, 3)]
    while len(program.values) < length:
        program.step()
    outputs = tuple(program.values[-3:])
    takes, gives = (Structure("tuple", (), (LEAF,) * len(values)) for values in (program.leaves, outputs))
    return program.builder.finish(
        "random", training=True, inputs=tuple(program.leaves), outputs=outputs, input_structure=takes,
        output_structure=gives,
    )  # fmt: skip
