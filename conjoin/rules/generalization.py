"""From a candidate to the most general rule of its form that is proven.

Candidates are found at some sizes with few inputs and parameters: `concat(relu(x), relu(x))` along the last dim. What
they say may hold for other inputs at each place, along any dim, for any stride and padding. Each such step is tried one
after the other, on random tensors first, and kept where it is proven without asking for more groups than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from conjoin.rules.conditions import ONE_GROUP
from conjoin.rules.definitions.dims import IllFormed
from conjoin.rules.definitions.proof import Verdict
from conjoin.rules.definitions.ranks import Ranks
from conjoin.rules.parameters import parameters, with_groups
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, operators_in
from conjoin.rules.trials.instances import NoInstance
from conjoin.rules.trials.refutation import try_out

_NUM_TRIALS = 6
"""Before a proof is tried: nearly all that is false is refuted by the first few."""
_MOST_NAMINGS = 64
_INPUT_NAMES = ("x", "y", "z", "w", "u", "v", "t", "r", "q", "p")
_NAMES: Mapping[str, str] = {"stride": "s", "pad": "p", "act": "f"}

Prove = Callable[[Rule], Verdict]


def generalize(rule: Rule, prove: Prove) -> tuple[Rule, Verdict]:
    """The rule with as much left open as is proven, and the verdict about it."""
    verdict = prove(rule)
    if not verdict.proven:
        return rule, verdict
    if ONE_GROUP in verdict.conditions:
        rule = with_groups(rule, 1)
        verdict = prove(rule)
    for steps in (_inputs_apart, _axes_named, _parameters_named):
        for wider in steps(rule):
            found = _proven(wider, prove, verdict)
            if found is not None:
                rule, verdict = wider, found
                break
    return rule, verdict


def _proven(wider: Rule, prove: Prove, before: Verdict) -> Verdict | None:
    """The verdict about a wider rule, where that is worth more than what is known."""
    try:
        if try_out(wider, _NUM_TRIALS, any_shapes=True).counterexample is not None:
            return None
        found = prove(wider)
        narrower = ONE_GROUP in found.conditions and ONE_GROUP not in before.conditions
        if not found.proven or narrower:
            return None
        return found if try_out(wider, _NUM_TRIALS, when=found.conditions).counterexample is None else None
    except NoInstance:
        return None


def padded_alike(rule: Rule, prove: Prove) -> Rule | None:
    """A rule for any number as padding, for as much as the kernel asks for, which may differ from dim to dim."""
    words = _with_params(rule, "pad", {_NAMES["pad"]: "same"})
    return words if words != rule and prove(words).proven else None


# Inputs.


def _inputs_apart(rule: Rule) -> Iterator[Rule]:
    """The rule with different inputs where one stands at several places, those with most inputs first."""
    places = _places(rule.left)
    own: dict[str, list[int]] = {}
    for i, name in enumerate(places):
        own.setdefault(name, []).append(i)
    repeated = [name for name, where in own.items() if len(where) > 1]
    later = _places(rule.right)
    found: dict[Rule, None] = {}
    for chosen in _subsets(repeated):
        choices = [own[name] if name in chosen else own[name][:1] for name in later]
        if not chosen or prod(map(len, choices)) > _MOST_NAMINGS:
            continue
        left = [i if name in chosen else own[name][0] for i, name in enumerate(places)]
        for right in product(*choices):
            if set(right) == set(left) and _is_one_tensor(wider := _renamed(rule, left, right)):
                found[wider] = None
    return iter(sorted(found, key=lambda wider: -len(inputs_of(*wider.left))))


def _is_one_tensor(rule: Rule) -> bool:
    """Whether two outputs are parts of one tensor: of two tensors each would be a rule of its own, and of no use."""
    wholes = {output.args for output in rule.right if isinstance(output, Apply) and output.op == "split"}
    return len(rule.right) == 1 or len(wholes) == 1


def _subsets(names: list[str]) -> Iterator[frozenset[str]]:
    for bits in product((True, False), repeat=min(len(names), 4)):
        yield frozenset(name for name, kept in zip(names, bits, strict=False) if kept)


def _places(roots: tuple[Expr, ...]) -> list[str]:
    """The inputs at every place of the written expressions."""
    found: list[str] = []
    for root in roots:
        found += [root.name] if isinstance(root, Input) else _places(root.args)
    return found


def _renamed(rule: Rule, left: list[int], right: tuple[int, ...]) -> Rule:
    names = {place: Input(_INPUT_NAMES[i % 10] + "1" * (i // 10)) for i, place in enumerate(dict.fromkeys(left))}
    sides = []
    for roots, places in ((rule.left, left), (rule.right, list(right))):
        rest = iter([names[place] for place in places])
        sides.append(tuple(_with_inputs(root, rest) for root in roots))
    return replace(rule, left=sides[0], right=sides[1])


def _with_inputs(expr: Expr, names: Iterator[Input]) -> Expr:
    if isinstance(expr, Input):
        return next(names)
    return replace(expr, args=tuple(_with_inputs(arg, names) for arg in expr.args))


# Parameters.


def _axes_named(rule: Rule) -> Iterator[Rule]:
    """The rule with names for dims where they may be the dims it has: for all, for all the same, or for one."""
    return (wider for wider in _with_names_of_dims(rule) if _covers(wider, rule))


def _covers(wider: Rule, rule: Rule) -> bool:
    """Whether every named dim may be the counted one that stood there: a name is never one of those at the end."""
    try:
        ranks = Ranks(*(Apply("sub", (), pair) for pair in zip(wider.left, wider.right, strict=True)))
    except IllFormed:
        return False
    pairs = zip(_applied(wider.outputs), _applied(rule.outputs), strict=True)
    for named, counted in pairs:
        axis = counted.param("axis")
        if axis != named.param("axis"):
            rank = ranks[named.args[0]]
            if rank.exact is not None or not isinstance(axis, int) or -axis <= rank.least:
                return False
    return True


def _applied(roots: tuple[Expr, ...]) -> Iterator[Apply]:
    """All applications at every place of the written expressions."""
    for root in roots:
        if isinstance(root, Apply):
            yield root
            yield from _applied(root.args)


def _with_names_of_dims(rule: Rule) -> Iterator[Rule]:
    axes = list(dict.fromkeys(v for e in operators_in(*rule.outputs) for k, v in e.params if k == "axis"))
    axes = [axis for axis in axes if isinstance(axis, int)]
    used = {v for e in operators_in(*rule.outputs) for k, v in e.params if k == "axis" and isinstance(v, str)}
    names = [name for name in "abcd" if name not in used]
    if not axes or len(axes) > len(names):
        return
    yield _with_params(rule, "axis", dict(zip(axes, names, strict=False)))
    if len(axes) > 1:
        yield _with_params(rule, "axis", dict.fromkeys(axes, names[0]))
        for axis in axes:
            yield _with_params(rule, "axis", {axis: names[0]})


def _parameters_named(rule: Rule) -> Iterator[Rule]:
    """The rule for any stride, padding and activation, as many of these as may be."""
    options: list[dict[str, Parameter]] = []
    for name in _NAMES:
        having = [e for e in operators_in(*rule.outputs) if name in dict(parameters(e))]
        values = {dict(parameters(expr))[name] for expr in having}
        known = values & {1, "same", "valid", "none", "relu"}
        if having and len(values) == 1 and known:
            options.append({name: next(iter(values))})
    for bits in product((True, False), repeat=len(options)):
        chosen = [option for option, kept in zip(options, bits, strict=True) if kept]
        wider = rule
        for option in chosen:
            for name, value in option.items():
                wider = _with_params(wider, name, {value: _NAMES[name]})
        if chosen:
            yield wider


def _with_params(rule: Rule, name: str, named: Mapping[Parameter, str]) -> Rule:
    def change(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        params = tuple((k, named.get(v, v) if k == name else v) for k, v in parameters(expr))
        return Apply(expr.op, _without_defaults(expr, params), tuple(map(change, expr.args)))

    return Rule(rule.name, tuple(map(change, rule.left)), tuple(map(change, rule.right)))


def _without_defaults(expr: Apply, params: tuple[tuple[str, Parameter], ...]) -> tuple[tuple[str, Parameter], ...]:
    defaults = dict(parameters(replace(expr, params=())))
    return tuple((name, value) for name, value in params if value != defaults[name])
