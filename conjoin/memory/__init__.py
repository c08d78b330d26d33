"""Which tensors of a step stay on the device, move to the host, or are made again."""

from conjoin.memory.baselines import least_recently_used, streaming
from conjoin.memory.placement import place
from conjoin.memory.program import Operation, Placement, Program, Step, WriteBack

__all__ = ["Operation", "Placement", "Program", "Step", "WriteBack", "least_recently_used", "place", "streaming"]
