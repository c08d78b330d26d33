"""Prove rules from the laws of the operators in first-order logic, as TASO (section 2.4) and Unity (section 4) do.

Tensors are one sort without shapes and parameters another; every operator is a function of both about which nothing is
known but the laws. Z3 instantiates the laws on the terms of a rule until both sides of an output become one. It finds
a proof in milliseconds or not at all: false rules run into the time limit, so random trials should come first.

Shapes are not looked at: a rule proven so is true where the shapes of all terms in between fit, too. A law that `needs`
something is one after which they may not; what the laws of a proof need is told with it. Proofs from the definitions
(`proof.py`) trust no law and find all conditions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

import z3

from conjoin.rules.definitions.dims import IllFormed
from conjoin.rules.definitions.ranks import Ranks, devices_of
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any, names_in, parameters
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, walk
from tests.laws.laws import Law, laws, lemmas

MILLISECONDS = 2000
"""For one output of a rule; TASO's rules take 10 to 100."""
_IMAGE_RANK = 4
_LAST: tuple[tuple[str, Parameter], ...] = (("axis", -1), ("axis", -2))
"""The dims that laws about matrices tell from others; a name in a rule about matrices is none of them."""
_FIRST_SHARE = 0.25
"""Of the time, for the laws about the operators of the rule alone; they are enough for most rules."""


Pair = tuple[Parameter, Parameter]


class _NotProven(Exception):
    """Why a proof was not found."""


@dataclass(frozen=True, slots=True)
class _Goal:
    """Two expressions of which it is asked whether they are equal."""

    left: Expr
    right: Expr
    hints: tuple[Expr, ...] = ()
    """Terms to look at as well."""
    apart: tuple[Pair, ...] = ()
    """Dims or mesh axes that are not the same."""


@dataclass(frozen=True, slots=True)
class LawVerdict:
    """What became of an attempt."""

    proven: bool
    laws: tuple[str, ...] = ()
    """Names of the laws that the proof used, and of the lemmas with the laws behind them."""
    needs: tuple[str, ...] = ()
    """What those laws need of shapes, each in its own names: `conv-enlarge: kernel k is odd`."""
    reason: str = ""
    """Why it was not proven."""
    seconds: float = 0.0


def prove_by_laws(rule: Rule, milliseconds: int = MILLISECONDS) -> LawVerdict:
    """Try to prove each output of a rule from the laws and lemmas; not proven does not mean false.

    >>> from conjoin.rules.text import parse_rule
    >>> found = prove_by_laws(parse_rule("", "matmul(transpose(x), transpose(y))", "transpose(matmul(y, x))"))
    >>> found.proven, found.laws
    (True, ('matmul-transpose',))
    """
    known = (*laws(), *proven_lemmas())
    found = prove_from(rule, known, milliseconds)
    behind = {lemma.name: used for lemma, used in _lemma_proofs().items()}
    used = dict.fromkeys(found.laws)
    for name in found.laws:
        used.update(dict.fromkeys(behind.get(name, ())))
    needs = [f"{law.name}: {words}" for law in known if law.name in used for words in law.needs]
    return replace(found, laws=tuple(used), needs=tuple(needs))


def prove_law(law: Law, known: Sequence[Law], milliseconds: int = MILLISECONDS) -> LawVerdict:
    """Try to prove a law from others; its names for dims and mesh axes may stand for the same unless it says not."""
    return _prove(law.rule, known, milliseconds, law.hints, (*law.apart, (-1, -2)))


def prove_from(
    rule: Rule, known: Sequence[Law], milliseconds: int = MILLISECONDS, hints: Iterable[Expr] = ()
) -> LawVerdict:
    """Try to prove each output of a rule from some laws alone."""
    values = [v for expr in walk(*rule.outputs) if isinstance(expr, Apply) for v in parameters(expr)]
    axes = dict.fromkeys([*_LAST, *((name, value) for name, value in values if name in ("axis", "mesh"))])
    apart = [(one[1], other[1]) for one, other in combinations(axes, 2) if one[0] == other[0]]
    return _prove(rule, known, milliseconds, tuple(hints), [pair for pair in apart if _are_apart(*pair)])


def _prove(
    rule: Rule, known: Sequence[Law], milliseconds: int, hints: tuple[Expr, ...], apart: Sequence[Pair]
) -> LawVerdict:
    start = time.perf_counter()
    used: dict[str, None] = {}
    reason = ""
    try:
        settled = _settled(rule)
        for left, right in zip(settled.left, settled.right, strict=True):
            used.update(dict.fromkeys(_prove_equal(_Goal(left, right, hints, tuple(apart)), known, milliseconds)))
    except IllFormed as error:
        reason = str(error)
    except _NotProven as error:
        reason = str(error)
    return LawVerdict(not reason, () if reason else tuple(used), (), reason, time.perf_counter() - start)


def proven_lemmas() -> tuple[Law, ...]:
    """The lemmas that were proven from the laws, and those before them, on this machine just now."""
    return tuple(_lemma_proofs())


@cache
def _lemma_proofs() -> Mapping[Law, tuple[str, ...]]:
    """Each lemma with the laws that it follows from."""
    found: dict[Law, tuple[str, ...]] = {}
    for lemma in lemmas():
        verdict = prove_law(lemma, laws(), 10 * MILLISECONDS)
        if verdict.proven:
            found[lemma] = verdict.laws
    return found


def _prove_equal(goal: _Goal, known: Sequence[Law], milliseconds: int) -> tuple[str, ...]:
    """The names of the laws that make two expressions one."""
    if goal.left == goal.right:
        return ()
    operators = {expr.op for expr in walk(goal.left, goal.right, *goal.hints) if isinstance(expr, Apply)}
    near = [law for law in known if law.operators <= operators]
    far = _reachable(known, operators)
    if len(far) > len(near):
        try:
            return _Question(goal, near, widely=False).ask(int(milliseconds * _FIRST_SHARE))
        except _NotProven:
            return _Question(goal, far, widely=True).ask(milliseconds - int(milliseconds * _FIRST_SHARE))
    return _Question(goal, near, widely=True).ask(milliseconds)


def _reachable(known: Sequence[Law], operators: set[str]) -> list[Law]:
    """Laws one of whose sides can be made from some operators by laws; meshes only where there are some."""
    parallel = any(BY_NAME[op].parallel for op in operators)
    have, found = set(operators), dict[str, Law]()
    usable = [law for law in known if parallel or not any(BY_NAME[op].parallel for op in law.operators)]
    changed = True
    while changed:
        changed = False
        for law in usable:
            sides = [{e.op for e in walk(side) if isinstance(e, Apply)} for side in (law.left, law.right)]
            undone = not all(sides) and law.operators & have  # operators that undo each other
            if law.name not in found and (undone or any(side and side <= have for side in sides)):
                found[law.name] = law
                have |= law.operators
                changed = True
    return list(found.values())


@cache
def _settled(rule: Rule) -> Rule:
    """The rule with one way to count dims: of images from the beginning, of all others from the end.

    IllFormed where the ranks cannot be, or where tensors that differ between devices meet others that do not.
    """
    if len(rule.left) != len(rule.right):
        raise IllFormed(f"the left side has {len(rule.left)} outputs and the right side {len(rule.right)}")
    pairs = [Apply("sub", (), pair) for pair in zip(rule.left, rule.right, strict=True)]
    ranks = Ranks(*pairs)
    devices_of(*pairs)

    def settled(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        exact = ranks[expr.args[0] if BY_NAME[expr.op].kind == "reduce" else expr].exact
        params = tuple((name, _settled_axis(v, exact) if name == "axis" else v) for name, v in expr.params)
        return Apply(expr.op, params, tuple(map(settled, expr.args)))

    return replace(rule, left=tuple(map(settled, rule.left)), right=tuple(map(settled, rule.right)))


def _settled_axis(axis: Parameter, rank: int | None) -> Parameter:
    if isinstance(axis, str) or rank is None:
        return axis
    return axis % rank if rank == _IMAGE_RANK else axis % rank - rank


@dataclass(slots=True)
class _Language:
    """Formulas for expressions; the names of parameters and inputs that laws speak of are bound."""

    tensor: z3.SortRef = field(default_factory=lambda: z3.DeclareSort("Tensor"))
    parameter: z3.SortRef = field(default_factory=lambda: z3.DeclareSort("Parameter"))

    def term(self, expr: Expr, bound: bool = False) -> z3.ExprRef:
        if isinstance(expr, Input):
            return z3.Const(f"{'?' if bound else ''}{expr.name}", self.tensor)
        values = parameters(expr)
        sorts = [self.parameter] * len(values) + [self.tensor] * (len(expr.args) + 1)
        operands = [*(self.value(*v, bound) for v in values), *(self.term(arg, bound) for arg in expr.args)]
        return z3.Function(expr.op, *sorts)(*operands) if operands else z3.Const(expr.op, self.tensor)

    def value(self, name: str, value: Parameter, bound: bool = False) -> z3.ExprRef:
        """A number or word is the same everywhere; a name is any value in a law, and some value in a rule."""
        mark = "=" if not is_any(name, value) else "?=" if bound else ""
        return z3.Const(f"{mark}{value}", self.parameter)

    def apart(self, one: z3.ExprRef, other: z3.ExprRef) -> z3.BoolRef:
        return z3.Function("apart", self.parameter, self.parameter, z3.BoolSort())(one, other)

    def occurs(self, name: str, value: z3.ExprRef) -> z3.BoolRef:
        """That a parameter has a value somewhere in the rule: what to try where a law leaves it open."""
        return z3.Function(f"occurs as {name}", self.parameter, z3.BoolSort())(value)


class _Question:
    """Do the laws make two expressions one?"""

    def __init__(self, goal: _Goal, known: Iterable[Law], widely: bool) -> None:
        self.goal, self.language, self.widely = goal, _Language(), widely
        self.solver = z3.SimpleSolver()
        self.solver.set("auto_config", False)
        self.solver.set("mbqi", False)
        for law in known:
            self.solver.assert_and_track(self._formula(law), law.name)
        self.solver.add(*self._surroundings())
        self.solver.add(self.language.term(goal.left) != self.language.term(goal.right))

    def ask(self, milliseconds: int) -> tuple[str, ...]:
        """The names of laws that do."""
        self.solver.set("timeout", max(milliseconds, 1))
        if self.solver.check() == z3.unsat:
            return tuple(sorted(str(name) for name in self.solver.unsat_core()))
        ended = "incomplete" in self.solver.reason_unknown()
        why = "whatever law was tried" if ended else f"in {milliseconds} ms"
        raise _NotProven(f"{self.goal.left} and {self.goal.right} did not become one {why}")

    def _formula(self, law: Law) -> z3.BoolRef:
        settled = _settled(law.rule)
        left, right = (self.language.term(side, bound=True) for side in (settled.left[0], settled.right[0]))
        names = names_in(*settled.outputs)
        unknowns = {f"?={name}": self.language.value(kind, name, bound=True) for name, kind in names.items()}
        unknowns |= {f"?{name}": z3.Const(f"?{name}", self.language.tensor) for name in inputs_of(*settled.outputs)}
        equation = left == right
        for pair in law.apart:
            one, other = (self.language.value(names.get(str(v), "axis"), v, bound=True) for v in pair)
            equation = z3.Implies(self.language.apart(one, other), equation)
        if not unknowns:
            return equation
        occurring = {f"?={name}": self.language.occurs(kind, unknowns[f"?={name}"]) for name, kind in names.items()}
        patterns = _patterns(left, right, set(unknowns), occurring if self.widely else {})
        return z3.ForAll(list(unknowns.values()), equation, patterns=patterns)

    def _surroundings(self) -> list[z3.BoolRef]:
        """What is known of the parameters of a rule: which of them are apart; and that hints are terms."""
        language, goal = self.language, self.goal
        exprs = walk(goal.left, goal.right, *goal.hints)
        values = {value for expr in exprs if isinstance(expr, Apply) for value in parameters(expr)}
        found = [language.occurs(name, language.value(name, value)) for name, value in values]
        for pair in goal.apart:
            one, other = (language.value("axis", value) for value in pair)
            found += [language.apart(one, other), language.apart(other, one)]
        look = z3.Function("look", language.tensor, z3.BoolSort())
        return [*found, *(look(language.term(hint)) for hint in goal.hints)]


def _are_apart(one: Parameter, other: Parameter) -> bool:
    """Whether two axes of a rule are surely not the same: names are of different dims, numbers if counted alike."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other and (one < 0) == (other < 0)
    return one != other


def _patterns(
    left: z3.ExprRef, right: z3.ExprRef, unknowns: set[str], occurring: Mapping[str, z3.BoolRef]
) -> list[z3.PatternRef]:
    """Terms at which a law is looked at: each of its sides; where one is an input alone, what lies around it."""
    found = []
    for side, opposite in ((left, right), (right, left)):
        missing = unknowns - _unknowns(side)
        if side.num_args() and missing <= set(occurring):
            rest = [occurring[name] for name in sorted(missing)]
            terms = [side] if _unknowns(side) else []
            found.append(z3.MultiPattern(*terms, *rest))
        if not opposite.num_args() and _unknowns(opposite):
            found += [z3.MultiPattern(term) for term in _around(side) if _unknowns(term) == unknowns]
    return found


def _around(term: z3.ExprRef) -> list[z3.ExprRef]:
    """Operators of one tensor applied to an unknown, below the top."""
    found = []
    for child in term.children():
        tensors = [arg for arg in child.children() if arg.sort() == term.sort()]
        if len(tensors) == 1 and not tensors[0].num_args():
            found.append(child)
        found += _around(child)
    return found


def _unknowns(term: z3.ExprRef) -> set[str]:
    if not term.num_args():
        name = str(term)
        return {name} if name.startswith("?") and name != "?" else set()
    return set[str]().union(*map(_unknowns, term.children()))
