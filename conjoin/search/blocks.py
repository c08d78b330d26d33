"""The blocks of a model, such as the layers of a transformer, and what of them a strategy runs again in backward.

Blocks are the members of a list of modules of which at least two have parameters alike, in modules of their own:
`blocks.0`, `blocks.1`, ... of a GPT, and `stages.2.0`, ... of a residual network, whose stages differ. The list nearest
to the model counts. What a block calls outside of itself, such as a rotary embedding, is part of its run.

What is run again is said as people train: of every block all (`full`), of every n-th block all (`every-n`: the n-th,
2n-th, ... of the whole model, as in torchtitan), or of every block what is cheap for its bytes (`selective`). The last
follows torchtitan's policy by operator (`torchtitan/distributed/activation_checkpoint.py`): what attention in one
kernel makes is kept, and so is every other product with weights, beginning with the first; all else is run again, from
what the block is given. Scores and softmax of an attention that is spelled out are run again, which alone is
Megatron-LM's selective recomputation (Korthikanti et al., 2022, section 5). Collectives are run again, too; there their
results are kept. Attention around a ring and experts that rows are sent to are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from conjoin.cost import ATTENTION
from conjoin.errors import StrategyError
from conjoin.ir import Graph, LeafKind, Node, Segment, asked_segments, operators_of, stored_leaf
from conjoin.ops import AGGREGATE, CAST, GRAPH_ATTENTION, RING_ATTENTION, ROUTED_EXPERTS
from conjoin.search.facts import NodeFacts, study

_AMONG_RANKS = (RING_ATTENTION, ROUTED_EXPERTS, AGGREGATE, GRAPH_ATTENTION)


def segments_for(recompute: str, graph: Graph, whole: Graph | None = None) -> tuple[Segment, ...]:
    """What is run again of a graph by a mode of recomputing; without one what the model asks for. Blocks of a stage
    are those of the `whole` model: there may be one in a stage.
    """
    match recompute:
        case "":
            return asked_segments(graph)
        case "none":
            return ()
    blocks = block_segments(graph, whole)
    if not blocks and whole is not None and block_segments(whole):
        return ()  # none of them is in this stage
    if not blocks:
        raise StrategyError(
            f"Blocks of {(whole or graph).name} were to be run again in the backward pass (recompute={recompute}). It "
            f"has none: no list of modules has two members, made of modules, with parameters alike. Leave recompute "
            f"out, or call torch.utils.checkpoint in the model."
        )
    match recompute:
        case "full":
            return blocks
        case "selective":
            return tuple(part for parts in cheap_parts(graph, blocks) for part in parts)
    every = int(recompute.removeprefix("every-"))
    among = _named_blocks(graph if whole is None else whole, whole)
    if every > len(among):
        raise StrategyError(
            f"Every {every}-th block of {(whole or graph).name} was to be run again in the backward pass "
            f"(recompute={recompute}). It has {len(among)} blocks. Write every-{len(among)} or a lower number, or full."
        )
    if whole is None:
        return blocks[every - 1 :: every]
    chosen = {name for name, _ in among[every - 1 :: every]}
    return tuple(segment for name, segment in _named_blocks(graph, whole) if name in chosen)


def cheap_parts(graph: Graph, blocks: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Of every block what is cheap to run again for its bytes."""
    facts = study(graph)
    nodes = [facts.by_node[node] for node in operators_of(graph)]
    return [tuple(_cheap_parts(nodes, block)) for block in blocks]


def block_segments(graph: Graph, whole: Graph | None = None) -> tuple[Segment, ...]:
    """The blocks of a model, or of a stage of it, in the order they run, each from its first operator to its last."""
    return tuple(segment for _, segment in _named_blocks(graph, whole))


def _named_blocks(graph: Graph, whole: Graph | None) -> list[tuple[str, Segment]]:
    """The same with the path of each."""
    lists = _repeated(graph if whole is None else whole)
    found: list[tuple[str, int, int]] = []
    for place, node in enumerate(operators_of(graph)):
        block = _block_of(_module_of(graph, node), lists)
        if block and found and found[-1][0] == block:
            found[-1] = (block, found[-1][1], place)
        elif block:
            found.append((block, place, place))
    return [(block, Segment(first, last)) for block, first, last in found if last > first]


def _module_of(graph: Graph, node: Node) -> str:
    """The path of the module that calls an operator; where no line of the user's is known, by a parameter it reads."""
    source = graph.source_of(node)
    if source is not None:
        return source.module
    leaves = (stored_leaf(value) for value in node.inputs) if node.op != CAST else ()
    return next((leaf.name for leaf in leaves if leaf is not None), "")


def _repeated(graph: Graph) -> frozenset[str]:
    """The lists of modules with two members whose parameters are alike, by their paths; none inside of another."""
    members: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        for path, number, rest in _splits(leaf.name):
            members.setdefault(path, {}).setdefault(number, []).append((rest, leaf.type.shape))
    alike = {path for path, found in members.items() if _has_twins(found.values())}
    return frozenset(path for path in alike if not any(path != above and _is_in(path, above) for above in alike))


def _has_twins(members: Iterable[list[tuple[str, tuple[int, ...]]]]) -> bool:
    """Whether two members made of modules have parameters of the same names and shapes."""
    composed = [tuple(sorted(found)) for found in members if any("." in name for name, _ in found)]
    return len(set(composed)) < len(composed)


def _splits(name: str) -> Iterator[tuple[str, str, str]]:
    """Every way to see a path as that of a list, a number in it, and the rest.

    >>> list(_splits("stages.0.1.weight"))
    [('stages', '0', '1.weight'), ('stages.0', '1', 'weight')]
    """
    words = name.split(".")
    for i, word in enumerate(words):
        if word.isdigit():
            yield ".".join(words[:i]), word, ".".join(words[i + 1 :])


def _is_in(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")


def _block_of(module: str, lists: frozenset[str]) -> str:
    """The member of one of the lists that a module is, or is part of."""
    return next((f"{path}.{number}" for path, number, _ in _splits(module) if path in lists), "")


def _cheap_parts(nodes: Sequence[NodeFacts], block: Segment) -> Iterator[Segment]:
    """A block without attention in one kernel and every other product with weights; apart from each other what lies
    before and after operators in which devices send each other more than layouts say."""
    apart = [place for place in range(block[0], block[1] + 1) if nodes[place].node.op in _AMONG_RANKS]
    kept, count = set[int](), 0
    for place in range(block[0], block[1] + 1):
        count += nodes[place].layer is not None
        if nodes[place].node.op == ATTENTION or (nodes[place].layer is not None and count % 2 == 1):
            kept.add(place)
    for before, after in pairwise([block[0] - 1, *apart, block[1] + 1]):
        inside = range(before + 1, after)
        if len(inside) > 1 and any(not nodes[p].is_view and p not in kept for p in inside):
            yield Segment(before + 1, after - 1, kept.intersection(inside))
