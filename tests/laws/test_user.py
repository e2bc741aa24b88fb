"""Laws from the user: composed in TOML, or one Python function; what is wrong with a file is said."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from qscale.errors import FitError
from qscale.laws import LAWS, columns_of, from_spec, get
from qscale.laws.user import from_toml, law_from_function, resolve, to_toml

CHINCHILLA = """
name = "sum"
target = "loss_fp"
link = "{link}"
source = "Hoffmann et al."

[[factors]]
kind = "total"
terms = [
  [{{kind = "constant", name = "E"}}],
  [{{kind = "constant", name = "A"}}, {{kind = "power", column = "n_params", name = "alpha", sign = -1}}],
  [{{kind = "constant", name = "B"}}, {{kind = "power", column = "tokens", name = "beta", sign = -1}}],
]
"""

PYTHON = """
import numpy as np

LAW = {
    "target": "delta_loss",
    "columns": ["n_params", "tokens", "bits"],
    "parameters": {
        "k": {"starts": [1.0], "bounds": [1e-30, 1e30], "scale": "log"},
        "beta": {"starts": [0.1, 1.0]},
        "alpha": {"starts": [0.1, 1.0]},
        "gamma": {"starts": [0.1, 1.0]},
    },
    "source": "a notebook",
}

def ouyang(data, k, beta, alpha, gamma):
    return k * data["tokens"] ** beta / data["n_params"] ** alpha / data["bits"] ** gamma

def by_math(data, k, beta, alpha, gamma):
    return abs(ouyang(data, k, beta, alpha, gamma))
"""


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "n_params": 10 ** rng.uniform(8, 11, 20),
            "tokens": 10 ** rng.uniform(10, 13, 20),
            "bits": np.tile([2, 3, 4, 8], 5),
        }
    )


@pytest.fixture
def python(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PYTHON)
    return path


def assert_same(ours, theirs, theta, frame) -> None:
    data = columns_of(theirs, frame)
    np.testing.assert_allclose(ours.location(theta, data), theirs.location(theta, data), rtol=1e-12)
    np.testing.assert_allclose(ours.gradient(theta, data), theirs.gradient(theta, data), rtol=1e-10)


def test_a_python_function_is_the_named_law_it_restates(python, frame) -> None:
    law = resolve(f"{python}:ouyang")
    assert (law.name, law.target, law.source, law.names) == (
        "ouyang",
        "delta_loss",
        "a notebook",
        ("k", "beta", "alpha", "gamma"),
    )
    theta = np.array([[-4.0, 0.5, 0.3, 5.0], [1.0, 0.1, 0.2, -3.0]])
    assert_same(law, get("ouyang"), theta, frame)
    assert_same(law, get("ouyang"), theta[:0], frame)


def test_a_toml_sum_is_the_named_law_it_restates(tmp_path, frame) -> None:
    path = tmp_path / "sum.toml"
    path.write_text(CHINCHILLA.format(link="log"))
    theta = np.array([[0.5, 6.0, 0.34, 7.0, 0.36]])
    assert_same(resolve(str(path)), get("chinchilla"), theta, frame)


def test_an_identity_link_predicts_the_target_itself(tmp_path, frame) -> None:
    path = tmp_path / "sum.toml"
    path.write_text(CHINCHILLA.format(link="identity"))
    law, log_law = resolve(str(path)), get("chinchilla")
    theta = np.array([[0.5, 6.0, 0.34, 7.0, 0.36]])
    data = columns_of(law, frame)
    predicted = np.exp(log_law.location(theta, data))
    np.testing.assert_allclose(law.location(theta, data), predicted, rtol=1e-14)
    np.testing.assert_allclose(
        law.gradient(theta, data),
        predicted[..., None] * log_law.gradient(theta, data),
        rtol=1e-13,
    )
    again = from_spec(json.loads(json.dumps(law.spec())))
    np.testing.assert_array_equal(again.location(theta, data), law.location(theta, data))


def test_a_toml_law_multiplies_a_function_by_other_factors(tmp_path, python, frame) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        """
name = "mixed"
target = "delta_loss"
[[factors]]
kind = "function"
path = "fall.py"
name = "fall"
columns = ["bits"]
parameters = { g = { starts = [1.0], bounds = [0.02, 200.0], scale = "reciprocal" } }
[[factors]]
kind = "power"
column = "tokens"
name = "beta"
"""
    )
    (tmp_path / "fall.py").write_text(
        "import numpy as np\ndef fall(data, g):\n    return np.exp(-data['bits'] / g)\n"
    )
    law = resolve(str(path), target="kl")
    assert law.target == "kl"
    theta = np.array([[2.0, 0.5]])
    data = columns_of(law, frame)
    expected = -2.0 * frame["bits"] + 0.5 * np.log(frame["tokens"])
    np.testing.assert_allclose(law.location(theta, data)[0], expected, rtol=1e-12)
    np.testing.assert_allclose(law.gradient(theta, data)[0, :, 0], -frame["bits"], rtol=1e-12)


def test_a_law_is_rebuilt_from_its_spec_until_its_file_changes(python, frame) -> None:
    law = resolve(f"{python}:ouyang")
    spec = json.loads(json.dumps(law.spec()))
    theta = np.array([[-4.0, 0.5, 0.3, 5.0]])
    data = columns_of(law, frame)
    again = from_spec(spec)
    assert again.parameters == law.parameters
    np.testing.assert_array_equal(again.location(theta, data), law.location(theta, data))
    python.write_text(PYTHON.replace("k * data", "2 * k * data"))
    with pytest.raises(FitError, match=r"mine\.py: the file has changed"):
        from_spec(spec)
    python.unlink()
    with pytest.raises(FitError, match=r"mine\.py: cannot be read"):
        from_spec(spec)


def test_central_differences_agree_where_complex_numbers_are_dropped(python, frame) -> None:
    law = resolve(f"{python}:by_math")
    theta = np.array([[-4.0, 0.5, 0.3, 5.0]])
    data = columns_of(law, frame)
    with pytest.raises(FitError, match=r"by_math: cannot be differentiated by a complex step"):
        law.gradient(theta, data)
    options = {**law.factors[0].options, "derivative": "central"}
    slow = from_spec({**law.spec(), "factors": [{"kind": "function", **options}]})
    np.testing.assert_allclose(
        slow.gradient(theta, data), get("ouyang").gradient(theta, data), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def ouyang(", "def ouyang(("), r"mine\.py: line \d+: "),
        (("import numpy", "import nothing_such"), r"mine\.py: raised ModuleNotFoundError"),
        (("def ouyang", "def other"), r"no function 'ouyang'\. Functions are: other, by_math"),
        (('"beta": {"starts": [0.1, 1.0]},', ""), r"parameter 'beta' has no starts"),
        (('"beta": {"starts": [0.1, 1.0]},', '"beta": {},'), r"parameter 'beta' has no starts"),
        (('"gamma":', '"delta": {"starts": [1]}, "gamma":'), r"'delta', which is not an argument"),
        (('"scale": "log"', '"scale": "log10"'), r"scale must be linear or log or reciprocal"),
        (('"starts": [1.0]', '"starts": [0.0]'), r"start 0 is not between 1e-30 and 1e\+30"),
        (('"starts": [1.0]', '"start": [1.0]'), r"unknown key 'start'.*Did you mean 'starts'"),
        (('"source"', '"sources"'), r"unknown key 'sources'.*Did you mean 'source'"),
        (('"target"', '"note"'), r"LAW has no 'target'"),
        (("LAW =", "OTHER ="), r"has no description"),
        (("def ouyang(data, k", "def ouyang(data, *k"), r"must be f\(data, p1, p2"),
    ],
)
def test_what_is_wrong_with_a_python_law_is_said(python, change, message) -> None:
    assert change[0] in PYTHON
    python.write_text(PYTHON.replace(*change))
    with pytest.raises(FitError, match=message):
        resolve(f"{python}:ouyang")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return data['runs'] * k", r"uses 'runs', which is not among its columns"),
        ("return [1.0, k]", r"ouyang: raised ValueError"),
        ("return 'much'", r"ouyang: returns <U4, not numbers"),
    ],
)
def test_what_a_function_does_wrong_is_said(python, frame, body, message) -> None:
    python.write_text(PYTHON.replace("return k *", f"{body}\n    return k *"))
    law = resolve(f"{python}:ouyang")
    with pytest.raises(FitError, match=message):
        law.location(np.zeros((1, 4)), columns_of(law, frame))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name = ", "nam = "), r"sum\.toml: unknown key 'nam'.*Did you mean 'name'"),
        (('target = "loss_fp"', ""), r"target must be a text"),
        (('"log"', '"logit"'), r"link must be log or identity"),
        (('"power"', '"pow"'), r"sum\.toml: factor 1: unknown factor 'pow'"),
        (("column = ", "columns = "), r"factor 'power' has no option 'columns'.*'column'\?"),
        (('column = "n_params", ', ""), r"factor 'power' needs column"),
        (("terms", "term"), r"factor 'total' needs 'terms'"),
        (("[[factors]]", "[[factors"), r"sum\.toml: not a TOML file"),
        (("[[factors]]", "[[factor]]"), r"unknown key 'factor'"),
        (("sign = -1}", "starts = []}"), r"parameter 'alpha' needs starts"),
    ],
)
def test_what_is_wrong_with_a_toml_law_is_said(tmp_path, change, message) -> None:
    path = tmp_path / "sum.toml"
    text = CHINCHILLA.format(link="log")
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(FitError, match=message):
        resolve(str(path))


def test_missing_files_and_names_are_said(tmp_path, python) -> None:
    for text in (f"{tmp_path}/none.toml", f"{tmp_path}/none.py:f"):
        with pytest.raises(FitError, match=r"none\.(toml|py): cannot be read"):
            resolve(text)
    with pytest.raises(FitError, match=r"name the function too"):
        resolve(str(python))
    with pytest.raises(FitError, match=r"no law named 'uyang'.*Did you mean 'ouyang'"):
        resolve("uyang")
    assert resolve("ouyang", "kl") == replace(get("ouyang"), target="kl")


def test_a_function_of_a_session_is_a_law_that_says_it_cannot_be_reloaded(frame) -> None:
    law = law_from_function(
        eval("lambda data, a: a * data['bits']"),
        name="line",
        target="delta_loss",
        columns=["bits"],
        parameters={"a": {"starts": [1.0]}},
        link="identity",
    )
    np.testing.assert_array_equal(
        law.location(np.array([[2.0]]), columns_of(law, frame))[0], 2.0 * frame["bits"]
    )
    with pytest.raises(FitError, match=r"was not defined in a file"):
        from_spec(law.spec())


@pytest.mark.parametrize("name", LAWS)
def test_a_law_written_as_toml_is_read_as_the_same_law(tmp_path, name) -> None:
    law = get(name)
    path = tmp_path / "law.toml"
    path.write_text(to_toml(law), encoding="utf-8")
    assert from_toml(path).spec() == law.spec()
