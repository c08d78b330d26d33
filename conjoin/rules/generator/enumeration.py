"""Enumerate all graphs of up to so many operators and pair those of equal value (TASO, Algorithm 1, memory-lean).

The paper keeps every graph. Here every distinct *value* is kept once, with a smallest graph for it; operands of a new
operator are values. A graph over other than the smallest graphs of its operands is equal to one over the smallest by a
rule that was found before, so that nothing is lost but repetitions. Values of the last level are never operands: only
their fingerprints are kept, and of those only the ones that occur twice.

All is computed at two choices of sizes, and values are equal where they are at both. What is equal by chance at one of
them, or fits together there only, would be operands of everything that follows.

Two graphs with several outputs are equal output by output. Where each output's new graph needs no other inputs than
its old one, that is several rules of one output, found as such. Other inputs can only come from a part of a
concatenation: graphs with several outputs that are kept are the two parts of one split (`Found.splits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from conjoin.rules.generator.arithmetic import Array, Residues, evaluate
from conjoin.rules.generator.fingerprints import Hashes, draw_inputs, joined, of_values
from conjoin.rules.generator.shapes import Types, result_type
from conjoin.rules.generator.values import Ints, Nodes, Values, num_common, sharing_pairs
from conjoin.rules.generator.vocabulary import Typed, Vocabulary
from conjoin.rules.patterns import Parameter

_MOST_NUMBERS = 1 << 21
"""Elements evaluated together: 16 MiB for each operand."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Applications of one operator to values of the same types."""

    choice: int
    of: Types
    left: Ints
    right: Ints | None


@dataclass(frozen=True, slots=True)
class Found:
    """What an enumeration gives: values, and other graphs for some of them."""

    vocabulary: Vocabulary
    values: Values
    others: Nodes
    """Applications whose value has a smaller graph, or an earlier one of the same size."""
    other_of: Ints
    """Which value each of them has."""
    num_graphs: int
    """Applications evaluated."""
    commutes: frozenset[int]
    """Operators whose operands may change places."""

    def splits(self) -> Iterator[tuple[tuple[tuple[int, int], int], tuple[int, int]]]:
        """Values of which both parts have graphs of their own: ((choices of the splits, whole), parts)."""
        is_split = np.array([choice.op == "split" for choice in self.vocabulary.choices], bool)
        picked = np.flatnonzero(is_split[self.others.choice])
        parts: dict[tuple[int, Parameter], dict[Parameter, tuple[int, int]]] = {}
        columns = (self.others.choice[picked], self.others.left[picked], self.other_of[picked])
        for choice, whole, value in zip(*(column.tolist() for column in columns), strict=True):
            params = dict(self.vocabulary.choices[choice].params)
            parts.setdefault((whole, params["axis"]), {})[params["part"]] = (choice, value)
        for (whole, _), both in parts.items():
            if len(both) == 2 and self._covers(whole, both[0][1], both[1][1]):
                yield ((both[0][0], both[1][0]), whole), (both[0][1], both[1][1])

    def _covers(self, whole: int, first: int, second: int) -> bool:
        """Whether parts that differ use all inputs of the whole, which are the first ones of those alike."""
        mask = self.values.mask
        covered = mask[first] | mask[second]
        return first != second and covered == mask[whole] and bool(first_uses(self.vocabulary.inputs)[covered])


class Enumeration:
    """The state between levels."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.values = Values()
        self.others = Nodes.none()
        self.other_of: Ints = np.zeros(0, np.int32)
        self.num_graphs = 0
        self.commutes: frozenset[int] = frozenset()
        """Operators whose operands may change places, as seen on the first level."""
        self._type_ids: dict[Types, int] = {}
        self._params = [[choice.numbers(sizes) for choice in vocabulary.choices] for sizes in vocabulary.both_sizes]
        self._fits = cache(self._find_fits)
        self._add_inputs()
        self._is_first_use = first_uses(vocabulary.inputs)
        self._takes = [self._may_take(choice.op, choice.on_inputs) for choice in vocabulary.choices]

    def _type_id(self, of: Types) -> int:
        if of not in self._type_ids:
            self._type_ids[of] = len(self._type_ids)
            self.values.types.append(of)
            self.values.content.append([np.zeros((0, *each.stored), np.int32) for each in of])
        return self._type_ids[of]

    def _add_inputs(self) -> None:
        drawn = (draw_inputs(self.vocabulary, sizes) for sizes in self.vocabulary.both_sizes)
        for place, both in enumerate(zip(*drawn, strict=True)):
            ids = np.full(1, -1, np.int32)
            node = Nodes(_fingerprint(*zip(*both, strict=True)), np.full(1, -1, np.int16), ids, ids)
            of = self._type_id(tuple(each for each, _ in both))
            self.values.add(node, 0, np.full(1, of, np.int32), [(of, [content for _, content in both])])
            if place < len(self.vocabulary.inputs):
                self.values.mask[-1] = np.uint32(1 << place)

    def _may_take(self, op: str, on_inputs: bool) -> Array:
        """Whether an operator takes each input and constant, and last whether it takes any other value."""
        constants = [op in constant.uses for constant in self.vocabulary.constants]
        return np.array([*[True] * len(self.vocabulary.inputs), *constants, not on_inputs])

    def _taken(self, choice: int, ids: Ints) -> Array:
        takes = self._takes[choice]
        return takes[np.minimum(ids, len(takes) - 1)]

    # Which applications there are.

    def _find_fits(self, left: int, right: int) -> tuple[tuple[int, Types], ...]:
        """Operators that take values of these types (right -1: one operand), with the types they make."""
        operands = [self.values.types[i] for i in (left, right) if i >= 0]
        found = []
        for index, choice in enumerate(self.vocabulary.choices):
            if choice.num_args == len(operands):
                of = self._made_type(index, operands)
                if of is not None and int(np.prod(of[0].stored)) <= self.vocabulary.most_elements:
                    found.append((index, of))
        return tuple(found)

    def _made_type(self, choice: int, operands: list[Types]) -> Types | None:
        """What an operator makes at all choices of sizes; None where operands do not fit at one of them."""
        made = []
        for params, types in zip(self._params, zip(*operands, strict=True), strict=True):
            of = result_type(self.vocabulary.choices[choice].op, params[choice], types)
            if of is None:
                return None
            made.append(of)
        return tuple(made)

    def blocks(self, level: int, is_last: bool) -> Iterator[Block]:
        """All applications whose graphs have this many operators."""
        yield from self._unary(level, is_last)
        for one in range(level):
            for other in range(level):
                lefts, rights = (np.flatnonzero(self.values.level == n).astype(np.int32) for n in (one, other))
                common = one + other - (level - 1)
                if common == 0:
                    for pair in self._all_pairs(lefts, rights):
                        yield from self._binary(*pair, is_last)
                elif 0 < common <= min(one, other):
                    for pair in sharing_pairs(self.values, lefts, rights, common):
                        for same in self._by_types(*pair):
                            yield from self._binary(*same, is_last)

    def _unary(self, level: int, is_last: bool) -> Iterator[Block]:
        ids = np.flatnonzero(self.values.level == level - 1).astype(np.int32)
        if is_last:
            ids = ids[self._is_first_use[self.values.mask[ids]]]
        for of, same in _grouped(self.values.type[ids], ids):
            for choice, made in self._fits(of, -1):
                picked = same[self._taken(choice, same)]
                if len(picked):
                    yield Block(choice, made, picked, None)

    def _all_pairs(self, lefts: Ints, rights: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Pairs of values whose graphs share nothing, of types that some operator takes, type by type."""
        by_type = list(_grouped(self.values.type[rights], rights))
        for one, firsts in _grouped(self.values.type[lefts], lefts):
            for other, seconds in by_type:
                if self._fits(one, other):
                    rows = max((1 << 20) // len(seconds), 1)
                    for start in range(0, len(firsts), rows):
                        some = firsts[start : start + rows]
                        pair = np.repeat(some, len(seconds)), np.tile(seconds, len(some))
                        apart = num_common(*(self.values.graph[ids] for ids in pair)) == 0
                        yield pair[0][apart], pair[1][apart]

    def _by_types(self, lefts: Ints, rights: Ints) -> Iterator[tuple[Ints, Ints]]:
        keys = self.values.type[lefts].astype(np.int64) << 32 | self.values.type[rights]
        for key, places in _grouped(keys, np.arange(len(keys))):
            if self._fits(key >> 32, key & 0xFFFFFFFF):
                yield lefts[places], rights[places]

    def _binary(self, lefts: Ints, rights: Ints, is_last: bool) -> Iterator[Block]:
        if is_last:
            first = self._is_first_use[self.values.mask[lefts] | self.values.mask[rights]]
            lefts, rights = lefts[first], rights[first]
        if not len(lefts):
            return
        ordered = lefts <= rights
        for choice, made in self._fits(int(self.values.type[lefts[0]]), int(self.values.type[rights[0]])):
            picked = self._taken(choice, lefts) & self._taken(choice, rights)
            if choice in self.commutes:
                picked &= ordered
            if picked.any():
                yield Block(choice, made, lefts[picked], rights[picked])

    # Evaluating them.

    def _content(self, block: Block) -> list[Array]:
        """The values of a block at each choice of sizes."""
        sides = [block.left] if block.right is None else [block.left, block.right]
        ids = [int(self.values.type[side[0]]) for side in sides]
        op, made = self.vocabulary.choices[block.choice].op, []
        for at, params in enumerate(self._params):
            known = [self.values.content[of][at] for of in ids]
            args = [content[self.values.row[side]].astype(np.int64) for content, side in zip(known, sides, strict=True)]
            types = [self.values.types[of][at] for of in ids]
            made.append(evaluate(Residues(), op, params[block.choice], types, args))
        return made

    def fingerprint(self, block: Block) -> Nodes:
        """The applications of a block with their fingerprints."""
        rows = max(_MOST_NUMBERS // max(*(int(np.prod(of.stored)) for of in block.of), 16), 1)
        hashes = [np.zeros(0, np.uint64)]
        for start in range(0, len(block.left), rows):
            some = slice(start, start + rows)
            part = replace(block, left=block.left[some], right=None if block.right is None else block.right[some])
            hashes.append(_fingerprint(block.of, self._content(part)))
        right = np.full_like(block.left, -1) if block.right is None else block.right
        return Nodes(np.concatenate(hashes), np.full(len(right), block.choice, np.int16), block.left, right)

    def build(self, level: int) -> None:
        """Find all values of a level that is not the last; what is made of constants alone is not kept."""
        made = Nodes.joined([self.fingerprint(block) for block in self.blocks(level, False)])
        self.num_graphs += len(made)
        if level == 1:
            self.commutes = self._commuting(made)
        _, first = np.unique(made.hashes, return_index=True)
        first = np.sort(first[~np.isin(made.hashes[first], self.values.nodes.hashes)])
        is_new = np.zeros(len(made), bool)
        is_new[first] = True
        on_inputs = self.values.masks(made) > 0
        self.store(made[first[on_inputs[first]]], level)
        known = np.isin(made.hashes, self.values.nodes.hashes)
        self.note_others(made[~is_new & known])

    def store(self, new: Nodes, level: int) -> None:
        """Evaluate new values once more, to keep them."""
        types = self._types_of(new)
        contents = []
        for of, places in _grouped(types, np.arange(len(new))):
            content = [np.zeros((len(places), *each.stored), np.int32) for each in self.values.types[of]]
            for _, inner in _grouped(self._source_keys(new[places]), np.arange(len(places))):
                some = new[places[inner]]
                right = None if some.right[0] < 0 else some.right
                made = self._content(Block(int(some.choice[0]), self.values.types[of], some.left, right))
                for kept, each in zip(content, made, strict=True):
                    kept[inner] = each
            contents.append((of, content))
        start = len(self.values)
        self.values.add(new, level, types, contents)
        self._share_splits(new, start)

    def _source_keys(self, nodes: Nodes) -> Array:
        """The same for applications of one operator to values of the same types."""
        left = self.values.type[nodes.left].astype(np.int64)
        right = np.where(nodes.right >= 0, self.values.type[nodes.right], -1).astype(np.int64) + 1
        return (nodes.choice.astype(np.int64) << 48) | (left << 24) | right

    def _types_of(self, nodes: Nodes) -> Ints:
        found = np.zeros(len(nodes), np.int32)
        for key, places in _grouped(self._source_keys(nodes), np.arange(len(nodes))):
            fits = dict(self._fits(key >> 24 & 0xFFFFFF, (key & 0xFFFFFF) - 1))
            found[places] = self._type_id(fits[key >> 48])
        return found

    def _share_splits(self, new: Nodes, start: int) -> None:
        """Both parts of a split are made by one operator."""
        firsts: dict[tuple[int, object], int] = {}
        pairs = []
        is_split = np.array([choice.op == "split" for choice in self.vocabulary.choices], bool)
        for place in np.flatnonzero(is_split[new.choice]).tolist():
            axis = dict(self.vocabulary.choices[new.choice[place]].params)["axis"]
            first = firsts.setdefault((int(new.left[place]), axis), start + place)
            if first != start + place:
                pairs.append((start + place, first))
        if pairs:
            ids, names = np.array(pairs, np.int32).T
            self.values.share(ids, names)

    def _commuting(self, made: Nodes) -> frozenset[int]:
        """Operators for which changing the operands' places never changed the value."""
        found = set()
        for choice in np.unique(made.choice).tolist():
            some = made[(made.choice == choice) & (made.left != made.right)]
            operands = zip(some.left.tolist(), some.right.tolist(), strict=True)
            seen = dict(zip(operands, some.hashes.tolist(), strict=True))
            if seen and all(seen.get((b, a)) == value for (a, b), value in seen.items()):
                found.add(choice)
        return frozenset(found)

    def note_others(self, nodes: Nodes) -> None:
        """Remember applications whose value is known."""
        order = np.argsort(self.values.nodes.hashes)
        place = np.searchsorted(self.values.nodes.hashes[order], nodes.hashes)
        self.others = Nodes.joined([self.others, nodes])
        self.other_of = np.concatenate((self.other_of, order[place].astype(np.int32)))

    def pair_last(self, made: Nodes, level: int) -> None:
        """Of the last level keep what has the value of another graph."""
        self.num_graphs += len(made)
        known = np.isin(made.hashes, self.values.nodes.hashes)
        unknown = np.flatnonzero(~known)
        hashes, first, counts = np.unique(made.hashes[unknown], return_index=True, return_counts=True)
        picked = np.sort(unknown[first[counts > 1]])
        rest = known.copy()
        rest[unknown] = np.isin(made.hashes[unknown], hashes[counts > 1])
        rest[picked] = False
        new = made[picked]
        self.values.append(new, level, np.full(len(new), -1, np.int32), np.full(len(new), -1, np.int32))
        self.note_others(made[rest])

    def found(self) -> Found:
        return Found(self.vocabulary, self.values, self.others, self.other_of, self.num_graphs, self.commutes)


def _fingerprint(types: Types, contents: Sequence[Array]) -> Hashes:
    return joined(of_values(content, of) for content, of in zip(contents, types, strict=True))


def _grouped(keys: Array, items: Array) -> Iterator[tuple[int, Array]]:
    """Items by key."""
    if not len(keys):
        return
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    for part in np.split(order, ends):
        yield int(keys[part[0]]), items[part]


@cache
def first_uses(inputs: tuple[Typed, ...]) -> Array:
    """For every set of inputs, whether of those alike it has the first ones: other sets are the same but for names."""
    alike = [
        [i for i, other in enumerate(inputs) if other.is_like(one)]
        for place, one in enumerate(inputs)
        if not any(one.is_like(before) for before in inputs[:place])
    ]
    sets = np.arange(1 << len(inputs))
    found = np.ones(len(sets), bool)
    for group in alike:
        for earlier, later in pairwise(group):
            found &= ((sets >> later) & 1) <= ((sets >> earlier) & 1)
    return found
