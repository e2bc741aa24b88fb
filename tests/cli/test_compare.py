"""``qscale compare`` and ``qscale select``: what they print, write and refuse."""

import json
import re

import numpy as np
import pytest

from qscale import table
from qscale.cli import main
from tests.simulations import simulate


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = simulate(runs=16, between=0.1)
    frame["family"] = np.repeat(["A", "B", "C", "D"], 12)
    frame["lr_peak"] = np.repeat(
        np.geomspace(1e-4, 1e-2, 16)[np.random.default_rng(0).permutation(16)], 3
    )
    frame["weight_decay"] = np.repeat(np.random.default_rng(1).uniform(0.01, 0.3, 16), 3)
    frame["delta_loss"] *= (frame["lr_peak"] / 1e-3) ** -0.5
    table.write(frame, "rows.csv")
    return tmp_path


def test_compare_prints_a_league_and_writes_it(rows, capsys) -> None:
    main([
        "compare", "rows.csv", "--laws", "ouyang,kumar", "--split", "family", "--random", "run",
        "--likelihood", "gaussian", "--given-rows", "1", "-o", "league.json",
    ])  # fmt: skip
    out = capsys.readouterr().out
    league = json.loads((rows / "league.json").read_text())
    assert "Held-out delta_loss: 32 rows in 4 clusters (family)" in out
    assert {row["model"] for row in league["table"]} == {"ouyang", "kumar", "mean_by_setting"}
    for row in league["table"]:
        assert f"{row['mean_abs_log_error']:.3g}" in out
    for row in league["tests"]:
        assert f"{row['p_holm']:.2g}" in out
    assert "told 1 measured row of each held-out run" in out
    assert "no p-value can be below 0.12" in out


def test_compare_back_tests_by_tokens(rows, capsys) -> None:
    main(
        [
            "compare",
            "rows.csv",
            "--laws",
            "ouyang",
            "--split",
            "expanding:tokens",
            "--where",
            "bits > 2",
        ]
    )
    out = capsys.readouterr().out
    assert re.search(r"ouyang against each other model", out)
    assert "clusters (run)" in out


LIKE_OUYANG = """
name = "mine"
target = "delta_loss"
factors = [
    {kind = "constant", name = "k"},
    {kind = "power", column = "tokens", name = "beta"},
    {kind = "power", column = "n_params", name = "alpha", sign = -1},
    {kind = "power", column = "bits", name = "gamma", sign = -1},
]
"""


def test_a_law_in_a_file_scores_and_is_selected_from_as_the_same_law_by_name(rows, capsys) -> None:
    (rows / "mine.toml").write_text(LIKE_OUYANG)
    laws = ["--laws", "ouyang,mine.toml", "--split", "family", "-o", "league.json"]
    main(["compare", "rows.csv", *laws])
    scores = {
        row["model"]: row["mean_abs_log_error"]
        for row in json.loads((rows / "league.json").read_text())["table"]
    }
    assert scores["mine.toml"] == pytest.approx(scores["ouyang"], rel=1e-4)
    assert scores["mine.toml"] < scores["mean_by_setting"]
    capsys.readouterr()
    main(["select", "rows.csv", "--law", "mine.toml", "--candidates", "lr_peak,weight_decay"])
    assert "Supported at 0.05: lr_peak." in capsys.readouterr().out


def test_the_selected_law_can_be_fitted_from_its_file(rows, capsys) -> None:
    call = ["select", "rows.csv", "--law", "ouyang", "--candidates", "lr_peak,weight_decay"]
    main([*call, "-o", "chosen.toml"])
    main(["fit", "rows.csv", "--law", "chosen.toml", "-o", "fit.json"])
    law = json.loads((rows / "fit.json").read_text())["law"]
    assert law["name"] == "chosen"
    assert [f["column"] for f in law["factors"] if "column" in f][-1] == "lr_peak"
    capsys.readouterr()
    with pytest.raises(SystemExit) as refused:
        main([*call, "-o", "chosen.toml"])
    assert refused.value.code == 2
    assert "chosen.toml exists already" in capsys.readouterr().err


def test_select_names_the_factor_that_made_the_data(rows, capsys) -> None:
    main(["select", "rows.csv", "--law", "ouyang", "--candidates", "lr_peak,weight_decay"])
    out = capsys.readouterr().out
    assert "48 rows in 16 clusters (run). No row was set aside." in out
    assert "Supported at 0.05: lr_peak." in out
    assert (
        "are constant within every run: only the differences between the 16 runs inform them"
        in " ".join(out.split())
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "--laws", "ouyang", "--split", "famly"), "--split famly: the table has no column"),
        (("compare", "--laws", "ouyang", "--split", "biggest:tokens"), "unknown kind 'biggest'"),
        (("compare", "--laws", "ouyan", "--split", "family"), "Did you mean 'ouyang'"),
        (("compare", "--split", "family"), "nothing to compare; give --laws"),
        (("compare", "--laws", "ouyang"), "--split"),
        (("compare", "--laws", "ouyang", "--split", "family", "--given-rows", "-1"), "--given-rows"),
        (("compare", "--laws", "ouyang", "--split", "family", "--likelihood", "cauchy"), "--likelihood"),
        (("compare", "--laws", "ouyang", "--split", "family", "-o", "league.txt"), "must end in one of"),
        (("compare", "--laws", "ouyang", "--split", "family", "-o", "rows.csv"), "exists already"),
        (("compare", "--laws", "ouyang", "--split", "family", "--where", "bits > 9"), "no row is bits > 9"),
        (("select", "--law", "ouyan", "--candidates", "lr_peak"), "Did you mean 'ouyang'"),
        (("select", "--law", "ouyang", "--candidates", "lr_peek"), "lr_peek"),
        (("select", "--law", "ouyang", "--candidates", "bits"), "has this factor already"),
        (("select", "--law", "ouyang", "--candidates", "lr_peak", "-o", "x.json"), "must end in .toml"),
        (("select", "--law", "ouyang", "--candidates", ","), "--candidates names no factor"),
        (("select", "--law", "ouyang", "--candidates", "lr_peak", "--alpha", "2"), "--alpha must be"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_exit_status_two(rows, capsys, arguments, message) -> None:
    command, *options = arguments
    with pytest.raises(SystemExit) as stopped:
        main([command, "rows.csv", *options])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in rows.iterdir()) == ["rows.csv"]
