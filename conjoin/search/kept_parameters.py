"""Parameters that stay gathered from the forward pass to the backward pass, though others are dropped and come again.

The backward pass begins with the last blocks. What they read would be dropped and gathered again at once, so it stays
where there is memory for it (`keep=2`: the last two blocks and what comes after them; FSDP2 has
`reshard_after_forward=False` for that). Or that of every n-th block stays, so that a gather less comes between two
(`keep=every-2`). A step is the same to the last bit; it sends fewer bytes, and holds more.
"""

from __future__ import annotations

from conjoin.errors import StrategyError
from conjoin.ir import REGATHER, Graph, Leaf, LeafKind, MemoryAction, Value, operators_of
from conjoin.search.blocks import block_segments


def without_kept(memory: tuple[MemoryAction, ...], keep: str, graph: Graph) -> tuple[MemoryAction, ...]:
    """What is done about memory, less gathering again what is to stay."""
    if not keep:
        return memory
    if not any(action.action == REGATHER for action in memory):
        raise StrategyError(
            f"Parameters of {graph.name} were to stay gathered between the passes (keep={keep}). By this strategy none "
            f"of them is gathered again for the backward pass. Leave keep out, or ask for fsdp or hsdp."
        )
    kept = kept_gathered(keep, graph)
    return tuple(action for action in memory if action.action != REGATHER or action.tensor not in kept)


def kept_gathered(keep: str, graph: Graph) -> frozenset[str]:
    """The names of the parameters that stay: of the last so many blocks and what follows, or of every n-th block."""
    blocks = block_segments(graph)
    wanted = int(keep.removeprefix("every-"))
    if wanted > len(blocks):
        raise StrategyError(
            f"Parameters of {graph.name} were to stay gathered between the passes (keep={keep}). It has {len(blocks)} "
            f"blocks: members of a list of modules of which two have parameters alike. "
            f"{f'Write keep={len(blocks)} or a lower number' if blocks else 'Leave keep out'}, or take zero1, which "
            f"keeps all."
        )
    places = {leaf: _places(graph, leaf) for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    if keep.startswith("every-"):
        inside = [range(block[0], block[1] + 1) for block in blocks[wanted - 1 :: wanted]]
        return frozenset(leaf.name for leaf, found in places.items() if any(found and found[0] in b for b in inside))
    start = blocks[-wanted][0]
    return frozenset(leaf.name for leaf, found in places.items() if found and found[0] >= start)


def _places(graph: Graph, leaf: Leaf) -> list[int]:
    """Where a parameter is read, by the places of operators, the first one first."""
    numbers = {node: place for place, node in enumerate(operators_of(graph))}
    return sorted(numbers[node] for node in graph.users.get(Value(leaf), ()) if node in numbers)
