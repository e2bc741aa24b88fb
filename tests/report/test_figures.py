"""Figures: they return the axes they were given, draw the fit's numbers, and leave no trace."""

import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from qscale.columns import COLUMNS
from qscale.fit import fit
from qscale.laws import LAWS, Law, get
from qscale.laws.factors import constant, offset, power
from qscale.report import figures
from qscale.report.svg import INK, to_svg
from tests.simulations import TRUE, simulate


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return simulate().assign(family=np.repeat(["A", "B", "C"], 24), source="$x_y$")


@pytest.fixture(scope="module")
def fitted(frame):
    return fit(frame, get("ouyang"), n_boot=0)


@pytest.fixture
def scores() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "fit": ["one", "one", "two", "two"],
            "held_out": ["family A", "family B"] * 2,
            "median_abs_log_error": [0.1, 0.2, 0.3, np.nan],
            "coverage_90": [0.9, 0.8, 1.0, np.nan],
        }
    )


def offsets(ax) -> dict[str, np.ndarray]:
    """Positions of the points of each labelled group."""
    return {c.get_label(): np.asarray(c.get_offsets()) for c in ax.collections}


def test_figures_draw_on_the_axes_given_and_change_no_setting(fitted, frame, scores) -> None:
    before = dict(mpl.rcParams)
    for draw in (
        lambda ax: figures.equation(fitted.law, ax=ax),
        lambda ax: figures.predicted_observed(fitted, frame, ax=ax),
        lambda ax: figures.residuals_against(fitted, frame, "bits", ax=ax),
        lambda ax: figures.residuals_against(fitted, frame, "family", ax=ax),
        lambda ax: figures.held_out_error(scores, ax=ax),
        lambda ax: figures.held_out_coverage(scores, ax=ax),
    ):
        ax = Figure().subplots()
        assert draw(ax) is ax
        new = draw(None)
        assert new.figure is not ax.figure
    assert dict(mpl.rcParams) == before


def test_predicted_against_observed_draws_the_law_at_its_estimates(fitted, frame) -> None:
    ax = figures.predicted_observed(fitted, frame)
    drawn = offsets(ax)
    for family in "ABC":
        rows = frame[frame["family"] == family]
        np.testing.assert_allclose(drawn[family][:, 0], get("ouyang").evaluate(fitted.values, rows))
        np.testing.assert_allclose(drawn[family][:, 1], rows["delta_loss"])
    assert ax.get_xlabel() == "predicted delta_loss (nats/token)"
    identity = ax.get_lines()[0]
    np.testing.assert_array_equal(identity.get_xdata(), identity.get_ydata())


def test_the_bands_hold_their_share_of_the_rows(frame) -> None:
    """Scatter of many simulated runs around the true law lies in the drawn bands as it should."""
    many = simulate(runs=400)
    made = fit(many, get("ouyang"), n_boot=0)
    ax = figures.predicted_observed(made, many)
    x = get("ouyang").evaluate(made.values, many)
    ratio = np.log(many["delta_loss"] / x)
    for level in (50, 90):
        band = next(c for c in ax.collections if c.get_label() == f"{level} % band")
        corners = band.get_paths()[0].vertices
        edges = np.log(np.unique(np.round(corners[:, 1] / corners[:, 0], 9)))
        inside = ((ratio > edges.min()) & (ratio < edges.max())).mean()
        assert inside == pytest.approx(level / 100, abs=0.05)


def test_points_are_told_apart_by_bits_without_families(fitted, frame) -> None:
    drawn = offsets(figures.predicted_observed(fitted, frame.drop(columns="family")))
    assert {"2 bits", "3 bits", "4 bits"} <= set(drawn)
    assert all(len(drawn[f"{bits} bits"]) == 24 for bits in (2, 3, 4))


def test_residual_panels_show_ratios_and_their_medians(fitted, frame) -> None:
    ax = figures.residuals_against(fitted, frame, "bits")
    ratio = frame["delta_loss"] / get("ouyang").evaluate(fitted.values, frame)
    points = np.asarray(ax.collections[0].get_offsets())
    np.testing.assert_allclose(points[:, 1], ratio)
    medians = ax.get_lines()[1]
    np.testing.assert_allclose(medians.get_xdata(), [2, 3, 4])
    np.testing.assert_allclose(medians.get_ydata(), ratio.groupby(frame["bits"]).median())


def test_residuals_against_a_partly_unknown_column(fitted, frame) -> None:
    column = frame["tokens"].where(frame.index >= 12)
    ax = figures.residuals_against(fitted, frame.assign(lr_sum=column), "lr_sum")
    assert len(ax.collections[0].get_offsets()) == 60


def test_binned_medians() -> None:
    values = np.arange(80.0)
    centres, medians = figures.binned_median(values, values**2, bins=8)
    np.testing.assert_allclose(centres, np.arange(8) * 10 + 4.5)
    expected = [np.median(np.arange(i, i + 10.0) ** 2) for i in range(0, 80, 10)]
    np.testing.assert_allclose(medians, expected)


def test_scores_stand_at_their_factor_and_percentage(scores) -> None:
    error = offsets(figures.held_out_error(scores))
    np.testing.assert_allclose(error["one"][:, 0], np.exp([0.1, 0.2]))
    share = offsets(figures.held_out_coverage(scores))
    np.testing.assert_allclose(share["two"][0, 0], 100)


@pytest.mark.parametrize("name", list(LAWS))
def test_every_law_is_typeset(name) -> None:
    text = figures.equation(get(name)).texts[0]
    assert text.get_parse_math()
    assert text.get_text().startswith("$")


def test_names_in_an_equation_are_not_read_as_mathematics() -> None:
    law = Law("mine", "top1_agreement", (constant("k"), offset("lr_schedule", ("a", "b"))))
    text = figures.equation(law).texts[0].get_text()
    assert r"\mathrm{top1\_agreement}" in text
    assert r"\mathrm{lr\_schedule}" in text


def test_a_law_that_cannot_be_typeset_is_shown_as_text() -> None:
    law = Law("mine", "delta_loss", (constant("k"), power("a{b", "beta")))
    text = figures.equation(law).texts[0]
    assert not text.get_parse_math()
    assert text.get_text() == law.formula
    to_svg(figures.equation(law), name="x", alt="y")


def test_labels_carry_units() -> None:
    assert figures.label("n_params") == "n_params (parameters)"
    assert figures.label("tokens") == "tokens"
    assert figures.label("mine") == "mine"
    assert all(figures.label(name).startswith(name) for name in COLUMNS)


def test_svg_stands_alone_follows_the_page_and_is_the_same_each_time(fitted, frame) -> None:
    def svg() -> str:
        ax = figures.residuals_against(fitted, frame, "source")  # a name that looks like TeX
        return to_svg(ax, name="panel", alt='a < "b"')

    text = svg()
    assert text == svg()
    assert text.startswith("<svg ")
    assert '<title>a &lt; "b"</title>' in text
    assert "currentColor" in text
    assert INK not in text
    for gone in ("<?xml", "<!DOCTYPE", "<!--", "<metadata", "http://purl.org"):
        assert gone not in text
    assert all(name.startswith("panel-") for name in re.findall(r'\bid="([^"]+)"', text))
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert used <= set(re.findall(r'\bid="([^"]+)"', text))
    assert used


def test_true_law_has_flat_residuals() -> None:
    """Without noise every ratio is one, in each panel."""
    frame = simulate(between=0, within=0)
    made = fit(frame, get("ouyang"), n_boot=0)
    assert dict(made.parameters()["estimate"]) == pytest.approx(TRUE, rel=1e-4)
    for column in ("n_params", "tokens", "bits"):
        ax = figures.residuals_against(made, frame, column)
        np.testing.assert_allclose(np.asarray(ax.collections[0].get_offsets())[:, 1], 1, rtol=1e-5)
        to_svg(ax, name="x", alt="y")
