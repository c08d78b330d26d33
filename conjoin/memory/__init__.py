"""Which tensors of a step stay on the device, move to the host, or are made again."""

from conjoin.memory.baselines import least_recently_used, streaming
from conjoin.memory.chain import Choice, Link, Option, find_choice
from conjoin.memory.program import Operation, Program, Residence, Step, WriteBack
from conjoin.memory.residence import find_residence

__all__ = [
    "Choice",
    "Link",
    "Operation",
    "Option",
    "Program",
    "Residence",
    "Step",
    "WriteBack",
    "find_choice",
    "find_residence",
    "least_recently_used",
    "streaming",
]
