"""Tables, citations and model cards: other programs read them, and their numbers are the fit's."""

import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from qscale import datasets, table
from qscale.errors import QscaleError
from qscale.fit import fit, load
from qscale.laws import get
from qscale.report import write_report
from qscale.report.card import degradation
from qscale.report.cite import bibtex, methods_paragraph
from qscale.report.evidence import Group, gather, held_out
from qscale.report.export import to_latex
from tests.report.conftest import EVIL
from tests.simulations import simulate


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """Report of one fit with everything beside it."""
    place = tmp_path_factory.mktemp("exported")
    return write_report(
        [folder / "ouyang.json"], place / "r.html", tables_in=place / "tables",
        card=place / "card.md", n_boot=25,
    )  # fmt: skip


@pytest.fixture(scope="module")
def evidence(folder):
    return gather("ouyang", load(folder / "ouyang.json"), table.read(folder / "rows.csv"))


def test_every_table_of_the_report_is_a_csv_and_a_latex_file(exported) -> None:
    tables = len(re.findall(r"<table ", exported.html.read_text()))
    files = sorted(exported.tables.iterdir())
    assert len(files) == 2 * tables
    assert {file.suffix for file in files} == {".csv", ".tex"}


def test_csv_keeps_every_digit(exported, folder) -> None:
    made = load(folder / "ouyang.json").parameters()
    read = pd.read_csv(exported.tables / "ouyang-parameters.csv", index_col="parameter")
    np.testing.assert_array_equal(read["estimate"], made["estimate"])
    np.testing.assert_array_equal(read["90 % high"], made["high"])


def test_latex_is_balanced_and_says_what_the_report_says(exported) -> None:
    for file in exported.tables.glob("*.tex"):
        text = file.read_text()
        assert text.count(r"\begin{") == text.count(r"\end{") == 2
        bare = re.sub(r"\\[{}]", "", text)
        assert bare.count("{") == bare.count("}")
        body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        (columns,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
        for line in body:
            assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
        # Special characters appear only where they mean something.
        assert not re.search(r"(?<!\\)[%#_]", text.split(r"\label")[0] + "".join(body))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX is installed")
def test_latex_sets_every_table_within_the_text(exported, tmp_path) -> None:
    files = sorted(exported.tables.glob("*.tex"))
    inputs = [rf"\input{{{file.as_posix()}}}\clearpage" for file in files]
    packages = r"\usepackage{booktabs,graphicx}"
    document = [r"\documentclass{article}", packages, r"\begin{document}", *inputs]
    (tmp_path / "all.tex").write_text("\n".join([*document, r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"({len(files)} pages" in done.stdout
    assert "Overfull" not in done.stdout


def test_latex_titles_a_table_by_the_headings_above_it(exported) -> None:
    assert (
        r"\caption{ouyang: Parameters. " in (exported.tables / "ouyang-parameters.tex").read_text()
    )


def test_latex_escapes_what_a_user_wrote() -> None:
    text = to_latex(pd.DataFrame({"x_1": [EVIL]}, index=["50 % & more"]), "{", "tab:x")
    assert r"50 \% \& more & \textless{}script\textgreater{}" in text
    assert r"\caption{\{}" in text


def test_the_card_is_read_by_the_hubs_own_library(exported, folder) -> None:
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard(exported.card.read_text())
    assert card.data.library_name == "qscale"
    assert "quantization" in card.data.tags
    assert card.data.model_name == "ouyang"
    results = card.data.eval_results
    splits = {r.dataset_split for r in results}
    assert splits >= {f"family {name} left out" for name in ("Ash", "Birch", "Cedar")}
    # The same numbers as in the report's table of held-out scores.
    scores = pd.read_csv(exported.tables / "held-out-1.csv", index_col="held out")
    for name, fit_name in (("", "ouyang"), ("_mean_by_setting", "mean_by_setting")):
        own = scores[scores["fit"] == fit_name]
        for result in (r for r in results if r.metric_type == f"median_error_factor{name}"):
            expected = own.loc[result.dataset_split.removesuffix(" left out"), "error, ×"]
            assert result.metric_value == pytest.approx(expected, rel=1e-12)


def test_the_cards_degradation_is_measured_beside_predicted(evidence) -> None:
    found = degradation(evidence)
    rows = evidence.rows
    assert found["rows"].sum() == len(rows)
    cell = rows[(rows["family"] == "Ash") & (rows["bits"] == 3)]
    expected = evidence.fit.center(cell.drop(columns="run"))
    assert found.loc["Ash, 3", "measured"] == pytest.approx(cell["delta_loss"].median())
    assert found.loc["Ash, 3", "predicted"] == pytest.approx(np.median(expected))


def test_citations_name_the_law_its_data_and_its_methods() -> None:
    name = "ptq_vs_learning_rate"
    frame = datasets.load(name)
    made = fit(frame, get("lr_anneal", "relative_delta"), n_boot=0, name=name)
    evidence = gather("x", made, frame)
    text = bibtex([evidence])
    keys = re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE)
    assert len(keys) == len(set(keys))
    assert {"catalantatjer2025", "patterson1971", "huber1981", "qscale"} <= set(keys)
    # The dataset's citation has the title that the law's source leaves out.
    assert "title = {Training Dynamics Impact Post-Training Quantization Robustness}" in text
    assert text.count("{") == text.count("}")


def test_two_papers_of_one_author_and_year_have_keys_of_their_own(evidence) -> None:
    law = replace(
        evidence.fit.law, source="Liu et al., arXiv:2401.00001; Liu and Wu, arXiv:2402.00002"
    )
    member = replace(evidence, law=law)
    keys = re.findall(r"^@\w+\{(\w+),$", bibtex([member]), re.MULTILINE)
    assert [key for key in keys if key.startswith("liu")] == ["liu2024a", "liu2024b"]


def test_the_methods_paragraph_says_what_was_done(evidence) -> None:
    group = Group((evidence,), held_out([evidence], n_boot=25, progress=lambda _: None))
    text = methods_paragraph(evidence, group)
    made = evidence.fit
    assert f"{made.data.rows} rows of {made.data.name} in {made.data.clusters} clusters" in text
    assert "Huber's loss, linear beyond" in text
    assert made.data.sha256[:12] in text
    summary = group.summary["ouyang", "leave one out"]
    assert f"a factor of {np.exp(summary.error):.3g}" in text


@pytest.mark.parametrize("known", [1.0, 0.5])
def test_the_methods_paragraph_says_how_rows_with_errors_count(known) -> None:
    frame = simulate(runs=12)
    errors = np.where(np.arange(len(frame)) < known * len(frame), 0.01, np.nan)
    frame["delta_loss_se"] = errors * frame["delta_loss"]
    each = gather("x", fit(frame, get("ouyang"), n_boot=0), frame)
    text = methods_paragraph(each, Group((each,), held_out([each], n_boot=25, progress=len)))
    rows = "Each row" if known == 1 else "18 rows"
    assert f"{rows} with a known standard error ha" in text
    assert ("Huber's loss" in text) == (known < 1)


def test_a_card_needs_a_name_of_its_own(folder, tmp_path) -> None:
    for name in ("card.txt", "r.md"):
        with pytest.raises(QscaleError, match="--model-card must end in .md"):
            write_report([folder / "ouyang.json"], tmp_path / "r.html", card=tmp_path / name)
    (tmp_path / "tables").mkdir()
    with pytest.raises(QscaleError, match="tables exists already"):
        write_report([folder / "ouyang.json"], tmp_path / "r.html", tables_in=tmp_path / "tables")
