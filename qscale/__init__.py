"""qscale: measure, fit and predict how much quantization raises a language model's loss."""

__version__ = "0.1.0"
