"""The studies of planning in examples/: what they must show."""

import pytest

from tests.test_examples import load


@pytest.mark.slow
def test_tolerances_are_kept_on_models_and_runs_that_were_left_out() -> None:
    for name in ("learning_rate_transfer", "new_family"):
        load(name)
    bits = load("plan_bits")
    studies = {
        "published": bits.published("gptq", "run"),
        "model loss": bits.with_model_loss("family"),
        "small": bits.small_models(),
        "rates": bits.learning_rates(),
    }
    for name, found in studies.items():
        promised = found.set_index("confidence")
        assert (promised["kept"] >= promised.index).all(), name
        assert (promised["answered"].diff().dropna() <= 0).all(), name


@pytest.mark.slow
def test_planned_measurements_narrow_the_largest_run_more_than_random_ones() -> None:
    study = load("plan_next")
    asked = study.question(
        "ptq_vs_learning_rate", "lr_anneal", "relative_delta", "averaging != 'lawa'", None
    )
    assert set(asked.targets["run"]) == {"OLMo-2-13B"}
    assert "OLMo-2-13B" not in set(asked.pool["run"])
    found = study.summary(study.study(asked, 16)).set_index(["way", "count"])
    for count in (4, 8, 16):
        assert found.loc[("target", count), "ratio"] < 1
    for count in (2, 4):
        assert found.loc[("target", count), "error"] < found.loc[("random", count), "error"]
