"""Mistakes of every kind on the command line: one line that says what to do, never a traceback."""

import json
import re
import warnings

import numpy as np
import pandas as pd
import pytest

from qscale import table
from qscale.cli import main
from tests.cli.test_cli import mistake, run
from tests.simulations import simulate

FIT = ("fit", "rows.csv", "--law", "ouyang")
LAW = """
LAW = {"target": "delta_loss", "columns": ["tokens", "bits"],
       "parameters": {"a": {"starts": [1.0], "scale": "log"}, "b": {"starts": [0.5]}}}
"""
TOML = """
name = "mine"
target = "delta_loss"
[[factors]]
kind = "constant"
%s
[[factors]]
kind = "power"
column = "tokens"
name = "beta"
%s
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = simulate()
    order = np.arange(len(rows))
    rows = rows.assign(
        method=np.where(order % 2, "rtn", "gptq"),
        family=[f"f{i // 18}" for i in order],
        known_to_be_negative=order - 5.0,
        infinite=np.where(order == 3, np.inf, 1.0 + order),
        half=np.where(order % 2, np.nan, 1.0),
    )
    table.write(rows, "rows.csv")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.json").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--random", "method|run"), r"random 'method\|run': column 'method' must hold numbers"),
        (("--random", "known_to_be_negative|run"), "must be above zero.*Got -5 in 6 of them"),
        (("--random", "infinite|run"), "column 'infinite' must be above zero.*Got inf in 1"),
        (("--random", "half|run"), "column 'half' must be above zero.*Got nan in 36"),
        (("--random", "absent|run"), "no column 'absent'"),
        (("--random", "a|b|run"), r"no column 'a\|b'"),
        (("--random", "delta_loss|run"), "'delta_loss' is what the law predicts"),
        (("--random", "run", "--random", "run"), "random 'run' is given twice"),
        (("--random", "none", "--random", "run"), "--random none asks for no random effect"),
        (("--offset", "method", "--offset", "method"), "offset 'method' is given twice"),
        (("--offset", "bits"), "offset 'bits': the column holds numbers.*a random effect"),
        (("--offset", "half"), "offset 'half': the column holds numbers"),
        (("--fix", "beta=0.4", "--fix", "beta=0.5"), "--fix beta is given twice"),
        (
            ("--fix", "k=1", "--fix", "beta=1", "--fix", "alpha=1", "--fix", "gamma=1"),
            "every parameter of law .* is held; leave one",
        ),
        (("--floor", "nan"), "floor must be a number, zero or more. Got nan"),
        (("--floor", "inf"), "floor must be a number, zero or more. Got inf"),
        (("--floor", "-1"), "floor must be a number, zero or more. Got -1"),
        (("--ceiling", "nan"), "ceiling must be a number, finite. Got nan"),
        (("--ceiling", "inf"), "ceiling must be a number, finite. Got inf"),
        (("--ceiling", "0"), "ceiling must be above zero for law 'ouyang'"),
        (("--ceiling", "1e-9"), "72 over the ceiling.*raise the ceiling"),
        (("--huber-delta", "nan"), "huber_delta must be a number, above zero. Got nan"),
        (("--huber-delta", "inf"), "huber_delta must be a number, above zero. Got inf"),
        (("--huber-delta", "1e-9"), "far below the residuals' scale"),
        (("--seed", "-1"), "--seed"),
        (("--target", "method"), "column 'method' must hold numbers"),
        (("--target", "bits"), "law 'ouyang' reads 'bits', which it is to predict"),
        (("--map", "x=tokens", "--map", "y=tokens"), "column 'tokens' is read as 'x' and 'y'"),
        (("--where", "bits = 3"), "'bits = 3' assigns; write =="),
        (("-o", "folder.json", "--force"), "folder.json: is not a file that can be replaced"),
        (("-o", "rows.csv/fit.json"), "rows.csv is not a folder that you can write to"),
    ],
)
def test_an_option_of_fit(data, capsys, options, message) -> None:
    assert re.search(message, mistake(capsys, *FIT, *options))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("run,run,tokens\na,b,1e9\n", "column 'run' appears twice"),
        ("run, tokens,tokens\na,1e9,1e9\n", "column 'tokens' appears twice"),
    ],
)
def test_a_heading_twice(data, capsys, content, message) -> None:
    (data / "twice.csv").write_text(content)
    assert re.search(message, mistake(capsys, "fit", "twice.csv", "--law", "ouyang"))


def test_headings_with_spaces_are_read_without(data, capsys) -> None:
    text = (data / "rows.csv").read_text()
    (data / "spaced.csv").write_text(text.replace(",", ", ", 3))
    assert "72 rows" in run(capsys, "fit", "spaced.csv", "--law", "ouyang")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("bounds = [-1, 1]", "", "'k' is searched for on a log scale.*above zero. Got -1"),
        ("", "starts = ['a']", "factor 2.*starts must be a list of numbers"),
        ("", "bounds = [1]", "factor 2.*bounds must be two numbers"),
        ("", "sign = 7", "sign must be 1 or -1. Got 7"),
        ("name = 'beta'", "", "parameter 'beta' is an amplitude.*different names"),
        ("name = 3", "", "name must be a text. Got 3"),
    ],
)
def test_a_law_as_toml(data, capsys, first, second, message) -> None:
    (data / "law.toml").write_text(TOML % (first, second))
    assert re.search(message, mistake(capsys, "fit", "rows.csv", "--law", "law.toml"))


def test_levels_of_an_offset_are_a_list(data, capsys) -> None:
    for levels in ("'ab'", "[]", "['rtn']"):
        text = f"kind = 'offset'\ncolumn = 'method'\nlevels = {levels}"
        (data / "law.toml").write_text((TOML % ("", "")).replace('kind = "constant"', text))
        message = mistake(capsys, "fit", "rows.csv", "--law", "law.toml")
        assert "levels must be two or more texts" in message


def test_a_law_of_text_or_of_its_own_target(data, capsys) -> None:
    for column, message in (
        ("run", "law 'mine' needs numbers, but column 'run' holds text"),
        ("delta_loss", "law 'mine' reads 'delta_loss', which it is to predict"),
    ):
        (data / "law.toml").write_text((TOML % ("", "")).replace("tokens", column))
        assert message in mistake(capsys, "fit", "rows.csv", "--law", "law.toml")


@pytest.mark.parametrize(
    ("change", "body", "message"),
    [
        (("", ""), "raise RuntimeError('no luck')", "raised RuntimeError: no luck"),
        (("", ""), "return np.ones(3)", "raised ValueError: .*broadcast"),
        (("", ""), "return -a * data['tokens'] ** b", "72 rows because law 'f' gives no number"),
        (("", ""), "return np.inf * data['tokens']", "72 rows because law 'f' gives no number"),
        (
            ('"target"', '"link": "identity", "target"'),
            "return np.nan * data['tokens']",
            "72 rows because law 'f' gives no number",
        ),
        (('["tokens", "bits"]', '"tokens"'), "return a", "columns must list.*Got 'tokens'"),
        (('["tokens", "bits"]', "3"), "return a", "columns must list.*Got 3"),
        (('"delta_loss"', "3"), "return a", "target must be a text. Got 3"),
        (("LAW =", "raise SystemExit(3)\nLAW ="), "return a", "raised SystemExit"),
    ],
)
def test_a_law_as_a_function(data, capsys, change, body, message) -> None:
    text = LAW.replace(*change) if change[0] else LAW
    (data / "law.py").write_text(f"import numpy as np\n{text}\ndef f(data, a, b):\n    {body}\n")
    assert re.search(message, mistake(capsys, "fit", "rows.csv", "--law", "law.py:f"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.update(format=1), "format 1 is not known.*fit again"),
        (lambda c: c.pop("effects"), "damaged"),
        (lambda c: c["data"].update(unknown=1), "damaged"),
        (lambda c: c["law"].pop("name"), "damaged"),
        (lambda c: c["law"].update(factors=3), "damaged"),
        (lambda c: c.update(data=[]), "damaged"),
        (lambda c: c.update(theta="abc"), "damaged"),
        (lambda c: c.update(theta=c["theta"][:2]), "damaged"),
        (lambda c: c.update(theta=[None, *c["theta"][1:]]), "damaged"),
        (lambda c: c.update(cov=[[1.0]]), "damaged"),
    ],
)
def test_a_damaged_fit(data, capsys, damage, message) -> None:
    main([*FIT, "--boots", "0", "-o", "fit.json"])
    content = json.loads((data / "fit.json").read_text())
    damage(content)
    (data / "damaged.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert re.search(message, mistake(capsys, "predict", "damaged.json", "--tokens", "1e11"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n-params", "nan"), "--n-params must be a finite number. Got nan"),
        (("--bits", "inf"), "--bits must be numbers.*Got 'inf'"),
        (("--group-size", "²"), "--group-size must be whole"),
        (("--set", "step=1", "--set", "step=2"), "--set step is given twice"),
        (("--n-params", "1e9", "--set", "n_params=2e9"), "--set n_params: it has a flag too"),
        (("--n-params", "1e9", "--given", "no_bits.csv"), "no column 'bits'; add"),
        (("--n-params", "1e9", "--given", "null.csv"), "row 2 has no value in column 'delta_loss'"),
        (("--n-params", "1e9", "--given", "collapsed.csv"), "row 1 has status collapsed"),
        (("--n-params", "1e9", "-o", "rows.csv/x.csv"), "not a folder that you can write to"),
    ],
)
def test_an_option_of_predict(data, capsys, options, message) -> None:
    measured = pd.read_csv("rows.csv").head(3)
    measured.drop(columns="bits").to_csv("no_bits.csv", index=False)
    measured.assign(delta_loss=[0.5, None, 0.1]).to_csv("null.csv", index=False)
    measured.head(1).assign(status="collapsed").to_csv("collapsed.csv", index=False)
    main([*FIT, "-o", "fit.json"])
    capsys.readouterr()
    message_given = mistake(capsys, "predict", "fit.json", "--tokens", "1e11", *options)
    assert re.search(message, message_given)


def test_a_missing_interval_is_explained_and_an_undetermined_one_warns_of_nothing(
    data, capsys
) -> None:
    few = ("--interval", "bootstrap", "--boots", "3", "-o", "few.json")
    assert "Intervals need twenty; raise --boots" in run(capsys, *FIT, *few)
    wanted = ("--tokens", "1e11", "--n-params", "1e9")
    assert "a dash means that the fit has no interval" in run(
        capsys, "predict", "few.json", *wanted
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "not_identified" in run(capsys, *FIT, "--offset", "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("regress", "--kind", "ols", "--formula", "infinite"), "row 4, column 'infinite'"),
        (("regress", "--kind", "forest", "--formula", "infinite"), "row 4, column 'infinite'"),
        (("regress", "--kind", "ols", "--target", "method"), "'method' must hold numbers"),
        (("regress", "--kind", "forest", "--seed", "99999999999"), "--seed"),
        (("fit", "--law", "ouyang", "-o", "rows.csv", "--force"), "--output must end in .json"),
        (("regress", "--kind", "ols", "-o", "rows.csv", "--force"), "must end in .fit or .json"),
        (("compare", "--split", "run", "--regressions", "foo"), "unknown regression 'foo'"),
        (
            ("fit", "--law", "curvature", "--target", "kl"),
            "no column 'quadratic_delta'.*and no column 'kl'",
        ),
        (("select", "--law", "ouyang", "--candidates", "method", "--seed", "-1"), "--seed"),
        (("select", "--law", "ouyang", "--candidates", "delta_loss"), "is what the law predicts"),
        (
            ("select", "--law", "ouyang", "--candidates", "method", "--offset", "bits"),
            "offset 'bits': the column holds numbers",
        ),
        (("compare", "--split", "family", "--laws", "ouyang", "--random", "no"), "column 'no'"),
        (("compare", "--split", "family", "--laws", "ouyang", "--cluster", "no"), "column 'no'"),
        (("compare", "--split", "family", "--laws", "ouyang", "--offset", "no"), "column 'no'"),
        (
            ("compare", "--split", "family", "--laws", "ouyang", "--target", "method"),
            "column 'method' must hold numbers",
        ),
        (
            ("compare", "--split", "family", "--laws", "ouyang", "-o", "rows.csv/league.json"),
            "not a folder that you can write to",
        ),
    ],
)
def test_an_option_of_other_commands(data, capsys, arguments, message) -> None:
    before = (data / "rows.csv").read_bytes()
    assert re.search(message, mistake(capsys, arguments[0], "rows.csv", *arguments[1:]))
    assert (data / "rows.csv").read_bytes() == before


def test_a_table_of_another_kind_and_numbers_with_units(data, capsys) -> None:
    message = mistake(capsys, "plan", "mix", "rows.csv", "--bits-per-weight", "4")
    assert "rows.csv is not a table that qscale sensitivity wrote" in message
    run(capsys, *FIT, "-o", "fit.json")
    message = mistake(capsys, "plan", "pareto", "fit.json", "--loss", "fit.json", "--memory", "8GB")
    assert "Got '8GB' instead; write 8e9" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--spec", "rtn int44"), "Spec 'rtn int44': bits.*Got 44"),
        (("--spec", "rtn itn4"), "A format must be int or mxint.*Got 'itn4'"),
        (("--spec", "none.toml"), "none.toml: cannot be read"),
        (("--spec", "mix.toml"), r"mix.toml: '\*': bits.*Got 9"),
        (("--spec", "rtn int4 row", "-o", "rows.csv"), "rows.csv: exists and is not a table of"),
        (("--spec", "rtn int4 row", "-o", "out.txt"), "out.txt: a table must end in one of .csv"),
        (("--spec", "rtn int4 row", "-o", "folder"), "folder: is not a file that can be replaced"),
        (("--spec", "rtn int4 row", "--probes", "1"), "num_probes must be at least 2. Got 1"),
        (("--spec", "rtn int4 row", "--batch-windows", "0"), "batch_windows must be at least 1"),
    ],
)
def test_an_option_of_sensitivity(data, capsys, options, message) -> None:
    (data / "mix.toml").write_text('[formats]\n"*" = "int9"\n')
    given = dict(zip(options[::2], options[1::2], strict=True))
    flags = {"--text": "text.txt", "-o": "out.csv"} | given
    (data / "text.txt").write_text("some words of text " * 50)
    arguments = [part for pair in flags.items() for part in pair]
    assert re.search(message, mistake(capsys, "sensitivity", "folder", *arguments))
    assert not (data / "out.csv").exists()
