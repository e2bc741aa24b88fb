"""``qscale predict`` without a fit, with a measured value, with contributions and with curvature."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qscale import table
from qscale.cli import main
from qscale.cli.described import parted
from qscale.fit.shipped import find
from qscale.predict import predict, zero_fit_prediction

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "examples" / "checkpoints" / "tiny-wsd-decayed")
TEXT = str(ROOT / "examples" / "texts" / "austen-wilde-darwin.txt")
BIG = ("--n-params", "13e9", "--tokens", "1.4e12", "--method", "gptq")


def run(capsys, *arguments: str) -> str:
    main(["predict", *arguments])
    return " ".join(capsys.readouterr().out.split())


def mistake(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["predict", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (None, None, (None, None)),
        ("published_rtn_kumar", None, ("published_rtn_kumar", None)),
        (TINY, None, (None, TINY)),
        ("model.Q4_0.gguf", None, (None, "model.Q4_0.gguf")),
        ("EleutherAI/pythia-70m@step1000", None, (None, "EleutherAI/pythia-70m@step1000")),
        ("out/kumar.json", None, ("out/kumar.json", None)),
        ("published_rtn_kumr", None, ("published_rtn_kumr", None)),
        ("a/b", TINY, ("a/b", TINY)),
    ],
)
def test_a_fit_is_told_from_a_checkpoint(first, second, expected) -> None:
    assert parted(first, second) == expected


def test_a_file_without_a_suffix_is_a_fit(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "forest").write_text("{}")
    assert parted("out/forest", None) == ("out/forest", None)


def test_without_a_fit_the_best_shipped_one_predicts(capsys, tmp_path) -> None:
    out = run(capsys, *BIG, "--bits", "3,4", "-o", str(tmp_path / "out.csv"))
    assert "Chosen: published_gptq_kumar covers this best of 7 fits" in out
    found = table.read(tmp_path / "out.csv")
    expected = predict(find("published_gptq_kumar"), found[["n_params", "tokens", "bits"]])
    np.testing.assert_allclose(found["delta_loss"], expected["delta_loss"])
    assert "Chosen" not in run(capsys, "published_gptq_kumar", *BIG)


def test_a_folder_alone_is_a_checkpoint(capsys) -> None:
    out = run(capsys, TINY, "--bits", "4", "--method", "gptq")
    assert "Law lr_anneal" in out  # its sidecar knows the learning rates
    assert "n_params 443264" in out


def test_a_loss_before_quantization_turns_shares_into_nats(capsys, tmp_path) -> None:
    asked = (
        "--n-params",
        "1e9",
        "--tokens",
        "1e11",
        "--bits",
        "3",
        "--lr-peak",
        "4e-4",
        "--lr",
        "0",
    )
    out = run(capsys, *asked)
    assert "--loss-fp gives nats per token" in out
    run(capsys, *asked, "--loss-fp", "2.5", "-o", str(tmp_path / "out.csv"))
    found = table.read(tmp_path / "out.csv").iloc[0]
    assert found["delta_loss"] == pytest.approx(2.5 * found["relative_delta"])
    assert "--observed is in nats per token" in mistake(capsys, *asked, "--observed", "0.1")
    nats = 2.5 * found["high_90"] * 1.5
    out = run(capsys, *asked, "--loss-fp", "2.5", "--observed", str(nats))
    assert "above the predicted band" in out
    assert f"are {nats / 2.5:.4g} of loss_fp" in out


def test_a_measured_value_gets_a_percentile_and_a_verdict(capsys) -> None:
    out = run(capsys, *BIG, "--bits", "3", "--observed", "0.31")
    percentile = float(re.search(r"at percentile (\d+\.?\d*)", out)[1])
    assert "within the predicted band" in out
    above = run(capsys, *BIG, "--bits", "3", "--observed", "30")
    assert "above the predicted band, over percentile 99.9" in above
    assert "a fault in conversion" in above
    assert 50 < percentile < 90


def test_explaining_shows_factors_gaps_and_the_other_fits(capsys) -> None:
    out = run(capsys, *BIG, "--bits", "3", "--explain", "--lr-peak", "0.01")
    assert re.search(
        r"N\^-γ_N │ n_params 1.3e\+10 │ n_params 2.96e\+10 │ x 1.35 │ \+0.297 ± 0.042", out
    )
    assert "Not seen: Peak learning rate (lr_peak = 0.01) is above" in out
    assert "Not chosen: published_rtn_kumar has not seen method gptq." in out
    several = run(capsys, *BIG, "--bits", "3,4", "--explain")
    assert "bits 3 ┃ bits 4" in several
    assert "Not seen: nothing that is known lies outside the data." in several


def test_predicting_from_a_description_or_a_folder_loads_no_torch() -> None:
    code = (
        "import sys\nfrom qscale.cli import main\n"
        f"main(['predict', *{BIG!r}, '--bits', '3', '--explain', '--observed', '0.1'])\n"
        f"main(['predict', {TINY!r}])\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'statsmodels', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*BIG, "--observed", "0.3"), "--observed belongs to one setting: give one value of --bits"),
        ((*BIG, "--bits", "3", "--observed", "nan"), "--observed must be a finite number. Got nan"),
        (("chinchilla_points_chinchilla", "--n-params", "1e9", "--tokens", "1e11", "--observed", "1"), "--observed is a delta_loss. Got a fit of loss_fp"),
        (("--n-params", "1e9"), "needs tokens .*give --tokens"),
        (("--n-params", "1e9", "--set", "delta_loss=1"), "this is what the fit predicts"),
        ((*BIG, "--text", TEXT), "--text needs a checkpoint"),
        (("no_such_fit", *BIG), "nor a shipped fit"),
        ((TINY, "--text", TEXT, "--bits", "9"), "from 2 to 8"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, options, message) -> None:
    assert re.search(message, mistake(capsys, *options))


def test_curvature_is_joined_with_the_law_where_it_was_tested(capsys, tmp_path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "out.csv"
    asked = (TINY, "--text", TEXT, "--bits", "2,4", "--probes", "2", "--context", "64")
    out = run(capsys, *asked, "-o", str(path))
    assert "Chosen: published_rtn_kumar" in out
    assert "curvature is not used at 2 bits: tested at 3 to 8 bits only, not 2." in out
    two, four = (row for _, row in table.read(path).iterrows())
    assert two["weight"] == 0.0
    assert two["delta_loss"] == pytest.approx(two["by_law"])
    # The law is far outside its data, so that curvature decides.
    assert four["weight"] > 0.9
    assert four["low_90"] < four["corrected"] < four["high_90"]
    own = zero_fit_prediction(table.read(path).loc[[1]]).iloc[0]
    assert np.log(four["corrected"]) == pytest.approx(own["log_mean"])


def test_curvature_stands_alone_beside_a_fit_of_another_method_and_without_one(
    capsys, tmp_path
) -> None:
    pytest.importorskip("torch")
    asked = ("--text", TEXT, "--bits", "4", "--probes", "2", "--context", "64")
    out = run(capsys, "published_gptq_kumar", TINY, *asked)
    assert "the fit is of gptq and curvature of round-to-nearest: they are not joined" in out
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(TINY).iterdir():
        if file.name != "qscale.toml":
            (bare / file.name).symlink_to(file)
    out = run(capsys, str(bare), *asked)
    assert "No shipped fit can be used:" in out
    assert "needs tokens" in out
    assert "100 %" in out
