"""What the tests of this room share: the comparison of a captured model with the plain one."""

from tests.frontends.conftest import _seed, compare, unequal

__all__ = ["_seed", "compare", "unequal"]
