"""The command line: what it prints, what it writes, and one line for every mistake."""

import json
import re
import subprocess
import sys

import pandas as pd
import pytest

from qscale import table
from qscale.cli import main
from qscale.fit import load
from tests.simulations import simulate


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table.write(simulate().assign(source="paper"), "rows.csv")
    return tmp_path


def run(capsys, *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def mistake(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("qscale: ")
    assert "Traceback" not in message
    return message


def test_fit_prints_a_summary_and_writes_a_fit(data, capsys) -> None:
    out = run(capsys, "fit", "rows.csv", "--law", "ouyang", "--boots", "50", "-o", "fit.json")
    assert "ΔL = k · D^β · N^-α · P^-γ" in out
    assert "72 rows of rows.csv in 24 clusters (run)" in out
    assert "converged" in out
    fitted = load("fit.json")
    for name, row in fitted.parameters().iterrows():
        assert f"{row['estimate']:.4g}" in out, name


def test_fit_maps_filters_and_holds(data, capsys) -> None:
    pd.read_csv("rows.csv").rename(columns={"tokens": "D"}).to_csv("theirs.csv", index=False)
    out = run(
        capsys, "fit", "theirs.csv", "--law", "ouyang", "--map", "tokens=D", "--where", "bits > 2",
        "--fix", "beta=0.4", "--boots", "0", "-o", "fit.json",
    )  # fmt: skip
    assert "24 rows because not bits > 2" in out
    assert "held" in out
    fitted = load("fit.json")
    assert fitted.values["beta"] == 0.4
    assert fitted.data.options["mapping"] == {"tokens": "D"}


def test_predict_prints_intervals_and_warns_of_extrapolation(data, capsys) -> None:
    run(capsys, "fit", "rows.csv", "--law", "ouyang", "--boots", "50", "-o", "fit.json")
    out = run(
        capsys, "predict", "fit.json", "--n-params", "1e6", "--tokens", "1e12", "--bits", "3,4",
        "-o", "predicted.csv",
    )  # fmt: skip
    assert "below the fitted range" in out
    predicted = table.read("predicted.csv")
    assert predicted["bits"].tolist() == [3.0, 4.0]
    assert (predicted["low_90"] < predicted["delta_loss"]).all()


def test_laws_and_datasets_are_listed(capsys) -> None:
    listed = run(capsys, "laws")
    assert all(name in listed for name in ("ouyang", "kumar", "chen", "lr_anneal", "chinchilla"))
    assert "k = 0.017" in run(capsys, "laws", "ouyang")
    assert "published_ptq" in run(capsys, "datasets")
    assert "published_rtn_kumar" in run(capsys, "fits")
    assert "gamma_post" in run(capsys, "fits", "published_rtn_kumar")
    assert "OPT-66B" in run(capsys, "datasets", "published_ptq")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "rows.csv", "--law", "ouyan"), "Did you mean 'ouyang'"),
        (("fit", "absent.csv", "--law", "ouyang"), "absent.csv"),
        (("fit", "novel.txt", "--law", "ouyang"), "must end in one of"),
        (("fit", "novel.csv", "--law", "ouyang"), "is this a CSV table?"),
        (("fit", "empty.csv", "--law", "ouyang"), "no rows"),
        (("fit", "rows.csv", "--law", "chen"), "no column 'group_size'"),
        (("fit", "rows.csv", "--law", "ouyang", "--map", "tokens"), "--map must be NAME=VALUE"),
        (("fit", "rows.csv", "--law", "ouyang", "--fix", "beta=x"), "--fix beta: must be a number"),
        (("fit", "rows.csv", "--law", "ouyang", "--boots", "many"), "--boots"),
        (("fit", "rows.csv", "--law", "ouyang", "--boots", "-1"), "--boots"),
        (("fit", "rows.csv"), "--law"),
        (("fit", "rows.csv", "--law", "ouyang", "-o", "rows.csv"), "must end in .json"),
        (("fit", "rows.csv", "--law", "ouyang", "-o", "fit.json"), "exists already"),
        (("fitt", "rows.csv"), "fit"),
        (("predict", "absent.json"), "absent.json"),
        (("predict", "rows.csv"), "rows.csv"),
        (("predict", "fit.json"), "give --tokens"),
        (("predict", "fit.json", "--bits", "four"), "--bits must be numbers.*Got 'four'"),
        (("predict", "fit.json", "--group-size", "big"), "--group-size must be whole.*Got 'big'"),
        (("predict", "fit.json", "--text", "novel.txt"), "--text needs a checkpoint"),
        (("predict", "fit.json", "nowhere"), "nowhere"),
        (("datasets", "published"), "published_ptq"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(data, capsys, arguments, message) -> None:
    (data / "novel.txt").write_text("Call me Ishmael.")
    (data / "novel.csv").write_text("Call me Ishmael.\nSome years ago.\n")
    (data / "empty.csv").write_text("n_params,tokens,bits,delta_loss,run\n")
    main(["fit", "rows.csv", "--law", "ouyang", "--boots", "0", "-o", "fit.json"])
    capsys.readouterr()
    before = {path: path.read_bytes() for path in data.iterdir()}
    assert re.search(message, mistake(capsys, *arguments))
    assert {path: path.read_bytes() for path in data.iterdir()} == before


def test_the_modelling_side_loads_without_torch_or_statsmodels() -> None:
    code = (
        "import sys, qscale, qscale.cli, qscale.table, qscale.datasets, qscale.fit, qscale.predict,"
        "qscale.load, qscale.cli.predict, qscale.cli.regress,"
        "qscale.validate, qscale.laws, qscale.checkpoint\n"
        "heavy = {'torch', 'transformers', 'statsmodels', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, json, qscale; print(json.dumps([m for m in sys.modules if m[:6] in ('numpy','pandas')]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []
