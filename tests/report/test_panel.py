"""The panel's numbers are Python's: trees, quantiles and predictions, in node and in Chromium."""

import json
import shutil
import subprocess
from importlib import resources
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from qscale import table
from qscale.columns import COLUMNS
from qscale.errors import QscaleError
from qscale.fit import fit
from qscale.fit.shipped import find
from qscale.laws import LAWS, Law, get
from qscale.laws.compose import natural
from qscale.laws.factors import constant, offset, power
from qscale.laws.law import columns_of
from qscale.laws.shapes import binary_log, effective, saturating, shifted_power
from qscale.laws.user import law_from_function
from qscale.predict import outside, predict
from qscale.report import write_report
from qscale.report.blocks import Panel, Text
from qscale.report.evidence import gather
from qscale.report.expression import trees
from qscale.report.panel import law_of, panel
from tests.report import browser
from tests.report.conftest import rows
from tests.simulations import simulate

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
needs_browser = pytest.mark.skipif(browser.binary() is None, reason="Chromium is not installed")
SHIPPED = ("learning_rate_gptq_lr_anneal", "published_gptq_kumar", "chinchilla_points_chinchilla")


def node(code: str, data: object) -> object:
    """Run code after the page's arithmetic, with ``data`` at hand, and return what it prints."""
    files = resources.files("qscale.report").joinpath("templates")
    script = files.joinpath("law.js").read_text() + (
        'const data = JSON.parse(require("fs").readFileSync(0, "utf-8"));'
        f"console.log(JSON.stringify({code}));"
    )
    done = subprocess.run(
        ["node", "-e", script], input=json.dumps(data), text=True, capture_output=True, check=True
    )
    return json.loads(done.stdout)


def grid(law: Law, n: int = 7, seed: int = 3) -> pd.DataFrame:
    """Rows that every law can be evaluated at."""
    rng = np.random.default_rng(seed)
    spans = {
        "n_params": (1e7, 1e11), "tokens": (1e9, 1e13), "bits": (2, 8), "group_size": (16, 512),
        "lr_peak": (1e-4, 1e-3), "lr": (1e-6, 9e-5), "decay_share": (0.1, 0.9),
        "quantized_share": (0.1, 1.0), "calibration_samples": (8, 512),
    }  # fmt: skip
    frame = pd.DataFrame(
        {c: np.exp(rng.uniform(*np.log(spans.get(c, (1.5, 9.0))), n)) for c in law.columns}
    )
    for column, levels in labels(law.spec()["factors"]):
        frame[column] = [levels[i % len(levels)] for i in range(n)]
    return frame


def labels(entry: object) -> list[tuple[str, list[object]]]:
    """Columns that a law's spec reads as labels, with their levels."""
    if isinstance(entry, dict) and "levels" in entry:
        return [(entry["column"], entry["levels"])]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [x for part in inner if isinstance(part, dict | list) for x in labels(part)]


def every_law() -> list[Law]:
    """All named laws, and one that holds the kinds of factors that none of them has."""
    fmt = effective("fmt", ("int", "nvfp4"), "a")
    width = effective("bits", (2.0, 4.0), "a", lossless=16.0)
    sizes = offset("source", ("x", "y", "z"))
    own = (
        binary_log("group_size"),
        shifted_power("bits", "e", shift=0.5),
        saturating("exponent_bits", "g", "b"),
        fmt,
        sizes,
    )
    return [
        *LAWS.values(),
        Law("own", "delta_loss", own),
        Law("widths", "delta_loss", (width, power("n_params", "a"))),
        Law("plain", "delta_loss", (natural(constant("k"), power("bits", "b", sign=-1)),)),
    ]


def starting(law: Law) -> np.ndarray:
    """Internal parameters inside the bounds, none of them zero."""
    return np.array([p.internal(p.starts[-1]) for p in law.parameters]) * 1.01 + 0.003


@needs_node
@pytest.mark.parametrize("law", every_law(), ids=lambda law: law.name)
def test_trees_have_the_value_and_gradient_of_the_law(law) -> None:
    frame, theta = grid(law), starting(law)
    data = columns_of(law, frame)
    shape = (len(frame), len(theta))
    value = np.broadcast_to(law.location(theta[None], data)[0], len(frame))
    gradient = np.broadcast_to(law.gradient(theta[None], data)[0], shape)
    found = node(
        "data.rows.map((row) => data.trees.map((tree) => evaluate(tree, data.theta, row)))",
        {
            "trees": trees(law.factors),
            "theta": theta.tolist(),
            "rows": frame.to_dict(orient="records"),
        },
    )
    assert np.isfinite(value).all()
    for parts, right, slope in zip(found, value, gradient, strict=True):
        assert sum(part[0] for part in parts) == pytest.approx(right, rel=1e-12, abs=1e-12)
        total = sum(np.array(part[1] or np.zeros(len(theta))) for part in parts)
        np.testing.assert_allclose(total, slope, rtol=1e-10, atol=1e-12)


@needs_node
def test_a_level_that_a_law_does_not_know_has_no_value() -> None:
    law = Law("widths", "delta_loss", (effective("bits", (2.0, 4.0), "a", lossless=16.0),))
    found = node(
        "[2, 3, 16, 20].map((bits) => evaluate(data.tree, data.theta, {bits})[0])",
        {"tree": trees(law.factors)[0], "theta": [0.5, -0.1, -0.2]},
    )
    right = law.location(np.array([[0.5, -0.1, -0.2]]), {"bits": np.array([2.0, 3.0, 16.0, 20.0])})
    assert found[1] is None
    np.testing.assert_allclose(np.array(found, dtype=float), right[0], rtol=1e-14)


@needs_node
def test_student_quantiles_are_scipys() -> None:
    nodes, weights = np.polynomial.legendre.leggauss(24)
    dof = [1.0, 1.3, 2.0, 3.7, 10.0, 49.99, 50.0, 333.3, 1e4, 1e6]
    found = node(
        "data.dof.map((dof) => [0.75, 0.95].map((p) => studentQuantile(p, dof, data.rule)))",
        {"dof": dof, "rule": [nodes.tolist(), weights.tolist()]},
    )
    np.testing.assert_allclose(found, [student.ppf([0.75, 0.95], d) for d in dof], rtol=1e-12)


def fits():
    """Fits of every interval method, with offsets, slopes by run and a link of its own."""
    frame = rows(30)
    frame = pd.concat([frame, frame.assign(bits=frame["bits"] + 3)], ignore_index=True)
    frame.loc[90:, "delta_loss"] *= 0.02
    made = {
        interval: fit(
            frame, get("ouyang"), offset=["source"], n_boot=n, interval=interval, random=["run"]
        )
        for interval, n in (("model", 0), ("sandwich", 0), ("conformal", 0), ("profile", 0))
    }
    made["bootstrap"] = fit(frame, get("kumar"), interval="bootstrap", n_boot=150)
    made["slopes"] = fit(frame, get("ouyang"), random=["run", "bits|run"], n_boot=0)
    plain = Law(
        "plain", "delta_loss", (natural(constant("k"), power("bits", "b", sign=-1)),),
        link="identity",
    )  # fmt: skip
    made["identity"] = fit(frame, plain, n_boot=0)
    return made | {name: find(name) for name in SHIPPED}


def points(fitted) -> list[dict[str, object]]:
    """Settings inside and far outside of what was fitted, labels known and not."""
    rng = np.random.default_rng(1)
    found = []
    for widen in (0.0, 0.0, 0.5, 2.0):
        point: dict[str, object] = {}
        for column in fitted.columns:
            low, high = fitted.data.ranges[column]
            low = max(low, 1e-7)
            edge = (high / low) ** widen
            value = float(np.exp(rng.uniform(np.log(low / edge), np.log(high * edge))))
            point[column] = float(np.clip(value, COLUMNS[column].low, COLUMNS[column].high))
        for column, levels in fitted.categories.items():
            point[column] = str(rng.choice(["", *levels]))
        found.append(point)
    return found


@needs_node
def test_predictions_in_the_page_are_those_of_python() -> None:
    for name, fitted in fits().items():
        law, settings = law_of(fitted), points(fitted)
        json.dumps(law, allow_nan=False)
        found = node(
            "data.settings.map((point) => predict(data.law, point))",
            {"law": law, "settings": settings},
        )
        for point, answer in zip(settings, found, strict=True):
            # One row at a time, as a page asks: a bootstrap's draws depend on the number of rows.
            right = predict(fitted, pd.DataFrame([point])).iloc[0]
            ends = [*answer["intervals"]["50"], *answer["intervals"]["90"]]
            expected = right[[fitted.target, "low_50", "high_50", "low_90", "high_90"]]
            shown = [np.inf if x is None else x for x in (answer["median"], *ends)]
            np.testing.assert_allclose(shown, expected.astype(float), rtol=1e-9, err_msg=name)


def test_fits_that_a_page_cannot_evaluate_say_why(tmp_path) -> None:
    frame = simulate(runs=24)
    own = law_from_function(
        lambda data, a, b: a * data["bits"] ** -b,
        name="fall", target="delta_loss", columns=["bits"],
        parameters={"a": {"starts": [1.0], "scale": "log"}, "b": {"starts": [1.0]}},
    )  # fmt: skip
    found = panel(gather("x", fit(frame, own, n_boot=0), frame), "x")
    assert isinstance(found, Text)
    assert "Python function" in found.text
    by_bits = fit(frame, get("ouyang"), random=["bits"], n_boot=0)
    found = panel(gather("x", by_bits, frame), "x")
    assert isinstance(found, Text)
    assert "known value of bits" in found.text


def test_inputs_start_in_the_middle_and_know_the_fitted_ranges(tmp_path) -> None:
    frame = simulate(runs=24)
    made = fit(frame, get("ouyang"), n_boot=0)
    found = panel(gather("x", made, frame), "x")
    assert isinstance(found, Panel)
    for each in found.law["inputs"]:
        assert (each["low"], each["high"]) == made.data.ranges[each["column"]]
        assert each["low"] <= each["start"] <= each["high"]
        assert each["ends"][0] <= each["low"] < each["high"] <= each["ends"][1]
    assert [each["log"] for each in found.law["inputs"]] == [True, True, False]


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory):
    """Report of a fit with offsets and an anneal factor, and the fit."""
    folder = tmp_path_factory.mktemp("page")
    rng = np.random.default_rng(5)
    frame = rows(30)
    peak = np.repeat(10 ** rng.uniform(-3.7, -3, 30), 3)
    frame = frame.assign(lr_peak=peak, lr=peak * np.tile([1.0, 0.5, 0.0], 30))
    name = str(folder / "rows.csv")
    table.write(frame, name)
    made = fit(table.read(name), get("lr_anneal"), offset=["source"], n_boot=0, name=name)
    return write_report({"x": made}, folder / "r.html", n_boot=0).html, made


@needs_browser
def test_the_page_in_a_browser(page) -> None:
    path, made = page
    with browser.Browser() as chrome:
        chrome.open(path)
        assert chrome.run("document.querySelector('.panel form').hidden") is False
        start = chrome.run("document.querySelector('[data-output=median]').dataset.value")
        _set(chrome, "source", made.categories["source"][1])
        for size, share, bits in ((1.3e9, 0.25, 3.5), (7e13, 1.0, 2.0)):
            _set(chrome, "n_params", size)
            _set(chrome, "lr", share)
            _set(chrome, "bits", bits)
            _compare(chrome, made)
        assert "n_params beyond" in chrome.run("document.querySelector('.warning').innerText")
        _refused(chrome, made)
        chrome.run("document.querySelector('[data-reset]').click()")
        _set(chrome, "source", "")
        again = chrome.run("document.querySelector('[data-output=median]').dataset.value")
        assert float(again) == pytest.approx(float(start), rel=1e-12)
        assert chrome.run("document.querySelector('.warning').hidden") is True
        _keyboard(chrome)
        _sorting(chrome)
        for width in (360, 768, 1280):
            chrome.size(width, 800, mobile=width < 500)
            assert chrome.run("document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark"):
            chrome.scheme(scheme)
            assert chrome.run(CONTRAST) == []
        chrome.scheme("dark", media="print")
        sliders = "getComputedStyle(document.querySelector('[data-slider]')).display"
        assert chrome.run(sliders) == "none"
        assert chrome.complaints() == []
        assert chrome.requests() == [path.resolve().as_uri()]


@needs_browser
def test_a_script_that_is_not_the_reports_own_is_not_run(page, tmp_path) -> None:
    text = (
        page[0].read_text().replace("</main>", "<script>document.title = 'taken'</script></main>")
    )
    (tmp_path / "r.html").write_text(text)
    with browser.Browser() as chrome:
        chrome.open(tmp_path / "r.html")
        assert chrome.run("document.title") != "taken"
        assert any("Content Security Policy" in line for line in chrome.complaints())


def _refused(chrome, made) -> None:
    """Type what no model has: the page answers it no more than Python does."""
    _set(chrome, "n_params", 1e15)
    said = chrome.run("document.querySelector('.warning').innerText")
    assert said == "n_params must be a number from 1000 to 100T."
    assert chrome.run("document.querySelector('[data-output=median]').innerText") == "–"
    assert chrome.run("document.querySelector('[data-input=n_params]').ariaInvalid") == "true"
    point = {"n_params": 1e15, "tokens": 1e12, "bits": 3.0, "lr_peak": 1e-3, "lr": 0.0}
    with pytest.raises(QscaleError, match="'n_params' must be between 1000 and 1e\\+14"):
        predict(made, pd.DataFrame([point]))
    _set(chrome, "n_params", 1e9)
    assert chrome.run("document.querySelector('[data-input=n_params]').ariaInvalid") == "false"


def _set(chrome, column: str, value: object) -> None:
    chrome.run(
        f"{{const e = document.querySelector('[data-input={column}]'); "
        f"e.value = {json.dumps(str(value))}; e.dispatchEvent(new Event('input'))}}"
    )


def _compare(chrome, made) -> None:
    """Compare what the panel shows with Python at the values it holds."""
    values = chrome.run(
        "Object.fromEntries([...document.querySelectorAll('[data-input]')]"
        ".map((e) => [e.dataset.input, e.value]))"
    )
    point = {k: v if k == "source" else float(v) for k, v in values.items()}
    point["lr"] *= point["lr_peak"]
    frame = pd.DataFrame([point])
    right = predict(made, frame).iloc[0]
    shown = chrome.run(
        "Object.fromEntries([...document.querySelectorAll('[data-output]')]"
        ".map((e) => [e.dataset.output, e.dataset.value]))"
    )
    shown = {name: float(text) for name, text in shown.items() if text}
    assert shown["median"] == pytest.approx(right["delta_loss"], rel=1e-9)
    assert shown["perplexity"] == pytest.approx(right["perplexity_ratio"], rel=1e-9)
    for name in ("low_50", "high_50", "low_90", "high_90"):
        assert shown[name] == pytest.approx(right[name], rel=1e-9)
    flagged = chrome.run(
        "[...document.querySelectorAll('.note.outside')].map((e) => e.dataset.note)"
    )
    assert {
        c
        for c in ("n_params", "tokens", "bits")
        if any(f"{c} =" in s for s in outside(made, frame))
    } == set(flagged)


def _keyboard(chrome) -> None:
    """Move a slider by the arrow keys: number, spoken value and answer follow."""
    before = chrome.run("document.querySelector('[data-output=median]').dataset.value")
    chrome.run("document.querySelector('[data-slider=n_params]').focus()")
    chrome.key("ArrowRight", 39)
    number = chrome.run("document.querySelector('[data-input=n_params]').value")
    spoken = chrome.run(
        "document.querySelector('[data-slider=n_params]').getAttribute('aria-valuetext')"
    )
    assert f"{float(number):.3e}"[:4] == f"{float(spoken.rstrip('BMT')):.3e}"[:4]
    after = chrome.run("document.querySelector('[data-output=median]').dataset.value")
    assert float(after) < float(before)


def _sorting(chrome) -> None:
    """Sort a table by the keyboard, both ways."""
    chrome.run(
        "globalThis.sorted = [...document.querySelectorAll('table.data')]"
        ".find((t) => t.tHead.innerText.startsWith('parameter')); "
        "sorted.tHead.querySelectorAll('button')[1].focus()"
    )
    column = "[...sorted.tBodies[0].rows].map((r) => Number(r.cells[1].innerText.replace(',', '')))"
    orders = []
    for wanted in ("ascending", "descending"):
        chrome.key("Enter", 13)
        assert chrome.run("sorted.tHead.rows[0].cells[1].getAttribute('aria-sort')") == wanted
        orders.append(chrome.run(column))
    assert all(a <= b for a, b in pairwise(orders[0]))
    assert orders[1] == orders[0][::-1]


CONTRAST = """
(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((s, x, i) => s + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll("body *:not(svg *):not(script):not(noscript)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility()) continue;
    const [a, b] = [luminance(parse(getComputedStyle(e).color)), luminance(behind(e))].sort();
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${e.tagName} ${e.textContent.slice(0, 30)} ${ratio}`);
  }
  return poor;
})()
"""
