"""The shipped fits: each loads, and refitting the shipped table gives the shipped numbers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from qscale.errors import FitError
from qscale.fit.shipped import find, folder, names


def build_script():
    spec = importlib.util.spec_from_file_location("build_fits", folder() / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_listed_fit_is_shipped_with_its_report() -> None:
    listed = build_script().entries()
    assert set(names()) == set(listed)
    for name in listed:
        for file in ("report.html", "report.md"):
            assert (folder() / name / file).stat().st_size > 1000


@pytest.mark.parametrize("name", names())
def test_a_shipped_fit_can_be_trusted(name: str) -> None:
    shipped = find(name)
    assert shipped.search.status == "converged"
    assert shipped.search.boots_converged >= 0.95 * shipped.search.boots


def test_refitting_the_shipped_table_gives_the_shipped_fit() -> None:
    script = build_script()
    name = "published_gptq_ouyang"
    again, shipped = script.make(script.entries()[name]), find(name)
    assert again.values == pytest.approx(shipped.values, rel=1e-6)
    assert again.data == shipped.data
    np.testing.assert_allclose(
        again.parameters()[["low", "high"]], shipped.parameters()[["low", "high"]], rtol=1e-4
    )


def test_learning_rate_factors_explain_what_tokens_and_size_do_not() -> None:
    # Sum of log-Huber losses at the other fit's delta would not compare; log residuals do.
    with_rate, without = find("learning_rate_gptq_lr_anneal"), find("learning_rate_gptq_ouyang")
    assert with_rate.data.rows == without.data.rows
    assert with_rate.values["beta"] < 0.15
    assert without.values["beta"] > 1.5 * with_rate.values["beta"]
    spread = [f.effects.residual**0.5 for f in (with_rate, without)]
    assert spread[0] < 0.5 * spread[1]


def test_an_unknown_fit_is_named_with_the_nearest() -> None:
    with pytest.raises(FitError, match="Did you mean 'published_gptq_ouyang'"):
        find("published_gptq_ouyan")
    assert Path(folder() / "fits.toml").is_file()
