"""``qscale predict`` without a fit, with a measured value, with contributions and with curvature."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from qscale import table
from qscale.cli import main
from qscale.cli.described import parted
from qscale.fit.shipped import find
from qscale.predict import predict, zero_fit_prediction

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "examples" / "checkpoints" / "tiny-wsd-decayed")
TEXT = str(ROOT / "examples" / "texts" / "austen-wilde-darwin.txt")
QUICK = ("--probes", "2", "--context", "64")
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
    path = tmp_path / "out.csv"
    out = run(capsys, *asked, "--loss-fp", "2.5", "-o", str(path))
    found = table.read(path).iloc[0]
    assert "relative_delta" not in found.index  # its intervals would be those of delta_loss
    assert "--observed is in nats per token" in mistake(capsys, *asked, "--observed", "0.1")
    assert "90 % interval, delta_loss" in out
    share = predict(find("learning_rate_gptq_lr_anneal"), table.read(path))
    np.testing.assert_allclose(found["high_90"], 2.5 * share["high_90"][0])
    np.testing.assert_allclose(found["delta_loss"], 2.5 * share["relative_delta"][0])
    assert f"to {found['high_90']:.3g}" in out
    nats = found["high_90"] * 1.5
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
        ((*BIG, "--probes", "3"), "--context and --probes are about --text"),
        (("no_such_fit", *BIG), "nor a shipped fit"),
        ((TINY, "--text", TEXT, "--bits", "9"), "from 2 to 8"),
        ((TINY, "--text", "absent.txt"), "--text absent.txt: no such text file"),
        ((*BIG, "-o", "out.json"), "must end in .csv or .parquet. Got out.json"),
        ((*BIG, "--loss-fp", "0"), "--loss-fp must be above 0. Got 0 instead"),
        ((*BIG, "--lr-peak", "1e-4", "--lr", "1e-3"), "--lr must be at most --lr-peak. Got 0.001"),
        ((TINY, "--lr", "1"), "--lr must be at most --lr-peak. Got 1 above 0.003"),
        (("--n-params", "7B"), "--n-params must be a number.*Got '7B' instead; write 7e9"),
        (("--tokens", "1.4t"), "--tokens must be a number.*Got '1.4t' instead; write 1.4e12"),
        (("--tokens", "many"), "--tokens must be a number.*Got 'many' instead."),
        (("learning_rate_gptq_lr_anneal", TINY, "--bits", "4", "--observed", "1"), "add --loss-fp"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, options, message) -> None:
    with pytest.raises(SystemExit) as left:
        main(["predict", *options])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert not said.out  # nothing was predicted before the mistake was seen


def test_curvature_is_not_joined_with_a_law_far_outside_its_data(capsys, tmp_path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "out.csv"
    out = run(capsys, TINY, "--text", TEXT, "--bits", "2,4", *QUICK, "-o", str(path))
    assert "Chosen: published_rtn_kumar" in out
    assert "curvature is not used at 2 bits: tested at 3 to 8 bits only, not 2." in out
    assert re.search(r"times outside its fitted range in tokens: at 2, 4 bits it is shown", out)
    assert "joined is curvature alone, times the factor" in out
    assert "was tested on models of" not in out  # of this size it was
    assert "at 2 bits joined is left blank" in out
    assert "the loss predicted at 2, 4 bits is above the loss of guessing, ln(256) = 5.55" in out
    assert out.index("joined") < out.index("Law kumar")  # the answer comes first
    two, four = (row for _, row in table.read(path).iterrows())
    assert np.isnan(two["delta_loss"])
    assert two["by_law"] > np.log(256)
    own = zero_fit_prediction(table.read(path).loc[[1]]).iloc[0]
    assert np.log(four["delta_loss"]) == pytest.approx(own["log_mean"])
    reach = norm.ppf(0.95) * own["log_sd"]
    assert np.log(four["high_90"]) == pytest.approx(own["log_mean"] + reach)


def test_curvature_is_joined_with_a_law_inside_its_data(capsys, tmp_path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "out.csv"
    inside = ("--n-params", "7e9", "--tokens", "1e12", "--bits", "2,4")
    out = run(capsys, TINY, "--text", TEXT, *inside, *QUICK, "-o", str(path))
    assert "joined is curvature alone" not in out
    assert "not joined" not in out
    two, four = (row for _, row in table.read(path).iterrows())
    assert two["delta_loss"] == pytest.approx(two["by_law"])  # 2 bits are near the law's 3
    assert 0.0 < four["weight"] < 1.0
    assert "tested on models of 4.43e+05 to 1.06e+08 parameters; at 7e+09 it is taken" in out
    ends = sorted([four["corrected"], four["by_law"]])
    assert ends[0] < four["delta_loss"] < ends[1]


def test_a_measured_value_is_held_against_what_is_joined(capsys) -> None:
    pytest.importorskip("torch")
    asked = (TINY, "--text", TEXT, "--bits", "4", *QUICK, "--observed")
    out = run(capsys, *asked, "0.5")
    assert "against joined: 0.5 is above the predicted band, over percentile 99.9" in out
    low, high = re.search(r"│ 4 │ 128 │ [\d.]+ │ [\d.]+ │ ([\d.]+) to ([\d.]+) │", out).groups()
    assert f"90 % of such are {low} to {high}." in out
    assert out.count("Observed") == 1


def test_measured_rows_say_which_method_and_loss_they_are_of(capsys, tmp_path) -> None:
    rows = pd.DataFrame(
        {"bits": [3.0, 4.0], "method": "rtn", "fmt": "int", "delta_loss": [0.106, 0.0156],
         "relative_delta": [0.0756, 0.0111], "loss_fp": 1.4}
    )  # fmt: skip
    path = tmp_path / "m.csv"
    table.write(rows, path)
    asked = (TINY, "--bits", "3,4", "--given", str(path))
    out = run(capsys, *asked)
    assert "Chosen: published_rtn_kumar" in out
    assert "method rtn, fmt int" in out
    assert "the given rows are of" not in out
    fed = run(capsys, TINY, "--bits", "3", "--given", str(path), "--observed", "0.106")
    assert "within the predicted band, near the middle" in fed
    other = run(capsys, "learning_rate_gptq_lr_anneal", *asked, "--method", "gptq")
    assert "the given rows are of method rtn, the prediction of gptq" in other
    assert "90 % interval, delta_loss" in other  # the rows say the loss before


@pytest.mark.parametrize(
    ("column", "value", "flag", "said"),
    [
        ("n_params", 1e6, ("--n-params", "13e9"), "n_params 1e+06, but --n-params or"),
        ("tokens", 1e11, ("--tokens", "2e12"), "tokens 1e+11, but --tokens or"),
        ("family", "OPT", ("--family", "LLaMA-1"), "family OPT, but --family or"),
    ],
)
def test_measured_rows_of_another_checkpoint_are_refused(
    capsys, tmp_path, column, value, flag, said
) -> None:
    path = tmp_path / "m.csv"
    facts = {"n_params": 13.2e9, "tokens": 2e12, "bits": 4.0, "method": "gptq", "delta_loss": 0.05}
    table.write(pd.DataFrame([facts]), path)
    asked = ("--n-params", "13e9", "--tokens", "2e12", "--bits", "3", "--method", "gptq")
    asked = (*asked, *(flag if column == "family" else ()), "--given", str(path))
    run(capsys, *asked)  # 13.2e9 is 13e9, rounded
    table.write(pd.DataFrame([facts | {column: value}]), path)
    message = mistake(capsys, *asked)
    assert f"row 1 has {said} the checkpoint says" in message
    assert f"correct {flag[0]}" in message


def test_a_fact_that_the_law_does_not_use_is_named(capsys) -> None:
    asked = ("--n-params", "7e9", "--tokens", "2e12", "--bits", "4", "--lr-peak", "3e-4")
    out = run(capsys, *asked)
    assert (
        "lr_peak is given, but kumar does not use it. learning_rate_gptq_lr_anneal does: add --lr."
        in out
    )
    assert "does not use it" not in run(capsys, "learning_rate_gptq_lr_anneal", *asked, "--lr", "0")


def test_curvature_stands_alone_beside_a_fit_of_another_method_and_without_one(
    capsys, tmp_path
) -> None:
    pytest.importorskip("torch")
    asked = ("--text", TEXT, "--bits", "4", *QUICK)
    out = run(capsys, "published_gptq_kumar", TINY, *asked)
    assert "the fit is of gptq and curvature of round-to-nearest: they differ. " in out
    assert "joined is curvature alone" in out
    assert out.index("Law kumar") < out.index("joined")  # what was asked for comes first
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(TINY).iterdir():
        if file.name != "qscale.toml":
            (bare / file.name).symlink_to(file)
    out = run(capsys, str(bare), *asked)
    assert "No shipped fit can be used:" in out
    assert "needs tokens" in out
    assert "100 %" in out


def test_a_fit_that_reads_curvature_gets_it_from_the_text(capsys, tmp_path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "out.csv"
    asked = ("zero_fit_3_4_bits", TINY, "--text", TEXT, "--bits", "3,4", *QUICK)
    out = run(capsys, *asked, "-o", str(path))
    found = table.read(path)
    assert found["bits"].tolist() == [3.0, 4.0]
    fitted = find("zero_fit_3_4_bits")
    expected = fitted.values["c"] * found["quadratic_delta"]
    np.testing.assert_allclose(found["delta_loss"], expected)
    assert "joined" not in out  # it is curvature already
    out = run(capsys, *asked[:-5], "3", *QUICK, "--observed", str(2 * found["high_90"].iloc[0]))
    assert "above the predicted band" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--n-params", "13e9", "--tokens", "2e12"), "no --method is given: the fit is of gptq."),
        ((*BIG, "--group-size", "32,64"), "group_size is given, but kumar does not use it."),
    ],
)
def test_what_was_left_open_or_makes_no_difference_is_said(capsys, options, sentence) -> None:
    assert sentence in run(capsys, *options)
