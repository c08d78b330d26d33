"""What fits: the largest batch of a model on a machine, and the smallest machine for a batch.

Memory grows with the batch nearly in a line. Two batches give the line, and where it meets what a device has the
answer is looked for; what is told was planned and simulated, and so was the next larger batch, which does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Graph, Pipeline, Plan
from conjoin.machine import Machine, parts_of
from conjoin.search.baselines import least_bytes
from conjoin.search.contest import NOT_TRIED
from conjoin.search.groups import products
from conjoin.search.named_pipelines import make_pipeline, usual_micro_batches
from conjoin.search.named_plans import make_plan
from conjoin.search.strategies import PIPELINE, read_request
from conjoin.sim import OPTIMIZER_COPIES, PipelinePrediction, Prediction, predict, predict_pipeline

RECOMPUTE = ("none", "selective", "full")
MICRO = (1, 2, 4, 8, 16, 32)
"""Micro-batches that are tried for a given batch."""
_MAX_BATCH = 1 << 20
_MAX_NODES = 256
_HELPS = 0.98
"""Of the memory before is what twice as many micro-batches must come to, or more of them are not tried."""
_MOST_STAGES = 16
"""Devices up to which a stage on each is tried."""
_PLAIN = ("data-parallel", "zero1", "fsdp")


@dataclass(frozen=True, slots=True)
class Fit:
    """A way to train, and what it comes to."""

    machine: Machine
    strategy: str
    """As `plan --strategy` takes it."""
    recompute: str
    micro: int
    batch: int
    """Samples of a step; 0 where none fits."""
    prediction: Prediction | PipelinePrediction | None
    """Of that batch; where none fits, of the smallest that could be planned."""
    beyond: tuple[int, int] | None = None
    """The next larger batch, and the bytes that it would take."""
    reason: str = ""
    """Why nothing was planned."""

    @property
    def fits(self) -> bool:
        return self.batch > 0

    @property
    def samples_per_second(self) -> float:
        found = self.prediction
        return self.batch / found.seconds if self.fits and found is not None and found.seconds else 0.0


@dataclass
class FitQuestion:
    """A model in any batch, the prices and the optimizer; graphs of a batch are captured once."""

    capture: Callable[[int, Graph | None], Graph]
    """The graph of so many samples; another graph of the model, where there is one, may be taken over."""
    costs: CostModel
    optimizer: str = "adam"
    progress: Callable[[str], None] | None = None
    _graphs: dict[int, Graph] = field(default_factory=dict)

    def graph(self, batch: int) -> Graph:
        """The captured model."""
        if batch not in self._graphs:
            self.tell(f"capturing a batch of {batch}")
            self._graphs[batch] = self.capture(batch, next(reversed(self._graphs.values()), None))
        return self._graphs[batch]

    def tell(self, doing: str) -> None:
        if self.progress is not None:
            self.progress(doing)

    def predict(
        self, machine: Machine, strategy: str, batch: int
    ) -> tuple[Plan, Prediction] | tuple[Pipeline, PipelinePrediction]:
        """A step of a batch by a strategy."""
        graph = self.graph(batch)
        self.tell(f"{strategy}, a batch of {batch} on {machine.num_devices} devices")
        if _is_pipeline(strategy):
            made = make_pipeline(graph, machine, strategy, self.costs)
            return made, predict_pipeline(made, machine, self.costs, self.optimizer)
        plan = make_plan(graph, machine, strategy)
        return plan, predict(plan, machine, self.costs, self.optimizer)


def usual_strategies(machine: Machine) -> tuple[str, ...]:
    """What is tried where nobody says which: all that split the batch alone."""
    return ("single",) if machine.num_devices == 1 else _PLAIN


def layers_split(machine: Machine) -> tuple[str, ...]:
    """What is tried where these do not fit: layers split inside nodes, the rest of the devices as fsdp."""
    inside = [axis.size for axis in machine.mesh.axes if not axis.between_nodes]
    return tuple(f"megatron:tp={degree},sp,fsdp" for degree in products(inside)[1:])


def in_stages(machine: Machine) -> tuple[str, ...]:
    """What is tried where these do not fit either: a stage on every node, its layers split; one on every device."""
    inside, nodes = machine.devices_per_node, machine.num_nodes
    by_node = (f"pipeline:pp={nodes},tp={inside}",) if nodes > 1 and inside > 1 else ()
    return (*by_node, f"pipeline:pp={machine.num_devices}") if machine.num_devices <= _MOST_STAGES else by_node


def _is_pipeline(strategy: str) -> bool:
    return read_request(strategy).name == PIPELINE


def largest_batches(question: FitQuestion, machine: Machine, strategies: Sequence[str] = ()) -> list[Fit]:
    """For each strategy and each way to run blocks again the largest batch; the highest throughput first.

    The best of them is told once more with micro-batches: as many as one likes, each of so many samples. Ctrl-C ends
    the search: what was found until then is told.
    """
    found: list[Fit] = []
    others = () if strategies or machine.num_devices == 1 else (layers_split(machine), in_stages(machine))
    try:
        for names in (strategies or usual_strategies(machine), *others):
            for name in names if not any(fit.fits for fit in found) else ():
                found.extend(_each_mode(question, machine, name))
        more = _in_micro_batches(question, machine, found)
    except KeyboardInterrupt:
        if not found:
            raise
        more = [Fit(machine, "other ways", "", 1, 0, None, reason=NOT_TRIED)]
    return [*sorted(found, key=lambda fit: -fit.samples_per_second), *more]


def _in_micro_batches(question: FitQuestion, machine: Machine, found: Sequence[Fit]) -> list[Fit]:
    best = max(found, key=lambda fit: fit.samples_per_second)
    if not best.fits or best.micro > 1:
        return []
    more = _largest(question, machine, best.strategy, "", micro=2)
    return [replace(more, recompute=best.recompute)] if more.fits else []


def _each_mode(question: FitQuestion, machine: Machine, name: str) -> Iterator[Fit]:
    """Without running anything again, then with more and more of it, as far as the model has blocks."""
    modes = RECOMPUTE if not read_request(name).recompute else ("",)
    for mode in modes:
        fit = _largest(question, machine, name, mode, micro=1)
        yield fit
        if not fit.fits and fit.prediction is None:
            return  # parameters alone are too many, or the strategy is none for this model


def _largest(question: FitQuestion, machine: Machine, name: str, mode: str, micro: int) -> Fit:
    """The largest batch by one strategy, or why there is none."""
    request = read_request(name)
    if _is_pipeline(name) and not request.asks_micro:
        micro = usual_micro_batches(machine, request)
    strategy = _written(name, mode, 1 if request.asks_micro else micro)
    micro = request.micro if request.asks_micro else micro
    first = machine.num_devices * micro
    least = least_bytes(name, question.graph(first), machine.mesh, OPTIMIZER_COPIES[question.optimizer])
    if least > machine.usable_bytes:
        why = f"parameters, gradients and optimizer take {least / 2**30:.1f} GiB of {machine.usable_bytes / 2**30:.1f}"
        return Fit(machine, strategy, mode, micro, 0, None, reason=why)
    try:
        return _Looking(question, machine, strategy, micro, first).run(mode)
    except StrategyError as error:
        return Fit(machine, strategy, mode, micro, 0, None, reason=str(error))


def _written(name: str, mode: str, micro: int) -> str:
    return f"{name}{f'+recompute={mode}' if mode and mode != 'none' else ''}{f'+micro={micro}' if micro > 1 else ''}"


@dataclass
class _Looking:
    """The largest batch of one strategy, looked for between one that fits and one that does not."""

    question: FitQuestion
    machine: Machine
    strategy: str
    micro: int
    first: int
    known: dict[int, Prediction | PipelinePrediction] = field(default_factory=dict)
    unit: int = 1
    """By how many samples a batch grows: one for each part that it is cut into."""

    def run(self, mode: str) -> Fit:
        """The answer, confirmed from both sides."""
        plan, self.known[self.first] = self.question.predict(self.machine, self.strategy, self.first)
        self.unit = self.micro * _parts_of_batch(plan, self.machine)
        fit = self._fits(self.first)
        while not fit and self.first > self.unit:  # layers are split too, and fewer samples than devices may do
            self.first = max(self.unit, self.first // 2 // self.unit * self.unit)
            fit = self._fits(self.first)
        if not fit:
            return Fit(self.machine, self.strategy, mode, self.micro, 0, self.known[self.first])
        low, high = self._bracket()
        if high is None:
            return Fit(self.machine, self.strategy, mode, self.micro, low, self.known[low])
        while high - low > self.unit:
            middle = min(max(self._guess(low, high), low + self.unit), high - self.unit)
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        beyond = high, self.known[high].memory.peak
        return Fit(self.machine, self.strategy, mode, self.micro, low, self.known[low], beyond)

    def _bracket(self) -> tuple[int, int | None]:
        """A batch that fits and a larger one that does not; None where none was found as far as we look."""
        low, high = self.first, self.first + self.unit
        while self._fits(high):
            low, high = high, self._guess(low, high) + self.unit
            if high <= low:
                high = 2 * low
            if low > _MAX_BATCH:
                return low, None
        return low, high

    def _guess(self, low: int, high: int) -> int:
        """Where the line through two batches meets what a device has, as a whole number of units."""
        one, other = (self.known[batch].memory.peak for batch in (low, high))
        slope = (other - one) / (high - low)
        if slope <= 0:
            return 2 * high
        met = low + (self.machine.usable_bytes - one) / slope
        return int(min(met, _MAX_BATCH)) // self.unit * self.unit

    def _fits(self, batch: int) -> bool:
        if batch not in self.known:
            self.known[batch] = self.question.predict(self.machine, self.strategy, batch)[1]
        return self.known[batch].fits


def _parts_of_batch(plan: Plan | Pipeline, machine: Machine) -> int:
    """Into how many parts a strategy cuts a batch, over devices."""
    degrees = read_request(plan.strategy).degrees
    if isinstance(plan, Pipeline):
        return max(len(stage.ranks) for stage in plan.stages) // degrees.get("tp", 1)
    cut = [degrees[key] for key in ("dp", "shard", "replicate") if key in degrees]
    return prod(cut) if cut or machine.num_devices == 1 else machine.num_devices


def least_machines(question: FitQuestion, machine: Machine, batch: int, strategies: Sequence[str] = ()) -> list[Fit]:
    """For sizes of a machine, the smallest first, the fastest way to train a batch; up to the first that fits, and to
    the machine itself.

    Where a size does not fit, the way that comes nearest is told. Ctrl-C ends with the sizes that were tried.
    """
    found: list[Fit] = []
    for part in _sizes(machine):
        if any(fit.fits for fit in found) and part.num_devices > machine.num_devices:
            break
        try:
            if part.num_devices > 1 or not strategies or "single" in strategies:
                found.append(_best_way(question, part, batch, strategies))
        except KeyboardInterrupt:
            if not found:
                raise
            return [*found, Fit(part, "", "", 1, 0, None, reason=NOT_TRIED)]
    return found


def _sizes(machine: Machine) -> Iterator[Machine]:
    """Parts of a machine, the smallest first, then more nodes than it has, where its description allows it."""
    yield from sorted(parts_of(machine), key=lambda part: part.num_devices)
    nodes = 2 * machine.num_nodes
    while nodes <= _MAX_NODES:
        try:
            yield machine.with_nodes(nodes)
        except UsageError:
            return
        nodes *= 2


def _best_way(question: FitQuestion, machine: Machine, batch: int, strategies: Sequence[str]) -> Fit:
    names = tuple(name for name in strategies if name != "single" or machine.num_devices == 1)
    given = names or usual_strategies(machine)
    best = _fastest(question, machine, batch, given)
    if best.fits or names or machine.num_devices == 1:
        return best
    for others in (layers_split(machine), in_stages(machine)):
        found = _fastest(question, machine, batch, others) if others and not best.fits else best
        best = found if found.fits or _peak(found) < _peak(best) else best
    return best


def _peak(fit: Fit) -> float:
    return inf if fit.prediction is None else fit.prediction.memory.peak


def _fastest(question: FitQuestion, machine: Machine, batch: int, names: Sequence[str]) -> Fit:
    """The fastest way that fits, each with as few micro-batches as it must have; else the one that takes the least."""
    tried = [_fewest_parts(question, machine, batch, name, mode) for name in names for mode in RECOMPUTE]
    best = max(tried, key=lambda fit: fit.samples_per_second)
    return best if best.fits else min(tried, key=_peak)


def _fewest_parts(question: FitQuestion, machine: Machine, batch: int, name: str, mode: str) -> Fit:
    """A way with as few micro-batches as fit; where more of them do not help any more, with what they come to."""
    found = _as_given(question, machine, batch, (name, mode, 1))
    for micro in MICRO[1:] if not _is_pipeline(name) else ():  # which has as many as it can anyway
        if found.fits or batch % micro:
            break
        fewer, found = found, _as_given(question, machine, batch, (name, mode, micro))
        if not found.fits and _peak(found) > _HELPS * _peak(fewer):
            return min(fewer, found, key=_peak)
    return found


def _as_given(question: FitQuestion, machine: Machine, batch: int, way: tuple[str, str, int]) -> Fit:
    name, mode, micro = way
    strategy = _written(name, mode, micro)
    least = least_bytes(name, question.graph(batch), machine.mesh, OPTIMIZER_COPIES[question.optimizer])
    if least > machine.usable_bytes:
        why = f"parameters, gradients and optimizer take {least / 2**30:.1f} GiB of {machine.usable_bytes / 2**30:.1f}"
        return Fit(machine, strategy, mode, micro, 0, None, reason=why)
    try:
        found = question.predict(machine, strategy, batch)[1]
    except StrategyError as error:
        return Fit(machine, strategy, mode, micro, 0, None, reason=str(error))
    told = found.pipeline.num_micro_batches if isinstance(found, PipelinePrediction) else micro
    return Fit(machine, strategy, mode, told, batch if found.fits else 0, found)
