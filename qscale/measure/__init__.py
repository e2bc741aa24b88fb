"""Measure a checkpoint: losses under quantization, curvature and weights. Needs torch."""

from qscale.model import require_torch

require_torch()
