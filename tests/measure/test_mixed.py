"""Measured rows of mixes of formats and of rounded activations."""

from __future__ import annotations

import pandas as pd
import pytest

from qscale import table
from qscale.errors import CheckpointError, QscaleError
from qscale.measure import job
from qscale.measure.loss import compare, mean_and_se, reference
from qscale.measure.run import measure
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized
from qscale.quantize.activations import quantized_inputs
from qscale.quantize.format import Format
from qscale.quantize.mix import Mix
from qscale.quantize.setting import Setting
from tests.checkpoints import build_family, save

FOUR = Format("int", 4, 8)
SPLIT = Mix((("*.0.*", Format("int", 8, 8)), ("*", FOUR)))
LEFT = Mix((("*.0.*", None), ("*", FOUR)), activations=Format("int", 8))
SETTINGS = [
    Setting(FOUR),
    Mix((("*", FOUR),)),
    SPLIT,
    LEFT,
    Setting(FOUR, activations=Format("int", 4)),
]
OPTIONS = {"context": 32, "probe_windows": 4, "num_probes": 3}


@pytest.fixture(scope="module")
def measured(trained, text_file, tmp_path_factory):
    """Table, rows, and what was said."""
    out = tmp_path_factory.mktemp("mixed") / "rows.csv"
    said: list[str] = []
    rows = measure(
        trained, text_file, out, settings=SETTINGS, features="", on_note=said.append, **OPTIONS
    )
    return out, rows, said


def test_a_mix_of_one_format_is_that_format(measured):
    _, rows, _ = measured
    one, same = rows.iloc[0], rows.iloc[1]
    for name in ("delta_loss", "kl", "bits", "bits_per_weight", "quantization_noise", "sqnr_db"):
        assert one[name] == same[name], name
    assert (one["fmt"], same["fmt"]) == ("int", "mix")
    assert one["spec"] != same["spec"]


def test_rows_of_mixes_say_what_is_stored_and_lost(measured, trained, text_file):
    out, rows, _ = measured
    subject = open_subject(trained, text_file, context=32, probe_windows=4)
    model, sizes = subject.checkpoint.model, subject.sizes
    full = reference(model, subject.evaluation)
    row = rows.iloc[2]
    first = sum(n for name, n in sizes.items() if ".0." in name) / sum(sizes.values())
    assert row["bits"] == pytest.approx(8 * first + 4 * (1 - first))
    assert row["bits_per_weight"] == pytest.approx(row["bits"] + 16 / 8)
    with fake_quantized(subject.weights, SPLIT):
        assert row["kl"] == pytest.approx(mean_and_se(compare(model, full).kl, full.counts)[0])
    assert rows.iloc[3]["bits"] == pytest.approx(16 * first + 4 * (1 - first))
    counts = rows["n_quantized"].tolist()
    assert counts == [len(sizes)] * 3 + [len(sizes) / 2, len(sizes)]  # two blocks
    read = table.read(out)
    assert read["spec"].nunique() == len(SETTINGS)
    assert read.iloc[2][["group_size", "symmetric", "scale_rule"]].isna().all()


def test_rounded_activations_count_in_the_losses(measured, trained, text_file):
    _, rows, said = measured
    assert rows["bits_activation"].tolist()[3:] == [8, 4]
    assert rows["bits_activation"].isna().sum() == 3
    subject = open_subject(trained, text_file, context=32, probe_windows=4)
    model = subject.checkpoint.model
    full = reference(model, subject.evaluation)
    second = [name for name in subject.weights if ".0." not in name]
    with fake_quantized(subject.weights, LEFT), quantized_inputs(model, second, LEFT.activations):
        found = mean_and_se(compare(model, full).kl, full.counts)[0]
    assert rows.iloc[3]["kl"] == pytest.approx(found)
    assert rows.iloc[4]["kl"] > 2 * rows.iloc[0]["kl"]
    assert sum("Rounded activations" in sentence for sentence in said) == 1


def test_mixes_are_not_measured_twice(measured, trained, text_file, monkeypatch):
    out, rows, _ = measured

    def never(*_args, **_options):
        raise AssertionError("measured again")

    monkeypatch.setattr(job, "compare", never)
    again = measure(trained, text_file, out, settings=SETTINGS, features="", **OPTIONS)
    pd.testing.assert_frame_equal(again.drop(columns="features"), rows.drop(columns="features"))


def test_nothing_is_measured_where_patterns_do_not_fit(trained, text_file, tmp_path):
    mix = Mix((("*.7.*", FOUR), ("*", FOUR)))
    with pytest.raises(QscaleError, match=r"pattern '\*\.7\.\*' is not the first to match"):
        measure(trained, text_file, tmp_path / "r.csv", settings=[mix], features="", **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_activations_of_fused_experts_are_refused(text_file, tmp_path):
    folder = save(build_family("mixtral"), tmp_path / "mixtral")
    setting = Setting(FOUR, activations=Format("int", 8))
    with pytest.raises(CheckpointError, match="experts.*must be the weight of a Linear"):
        measure(folder, text_file, tmp_path / "r.csv", settings=[setting], features="", **OPTIONS)
