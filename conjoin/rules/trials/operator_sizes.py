"""What each operator asks of the sizes of its operands, as torch does, and the sizes of what it gives.

This says no more than when an operator runs: a convolution of some groups asks for channels that are a multiple of
them, not for channels that are divided in any other way. `tests/rules/test_operator_sizes.py` asks torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from conjoin.rules.operators import BY_NAME, FUNCTIONS
from conjoin.rules.parameters import parameters
from conjoin.rules.patterns import Apply, Expr, Input
from conjoin.rules.trials.forms import Ranks
from conjoin.rules.trials.puzzles import Contradiction, Puzzle

Sizes = tuple[int, ...]
"""Of a tensor: for every dim an unknown of a puzzle."""
_BOUNDS: Mapping[str, tuple[int, int]] = {"stride": (1, 3), "pad": (0, 2), "mesh": (1, 3), "kernel": (1, 7)}
"""Numbers that are worth trying; of groups and parts whatever divides."""


class Shaping:
    """The sizes of expressions, as unknowns of a puzzle."""

    def __init__(self, ranks: Ranks) -> None:
        self.puzzle, self.ranks = Puzzle(), ranks
        self.sizes: dict[Expr, Sizes] = {}
        self.named: dict[str, int] = {}
        """Numbers by name; devices along mesh axes too."""
        self.parts: dict[int, tuple[int, int]] = {}
        """Sizes that were put together, or are split, and their two parts."""
        self.firsts: dict[Apply, int] = {}

    def copy(self) -> Shaping:
        made = Shaping(self.ranks)
        made.puzzle = self.puzzle.copy()
        made.sizes, made.named = dict(self.sizes), dict(self.named)
        made.parts, made.firsts = dict(self.parts), dict(self.firsts)
        return made

    def add(self, expr: Expr) -> None:
        """An expression whose operands are there; Contradiction where it cannot run."""
        if expr in self.sizes:
            return
        if isinstance(expr, Input):
            self.sizes[expr] = tuple(self.puzzle.new() for _ in range(self.ranks.rank(expr)))
            return
        sizes = _OPERATORS[expr.op](self, expr, [self.sizes[arg] for arg in expr.args])
        if len(sizes) != self.ranks.rank(expr):
            raise Contradiction(f"{expr} has {len(sizes)} dims")
        self.sizes[expr] = sizes

    def number(self, expr: Apply, name: str) -> int:
        """A parameter."""
        value = dict(parameters(expr))[name]
        if isinstance(value, int):
            return self.puzzle.number(value)
        return self.named_number(value, *_BOUNDS.get(name, (1, 12)))

    def named_number(self, name: str, least: int = 0, most: int = 12) -> int:
        if name not in self.named:
            self.named[name] = self.puzzle.new(least, most)
        elif least:
            self.puzzle.same(self.named[name], self.puzzle.new(least))
        return self.named[name]

    def mesh(self, expr: Apply) -> int:
        name = str(expr.param("mesh", "m"))
        number = self.named_number(name, *_BOUNDS["mesh"])
        if name.isdecimal():
            self.puzzle.learn(number, int(name))
        return number

    def place(self, expr: Apply, on: Expr) -> int:
        return self.ranks.place(on, expr.param("axis"))

    def same(self, one: Sizes, other: Sizes) -> Sizes:
        """Operands of one shape; of which one was put together, its sizes are meant."""
        if len(one) != len(other):
            raise Contradiction("operands of different ranks")
        for a, b in zip(one, other, strict=True):
            self.puzzle.same(a, b)
        return tuple(b if b in self.parts and a not in self.parts else a for a, b in zip(one, other, strict=True))

    def part(self, whole: int, is_input: bool) -> tuple[int, int]:
        """Where a size is split: where it was put together, or anywhere."""
        if whole in self.parts:
            return self.parts[whole]
        same = (key for key in self.parts if self.puzzle.find(key) == self.puzzle.find(whole))
        alike = [] if is_input else [self.parts[key] for key in same]
        first, second = alike[0] if alike else (self.puzzle.new(), self.puzzle.new())
        self.puzzle.state("sum", whole, (first, second))
        for other in alike[1:]:
            self.puzzle.same(other[0], first)
        self.parts[whole] = (first, second)
        return self.parts[whole]

    def odd(self, size: int) -> None:
        self.puzzle.state("odd", size, (self.puzzle.new(0),))

    def not_larger(self, small: int, large: int) -> None:
        self.puzzle.state("sum", large, (small, self.puzzle.new(0)))

    def windows(self, expr: Apply, image: Sequence[int], kernel: Sequence[int]) -> Sizes:
        """How many windows there are along both dims of an image."""
        stride, pad = self.number(expr, "stride"), dict(parameters(expr))["pad"]
        if pad == "same":
            for size in kernel:
                self.odd(size)
            if self.puzzle.value(stride) == 1:
                return tuple(image)
            kernel, padding = [self.puzzle.number(1)] * 2, self.puzzle.number(0)
        else:
            padding = self.puzzle.number(0) if pad == "valid" else self.number(expr, "pad")
        pairs = zip(image, kernel, strict=True)
        return tuple(self.puzzle.relate("windows", (size, own, stride, padding)) for size, own in pairs)


def _alike(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    found = args[0]
    for arg in args[1:]:
        found = shaping.same(found, arg)
    if expr.param("axis") != "":
        shaping.place(expr, expr)
    return found


def _scale(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    return args[0]


def _by_last(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    return (*args[0][:-1], *shaping.same(args[0][-1:], args[1]))


def _matmul(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    (*a, m, k), (*b, other, n) = args
    shaping.puzzle.same(k, other)
    return (*shaping.same(tuple(a), tuple(b)), m, n)


def _linear(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    (*lead, k), (n, other) = args
    shaping.puzzle.same(k, other)
    return (*lead, n)


def _flatten(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    *lead, slow, fast = args[0]
    whole = shaping.puzzle.relate("product", (slow, fast))
    if slow in shaping.parts:
        first, second = (shaping.puzzle.relate("product", (part, fast)) for part in shaping.parts[slow])
        shaping.parts.setdefault(whole, (first, second))
    return (*lead, whole)


def _unflatten(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    *lead, whole = args[0]
    parts, piece = shaping.number(expr, "parts"), shaping.puzzle.new()
    shaping.puzzle.state("product", whole, (parts, piece))
    return (*lead, parts, piece)


def _conv(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    (samples, channels, *image), (features, own, *kernel) = args
    puzzle = shaping.puzzle
    is_open = expr.param("groups", "?") == "?"
    groups = puzzle.new() if is_open else shaping.number(expr, "groups")
    puzzle.state("product", channels, (groups, own))
    puzzle.state("product", features, (groups, puzzle.new()))
    return (samples, features, *shaping.windows(expr, image, kernel))


def _enlarge(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    features, channels, *kernel = args[0]
    target, puzzle = shaping.number(expr, "kernel"), shaping.puzzle
    for size in kernel:
        more = puzzle.relate("product", (puzzle.number(2), puzzle.new(0)), least=0)
        puzzle.state("sum", target, (size, more))
    return features, channels, target, target


def _pool(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    samples, channels, *image = args[0]
    kernel, pad = shaping.number(expr, "kernel"), dict(parameters(expr))["pad"]
    if pad not in ("same", "valid"):  # torch pools have at most half a window of padding
        twice = (shaping.puzzle.number(2), shaping.number(expr, "pad"))
        shaping.not_larger(shaping.puzzle.relate("product", twice, least=0), kernel)
    return (samples, channels, *shaping.windows(expr, image, (kernel, kernel)))


def _concat(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    place = shaping.place(expr, expr)
    one, other = args
    rest = shaping.same((*one[:place], *one[place + 1 :]), (*other[:place], *other[place + 1 :]))
    whole = shaping.puzzle.relate("sum", (one[place], other[place]))
    shaping.parts.setdefault(whole, (one[place], other[place]))
    return (*rest[:place], whole, *rest[place:])


def _split(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    place = shaping.place(expr, expr)
    parts = shaping.part(args[0][place], isinstance(expr.args[0], Input))
    shaping.firsts[expr] = parts[0]
    return (*args[0][:place], parts[int(expr.param("part"))], *args[0][place + 1 :])


def _reduce_dim(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    place = shaping.place(expr, expr.args[0])
    return (*args[0][:place], *args[0][place + 1 :])


def _embedding(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    return (*args[1], args[0][1])


def _bag(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    return (*args[1][:-1], args[0][1])


def _aggregate(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    for others in args[2:]:
        shaping.same(args[1], others)
    return shaping.number(expr, "vertices"), args[0][1]


def _constant(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    """As large as it has to be."""
    sizes = tuple(shaping.puzzle.new() for _ in range(shaping.ranks.rank(expr)))
    if expr.op == "identity":
        shaping.puzzle.same(sizes[-2], sizes[-1])
    if expr.op in ("identity_kernel", "pool_kernel"):
        kernel = shaping.number(expr, "kernel")
        shaping.puzzle.same(sizes[2], kernel)
        shaping.puzzle.same(sizes[3], kernel)
    if expr.op == "identity_kernel":
        shaping.puzzle.same(sizes[0], sizes[1])
        shaping.odd(sizes[2])
    if expr.op == "pool_kernel":
        shaping.puzzle.learn(sizes[1], 1)
    return sizes


def _partition(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    place, piece = shaping.place(expr, expr), shaping.puzzle.new()
    shaping.puzzle.state("product", args[0][place], (shaping.mesh(expr), piece))
    return (*args[0][:place], piece, *args[0][place + 1 :])


def _combine(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    place = shaping.place(expr, expr)
    whole = shaping.puzzle.relate("product", (shaping.mesh(expr), args[0][place]))
    return (*args[0][:place], whole, *args[0][place + 1 :])


def _over_devices(shaping: Shaping, expr: Apply, args: list[Sizes]) -> Sizes:
    shaping.mesh(expr)
    return args[0]


_OPERATORS: Mapping[str, Callable[[Shaping, Apply, list[Sizes]], Sizes]] = {
    **dict.fromkeys((*FUNCTIONS, "add", "sub", "mul", "div", "neg", "softmax"), _alike),
    "scale": _scale,
    "bias": _by_last,
    "gain": _by_last,
    "matmul": _matmul,
    "linear": _linear,
    "transpose": lambda shaping, expr, args: (*args[0][:-2], args[0][-1], args[0][-2]),
    "swap": lambda shaping, expr, args: (*args[0][:-3], args[0][-2], args[0][-3], args[0][-1]),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "conv": _conv,
    "enlarge": _enlarge,
    "avg_pool": _pool,
    "max_pool": _pool,
    "concat": _concat,
    "split": _split,
    "sum": _reduce_dim,
    "mean": _reduce_dim,
    "embedding": _embedding,
    "embedding_bag": _bag,
    **dict.fromkeys(("aggregate", "aggregate_weighted", "aggregate_mean"), _aggregate),
    **dict.fromkeys(("ones", "identity", "identity_kernel", "pool_kernel"), _constant),
    "partition": _partition,
    "combine": _combine,
    "replicate": _over_devices,
    "reduce": _over_devices,
}
assert _OPERATORS.keys() == BY_NAME.keys()
