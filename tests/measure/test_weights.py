"""Norms, quantization noise, and holding a model quantized for a while."""

from __future__ import annotations

import math

import pytest
import torch

from qscale.measure.weights import fake_quantized, ragged, sqnr_db, squared_errors, squared_norms
from qscale.model import load, quantizable
from qscale.quantize.format import ABSMAX_FULL, MINMAX, Format


def test_norms_and_noise_by_hand():
    weights = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[0.0, 0.4, -1.0, 1.0]])}
    assert squared_norms(weights) == pytest.approx({"a": 25, "b": 2.16})
    # Two bits, step absmax: 3 goes to 4, and 0.4 to 0.
    assert squared_errors(weights, Format("int", 2)) == pytest.approx({"a": 1, "b": 0.16})
    assert sqnr_db(27.16, 1.16) == pytest.approx(10 * math.log10(27.16 / 1.16))
    assert sqnr_db(5.0, 0.0) == math.inf


def test_sqnr_of_a_uniform_weight_gains_six_decibels_a_bit():
    """A uniform signal of b bits has 20 log10(2^b - 1) dB, by the step^2 / 12 of its error."""
    weights = {"w": torch.rand(64, 4096, generator=torch.Generator().manual_seed(0)) * 2 - 1}
    signal = squared_norms(weights)["w"]
    for bits in (4, 6, 8):
        noise = squared_errors(weights, Format("int", bits, None, ABSMAX_FULL))["w"]
        assert sqnr_db(signal, noise) == pytest.approx(20 * math.log10(2**bits - 1), abs=0.05)


def test_ragged_matrices_are_counted():
    weights = {"a": torch.zeros(3, 10), "b": torch.zeros(2, 15), "c": torch.zeros(1, 4)}
    assert [ragged(weights, Format("int", 4, size)) for size in (None, 1, 5, 4, 15)] == [
        0,
        0,
        1,
        2,
        2,
    ]


def test_weights_are_quantized_inside_and_the_same_bits_afterwards(trained):
    model = load(trained).model
    weights = quantizable(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    noise = squared_errors(weights, Format("int", 3, 8, MINMAX))

    def inside() -> None:
        with fake_quantized(weights, Format("int", 3, 8, MINMAX)):
            for name, p in model.named_parameters():
                moved = float((p.detach() - before[name]).double().square().sum())
                assert moved == pytest.approx(noise.get(name, 0.0))
                assert (moved > 0) == (name in weights)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
