"""Parameters that no row informs: an honest status, a file that can be read, words in tables."""

import pytest

from qscale.cli.fit import summary
from qscale.fit import fit, load
from qscale.laws import Law, get
from qscale.laws.function import factor_of
from tests.simulations import simulate


def idle(link: str) -> Law:
    """Law whose only parameter changes nothing."""
    parameters = {"a": {"starts": [0.1, 1.0]}}
    factor = factor_of(lambda data, a: 3.0 + 0 * a * data["bits"], ["bits"], parameters, link=link)
    return Law("idle", "delta_loss", (factor,), link=link)


@pytest.mark.parametrize("link", ["log", "identity"])
def test_a_parameter_without_effect_is_not_identified(link, capsys) -> None:
    found = fit(simulate(), idle(link))
    assert found.search.status == "not_identified"
    assert found.search.undetermined == ("a",)
    assert found.search.condition_number >= 1e18
    assert "a changes no prediction" in found.search.detail
    line = next(text for text in str(found.summary()).splitlines() if text.startswith("a "))
    assert line.split()[1:] == ["0.1", "-", "not", "determined"]
    assert "<td>-</td><td colspan=2>not determined</td>" in found.summary()._repr_html_()
    summary(found)
    printed = capsys.readouterr().out
    assert "not determined" in printed
    assert "- to -" not in printed


def test_what_is_not_a_number_is_null_in_the_file(tmp_path) -> None:
    table = simulate()
    table["tokens"] = 20.0 * table["n_params"]
    made = fit(table, get("ouyang"), random=(), likelihood="gaussian", n_boot=0)
    assert made.search.undetermined == ("beta", "alpha")
    made.save(tmp_path / "fit.json")
    text = (tmp_path / "fit.json").read_text()
    assert '"huber_delta": null' in text
    assert "NaN" not in text
    assert load(tmp_path / "fit.json").search == made.search


def test_a_fit_without_intervals_prints_a_dash(capsys) -> None:
    summary(fit(simulate(), get("ouyang"), random=(), n_boot=0))
    assert "- to -" not in capsys.readouterr().out
