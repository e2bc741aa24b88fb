"""Strange tables give a fit or an error that says what is wrong, never a warning or a crash."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qscale.errors import FitError, TableError
from qscale.fit import fit
from qscale.laws import get
from tests.simulations import TRUE, simulate

INTERVALS = ["model", "sandwich", "bootstrap", "profile"]


def ouyang(table: pd.DataFrame, **options):
    return fit(table, get("ouyang"), **({"n_boot": 30} | options))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.head(4), FitError, "4 usable rows cannot determine the 4 parameters"),
        (lambda t: t.head(0), TableError, "is empty in every row"),
        (lambda t: t.assign(bits=4.0), FitError, "'bits' has 1 distinct value.*--fix gamma="),
        (lambda t: t.assign(delta_loss=-t["delta_loss"]), FitError, "not above zero"),
        (
            lambda t: t.assign(delta_loss=np.nan),
            TableError,
            "column 'delta_loss' .* is empty in every row",
        ),
        (lambda t: t.assign(tokens=np.nan), TableError, "column 'tokens' .* is empty in every row"),
        (lambda t: t.assign(tokens=np.inf), FitError, "no row is left.*outside the law's domain"),
        (lambda t: t.assign(tokens=-1.0), FitError, "no row is left.*outside the law's domain"),
    ],
)
def test_a_table_that_cannot_be_fitted_is_an_error(change, error, message) -> None:
    with pytest.raises(error, match=message):
        ouyang(change(simulate()))


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.0, -1.0])
@pytest.mark.parametrize("column", ["delta_loss", "tokens"])
def test_rows_without_a_usable_value_are_set_aside(column, value, interval) -> None:
    table = simulate()
    table.loc[[0, 5], column] = value
    found = ouyang(table, interval=interval)
    assert sum(s.rows for s in found.data.set_aside) == 2
    assert found.values == ouyang(table.drop([0, 5]), interval=interval).values


@pytest.mark.parametrize("interval", INTERVALS)
def test_exact_data_are_fitted_exactly(interval) -> None:
    found = ouyang(simulate(between=0.0, within=0.0), interval=interval)
    assert found.values == pytest.approx(TRUE, rel=1e-6)
    assert np.isfinite(found.parameters()["estimate"]).all()
    assert found.search.status == "converged"


@pytest.mark.parametrize("interval", INTERVALS)
def test_one_family_alone_has_no_random_effect_of_families(interval) -> None:
    table = simulate().assign(family="only")
    found = ouyang(table, random=("family", "run"), interval=interval)
    assert "No random effect of family: family has only 1 distinct value." in found.search.notes
    assert [term.text for term in found.effects.terms] == ["run"]


@pytest.mark.parametrize("clusters", [1, 2])
@pytest.mark.parametrize("interval", [None, *INTERVALS])
def test_one_or_two_clusters_give_a_fit_or_an_error(clusters, interval) -> None:
    table = simulate(between=0.0, within=0.01)
    table["run"] = np.arange(len(table)) % clusters
    if clusters == 1 and interval in ("sandwich", "bootstrap"):
        with pytest.raises(FitError, match=r"all rows have the same run.*interval model"):
            ouyang(table, interval=interval)
        return
    found = ouyang(table, interval=interval)
    assert found.interval == (interval or ("model" if clusters == 1 else "bootstrap"))
    assert found.values == pytest.approx(TRUE, rel=0.1)
    assert any("No random effect of run" in note for note in found.search.notes)
    parameters = found.parameters()
    if found.interval == "bootstrap":  # of so few it has none
        assert parameters["low"].isna().all()
    else:
        assert (parameters["low"] < parameters["high"]).all()
        assert (np.diff(found.quantiles(table, np.array([0.05, 0.5, 0.95])), axis=0) > 0).all()


def test_conformal_intervals_need_clusters() -> None:
    with pytest.raises(FitError, match="need at least 9 clusters; there are 2"):
        ouyang(simulate(runs=4).assign(run=["a", "b"] * 6), interval="conformal")


@pytest.mark.parametrize("interval", INTERVALS)
def test_copied_rows_are_noted_and_count_again(interval) -> None:
    table = simulate()
    doubled = pd.concat([table, table.head(6)], ignore_index=True)
    found = ouyang(doubled, interval=interval)
    assert any("6 rows repeat another row of the same run exactly" in n for n in found.search.notes)
    assert not any("repeat" in note for note in ouyang(table, interval=interval).search.notes)
    # Two groups at one cost are two settings, although the law does not read them.
    grouped = doubled.assign(group_size=[128.0] * len(table) + [64.0] * 6)
    assert not any("repeat" in note for note in ouyang(grouped, interval=interval).search.notes)


def test_a_whole_table_twice_moves_no_estimate() -> None:
    table = simulate()
    twice = pd.concat([table, table.assign(run=table["run"] + "again")], ignore_index=True)
    once, found = (ouyang(t, random=(), huber_delta=0.2, n_boot=0) for t in (table, twice))
    assert found.values == pytest.approx(once.values, rel=1e-6)
    assert found.search.objective == pytest.approx(2 * once.search.objective, rel=1e-9)


def test_a_column_that_the_law_does_not_read_may_be_empty() -> None:
    table = simulate()
    found = ouyang(table.assign(group_size=np.nan, family=None, lr_peak=np.nan))
    assert found.values == ouyang(table).values
    with pytest.raises(TableError, match="family"):
        ouyang(table.assign(family=None), random=("family",))


@given(power=st.integers(-9, 9), interval=st.sampled_from(INTERVALS))
@settings(max_examples=8, deadline=None)
def test_tokens_in_other_units_rescale_the_amplitude_alone(power, interval) -> None:
    table = simulate()
    other = table.assign(tokens=table["tokens"] / 10.0**power)
    once, found = (ouyang(t, interval=interval) for t in (table, other))
    beta = once.values["beta"]
    expected = {**once.values, "k": once.values["k"] * 10.0 ** (power * beta)}
    assert found.values == pytest.approx(expected, rel=1e-4)
    probabilities = np.array([0.05, 0.5, 0.95])
    np.testing.assert_allclose(
        found.quantiles(other, probabilities), once.quantiles(table, probabilities), rtol=1e-3
    )


@given(factor=st.floats(1e-4, 1e4), interval=st.sampled_from(INTERVALS))
@settings(max_examples=8, deadline=None)
def test_a_target_in_other_units_rescales_amplitude_and_predictions(factor, interval) -> None:
    table = simulate()
    other = table.assign(delta_loss=factor * table["delta_loss"])
    once, found = (ouyang(t, interval=interval) for t in (table, other))
    expected = {**once.values, "k": once.values["k"] * factor}
    assert found.values == pytest.approx(expected, rel=1e-4)
    probabilities = np.array([0.05, 0.5, 0.95])
    np.testing.assert_allclose(
        found.quantiles(other, probabilities),
        factor * once.quantiles(table, probabilities),
        rtol=1e-3,
    )


def test_a_table_of_nothing_but_noise_is_an_error() -> None:
    table = simulate().assign(delta_loss_se=1e6)
    with pytest.raises(FitError, match=r"0 of 72 usable rows are measured \(72 lie under their"):
        fit(table, get("ouyang"))


@pytest.mark.parametrize("likelihood", ["gaussian", "huber", "student_t"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_scatter_of_rows_is_its_own_whether_or_not_their_errors_are_known(
    likelihood, share
) -> None:
    """Rows with a known error are Gaussian: no factor of a robust density belongs to them."""
    found = []
    for seed in range(6):
        table = simulate(runs=150, between=0.0, within=0.2, seed=seed)
        known = np.random.default_rng(seed).uniform(size=len(table)) < share
        table["delta_loss_se"] = np.where(known, 0.02 * table["delta_loss"], np.nan)
        made = fit(table, get("ouyang"), likelihood=likelihood, random=(), interval="model")
        found.append(made.effects.residual**0.5)
    assert np.mean(found) == pytest.approx(0.2, rel=0.03)
