"""What a rank is given arrives there as it was, also what only the launcher has: parts of scripts and functions."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from conjoin.errors import UsageError
from conjoin.machine import Machine, Mesh
from conjoin.ops import Call, TensorType
from conjoin.rules.patterns import Apply, Input
from conjoin.runtime import launch
from conjoin.runtime.ranks.parcels import pack, unpack
from tests.ir.wording import assert_three_sentences

SCRIPT = '''
import dataclasses, functools, math, sys
from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar
import torch
from torch import nn

SCALE = 3.0
T = TypeVar("T")

class Net(nn.Module):
    """A model of a script."""
    width = 4
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, Net.width)
        self.tied = self.up.weight
    @property
    def doubled(self): return 2 * self.width
    @classmethod
    def named(cls): return cls.__name__
    @staticmethod
    def shift(x): return x + SCALE
    def forward(self, x): return self.shift(self.up(x)).sum()

class Wide(Net):
    def forward(self, x): return 2 * super().forward(x)

@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)
    def norm(self): return math.hypot(self.x, len(self.y))

@dataclasses.dataclass
class Box(Generic[T]):
    held: T
    size: int = 3

class Shape(ABC):
    @abstractmethod
    def area(self): ...

class Square(Shape):
    def area(self): return 9

class Pair(NamedTuple):
    a: int
    b: int = 7

def factorial(n): return 1 if n < 2 else n * factorial(n - 1)

def counter():
    count = 0
    def more(by=1, *, times=1):
        nonlocal count
        count += by * times
        return count
    def now(): return count
    def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
    return more, now, deep

def decorated(function):
    @functools.wraps(function)
    def call(*args): return function(*args) + 1
    return call

@decorated
def plain(x): return x

more, now, deep = counter()
model = Wide()
base = torch.arange(6.0)

def program(x):
    point = Point(3, [1, 2, 3, 4])
    box = Box("held")
    assert dataclasses.replace(point, x=0) == Point(0, [1, 2, 3, 4])
    assert [field.name for field in dataclasses.fields(Box)] == ["held", "size"]
    try: Shape()
    except TypeError: pass
    else: raise AssertionError
    more(2, times=3)
    base[0] = 10.0
    return {
        "model": model(torch.ones(2)).item(), "tied": model.tied is model.up.weight, "doubled": model.doubled,
        "named": Wide.named(), "norm": point.norm(), "box": box.size, "area": Square().area(), "pair": Pair(1).b,
        "factorial": factorial(5), "now": now(), "deep": deep(4), "plain": plain(x), "lambda": (lambda y: y * SCALE)(x),
        "shared": views[0][0].item(), "doc": Net.__doc__, "generic": Box[int](1).held,
        "builtins": "__builtins__" in globals(),
    }

views = (base[:3], base)
'''


@pytest.mark.parametrize("name", ["__main__", "typed_in"])
def test_a_script_arrives_at_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(SCRIPT, vars(module))
    program, point, model, views = (vars(module)[name] for name in ("program", "Point", "model", "views"))

    def run(rank: int, model: Any, views: Any, kinds: Any) -> Any:
        assert kinds == (type(None), int) and views[0].untyped_storage()._cdata == views[1].untyped_storage()._cdata
        return program(5), model.width, point(rank), pickle.loads(pickle.dumps(model)).doubled

    found, width, returned, doubled = launch(1, run, model, views, (type(None), int))[0]
    assert returned == point(0) and (width, doubled) == (4, 8)
    assert found.pop("model") == pytest.approx(model(torch.ones(2)).item())
    assert found == {
        "tied": True, "doubled": 8, "named": "Wide", "norm": 5.0, "box": 3, "area": 9, "pair": 7, "factorial": 120,
        "now": 6, "deep": 4, "plain": 6, "lambda": 15.0, "shared": 10.0, "doc": "A model of a script.", "generic": 1,
        "builtins": True,
    }  # fmt: skip
    assert views[0][0] == 0 and vars(module)["now"]() == 0, "the ranks have copies"


def test_what_can_be_imported_goes_by_name() -> None:
    sent = (test_what_can_be_imported_goes_by_name, nn.Linear, torch.relu, sys)
    assert unpack("it", pack("it", sent)) == sent


@pytest.mark.parametrize(
    "value",
    [
        Machine("two", 1, 2, "cpu"),
        Mesh.of_nodes(1, 2),
        Call("relu", (TensorType((2,), torch.float32),)),
        Apply("relu", (), (Input("x"),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hashes_are_found_anew_where_a_value_arrives(value: Any) -> None:
    """Those of text are other ones in every process."""
    right = hash(value)
    object.__setattr__(value, "_hash", right + 1)
    arrived = unpack("It", pack("It", value))
    assert hash(value) != right and arrived == value and hash(arrived) == right


def test_a_function_in_a_function_has_the_globals_of_its_module() -> None:
    found = unpack("it", pack("it", lambda: SCRIPT))
    assert found() is SCRIPT and found.__globals__ is globals()


def test_what_is_tied_to_this_process_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(UsageError, match=r"^The program cannot be sent") as told:
        pack("The program", lambda: file)
    assert_three_sentences(told.value)


def test_what_the_other_process_lacks_is_refused() -> None:
    sent = pack("The program", nn.Linear).replace(b"Linear", b"Lenear")
    with pytest.raises(UsageError, match=r"(?s)^The program did not arrive.*Lenear") as told:
        unpack("The program", sent)
    assert_three_sentences(told.value)
