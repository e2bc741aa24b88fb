"""The written report: self-contained, escaped, reproducible, and the numbers are the fit's."""

import re
import shlex
from html.parser import HTMLParser
from xml.etree import ElementTree

import cyclopts
import pandas as pd
import pytest

from qscale import datasets, table
from qscale.cli import app, main
from qscale.cli.fit import fit as fit_command
from qscale.errors import QscaleError
from qscale.fit import fit, load
from qscale.laws import Law, get
from qscale.laws.factors import constant, power
from qscale.report import write_report
from qscale.report.content import QUESTION
from qscale.report.evidence import LEAVE_ONE_OUT, HeldOut, gather, summarize
from qscale.report.tables import escape_markdown, number
from qscale.report.words import command, headline
from qscale.report.write import fenced
from tests.report.conftest import EVIL, rows

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, text, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if {"style", "script"} & set(self.open):
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="session")
def page(written) -> Page:
    return Page(written.html.read_text())


def test_the_page_is_well_formed_and_begins_with_the_answer(page) -> None:
    assert page.open == []
    text = " ".join(page.text.split())
    start = text.index(QUESTION) + len(QUESTION)
    assert re.match(
        r" ouyang: At [\d.]+B parameters, [\d.]+[BT] tokens and the average source, the middle of "
        r"its 72 rows, quantization is predicted to raise the loss \(nats/token\) by ",
        text[start:],
    )


def test_nothing_is_loaded_from_elsewhere(written, page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "image")
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            if attributes.get(name) is not None:
                assert attributes[name].startswith("#"), (tag, name)
    style = re.search(r"<style>(.*?)</style>", written.html.read_text(), re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert set(re.findall(r"url\((.)", written.html.read_text())) == {"#"}


def test_ids_are_unique_and_links_have_targets(page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links
    assert {link[1:] for link in links} <= set(ids)


def test_every_figure_has_a_text_alternative_and_is_also_a_file(written, page) -> None:
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    files = sorted(written.figures.glob("*.svg"))
    assert len(drawings) == len(files) == 14  # for each fit 3 numbers, source and 2 more; 2 scores
    assert all(a["role"] == "img" and len(a["aria-label"]) > 10 for a in drawings)
    titles = set()
    for file in files:
        root = ElementTree.parse(file).getroot()
        titles.add(root.find("{http://www.w3.org/2000/svg}title").text)
    assert titles == {a["aria-label"] for a in drawings}
    equation = "ΔL = k · D^β · N^-α · P^-γ · o_source"
    assert equation in titles


def test_numbers_in_the_tables_are_those_of_the_fit(folder, page) -> None:
    parameters = [t for t in page.tables if t[0][:2] == ["parameter", "estimate"]]
    for shown, name in zip(parameters, ("ouyang", "kumar"), strict=True):
        fitted = load(folder / f"{name}.json")
        heading = ["parameter", "estimate", "se", "90 % low", "90 % high", "published"]
        assert shown[0] == heading
        table_ = fitted.parameters(0.9)
        assert [row[0] for row in shown[1:]] == list(table_.index)
        for row, (_, expected) in zip(shown[1:], table_.iterrows(), strict=True):
            values = [float(cell.replace(",", "")) for cell in row[1:5]]
            assert values == pytest.approx(expected.tolist(), rel=6e-4)
        published = {row[0]: row[5] for row in shown[1:]}
        (constants,) = get(name).published
        assert published == {n: number(constants.values.get(n)) for n in table_.index}


def test_markdown_lists_the_same_parameters_and_shows_every_figure(folder, written) -> None:
    text = written.markdown.read_text()
    assert text.startswith(f"# {QUESTION}\n\nouyang: At ")
    for name in ("ouyang", "kumar"):
        for parameter, row in load(folder / f"{name}.json").parameters().iterrows():
            cells = [number(row[c]) for c in ("estimate", "se", "low", "high")]
            shown = escape_markdown(parameter)
            assert f"| {shown} | {' | '.join(cells)} |" in text
    pictures = re.findall(r"\]\((report_figures/[^)]+)\)", text)
    assert len(pictures) == 14
    assert all((written.markdown.parent / picture).is_file() for picture in pictures)


def test_user_text_is_escaped(written, page) -> None:
    assert EVIL in page.text
    assert "<script>alert" not in written.html.read_text()
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    # A panel's data for each fit, and the page's own script.
    assert scripts == [{"type": "application/json"}] * 2 + [{}]
    markdown = written.markdown.read_text()
    assert "<script" not in markdown
    assert "[a](b)" not in markdown
    assert all("<script" not in file.read_text() for file in written.figures.iterdir())


def test_two_runs_give_the_same_bytes(folder, written, tmp_path) -> None:
    fits = [folder / "ouyang.json", folder / "kumar.json"]
    again = write_report(fits, tmp_path / "report.html", n_boot=30)
    assert again.html.read_bytes() == written.html.read_bytes()
    assert again.markdown.read_bytes() == written.markdown.read_bytes()
    names = [file.name for file in sorted(written.figures.iterdir())]
    assert names == [file.name for file in sorted(again.figures.iterdir())]
    for name in names:
        assert (again.figures / name).read_bytes() == (written.figures / name).read_bytes()


def test_fits_of_one_table_are_ranked_on_the_rows_all_can_use(folder, page) -> None:
    side = page.tables[0]
    assert [row[0] for row in side] == ["fit", "ouyang", "kumar"]
    ranking = re.search(
        r"Refitted on parts of the 72 rows .* Error on each family left out: (\w+) ×([\d.]+), "
        r"(\w+) ×([\d.]+)\. (\w+) is best on (\d) of 3",
        page.text,
    )
    first, error, second, other, best, _ = ranking.groups()
    assert {first, second} == {"ouyang", "kumar"}
    assert best == first
    assert float(error) <= float(other)
    errors = {row[0]: float(row[1]) for row in side[1:]}
    assert errors[first] == pytest.approx(float(error), rel=5e-3)
    assert "not ranked" not in page.text


def test_fits_of_different_tables_or_targets_are_not_ranked(folder, tmp_path) -> None:
    table.write(rows(12), tmp_path / "other.csv")
    name = str(tmp_path / "other.csv")
    other = fit(table.read(name), get("ouyang"), n_boot=25, name=name)
    fits = {"one": load(folder / "ouyang.json"), "two": other}
    text = write_report(fits, tmp_path / "r.html", n_boot=25).markdown.read_text()
    assert "not ranked against each other" in text
    assert "is best on" not in text
    # One law on two tables: its parameters stand side by side.
    row = next(line for line in text.splitlines() if line.startswith("| beta"))
    assert row.count(" to ") == 2


def test_a_law_that_needs_more_columns_is_compared_on_common_rows(tmp_path) -> None:
    frame = rows().assign(group_size=[128.0, 64.0, None] * 24)
    table.write(frame, tmp_path / "t.csv")
    name = str(tmp_path / "t.csv")
    fits = {
        law: fit(table.read(name), get(law), n_boot=25, name=name) for law in ("ouyang", "chen")
    }
    text = write_report(fits, tmp_path / "r.html", n_boot=25).markdown.read_text()
    assert "72 rows of" in text
    assert "Splits are made of the 48 rows that all the fits can use" in text


def test_an_existing_output_is_refused_without_force(folder, tmp_path) -> None:
    for existing in ("r.html", "r.md", "r_figures"):
        place = tmp_path / existing.replace(".", "-")
        place.mkdir()
        (place / existing).touch()
        with pytest.raises(QscaleError, match=rf"{existing} exists already.*--force"):
            write_report([folder / "ouyang.json"], place / "r.html", n_boot=25)
        assert [file.name for file in place.iterdir()] == [existing]


def test_force_replaces_everything_of_the_earlier_report(folder, tmp_path) -> None:
    (tmp_path / "r.html").write_text("old")
    (tmp_path / "r_figures").mkdir()
    (tmp_path / "r_figures" / "stale.svg").write_text("old")
    (tmp_path / "r_figures" / "notes.txt").write_text("mine")
    result = write_report([folder / "ouyang.json"], tmp_path / "r.html", force=True, n_boot=25)
    assert result.html.read_text().startswith("<!DOCTYPE html>")
    assert not (result.figures / "stale.svg").exists()
    assert (result.figures / "notes.txt").read_text() == "mine"
    leftovers = list(tmp_path.rglob(".*"))
    assert leftovers == []


def test_mistakes_are_named(folder, tmp_path) -> None:
    with pytest.raises(QscaleError, match=r"--output must end in \.html"):
        write_report([folder / "ouyang.json"], tmp_path / "r.pdf")
    with pytest.raises(QscaleError, match="at least one fit"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(QscaleError, match="given twice"):
        write_report([folder / "ouyang.json"] * 2, tmp_path / "r.html")
    lost = fit(rows(), get("ouyang"), n_boot=0, name=str(tmp_path / "gone.csv"))
    with pytest.raises(QscaleError, match=r"gone\.csv.*--table"):
        write_report({"lost": lost}, tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def parse(line: str) -> dict[str, object]:
    """Read a ``qscale fit`` command the way the command line does."""
    program, name, *arguments = shlex.split(line)
    assert (program, name) == ("qscale", "fit")
    commands = cyclopts.App(default_parameter=app.default_parameter)
    commands.default(fit_command)
    _, bound, _ = commands.parse_args(arguments)
    return dict(bound.arguments)


def test_the_command_to_reproduce_reads_back_as_the_options(tmp_path) -> None:
    frame = rows().rename(columns={"tokens": "seen tokens"})
    frame.to_csv(tmp_path / "it's mine.csv", index=False)
    name = str(tmp_path / "it's mine.csv")
    where = "bits >= 2 and source != 'it\\'s \"quoted\"'"
    mapping = {"tokens": "seen tokens"}
    data = table.read(name, mapping)
    made = fit(
        data.assign(relative_delta=data["delta_loss"]), get("ouyang", "relative_delta"),
        where=where, offset=["source", "family"], fixed={"beta": 0.1 + 0.2, "alpha": -0.25},
        cluster="family", huber_delta=1e-3, n_boot=25, seed=7, name=name, mapping=mapping,
    )  # fmt: skip
    evidence = gather("x", made, data.assign(relative_delta=data["delta_loss"]))
    options = parse(command(evidence))
    assert options["data"] == name
    assert options["law"] == "ouyang"
    assert options["target"] == "relative_delta"
    assert options["map_"] == ["tokens=seen tokens"]
    assert options["where"] == where
    assert options["offset"] == ["source", "family"]
    assert {k: float(v) for k, v in (fix.split("=") for fix in options["fix"])} == {
        "beta": 0.1 + 0.2,
        "alpha": -0.25,
    }
    assert options["cluster"] == "family"
    assert options["huber_delta"] == 1e-3
    assert (options["boots"], options["seed"]) == (25, 7)
    assert options["interval"] == made.interval


def test_the_command_in_the_report_makes_the_same_fit(folder, page, tmp_path, monkeypatch) -> None:
    line = next(line for line in page.text.splitlines() if line.startswith("qscale fit"))
    monkeypatch.chdir(tmp_path)
    main(shlex.split(line)[1:])
    assert load("fit.json").to_json() == load(folder / "ouyang.json").to_json()


def test_a_law_of_the_users_own_is_reproduced_by_the_python_in_the_report(folder) -> None:
    law = Law("mine", "delta_loss", (constant("k"), power("bits", "gamma", sign=-1)))
    name = str(folder / "rows.csv")
    made = fit(table.read(name), law, offset=["source"], n_boot=25, seed=3, name=name)
    scope: dict[str, object] = {}
    exec(command(gather("mine", made, table.read(name))), scope)
    assert scope["result"].to_json() == made.to_json()


def test_a_changed_table_is_noticed(folder, written, tmp_path) -> None:
    changed = rows()
    changed.loc[0, "delta_loss"] *= 2
    table.write(changed, tmp_path / "rows.csv")
    same = written.markdown.read_text()
    assert same.count("Made again from the table for this report, the fit has the same estim") == 2
    fits, changed_table = [folder / "ouyang.json"], tmp_path / "rows.csv"
    result = write_report(fits, tmp_path / "b.html", table=changed_table, n_boot=25)
    text = result.markdown.read_text()
    assert "the fit has the same" not in text
    assert "The table has changed since the fit" in text
    assert "The table at hand is not the one this fit was made on" in text


def test_labels_that_look_alike_in_file_names_keep_their_own_figures(folder, tmp_path) -> None:
    fitted = load(folder / "ouyang.json")
    fits = {"a b": fitted, "a-b": fitted}
    result = write_report(fits, tmp_path / "r.html", n_boot=25)
    names = {file.stem for file in result.figures.glob("*-predicted.svg")}
    assert names == {"a-b-predicted", "a-b-2-predicted"}


def test_without_families_parts_of_the_clusters_are_left_out(tmp_path) -> None:
    table.write(rows().drop(columns="family"), tmp_path / "t.csv")
    name = str(tmp_path / "t.csv")
    made = fit(table.read(name), get("ouyang"), n_boot=25, name=name)
    text = write_report({"x": made}, tmp_path / "r.html", n_boot=25).markdown.read_text()
    assert "fewer than two families: the 24 clusters by run were dealt into 10 parts" in text
    held_out = re.findall(r"^\| part \d+ of 10 \| x \| (\d+) ", text, re.MULTILINE)
    assert len(held_out) == 10
    assert sum(map(int, held_out)) == 72


def test_a_shipped_dataset_is_cited(tmp_path) -> None:
    name = "chinchilla_points"
    made = fit(datasets.load(name), get("chinchilla"), n_boot=0, name=name, huber_delta=1e-2)
    text = write_report({"c": made}, tmp_path / "r.html", n_boot=0).markdown.read_text()
    described = datasets.describe(name)
    assert described.citation in text
    assert "Besiroglu et al., arXiv:2404.10102" in text


def test_a_fence_cannot_be_ended_by_its_content() -> None:
    text = fenced("a\n````\nb")
    assert text.splitlines()[0] == "`````" == text.splitlines()[-1]


def test_the_command_line_writes_and_says_where(folder, tmp_path, capsys) -> None:
    fits = [str(folder / "ouyang.json")]
    main(["report", *fits, "-o", str(tmp_path / "r.html")])
    out = capsys.readouterr().out
    for path in ("r.html", "r.md", "r_figures"):
        assert str(tmp_path / path) in out
        assert (tmp_path / path).exists()
    with pytest.raises(SystemExit) as stopped:
        main(["report", *fits, "-o", str(tmp_path / "r.html")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_frames_are_not_changed(folder) -> None:
    frame = table.read(folder / "rows.csv")
    before = frame.copy()
    gather("x", load(folder / "ouyang.json"), frame)
    pd.testing.assert_frame_equal(frame, before)


def test_a_law_of_bits_alone_has_an_answer_too(tmp_path) -> None:
    frame = rows()
    table.write(frame, tmp_path / "rows.csv")
    law = Law("bits", "delta_loss", (constant("k"), power("bits", "g", sign=-1)))
    made = fit(frame, law, n_boot=0, name=str(tmp_path / "rows.csv"))
    evidence = gather("bits", made, frame)
    scores = pd.DataFrame({
        "fit": "bits", "protocol": LEAVE_ONE_OUT, "held_out": ["a", "b"], "rows": 3,
        "median_abs_log_error": [0.2, None], "coverage_50": 0.5, "coverage_90": 1.0,
    })  # fmt: skip
    held = HeldOut(scores, "family", len(frame), (), scores.iloc[:0])
    said = headline(evidence, held, summarize(scores))
    assert f"In the middle of its {made.data.rows} rows, quantization" in said
    assert "each family left out (but for 1 that could not be scored)" in said
