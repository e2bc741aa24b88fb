"""Mistakes made from Python: each is named in a sentence, none is silent."""

import numpy as np
import pandas as pd
import pytest

from qscale.errors import FitError, QscaleError, TableError
from qscale.laws import Law, columns_of, from_spec, get
from qscale.laws.factors import constant, power
from qscale.plan import alternatives, choose, decisions, fewest_bits_of
from qscale.predict import candidates, combine, judge_interval
from qscale.regress import regress
from qscale.select import exponents_within
from qscale.validate import Split, expanding, held_out, largest, lowest, paired, summarize
from tests.simulations import simulate

LAW = get("ouyang")
ROW = pd.DataFrame({"n_params": [1e9, 1e9], "tokens": 1e11, "bits": 3.0})


@pytest.fixture(scope="module")
def fitted():
    return LAW.fit(simulate(), interval="sandwich")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": -1}, "row 1, column 'tokens' must be between 10000 and 1e.16 tokens. Got -1"),
        ({"n_params": [1e9, 7]}, "row 2, column 'n_params' must be between 1000 and .* Got 7"),
        ({"bits": [3, 0]}, "row 2, column 'bits' must be between 0.5 and 32 bits. Got 0"),
        ({"tokens": "many"}, "row 1, column 'tokens' must be a number .* Got 'many' instead"),
        ({"bits": None}, "column 'bits' .* is empty in every row"),
    ],
)
def test_described_rows_that_cannot_be_right(fitted, change, message) -> None:
    with pytest.raises(TableError, match=message):
        fitted.predict(ROW.assign(**change))


def test_numbers_written_as_text_are_numbers(fitted) -> None:
    text = fitted.predict(ROW.assign(tokens="1e11"))
    numbers = fitted.predict(ROW)
    pd.testing.assert_frame_equal(text.drop(columns="tokens"), numbers.drop(columns="tokens"))
    whole = fitted.predict(ROW.assign(bits=3))
    assert whole["bits"].dtype == int  # what was given comes back as it was


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda fit: fit.predict({"tokens": 1e11}), "must be a pandas.DataFrame. Got dict instead"),
        (lambda fit: fit.predict(ROW, levels=(90,)), "levels must be between 0 and 1. Got 90"),
        (lambda fit: fit.predict(ROW, kind="new"), "kind must be one of mean, new_checkpoint"),
        (lambda fit: fit.conf_int(90), "alpha must be between 0 and 1. Got 90 instead"),
        (lambda fit: fit.conf_int(1.5), "alpha must be between 0 and 1. Got 1.5 instead"),
        (lambda fit: fit.parameters(90), "level must be between 0 and 1. Got 90 instead"),
        (lambda fit: fit.plot.residuals("nope"), "no column 'nope'.*Columns are: run, n_params"),
    ],
)
def test_questions_that_a_fit_has_no_answer_to(fitted, ask, message) -> None:
    with pytest.raises(QscaleError, match=message):
        ask(fitted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": "x"}, "interval must be one of model, .*conformal. Got 'x' instead"),
        ({"likelihood": "cauchy"}, "likelihood must be one of .*huber. Got 'cauchy' instead"),
        ({"n_boot": -1}, "n_boot must be a whole number, zero or more. Got -1 instead"),
        ({"floor": "low"}, "floor must be a number, zero or more. Got low"),
        ({"fixed": {"beta": "x"}}, "'beta' must be held between -30 and 30. Got x instead"),
        ({"offset": ["a", "a"]}, "^offset 'a' is given twice"),
    ],
)
def test_options_of_a_fit_that_are_none(options, message) -> None:
    with pytest.raises(FitError, match=message):
        LAW.fit(simulate(), **options)


@pytest.mark.parametrize("table", ["mine.csv", None, {"bits": [3]}])
def test_a_table_is_a_frame(table) -> None:
    message = (
        r"table must be a pandas.DataFrame. Got .* instead; read a file with qscale.table.read"
    )
    with pytest.raises(TableError, match=message):
        LAW.fit(table)
    with pytest.raises(TableError, match=message):
        regress(table, kind="ols")


def test_a_text_is_one_name() -> None:
    table = simulate().assign(source=["here", "there", "there"] * 24)
    found = LAW.fit(table, offset="source", random="run", interval="model")
    assert found.values == LAW.fit(table, offset=["source"], interval="model").values
    assert "source[here]" in found.values


def test_a_result_is_shown_in_a_line_and_printed_as_its_summary(fitted) -> None:
    said = "<Fit of ouyang: target delta_loss, rows 72, runs 24, status converged>"
    assert repr(fitted) == said
    assert str(fitted) == str(fitted.summary())
    linear = regress(simulate(), kind="ols")
    assert repr(linear).startswith("<Regression of ols: target log delta_loss, rows 72, runs 24, ")
    assert str(linear) == str(linear.summary())


def test_text_in_a_column_of_ones_own_is_named() -> None:
    table = simulate().rename(columns={"tokens": "seen"})
    law = Law("mine", "delta_loss", (constant("k"), power("seen", "a")))
    made = law.fit(table, interval="model")
    with pytest.raises(TableError, match="column 'seen' must hold numbers"):
        made.predict(pd.DataFrame({"seen": ["many"]}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.quantiles(ROW, [0.5, 1.5]), "probabilities must be a list of numbers between"),
        (lambda f: f.quantiles(ROW, 0.5), "probabilities must be a list"),
        (lambda f: f.quantiles(ROW, ["half"]), "probabilities must be a list"),
        (lambda f: f.quantiles(ROW, [0.5], "median"), "kind must be one of mean, new_checkpoint"),
        (lambda f: f.surprise(ROW), "measured rows: no column 'delta_loss'"),
        (lambda f: f.given(ROW.assign(delta_loss="a")), "'delta_loss' must hold numbers"),
        (
            lambda f: f.given(ROW.assign(delta_loss=0.1, delta_loss_se=-1.0)),
            "row 1, delta_loss_se must be zero or more",
        ),
    ],
)
def test_what_a_fit_cannot_be_asked(fitted, call, message) -> None:
    with pytest.raises(QscaleError, match=message):
        call(fitted)


TABLE = simulate()
POOL = ROW.assign(run=["a", "b"])
NO = np.zeros(3, dtype=bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: paired([0.1, np.nan], ["a", "b"]), "differences must be finite. 1 of 2 are not"),
        (lambda _: paired([0.1], ["a", "b"]), "must be of one length, one or more. Got 1 and 2"),
        (lambda _: paired([0.1, 0.2], ["a", "b"], level=2), "level must be between 0 and 1. Got 2"),
        (lambda _: paired([0.1, 0.2], ["a", "b"], n_boot=0), "n_boot must be a whole number, 1"),
        (lambda _: summarize(TABLE), "held-out errors: no column 'split'"),
        (lambda _: largest(TABLE, share=2), "share must be between 0 and 1. Got 2"),
        (lambda _: lowest(TABLE, share=0), "share must be between 0 and 1. Got 0"),
        (lambda _: expanding(TABLE, windows=1.5), "windows must be a whole number, 1 or more"),
        (lambda _: expanding(TABLE, "epoch"), "the table has no column 'epoch'"),
        (
            lambda _: held_out(TABLE, None, Split("x", NO), target="delta_loss"),
            "split x is of 3 rows, the table of 72",
        ),
        (
            lambda _: held_out(TABLE, None, Split("x", NO), target="delta_loss", given_rows=-1),
            "given_rows must be a whole number, 0 or more. Got -1",
        ),
        (lambda _: judge_interval(0.3, 0.2, 0.1), "low_90 must be above zero and below high_90"),
        (lambda _: judge_interval(-0.1, 0.2, 0.1), "low_90 must be above zero"),
        (lambda _: judge_interval(0.2, 0.2, 0.1), "low_90 must be above zero and below high_90"),
        (
            lambda _: combine((np.zeros(1), np.zeros(1)), (NO[:1], NO[:1] + 1.0)),
            "above zero, or nul",
        ),
        (
            lambda _: fewest_bits_of(
                pd.DataFrame({"bits_per_weight": [3.0], "delta_loss": [0.1], "log_sd": [-1.0]}), 0.1
            ),
            "row 1, log_sd must be above zero",
        ),
        (lambda f: choose(f, POOL, ROW, 1, level=2), "level must be between 0 and 1"),
        (lambda f: choose(f, POOL, ROW, 1, criterion="best"), "criterion must be one of target"),
        (lambda f: choose(f, POOL, ROW, 1.5), "count must be a whole number"),
        (lambda f: alternatives(f, ROW, [{"tokens": "many"}]), "tokens must be a number"),
        (lambda f: alternatives(f, ROW, [{"tokens": 1e12}], level=1.5), "level must be between"),
        (
            lambda f: alternatives(f, ROW, [{"tokens": 1e12}], seed=-1),
            "seed must be a whole number",
        ),
        (lambda f: alternatives(f, ROW, [{"tokens": 1e12}], count=0), "draws must be a whole numb"),
        (
            lambda _: decisions(TABLE, None, [], tolerances=[0.1], confidences=[]),
            "confidences and choice must hold one value or more",
        ),
        (
            lambda _: decisions(TABLE, None, [], tolerances=[0.1], confidences=[0.9, 9.0]),
            "confidence must be between 0 and 1. Got 9",
        ),
        (
            lambda _: decisions(TABLE.drop(columns="bits"), None, [], tolerances=[0.1]),
            "a back-test needs column 'bits'",
        ),
        (lambda _: get(None), "a law's name must be a text"),
        (lambda _: from_spec({}), "a law's spec must be a dict with name, target, factors"),
        (lambda _: columns_of(LAW, ROW.drop(columns="bits")), "needs column 'bits'"),
        (lambda _: candidates({"n_parms": 1e9}), "'n_parms' is no column.*'n_params'"),
        (lambda _: candidates({"n_params": "big"}), "n_params must be a number. Got 'big'"),
        (lambda _: exponents_within(TABLE, "kl"), "exponents within runs: no column 'kl'"),
    ],
)
def test_what_plans_and_scores_cannot_be_asked(fitted, call, message) -> None:
    with pytest.raises(QscaleError, match=message):
        call(fitted)
