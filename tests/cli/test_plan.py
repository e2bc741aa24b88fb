"""``qscale plan``: what it prints and writes, and one line for every mistake."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from qscale import table
from qscale.cli import main
from qscale.fit import fit
from qscale.fit.shipped import find
from qscale.laws import get
from qscale.plan.mix import allocate
from qscale.quantize.mix import Mix
from tests.plan.test_mix import simulated
from tests.simulations import simulate


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    table.write(simulate(), folder / "rows.csv")
    fit(simulate(), get("ouyang"), interval="model", name="rows.csv").save(folder / "fit.json")
    return folder


@pytest.fixture
def data(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str) -> str:
    main(["plan", *arguments] if arguments[0] != "fit" else list(arguments))
    return capsys.readouterr().out


def mistake(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "Traceback" not in message
    return message


ROOT = Path(__file__).parents[2]
CHECKPOINT = str(ROOT / "examples" / "checkpoints" / "tiny-wsd-decayed")
TEXT = str(ROOT / "examples" / "texts" / "austen-wilde-darwin.txt")
KNOWN = ("--n-params", "1e9", "--tokens", "1e12")


def test_bits_names_the_smallest_setting_and_writes_all(data, capsys) -> None:
    out = run(capsys, "bits", "fit.json", *KNOWN, "--ppl-ratio", "1.2", "-o", "bits.csv")
    written = table.read("bits.csv")
    kept = written[written["kept"]]
    assert f"bits {kept['bits'].iloc[0]:g}" in out.split("Fewest bits within")[1]
    assert written["bits_per_weight"].tolist() == [2.125, 3.125, 4.125, 5.125, 6.125, 8.125]
    assert "extrapolation" not in out.split("Fewest bits")[1] or kept["bits"].iloc[0] > 4


def test_bits_says_when_none_will_do_and_when_it_extrapolates(data, capsys) -> None:
    none = run(capsys, "bits", "fit.json", *KNOWN, "--tolerance", "1e-6", "--bits", "2,3")
    assert "No setting keeps" in none
    beyond = run(capsys, "bits", "fit.json", *KNOWN, "--tolerance", "0.001")
    assert "above the fitted range 2 to 4" in " ".join(beyond.split())


def test_bits_of_a_shipped_fit_of_relative_loss(data, capsys) -> None:
    asked = ("bits", "learning_rate_gptq_lr_anneal", *KNOWN, "--lr-peak", "3e-4", "--lr", "0",
             "--bits", "3,4", "--tolerance", "0.05")  # fmt: skip
    assert "--loss-fp" in mistake(capsys, *asked)
    assert "relative 0.025" in run(capsys, *asked, "--loss-fp", "2")


def test_bits_after_one_measured_row(data, capsys) -> None:
    asked = ("bits", "fit.json", *KNOWN, "--tolerance", "0.02", "--bits", "2,3,4")
    run(capsys, *asked, "-o", "before.csv")
    rows = pd.DataFrame({"bits": [4.0], "delta_loss": [0.005], "delta_loss_se": [0.0]})
    table.write(rows, "given.csv")
    out = run(capsys, *asked, "--given", "given.csv", "-o", "after.csv")
    assert "Given: 1 measured row of given.csv" in out
    before, after = pd.read_csv("before.csv"), pd.read_csv("after.csv")
    spread = [(t["bound"] / t["delta_loss"]).to_numpy() for t in (before, after)]
    assert (spread[1] < spread[0]).all()


def test_bits_of_a_regression_and_of_a_law_without_bits(data, capsys) -> None:
    formula = "log(delta_loss) ~ log(n_params) + log(tokens) + log(bits)"
    main(["regress", "rows.csv", "--kind", "ols", "--formula", formula, "-o", "regression.json"])
    out = run(capsys, "bits", "regression.json", *KNOWN, "--tolerance", "0.02")
    assert "Fewest bits within" in out
    assert "must be the fit of a law" in mistake(capsys, "tokens", "regression.json", *KNOWN)
    table.write(simulate().assign(quadratic_delta=lambda t: t["delta_loss"] * 2), "q.csv")
    main(["fit", "q.csv", "--law", "curvature", "--interval", "model", "-o", "curvature.json"])
    capsys.readouterr()
    asked = ("bits", "curvature.json", "--set", "quadratic_delta=0.1", "--tolerance", "1")
    assert "does not read bits" in mistake(capsys, *asked)


def test_bits_without_a_fit_says_which_was_chosen_and_answers_as_it(data, capsys) -> None:
    asked = (*KNOWN, "--method", "gptq", "--tolerance", "0.1")
    chosen = run(capsys, "bits", *asked)
    assert "Chosen: published_gptq_kumar covers this best of 5 fits" in chosen
    named = run(capsys, "bits", "published_gptq_kumar", *asked)
    answer = "Fewest bits within"
    assert chosen.split(answer)[1] == named.split(answer)[1]
    assert "Chosen" not in named


def test_bits_of_a_checkpoint_by_its_own_curvature(data, capsys) -> None:
    pytest.importorskip("torch")
    asked = ("bits", CHECKPOINT, "--text", TEXT, "--context", "64", "--probes", "2", "--bits",
             "2,3,4,5,6", "--confidence", "0.8", "--tolerance", "0.03", "-o", "bits.csv")  # fmt: skip
    out = " ".join(run(capsys, *asked).split())
    written = pd.read_csv("bits.csv").set_index("bits")
    assert written.index.tolist() == [3, 4, 5, 6]  # nothing is tested at 2 bits
    assert "at 2 bits joined is left blank" in out
    four = written.loc[4]
    for share, column in ((0.8, "bound"), (0.95, "high_90")):
        reach = norm.ppf(share) * four["log_sd"]
        assert four[column] == pytest.approx(four["delta_loss"] * np.exp(reach))
    smallest = written.index[written["bound"] <= 0.03][0]
    assert f"confidence 0.8: bits {smallest:g}," in out
    assert "--text is about rtn" in mistake(capsys, *asked[:-2], "--method", "gptq")
    asked = ("bits", "--text", TEXT, "--tolerance", "1")
    assert "--text needs a checkpoint" in mistake(capsys, *asked)


def test_bits_by_a_fit_that_reads_curvature_say_what_it_has_not_seen(data, capsys) -> None:
    pytest.importorskip("torch")
    asked = ("bits", "zero_fit_3_4_bits", CHECKPOINT, "--text", TEXT, "--context", "64", "--probes",
             "2", "--tolerance", "0.001", "-o", "bits.csv", "--bits")  # fmt: skip
    out = " ".join(run(capsys, *asked, "3,8").split())
    written = pd.read_csv("bits.csv")
    fitted = find("zero_fit_3_4_bits")
    expected = fitted.values["c"] * written["quadratic_delta"]
    np.testing.assert_allclose(written["delta_loss"], expected)
    assert "fewest bits within" in out.lower()
    assert "is below the fitted range" in out  # 8 bits cost less than any row it was fitted to


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (("schedule", *KNOWN, "--lr-peak", "3e-4", "--lr", "0", "--try", "lr_peak=1e-3"),
         "learning_rate_gptq_lr_anneal covers this best of 1 fit:"),
        (("tokens", "--n-params", "1e9", "--bits", "3", "--method", "rtn"),
         "published_rtn_kumar covers this best of 5 fits"),
        (("pareto", "--sizes", "1e9,7e9", "--tokens", "1e12", "--method", "gptq"),
         "published_gptq_kumar covers this best of 5 fits"),
        (("next", *KNOWN, "--method", "gptq", "--candidates", "rows.csv", "--count", "1"),
         "published_gptq_kumar covers this best of 7 fits"),
    ],
)  # fmt: skip
def test_a_fit_is_chosen_that_reads_what_is_asked(data, capsys, arguments, chosen) -> None:
    assert chosen in " ".join(run(capsys, *arguments).split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lr=1e-3", "--try lr=0.001: lr must be at most lr_peak. Got 0.001 above 0.0003"),
        ("tokens=1e18", "--try tokens=1e18: row 1, column 'tokens' must be between"),
        ("lr_peak=0", "column 'lr_peak' must be between"),
    ],
)
def test_schedule_refuses_what_no_run_has(data, capsys, change, message) -> None:
    asked = ("schedule", *KNOWN, "--lr-peak", "3e-4", "--lr", "0", "--try", change)
    assert message in mistake(capsys, *asked)


def test_schedule_says_that_no_shipped_fit_reads_what_is_tried(data, capsys) -> None:
    asked = ("schedule", *KNOWN, "--try", "weight_decay=0.01")
    assert "no shipped fit reads weight_decay" in mistake(capsys, *asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bits", "fit.json", *KNOWN), "either --tolerance or --ppl-ratio"),
        (("bits", "fit.json", *KNOWN, "--tolerance", "1", "--ppl-ratio", "2"), "either"),
        (("bits", "fit.json", *KNOWN, "--ppl-ratio", "0.9"), "--ppl-ratio must be above 1"),
        (("bits", "fit.json", *KNOWN, "--tolerance", "-1"), "tolerance must be"),
        (("bits", "fit.json", *KNOWN, "--tolerance", "1", "--confidence", "1"), "confidence"),
        (("bits", "fit.json", "--tolerance", "1"), "give --tokens"),
        (("bits", "fit.json", "nowhere", "--tolerance", "1"), "nowhere"),
        (("bits", "fit.json", *KNOWN, "--tolerance", "1", "-o", "rows.csv"), "exists already"),
        (("bits", "fit.json", *KNOWN, "--tolerance", "1", "--bits", "x"), "--bits must be numbers"),
    ],
)
def test_a_mistake_in_bits(data, capsys, arguments, message) -> None:
    assert message in mistake(capsys, *arguments)


@pytest.fixture
def matrices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for bits, rows in simulated(5).groupby("spec"):
        table.write(rows, f"{bits.split()[1][-1]}.csv")
    return ["2.csv", "3.csv", "4.csv"]


def test_mix_writes_what_measure_takes(matrices, capsys) -> None:
    out = run(capsys, "mix", *matrices, "--bits-per-weight", "3.3", "-o", "mix.toml")
    assert "no mix within the budget is better" in " ".join(out.split())
    made = Mix.read("mix.toml")
    tables = pd.concat([table.read(path) for path in matrices])
    sizes = {name: (1, int(n)) for name, n in zip(tables["matrix"], tables["n"], strict=True)}
    chosen = made.resolve(sizes)
    best = allocate(tables, 3.3).choices.set_index("matrix")["spec"]
    assert {name: f"rtn {fmt}" for name, fmt in chosen.items()} == best.to_dict()
    count = sum(n for _, n in sizes.values())
    run(capsys, "mix", *matrices, "--memory", f"{3.3 * count / 8}", "-o", "bytes.toml")
    assert Path("bytes.toml").read_text() == Path("mix.toml").read_text()
    run(capsys, "mix", *matrices, "--bits-per-weight", "8", "--or-none", "-o", "some.toml")
    assert any(fmt is None for _, fmt in Mix.read("some.toml").formats)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bits-per-weight", "3"), "give the tables"),
        (("2.csv", "--bits-per-weight", "2"), "smallest settings take 2.25"),
        (("2.csv", "2.csv", "--bits-per-weight", "3"), "has two rows"),
        (("2.csv", "--bits-per-weight", "3", "-o", "mix.json"), "must end in .toml"),
        (("2.csv", "gptq.csv", "--bits-per-weight", "3"), "differ in the format alone"),
        (("mixed.csv", "--bits-per-weight", "3"), "a table of a mix cannot be chosen from"),
        (("absent.csv", "--bits-per-weight", "3"), "no such file"),
        (("2.csv",), "either --bits-per-weight or --memory"),
        (("2.csv", "--memory", "2GB"), "--memory must be a number"),
        (
            ("2.csv", "--bits-per-weight", "16", "--or-none"),
            "every matrix fits the budget as it is",
        ),
        (("2.csv", "--bits-per-weight", "3", "--cost", "kl"), "2.csv: no kl, which qscale sens"),
        (("2.csv", "--memory", "1e9", "--bits-per-weight", "3"), "either --bits-per-weight or"),
        (("2.csv", "--memory", "-1"), "--memory must be a number above zero. Got -1"),
    ],
)
def test_a_mistake_in_mix(matrices, capsys, arguments, message) -> None:
    rows = table.read("3.csv")
    table.write(rows.assign(spec="gptq int3"), "gptq.csv")
    table.write(rows.assign(spec="rtn mix:0123abcd"), "mixed.csv")
    assert message in mistake(capsys, "mix", *arguments)


def test_tokens_prints_an_interval_and_whether_training_is_past_it(data, capsys) -> None:
    out = run(
        capsys, "tokens", "fit.json", *KNOWN, "--bits", "2,3", "--draws", "100", "-o", "t.csv"
    )
    assert "1e+12 is past it" in out
    assert "different models and texts" in " ".join(out.split())
    written = pd.read_csv("t.csv")
    assert (written["low"] < written["critical_tokens"]).all()
    without = run(capsys, "tokens", "fit.json", "--n-params", "1e9", "--bits", "2,3")
    assert "is past it" not in without


def test_tokens_says_when_there_are_none(data, capsys) -> None:
    rows = simulate()
    table.write(
        rows.assign(delta_loss=rows["delta_loss"] * (rows["tokens"] / 1e12) ** -0.6), "f.csv"
    )
    run(capsys, "fit", "f.csv", "--law", "ouyang", "--interval", "model", "-o", "falls.json")
    out = run(capsys, "tokens", "falls.json", *KNOWN, "--bits", "2", "--draws", "50")
    assert "there are no critical tokens" in " ".join(out.split())
    mistaken = mistake(capsys, "tokens", "fit.json", *KNOWN, "--loss", "fit.json")
    assert "must predict loss_fp" in mistaken


def test_pareto_fills_a_memory_and_chooses_among_sizes(data, capsys) -> None:
    asked = ("pareto", "fit.json", "--tokens", "1e12", "--draws", "50")
    filled = run(capsys, *asked, "--memory", "2e9,8e9", "-o", "filled.csv")
    assert "Within 2e+09 bytes" in filled
    assert "Within 8e+09 bytes" in filled
    assert len(pd.read_csv("filled.csv")) == 12
    family = run(capsys, *asked, "--sizes", "1e9,7e9", "--memory", "1e6,4e9")
    assert "Nothing fits 1e+06 bytes" in family
    assert "Frontier of 12 points" in family
    scaled = run(capsys, "pareto", "fit.json", "--tokens-per-param", "20", "--sizes", "1e9",
                 "--draws", "50")  # fmt: skip
    assert "Frontier of 6 points" in scaled


def test_pareto_of_measured_rows(data, capsys) -> None:
    chosen = "method == 'gptq' and source == 'GPTQ paper' and protocol == 'wikitext2/ctx2048'"
    out = run(capsys, "pareto", "--measured", "published_ptq", "--where", chosen)
    assert "OPT-125M" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --sizes to choose from, or --memory to fill, or --measured"),
        (("fit.json", "--measured", "published_ptq"), "give either a fit or --measured"),
        (("fit.json", "--tokens", "1e12"), "give --sizes"),
        (("fit.json", "--memory", "1e9"), "give the training tokens"),
        (("fit.json", "--memory", "0", "--tokens", "1e12"), "--memory must be above zero"),
        (("fit.json", "--sizes", "-1", "--tokens", "1e12"), "--sizes must be above zero"),
        (("fit.json", "--memory", "1e9", "--tokens-per-param", "-1"), "must be above zero"),
        (("fit.json", "--n-params", "1e9", "--tokens", "1e12"), "give --sizes, or --memory"),
        (("--measured", "published_ptq"), "several protocols"),
        (
            ("--measured", "published_ptq", "--where", "bits > 99"),
            "no row of published_ptq is bits",
        ),
        (("fit.json", "--sizes", "7", "--tokens", "1e12"), "write 125e6 for 125 million"),
        (
            ("fit.json", "--sizes", "1e9", "--tokens", "1e12", "--draws", "0"),
            "draws must be a whole",
        ),
    ],
)
def test_a_mistake_in_pareto(data, capsys, arguments, message) -> None:
    assert message in mistake(capsys, "pareto", *arguments)


RATES = ("--lr-peak", "1e-3", "--lr", "1e-4")


def test_schedule_prints_ratios_and_cautions(data, capsys) -> None:
    name = "learning_rate_gptq_lr_anneal"
    out = run(capsys, "schedule", name, *KNOWN, *RATES, "--try", "lr_peak=2e-2", "--try",
              "tokens=2e12,lr=1e-3", "-o", "s.csv")  # fmt: skip
    said = " ".join(out.split())
    assert "above the fitted range" in said
    assert "is not predicted here" in said
    written = pd.read_csv("s.csv")
    assert written["schedule"].tolist()[:3] == [
        "as given",
        "lr_peak=0.02",
        "tokens=2e+12, lr=0.001",
    ]
    plain = run(capsys, "schedule", "fit.json", *KNOWN, "--try", "tokens=2e12")
    assert "does not read the learning rate" in plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give an alternative"),
        (("--try", "lr_peak"), "--try must be NAME=VALUE"),
        (("--try", "lr_peak=fast"), "--try lr_peak: must be a number"),
        (("--try", "lr_peak=1e-3"), "does not read it"),
    ],
)
def test_a_mistake_in_schedule(data, capsys, arguments, message) -> None:
    assert message in mistake(capsys, "schedule", "fit.json", *KNOWN, *arguments)


def test_next_orders_candidates(data, capsys) -> None:
    candidates = simulate(runs=6, seed=5, prefix="new").drop(columns="delta_loss")
    table.write(candidates, "pool.csv")
    asked = ("next", "fit.json", "--candidates", "pool.csv", "--n-params", "1e12", "--tokens",
             "1e13", "--count", "3")  # fmt: skip
    out = run(capsys, *asked, "-o", "next.csv")
    assert "3 of 18 candidates for the prediction" in out
    written = pd.read_csv("next.csv")
    assert written["sd"].is_monotonic_decreasing
    assert "5 of 6 candidates" in run(
        capsys, *asked[:-1], "5", "--where", "bits == 2", "--criterion", "parameters"
    )
    table.write(pd.DataFrame({"n_params": 1e12, "tokens": 1e13, "bits": [3.0, 4.0]}), "own.csv")
    own = run(capsys, *asked[:2], "--candidates", "own.csv", *KNOWN, "--count", "1", "-o", "o.csv")
    assert "1 of 2 candidates" in own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--candidates"),
        (("--candidates", "absent.csv"), "absent.csv"),
        (("--candidates", "rows.csv", "--count", "1000"), "number of candidates, 72"),
        (("--candidates", "rows.csv", "--where", "bits >"), "where 'bits >'"),
        (("--candidates", "few.csv"), "no column 'tokens'"),
        (("--candidates", "rows.csv", "--where", "bits > 99"), "no row of rows.csv is bits > 99"),
    ],
)
def test_a_mistake_in_next(data, capsys, arguments, message) -> None:
    table.write(simulate().drop(columns="tokens"), "few.csv")
    assert message in mistake(capsys, "next", "fit.json", *KNOWN, *arguments)
