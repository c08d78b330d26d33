"""Rewritten graphs compute what they did before, gradients included, and keep everything that no rule speaks of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from random import Random

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph, GraphBuilder, Leaf, LeafKind, Value, find_layout_faults, make_leaf, sequential, verify
from conjoin.machine import Axis, Mesh
from conjoin.ops import Call, TensorType, bind_args, map_tensors, output_types, spec_for
from conjoin.rules.graphs.matching import Index, Match, find_matches
from conjoin.rules.graphs.rewriting import Refused, apply, apply_all, kept_values
from conjoin.rules.patterns import Apply, Rule
from conjoin.rules.text import parse_rule
from conjoin.runtime import to_module
from tests.rules.rewrite_cases import MODELS, RULES, body_of, graph_of, run_graph, same

MATRICES = """
input:x f64[4,4]
param:a f64[4,4] trainable
param:b f64[4,4] trainable
param:c f64[4,4] trainable
"""


def rewritten(graph: Graph, rule: Rule | str, given: Mapping[str, object] | None = None) -> Graph:
    """The graph after the first match of a rule."""
    chosen = RULES[rule] if isinstance(rule, str) else rule
    return verify(apply(graph, chosen, find_matches(graph, chosen, given)[0]))


# The same numbers.


def step(model: nn.Module, graph: Graph, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """Loss, gradients and buffers after one step of a graph with the model's own weights."""
    own = copy.deepcopy(model)
    torch.manual_seed(1)
    loss = to_module(graph, own)(*batch)
    loss.backward()
    gradients = [p.grad for p in own.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(buffer.double() for buffer in own.buffers())]


@pytest.fixture(scope="module")
def captured() -> dict[str, tuple[nn.Module, Graph]]:
    found = {}
    for name, (make, batch) in MODELS.items():
        torch.manual_seed(0)
        model = make().double()
        found[name] = model, capture(model, batch)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_rule_keeps_loss_gradients_and_buffers(name: str, captured: dict[str, tuple[nn.Module, Graph]]) -> None:
    model, graph = captured[name]
    batch = MODELS[name][1]
    before, index = step(model, graph, batch), Index(graph)
    tried = 0
    for rule in RULES.values():
        for match in find_matches(index, rule)[:2]:
            after = verify(apply(graph, rule, match))
            assert same(before, step(model, after, batch)), f"{rule} at {match}"
            assert (after.leaves, after.inputs) == (graph.leaves, graph.inputs)
            tried += 1
    assert tried >= {"lookups": 2}.get(name, 10)


def test_every_rule_is_tried_somewhere(captured: dict[str, tuple[nn.Module, Graph]]) -> None:
    indexes = [Index(graph) for _, graph in captured.values()]
    assert [name for name, rule in RULES.items() if not any(find_matches(index, rule) for index in indexes)] == []


def test_a_false_rule_changes_the_numbers() -> None:
    graph = graph_of(MATRICES + "%0: f64[4,4] = matmul(input:x, param:a)", "%0")
    after = rewritten(graph, parse_rule("false", "matmul(x, y)", "matmul(y, x)"))
    assert not same(run_graph(graph), run_graph(after))


# Random graphs, many rules one after the other.

UNARY, BINARY = ("relu", "tanh", "sigmoid", "neg"), ("add.Tensor", "mul.Tensor", "sub.Tensor", "matmul", "linear")


def random_graph(rng: Random) -> Graph:
    """A chain of calls on square matrices, each on what was made before."""
    builder = GraphBuilder()
    kind = TensorType((4, 4), torch.float64)
    leaves = [make_leaf(LeafKind.INPUT, f"x{i}", kind) for i in range(2)]
    leaves += [make_leaf(LeafKind.PARAMETER, f"w{i}", kind, trainable=True) for i in range(2)]
    values = [builder.add_leaf(leaf) for leaf in leaves]

    def call(op: str, *args: object) -> list[Value]:
        bound = bind_args(op, args, {})
        typed = Call(op, map_tensors(op, bound, lambda value: value.type))
        spec = spec_for(typed)
        assert spec is not None
        return list(builder.add_call(op, bound, output_types(spec, typed)).outputs())

    for _ in range(rng.randint(4, 9)):
        x, y = rng.choice(values[-5:]), rng.choice(values)
        match rng.randrange(5):
            case 0:
                values += call(rng.choice(UNARY), x)
            case 1:
                values += call(rng.choice(("mul.Tensor", "div.Tensor")), x, rng.choice((2, 0.5, 3)))
            case 2:
                values += call("transpose.int", x, 0, 1)
            case 3:
                dim, at = rng.randrange(2), rng.randint(1, 3)
                parts = call("split_with_sizes", x, (at, 4 - at), dim)
                values += call("cat", tuple(rng.sample(parts, 2)), dim)
            case _:
                values += call(rng.choice(BINARY), x, y)
    form = graph_of("input:x0 f64[4,4]\ninput:x1 f64[4,4]\n%0: f64[4,4] = relu(input:x0)", "%0").input_structure
    outputs = (values[-1],)
    return builder.finish("random", training=True, inputs=tuple(values[:2]), outputs=outputs, input_structure=form)


@pytest.mark.parametrize("seed", range(40))
def test_many_rules_one_after_the_other(seed: int) -> None:
    rng = Random(seed)
    graph = random_graph(rng)
    before = run_graph(graph, seed)
    both = [rule for rule in RULES.values()] + [r.reversed() for r in RULES.values() if isinstance(r.right[0], Apply)]
    for _ in range(6):
        index = Index(graph)
        matches = [(rule, match) for rule in both for match in find_matches(index, rule)]
        if not matches:
            break
        rule, match = rng.choice(matches)
        try:
            graph = verify(apply(graph, rule, match))
        except Refused:
            continue
        assert same(before, run_graph(graph, seed)), f"{rule} at {match}"


# Graph in, graph out.


def test_two_layers_that_share_their_input_become_one() -> None:
    calls = """
    %0: f64[4,4] = matmul(input:x, param:a)
    %1: f64[4,4] = relu(%0)
    %2: f64[4,4] = matmul(input:x, param:b)
    %3: f64[4,4] = add.Tensor(%1, %2)
    """
    assert body_of(rewritten(graph_of(MATRICES + calls, "%3"), "matmul-merge")) == (
        "%0: f64[4,8] = cat([param:a, param:b], dim=1)\n"
        "%1: f64[4,8] = matmul(input:x, %0)\n"
        "%2: f64[4,4], %3: f64[4,4] = split_with_sizes(%1, split_sizes=[4, 4], dim=1)\n"
        "%4: f64[4,4] = relu(%2)\n"
        "%5: f64[4,4] = add.Tensor(%4, %3)\n"
    )


def test_what_reads_an_output_waits_for_what_the_new_call_needs() -> None:
    """The first product is read before the second one's operand is there."""
    calls = """
    %0: f64[4,4] = matmul(input:x, param:a)
    %1: f64[4,4] = relu(%0)
    %2: f64[4,4] = tanh(param:b)
    %3: f64[4,4] = matmul(input:x, %2)
    """
    after = rewritten(graph_of(MATRICES + calls, "%1, %3"), "matmul-merge")
    assert [node.op for node in after.nodes] == ["tanh", "cat", "matmul", "split_with_sizes", "relu"]


def test_a_part_of_a_call_is_replaced_inside_of_it() -> None:
    calls = """
    %0: f64[4,4] = relu(param:a)
    %1: f64[4,4] = relu(param:b)
    %2: f64[16,4] = cat([input:x, %0, %1, param:c])
    """
    assert body_of(rewritten(graph_of(MATRICES + calls, "%2"), "relu-concat")) == (
        "%0: f64[8,4] = cat([param:a, param:b])\n%1: f64[8,4] = relu(%0)\n%2: f64[16,4] = cat([input:x, %1, param:c])\n"
    )


def test_what_something_else_reads_stays() -> None:
    calls = "%0: f64[4,4] = matmul(input:x, param:a)\n%1: f64[4,4] = matmul(%0, param:b)\n%2: f64[4,4] = relu(%0)"
    graph, rule = graph_of(MATRICES + calls, "%1, %2"), RULES["matmul-associates"]
    (match,) = find_matches(graph, rule)
    after = apply(graph, rule, match)
    assert kept_values(graph, match) == (Value(graph.nodes[0]),)
    assert [node.op for node in after.nodes].count("matmul") == 3
    alone = graph_of(MATRICES + calls.partition("\n%2")[0], "%1")
    assert kept_values(alone, find_matches(alone, rule)[0]) == () and len(rewritten(alone, rule).nodes) == 2


def test_an_output_may_be_an_input_of_the_rule() -> None:
    calls = "%0: f64[4,4] = t(param:a)\n%1: f64[4,4] = transpose.int(%0, dim0=0, dim1=1)\n%2: f64[4,4] = relu(%1)"
    assert body_of(rewritten(graph_of(MATRICES + calls, "%2"), "transpose-twice")) == "%0: f64[4,4] = relu(param:a)\n"


def test_the_right_side_may_hold_the_left_side() -> None:
    rule = parse_rule("r", "transpose(x)", "transpose(transpose(transpose(x)))")
    grow = parse_rule("g", "relu(x)", "relu(relu(x))")
    graph = graph_of(MATRICES + "%0: f64[4,4] = relu(input:x)\n%1: f64[4,4] = t(%0)", "%1")
    assert [node.op for node in rewritten(graph, grow).nodes] == ["relu", "relu", "t"]
    assert [node.op for node in rewritten(graph, rule).nodes] == ["relu", "transpose.int"]


@pytest.mark.parametrize("place", ["leaf", "call"])
def test_a_bare_input_is_replaced_where_it_is_said(place: str) -> None:
    calls = "%0: f64[4,4] = relu(input:x)\n%1: f64[4,4] = matmul(%0, param:a)\n%2: f64[4,4] = add.Tensor(%1, param:a)"
    graph = graph_of(MATRICES + calls, "%2")
    value = Value(graph.nodes[0]) if place == "call" else Value(graph.leaves[1])
    rule = parse_rule("r", "x", "matmul(x, identity)")
    (match,) = find_matches(graph, rule, at=value)
    after = verify(apply(graph, rule, match))
    assert [node.op for node in after.nodes].count("matmul") == 2 and same(run_graph(graph), run_graph(after))


def test_the_same_object_when_nothing_changes() -> None:
    graph = graph_of(MATRICES + "%0: f64[4,4] = add.Tensor(input:x, input:x)", "%0")
    assert rewritten(graph, "add-commutes") is graph


def test_sources_regions_and_buffers_are_kept() -> None:
    text = """
    input:x f64[4,4]
    param:a f64[4,4] trainable
    param:b f64[4,4] trainable
    buffer:mean f64[4]
    %0: f64[4,4] = matmul(input:x, param:a) pinned  @ "model.py":3 "first"
    %1: f64[4,4] = matmul(%0, param:b) pinned  @ "model.py":4 "second"
    %2: f64[4] = mean.dim(%1, dim=[0])  @ "model.py":5
    """
    graph = graph_of(text, "%1")
    graph = Graph(**{**_fields(graph), "updates": (("mean", Value(graph.nodes[-1])),)})
    after = rewritten(graph, "matmul-associates")
    assert body_of(after) == (
        '%0: f64[4,4] = matmul(param:a, param:b) pinned  @ "model.py":4 "second"\n'
        '%1: f64[4,4] = matmul(input:x, %0) pinned  @ "model.py":4 "second"\n'
        '%2: f64[4] = mean.dim(%1, dim=[0])  @ "model.py":5\n'
    )
    assert after.updates == (("mean", Value(after.nodes[-1])),)


def _fields(graph: Graph) -> dict[str, object]:
    return {name: getattr(graph, name) for name in graph.__dataclass_fields__}


# What is refused.


def refusal(graph: Graph, rule: Rule | str, given: Mapping[str, object] | None = None) -> str:
    chosen = RULES[rule] if isinstance(rule, str) else rule
    with pytest.raises(Refused) as caught:
        apply(graph, chosen, find_matches(graph, chosen, given)[0])
    return str(caught.value)


def test_a_cycle() -> None:
    """A × relu(A × B): TASO, figure 2.6."""
    calls = "%0: f64[4,4] = matmul(input:x, param:a)\n%1: f64[4,4] = relu(%0)\n%2: f64[4,4] = matmul(input:x, %1)"
    assert "would need itself" in refusal(graph_of(MATRICES + calls, "%2"), "matmul-merge")


def test_random_draws_in_another_order() -> None:
    calls = """
    %0: f64[4,4] = matmul(input:x, param:a)
    %1: f64[4,4] = dropout(%0, p=0.5, train=true)
    %2: f64[4,4] = dropout(param:b, p=0.5, train=true)
    %3: f64[4,4] = matmul(input:x, %2)
    """
    assert refusal(graph_of(MATRICES + calls, "%1, %3"), "matmul-merge") == "random draws would change their order"


def test_two_draws_from_what_becomes_one_tensor_are_two() -> None:
    calls = """
    %0: f64[4,4] = add.Tensor(input:x, param:a)
    %1: f64[4,4] = add.Tensor(param:a, input:x)
    %2: f64[4,4] = dropout(%0, p=0.5, train=true)
    %3: f64[4,4] = dropout(%1, p=0.5, train=true)
    """
    rule = parse_rule("r", "add(x, y)", "add(y, x)")
    graph = graph_of(MATRICES + calls, "%2, %3")
    for match in find_matches(graph, rule):
        made = apply(graph, rule, match)
        assert [node.op for node in made.nodes].count("dropout") == 2 and made.outputs[0] != made.outputs[1]


@pytest.mark.parametrize(("kept", "refused"), [("%1", True), ("%1, %3", False)])
def test_a_parameter_that_would_be_left_without_gradient(kept: str, refused: bool) -> None:
    """An optimizer lets a weight decay whose gradient is zeros, and leaves one alone that has none."""
    calls = """
    %0: f64[8,4] = cat([input:x, param:a])
    %1: f64[4,4], %2: f64[4,4] = split_with_sizes(%0, split_sizes=[4, 4])
    %3: f64[4,4] = relu(param:a)
    """
    graph = graph_of(MATRICES + calls, kept)
    if refused:
        assert refusal(graph, "split-concat") == "a would get no gradient where it gets one of zeros"
    else:
        assert [node.op for node in rewritten(graph, "split-concat").nodes] == ["relu"]


@pytest.mark.parametrize(
    ("type", "factors", "left", "right"),
    [
        ("f64", (1e200, 1e200), "scale(scale(x, y), w)", "scale(x, scale(y, w))"),
        ("f16", (1e5, 1e3), "scale(scale(x, y), w)", "scale(x, scale(y, w))"),
        ("f16", (1e5, 1.0), "scale(scale(x, y), w)", "scale(x, mul(y, w))"),
    ],
)
def test_a_number_that_the_dtype_cannot_hold(type: str, factors: tuple[float, float], left: str, right: str) -> None:
    one, other = factors
    calls = f"%0: {type}[4] = mul.Tensor(input:x, {one})\n%1: {type}[4] = mul.Tensor(%0, {other})"
    graph, rule = graph_of(f"input:x {type}[4]\n{calls}", "%1"), parse_rule("r", left, right)
    for match in find_matches(graph, rule):
        with pytest.raises(Refused, match="is no number that"):
            apply(graph, rule, match)


def test_a_match_of_another_graph_or_rule() -> None:
    graph = graph_of(MATRICES + "%0: f64[4,4] = add.Tensor(input:x, param:a)", "%0")
    other = graph_of(MATRICES + "%0: f64[4,4] = add.Tensor(input:x, param:b)", "%0")
    match = find_matches(graph, RULES["add-commutes"])[0]
    with pytest.raises(Refused, match="another graph"):
        apply(other, RULES["add-commutes"], match)
    with pytest.raises(Refused, match="not of ones"):
        apply(graph, RULES["ones"], match)


def test_what_a_rule_leaves_open() -> None:
    rule = parse_rule("r", "relu(x)", "relu(concat[axis=-1](split[axis=-1, part=0](x), split[axis=-1, part=1](x)))")
    graph = graph_of(MATRICES + "%0: f64[4,4] = relu(input:x)", "%0")
    assert "leaves the sizes of" in refusal(graph, rule)
    parallel = parse_rule("r", "relu(x)", "combine[axis=0](relu(partition[axis=0](x)))")
    assert "leaves mesh of" in refusal(graph, parallel)


@pytest.mark.parametrize(
    ("type", "reason"),
    [
        (TensorType((1, 4), torch.float64), r"has shape \[1, 4\] where \[4, 4\] was derived"),
        (TensorType((4, 4), torch.float32), r"gives f32\[4,4\] where f64\[4,4\] is needed"),
    ],
)
def test_a_result_of_another_type(type: TensorType, reason: str) -> None:
    """A match that speaks of tensors it was not found on: nothing is replaced."""
    graph = graph_of(MATRICES + "%0: f64[4,4] = add.Tensor(input:x, param:a)", "%0")
    rule = RULES["add-commutes"]
    match = find_matches(graph, rule)[0]
    other = Value(make_leaf(LeafKind.INPUT, "n", type))
    wrong = Match(rule, rule, match.outputs, (("x", other), ("y", other)), (), match.nodes, match.sizes)
    with pytest.raises(Refused, match=reason):
        apply(graph, rule, wrong)


# On a mesh.

MESH = Mesh((Axis("d", 2),))
PARALLEL = [
    ("relu(x)", "combine[axis=0](relu(partition[axis=0](x)))"),
    ("matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), replicate(y)))"),
    ("matmul(x, y)", "combine[axis=-1](matmul(replicate(x), partition[axis=-1](y)))"),
    ("matmul(x, y)", "reduce(matmul(partition[axis=-1](x), partition[axis=-2](y)))"),
]


@pytest.mark.parametrize(("left", "right"), PARALLEL)
def test_a_rule_that_parallelizes_gives_a_legal_graph_and_can_be_undone(left: str, right: str) -> None:
    calls = "%0: f64[4,4] = matmul(input:x, param:a)\n%1: f64[4,4] = relu(%0)"
    graph = graph_of(MATRICES + calls, "%1")
    rule = parse_rule("parallel", left, right)
    after = rewritten(graph, rule, {"m": ("d",)})
    assert after != graph and find_layout_faults(after, MESH) == ()
    assert sequential(after) == graph
    back = rewritten(after, rule.reversed())
    assert back == graph


def test_a_rule_keeps_the_layouts_of_a_parallel_graph() -> None:
    calls = """
    %0: f64[4,4]{d:S(0)} = conjoin::partition(input:x, dim=0, axes=["d"])
    %1: f64[4,4]{d:B} = conjoin::replicate(param:a, axes=["d"])
    %2: f64[4,4]{d:B} = conjoin::replicate(param:b, axes=["d"])
    %3: f64[4,4]{d:S(0)} = matmul(%0, %1)
    %4: f64[4,4]{d:S(0)} = matmul(%0, %2)
    %5: f64[4,4]{d:S(0)} = add.Tensor(%3, %4)
    %6: f64[4,4] = conjoin::combine(%5, dim=0, axes=["d"])
    """
    after = rewritten(graph_of(MATRICES + calls, "%6"), "matmul-collects")
    assert find_layout_faults(after, MESH) == ()
    assert [str(node.types[0]) for node in after.nodes][3:5] == ["f64[4,4]{d:B}", "f64[4,4]{d:S(0)}"]


def test_operands_that_do_not_lie_as_a_call_needs_them_are_refused() -> None:
    calls = """
    %0: f64[4,4]{d:P} = conjoin::assign(input:x, axes=["d"])
    %1: f64[4,4]{d:P} = neg(%0)
    %2: f64[4,4] = conjoin::reduce(%1, axes=["d"])
    """
    rule = parse_rule("false", "neg(x)", "tanh(x)")
    assert "tanh cannot take its operands as P on axis d" in refusal(graph_of(MATRICES + calls, "%2"), rule)


def test_leaves_are_named_as_before() -> None:
    graph = graph_of(MATRICES + "%0: f64[4,4] = matmul(input:x, param:a)\n%1: f64[4,4] = matmul(%0, param:b)", "%1")
    after = rewritten(graph, "matmul-associates")
    assert after.leaves == graph.leaves and all(isinstance(leaf, Leaf) for leaf in after.leaves)


# Many matches at once.


@pytest.mark.parametrize("rule", ["add-commutes", "linear-merge", "scale-into-matmul", "matmul-associates"])
@pytest.mark.parametrize("name", ["products", "attention"])
def test_many_matches_give_what_they_give_one_by_one(
    rule: str, name: str, captured: dict[str, tuple[nn.Module, Graph]]
) -> None:
    model, graph = captured[name]
    index = Index(graph)
    matches = find_matches(index, RULES[rule], apart=True)
    made, applied = apply_all(graph, RULES[rule], matches)
    assert len(applied) <= len(matches) and (made is graph) == (not applied)
    calls = [node for match in applied for node in match.nodes]
    assert len(set(calls)) == len(calls)
    one_by_one = graph
    for match in sorted(applied, key=lambda m: -max(index.places[node] for node in m.nodes)):
        one_by_one = apply(one_by_one, RULES[rule], match)
    assert {*verify(made).nodes} == {*one_by_one.nodes}
    batch = MODELS[name][1]
    assert all(same([a], [b]) for a, b in zip(step(model, graph, batch), step(model, made, batch), strict=True))


def test_outputs_that_need_each_other_are_no_match_when_asked_for() -> None:
    graph = graph_of(f"{MATRICES}%0: f64[4,4] = relu(input:x)\n%1: f64[4,4] = relu(%0)\n%2: f64[4,4] = relu(param:a)"
                     "\n%3: f64[4,4] = add.Tensor(%1, %2)", "%3")  # fmt: skip
    pair = "relu(concat[axis=0](x, y))"
    rule = parse_rule("pair", "relu(x); relu(y)", f"split[axis=0, part=0]({pair}); split[axis=0, part=1]({pair})")
    every, apart = (find_matches(graph, rule, apart=apart) for apart in (False, True))
    assert len(every) == 3 and len(apart) == 2
    made, applied = apply_all(graph, rule, apart)
    assert len(applied) == 1 and same(run_graph(graph), run_graph(made))
    # Matches that exclude each other: all but one are left, the rest need themselves.
    needing = [match for match in every if match not in apart]
    assert apply_all(graph, rule, needing) == (graph, ())


def test_an_input_of_the_right_side_alone_is_refused() -> None:
    """A rule read backwards may ask for a tensor that nothing in the graph tells."""
    graph = graph_of(MATRICES + "%0: f64[4,4] = relu(input:x)", "%0")
    rule = parse_rule("forwards", "split[axis=0, part=0](concat[axis=0](relu(x), relu(y)))", "relu(x)")
    back = Rule("backwards", rule.right, rule.left)
    for match in find_matches(Index(graph), back):
        with pytest.raises(Refused):
            apply(graph, back, match)
