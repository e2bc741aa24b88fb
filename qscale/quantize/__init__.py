"""Fake quantization: number formats, their settings and round-to-nearest."""
