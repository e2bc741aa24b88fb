"""Features of weights, streamed from safetensors files without loading the model.

``moments`` and ``spectral`` hold the sums and the spectral norm of one matrix, ``grid`` tells
weights that were quantized before, ``features`` runs over a checkpoint and ``distance`` over
several side by side.
"""

from qscale.measure.stream.distance import mean_distance, weight_distance
from qscale.measure.stream.features import WeightFeatures, weight_features
from qscale.measure.stream.grid import Grid, find_grid

__all__ = [
    "Grid",
    "WeightFeatures",
    "find_grid",
    "mean_distance",
    "weight_distance",
    "weight_features",
]
