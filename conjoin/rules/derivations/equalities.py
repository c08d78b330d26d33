"""Expressions that were found equal, in classes, with the steps by which they were: an e-graph that explains itself.

Two expressions are in one class when a rule says so (`merge`) or when they apply one operator to operands of the same
classes. Every expression keeps a link to another one of its class, and links form trees: the path between two of them
is why they are equal (`explain`). A link between applications of one operator is explained by their operands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from conjoin.rules.derivations.worlds import Key, Known
from conjoin.rules.patterns import Apply, Expr


@dataclass(frozen=True, slots=True)
class Reason:
    """Why two expressions are equal: a rule, or (without one) their operands."""

    rule: str | None = None
    backwards: bool = False

    @property
    def reversed(self) -> Reason:
        return replace(self, backwards=not self.backwards)


@dataclass(frozen=True, slots=True)
class Change:
    """An expression that became another one by a rule."""

    reason: Reason
    result: Expr


@dataclass(frozen=True, slots=True)
class Node:
    """An application: what it applies, and the numbers of its operands."""

    key: Key
    args: tuple[int, ...]


class Equalities:
    """All expressions met so far. Each has a number; so has each class, that of one of its expressions."""

    def __init__(self) -> None:
        self.known: list[Known] = []
        self.nodes: list[Node | None] = []
        self.sizes: list[int] = []
        self.number_of: dict[Expr, int] = {}
        self._parent: list[int] = []
        self._link: list[tuple[int, Reason] | None] = []
        self._smallest: dict[int, int] = {}
        self._users: dict[int, list[int]] = defaultdict(list)
        self._members: dict[int, list[int]] = {}
        self._at: dict[Node, int] = {}
        self._pending: list[tuple[int, int, Reason]] = []

    def __len__(self) -> int:
        return len(self.known)

    def find(self, number: int) -> int:
        """The class of an expression."""
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def smallest(self, number: int) -> int:
        """The smallest expression of a class."""
        return self._smallest[self.find(number)]

    def at(self, key: Key, args: tuple[int, ...]) -> int | None:
        """An application to operands of these classes that is known already."""
        return self._at.get(Node(key, tuple(map(self.find, args))))

    def classes(self) -> dict[int, list[Node]]:
        """The distinct applications of every class, their operands as classes."""
        found: dict[int, dict[Node, None]] = {}
        for number, node in enumerate(self.nodes):
            nodes = found.setdefault(self.find(number), {})
            if node is not None:
                nodes[self._canonical(node)] = None
        return {number: list(nodes) for number, nodes in found.items()}

    def add(self, known: Known, node: Node | None = None) -> int:
        """The number of an expression; a new one joins what applies the same to operands of the same classes."""
        number = self.number_of.get(known.expr)
        if number is not None:
            return number
        number = len(self.known)
        self.number_of[known.expr] = number
        self.known.append(known)
        self.nodes.append(node)
        self.sizes.append(1 + sum(self.sizes[arg] for arg in node.args) if node else 0)
        self._parent.append(number)
        self._link.append(None)
        self._smallest[number], self._members[number] = number, [number]
        if node is not None:
            for arg in node.args:
                self._users[self.find(arg)].append(number)
            same = self._at.setdefault(self._canonical(node), number)
            if same != number:
                self._pending.append((number, same, Reason()))
                self._settle()
        return number

    def merge(self, one: int, other: int, reason: Reason) -> bool:
        """Two expressions are equal by a rule; whether that is news."""
        if self.find(one) == self.find(other):
            return False
        self._pending.append((one, other, reason))
        self._settle()
        return True

    def _settle(self) -> None:
        while self._pending:
            one, other, reason = self._pending.pop()
            small, large = self.find(one), self.find(other)
            if small == large:
                continue
            if len(self._members[small]) > len(self._members[large]):
                one, other, small, large, reason = other, one, large, small, reason.reversed
            self._hang(one, other, reason)
            self._parent[small] = large
            self._members[large] += self._members.pop(small)
            self._smallest[large] = min(self._smallest[large], self._smallest.pop(small), key=self.sizes.__getitem__)
            users = self._users.pop(small, [])
            self._users[large] += users
            for user in users:
                node = self.nodes[user]
                assert node is not None
                same = self._at.setdefault(self._canonical(node), user)
                if self.find(same) != self.find(user):
                    self._pending.append((user, same, Reason()))

    def _canonical(self, node: Node) -> Node:
        return Node(node.key, tuple(map(self.find, node.args)))

    def _hang(self, one: int, other: int, reason: Reason) -> None:
        """Make the first the root of its tree, and hang it below the other."""
        current, link = one, (other, reason)
        while True:
            above = self._link[current]
            self._link[current] = link
            if above is None:
                return
            link = (current, above[1].reversed)
            current = above[0]

    def explain(self, one: int, other: int) -> Iterator[Change]:
        """The rewrites that make one expression of a class another."""
        for number, next_one, reason in self._path(one, other):
            if reason.rule is not None:
                yield Change(reason, self.known[next_one].expr)
            else:
                yield from self._explain_operands(number, next_one)

    def _path(self, one: int, other: int) -> list[tuple[int, int, Reason]]:
        above = self._above(other)
        place = {number: i for i, number in enumerate(above)}
        up: list[tuple[int, int, Reason]] = []
        while one not in place:
            link = self._link[one]
            assert link is not None
            up.append((one, link[0], link[1]))
            one = link[0]
        down: list[tuple[int, int, Reason]] = []
        for number in above[: place[one]]:
            link = self._link[number]
            assert link is not None
            down.append((link[0], number, link[1].reversed))
        return up + down[::-1]

    def _above(self, number: int) -> list[int]:
        found = [number]
        while (link := self._link[found[-1]]) is not None:
            found.append(link[0])
        return found

    def _explain_operands(self, one: int, other: int) -> Iterator[Change]:
        """One operand after the other."""
        before, after = self.nodes[one], self.nodes[other]
        target = self.known[other].expr
        assert before is not None and after is not None and isinstance(target, Apply)
        args = [self.known[arg].expr for arg in before.args]
        for i, (old, new) in enumerate(zip(before.args, after.args, strict=True)):
            for change in self.explain(old, new):
                args[i] = change.result
                yield Change(change.reason, replace(target, args=tuple(args)))
