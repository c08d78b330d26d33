"""What parts take, learned from what they took: ROC's linear cost model of a layer (section 4.4.1, equations 4.4-4.7).

    seconds(layer, part) = Σ_i w_i(layer) · x_i(part),    w ≥ 0

The features are nearly collinear (edges, runs and loads grow together), so that least squares alone gives large weights
of both signs, which predict what was measured and nothing else. Here weights are not negative, and a ridge, relative to
each feature's size, decides between weights that explain the measurements equally well. The best of the 2^7 sets of
weights that may differ from zero is taken, so the fit is exact. Forward and backward are layers of their own, and cuts
are balanced for both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from conjoin.errors import GraphError
from conjoin.gnn.adjacency import Floats, Ints
from conjoin.gnn.cuts import Load
from conjoin.gnn.features import NAMES, Features

RIDGE = 1e-4
"""Of a feature's mean square: enough to tell collinear features apart, and 0.01 % off where they are not."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeModel:
    """Sums over all measurements of one layer: what least squares needs, in memory that does not grow."""

    products: Floats
    """Σ x xᵀ, each measurement weighed by 1/seconds², so that errors count as shares."""
    moments: Floats
    """Σ x·seconds, weighed alike."""
    count: int = 0

    @classmethod
    def empty(cls) -> TimeModel:
        """A model of a layer that was never measured."""
        return cls(np.zeros((len(NAMES), len(NAMES))), np.zeros(len(NAMES)))

    def observed(self, features: Floats, seconds: Floats) -> TimeModel:
        """Return the model that has also seen these parts: a row of features and the seconds of each."""
        if features.shape != (len(seconds), len(NAMES)) or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise GraphError(
                f"Times of {len(features)} parts were to be learned from {np.asarray(seconds).tolist()[:4]}. Each part "
                "takes more than no seconds, and not for ever. Give one measurement for each part."
            )
        scaled = features / seconds[:, None]
        products, moments = self.products + scaled.T @ scaled, self.moments + scaled.sum(axis=0)
        return TimeModel(products, moments, self.count + len(seconds))

    def weights(self) -> Floats:
        """Return the seconds of one unit of each feature: not negative, and zero where a feature explains nothing."""
        size = np.sqrt(np.diagonal(self.products))
        seen = np.flatnonzero(size > 0)
        found = np.zeros(len(NAMES))
        if not len(seen):
            return found
        products = self.products[np.ix_(seen, seen)] / np.outer(size[seen], size[seen]) + RIDGE * np.eye(len(seen))
        found[seen] = _least_squares(products, self.moments[seen] / size[seen]) / size[seen]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PartitionModel:
    """What every layer of a model takes on any part of any graph; `layers` pass forward, then backward."""

    layers: tuple[TimeModel, ...]
    widths: tuple[int, ...]
    """Of the rows that each layer aggregates."""

    @classmethod
    def empty(cls, widths: tuple[int, ...]) -> PartitionModel:
        """A model that has seen nothing, of layers that aggregate rows of these widths."""
        return cls(tuple(TimeModel.empty() for _ in widths), widths)

    def observed(self, features: Features, cuts: Ints, seconds: Floats) -> PartitionModel:
        """Return the model that has also seen an epoch: `seconds[layer, part]`."""
        _check_widths(self, features)
        layers = tuple(layer.observed(features.of_parts(cuts, i), seconds[i]) for i, layer in enumerate(self.layers))
        return replace(self, layers=layers)

    def load(self, features: Features) -> Load:
        """Return what ranges of a graph's vertices are predicted to take, in seconds."""
        _check_widths(self, features)
        if not all(layer.count for layer in self.layers):
            raise GraphError(
                "Seconds of parts were asked for from a model that has not seen every layer run. Nothing is known of "
                "them. Measure an epoch first, with equal_edges."
            )
        return Load(features, np.stack([layer.weights() for layer in self.layers]))


def write_model(model: PartitionModel) -> str:
    """Return a model as text, so that graphs can be cut by it in another process."""
    layers = [
        {"products": layer.products.tolist(), "moments": layer.moments.tolist(), "count": layer.count}
        for layer in model.layers
    ]
    return json.dumps({"features": NAMES, "widths": model.widths, "layers": layers})


def parse_model(text: str) -> PartitionModel:
    """Return the model that `write_model` wrote."""
    try:
        read = json.loads(text)
        layers = tuple(
            TimeModel(np.array(layer["products"], float), np.array(layer["moments"], float), int(layer["count"]))
            for layer in read["layers"]
        )
        widths = tuple(int(width) for width in read["widths"])
        shapes = {(layer.products.shape, layer.moments.shape) for layer in layers}
        sound = shapes == {((len(NAMES),) * 2, (len(NAMES),))} and tuple(read["features"]) == NAMES
        sound &= len(widths) == len(layers) and all(np.isfinite(layer.products).all() for layer in layers)
    except (ValueError, KeyError, TypeError) as error:
        raise GraphError(
            f"A learned model of parts was asked for from a text. It cannot be read: {error!r}. Give what write_model "
            "returned."
        ) from error
    if not sound:
        raise GraphError(
            f"A learned model of parts was asked for from a text. Its features are not {', '.join(NAMES)}, or sizes do "
            "not fit each other. Learn it again with this version."
        )
    return PartitionModel(layers, widths)


def _check_widths(model: PartitionModel, features: Features) -> None:
    if model.widths != features.widths:
        raise GraphError(
            f"A model of layers that aggregate rows of widths {model.widths} was asked about features of a graph that "
            f"were made for widths {features.widths} instead. The weights of one are not those of the other. Make the "
            f"features for the model's widths."
        )


def _least_squares(products: Floats, moments: Floats) -> Floats:
    """The least of wᵀ·products·w − 2·moments·w over w ≥ 0: the best of all sets of weights that are not zero."""
    size = len(moments)
    best, least = np.zeros(size), 0.0
    for chosen in range(1, 1 << size):
        places = [i for i in range(size) if chosen >> i & 1]
        weights = np.linalg.solve(products[np.ix_(places, places)], moments[places])
        value = -float(moments[places] @ weights)
        if value < least and (weights >= 0).all():
            best, least = np.zeros(size), value
            best[places] = weights
    return best
