"""The controlled sweep's training: its forward pass, schedules, branches and resuming."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qscale.model import load
from qscale.provenance import TRAINING_COLUMNS
from tests.checkpoints import babble

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "controlled_sweep"
sys.path.insert(0, str(FOLDER))

import lean_llama  # noqa: E402
import recipe  # noqa: E402
import runs  # noqa: E402

TINY = runs.Run(32, 2e-2, 0.1, 3, "wsd", (4.0, 8.0), average=True)
"""60 and 121 steps of 2048 tokens for 30,944 parameters."""


@pytest.fixture(scope="module")
def data():
    return torch.tensor(list(babble(4000, seed=5).encode()), dtype=torch.uint8)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    return recipe.train(TINY, data, tmp_path_factory.mktemp("runs"), "a test", compiled=False)


def weights(folder):
    return load(folder).model.state_dict()


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_forward_pass_is_that_of_transformers(width) -> None:
    shape = lean_llama.Shape(width, layers=2, context=24)
    model = lean_llama.initial(shape, 1)
    with torch.no_grad():  # far from where it starts, so that every part counts
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
        ids = torch.randint(256, (3, 24), generator=torch.manual_seed(1))
        expected = model(input_ids=ids).logits
        fused = lean_llama.fuse(model)
        found = lean_llama.logits(fused, ids, shape, lean_llama.tables(shape))
        again = lean_llama.unfuse(fused, shape)(input_ids=ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(again, expected)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    for width in (32, 64, 128, 256):
        shape = lean_llama.Shape(width)
        model = lean_llama.initial(shape, 0)
        assert shape.n_params == sum(p.numel() for p in model.parameters()) - 256 * width


def test_sums_of_the_learning_rate_have_their_closed_forms() -> None:
    run = runs.Run(64, 1e-3, 0.1, 0, "wsd", (12.5, 50.0))
    begin, end = list(run.branches.items())[-1]
    half, whole = (k for k in run.kept if k.kind == "decay" and k.begin == begin)
    stable = 1e-3 * (begin - (runs.WARMUP_STEPS - 1) / 2)
    n = end - begin

    def in_decay(k):
        return 1e-3 * (k - k * (k - 1) / (2 * n))

    found = run.training(whole, "")
    assert found["lr_sum"] == pytest.approx(stable + in_decay(n))
    assert found["lr"] == 0
    assert found["decay_fraction"] == 1
    assert found["decay_share"] == pytest.approx(0.2, abs=1e-3)
    found = run.training(half, "")
    assert found["lr_sum"] == pytest.approx(stable + in_decay(half.step - begin))
    assert found["lr"] == pytest.approx(5e-4, rel=2 / n)


def test_a_cosine_sums_to_its_mean_rate() -> None:
    run = runs.Run(64, 1e-3, 0.1, 0, "cosine", (50.0,))
    found = run.training(run.kept[-1], "")
    n = run.last - runs.WARMUP_STEPS
    # n steps from the peak on: half a step above the mean of both ends
    expected = 1e-3 * (0.55 * n + 0.45) + 1e-3 * (runs.WARMUP_STEPS + 1) / 2
    assert found["lr_sum"] == pytest.approx(expected)
    assert found["lr"] == pytest.approx(1e-4)
    middle = run.training(run.kept[0], "")
    angle = math.pi * middle["decay_fraction"]
    assert middle["lr"] == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(angle)) / 2))


def test_windows_depend_on_seed_and_step_alone(data) -> None:
    other = replace(TINY, lr_peak=1e-3, width=64)
    assert torch.equal(recipe.batch(data, TINY, 7), recipe.batch(data, other, 7))
    assert not torch.equal(recipe.batch(data, TINY, 7), recipe.batch(data, TINY, 8))
    assert not torch.equal(
        recipe.batch(data, TINY, 7), recipe.batch(data, replace(TINY, seed=4), 7)
    )


def test_a_run_keeps_what_it_says_with_all_training_columns(trained) -> None:
    for kept in TINY.kept:
        opened = load(trained / kept.name)
        said = {k: v for s in opened.description.statements for k, v in s.values.items()}
        expected = TINY.training(kept, "a test")
        assert set(TRAINING_COLUMNS) == set(expected)
        for name, value in expected.items():
            assert said[name] == (value if isinstance(value, str) else pytest.approx(value))
    assert not list(trained.glob("*.pt"))
    assert len(list(trained.glob("*-step*"))) == len(TINY.kept)


def test_a_run_learns(trained) -> None:
    ids = torch.tensor(list(babble(300, seed=9).encode()))[:1024].view(8, 128)
    model = load(trained / TINY.kept[-1].name).model
    with torch.inference_mode():
        assert model(input_ids=ids, labels=ids).loss < 2.0


class KilledError(Exception):
    pass


# In the stable phase, the first decay, the phase again, the second decay and the phase's end.
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(20, marks=pytest.mark.slow),
        51,
        pytest.param(70, marks=pytest.mark.slow),
        125,
        pytest.param(140, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_anywhere_ends_with_the_same_weights(
    steps, trained, data, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(recipe, "SNAPSHOT_SECONDS", 0.0)
    plain, taken = recipe.batch, []

    def dying(*arguments):
        taken.append(arguments)
        if len(taken) > steps:
            raise KilledError
        return plain(*arguments)

    monkeypatch.setattr(recipe, "batch", dying)
    with pytest.raises(KilledError):
        recipe.train(TINY, data, tmp_path, "a test", compiled=False)
    monkeypatch.setattr(recipe, "batch", plain)
    folder = recipe.train(TINY, data, tmp_path, "a test", compiled=False)
    for kept in TINY.kept:
        assert same(weights(folder / kept.name), weights(trained / kept.name)), kept.name


def test_branches_leave_the_stable_phase_as_it_is(trained, data, tmp_path) -> None:
    alone = replace(TINY, ends=(8.0,))
    folder = recipe.train(alone, data, tmp_path, "a test", compiled=False)
    both = {kept.name for kept in alone.kept} & {kept.name for kept in TINY.kept}
    assert any(name.startswith("decay") for name in both)
    for name in both:
        if not name.startswith("mean"):  # their windows start at the stop before
            assert same(weights(folder / name), weights(trained / name)), name


def test_a_mean_is_the_mean_of_the_weights_of_the_last_fifth(data, tmp_path, monkeypatch) -> None:
    seen = []
    add = recipe._add_to_average

    def note(state):
        if state.step % runs.AVERAGE_EVERY == 0:
            seen.append((state.step, [w.detach().clone() for w in state.weights]))
        add(state)

    monkeypatch.setattr(recipe, "_add_to_average", note)
    run = replace(TINY, ends=(6.0,))
    folder = recipe.train(run, data, tmp_path, "a test", compiled=False)
    kept = next(kept for kept in run.kept if kept.kind == "mean")
    mean = [
        torch.stack([w[i] for step, w in seen if step <= kept.step]).double().mean(0)
        for i in range(len(seen[0][1]))
    ]
    assert min(step for step, _ in seen) > 0.8 * kept.step
    expected = lean_llama.unfuse([w.float() for w in mean], run.shape).state_dict()
    for name, weight in weights(folder / kept.name).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7)


def test_the_grid_is_as_wide_as_the_study_needs() -> None:
    found = runs.grid()
    kept = {(run.name, kept.name) for run in found for kept in run.kept}
    assert len(kept) >= 300
    assert len(kept) == sum(len(run.kept) for run in found)
    assert len({run.width for run in found}) >= 3
    for width in (runs.SMALL, runs.MEDIUM, runs.LARGE):
        rates = {run.lr_peak for run in found if run.width == width}
        assert len(rates) >= 4
        assert max(rates) >= 16 * min(rates)
