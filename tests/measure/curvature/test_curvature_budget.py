"""The forecast of time and memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qscale.errors import TextError
from qscale.measure.curvature import budget, cost
from tests.checkpoints import build_model


@pytest.fixture(scope="module")
def subject() -> tuple[torch.nn.Module, torch.Tensor, list[str]]:
    model = build_model("llama")
    windows = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    return model, windows, [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("method", ["exact", "central", "forward"])
def test_time_grows_with_probes_and_windows(subject, monkeypatch, method: str) -> None:
    model, windows, names = subject
    ticks = iter(range(0, 100, 3))
    monkeypatch.setattr(budget.time, "perf_counter", lambda: float(next(ticks)))
    few, many = (
        cost(model, windows, names, ggn_probes=2, hessian_probes=n, method=method) for n in (2, 5)
    )
    assert few.gradient_seconds == 3.0 * 4  # four microbatches, each of three ticks
    per_probe = (many.hessian_seconds - few.hessian_seconds) / 3
    assert per_probe == pytest.approx(few.gradient_seconds * budget.PROBE[method])
    assert dataclasses.replace(many, hessian_seconds=few.hessian_seconds) == few
    assert few.ggn_seconds < few.hessian_seconds
    assert "GiB above the model" in str(few)


def test_memory_grows_with_the_microbatch_and_shrinks_with_differences(subject) -> None:
    model, windows, names = subject
    peaks = [
        cost(model, windows, names[1:2], ggn_probes=2, hessian_probes=2, batch_windows=size, method=method).peak_bytes
        for size, method in ((1, "exact"), (2, "exact"), (1, "forward"))
    ]  # fmt: skip
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.1)
    assert peaks[2] < 0.6 * peaks[0]


def test_windows_must_have_something_to_score(subject) -> None:
    model, windows, names = subject
    with pytest.raises(TextError, match="at least one window"):
        cost(model, windows[:0], names, ggn_probes=2, hessian_probes=2)
